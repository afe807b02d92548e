"""Holes in the log: lost records, as recovery reports them. Pure."""

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
    """Positions `[start, end)` whose durable records are all damaged or missing."""

    start: int
    end: int
    reason: str
    traces: tuple[Trace, ...] = ()
    """The known lost records, in the order of the log."""
    explained: bool = False
    """True if `traces` contains all lost records."""
    damage: tuple[int, int] | None = None
    """The positions of the whole damage, of which this hole is a part."""


class Visitor(Protocol):
    """Receives the records and the holes of a log, in order."""

    def record(self, header: Header, body: memoryview) -> None:
        """Take a whole record. The body is valid only during the call."""
        ...

    def hole(self, hole: Hole) -> None:
        """Take a hole, whose records are lost."""
        ...
