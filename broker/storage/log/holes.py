"""What damage took from the log, as recovery tells it.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ....protocol.record import Header


class Trace(NamedTuple):
    """A record that was durable in the log: its header, and its body if the trail keeps it."""

    header: Header
    body: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """Positions `[start, end)` that were durable and hold no whole record any more."""

    start: int
    end: int
    reason: str
    traces: tuple[Trace, ...] = ()
    """The records known to have been there, in the order of the log."""
    explained: bool = False
    """They are all that was there."""
    damage: tuple[int, int] | None = None
    """Positions of the whole damage, of which this is a part."""


class Visitor(Protocol):
    """What is told of the log."""

    def record(self, header: Header, body: memoryview) -> None:
        """A whole record; the body is valid during the call only."""
        ...

    def hole(self, hole: Hole) -> None:
        """Bytes that are lost."""
        ...
