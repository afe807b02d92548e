"""Holes in the log, as recovery reports them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ....protocol.record import Header


class TrailEntry(NamedTuple):
    """A record as the trail knows it: its header, and its body if the trail has it."""

    header: Header
    body: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """The positions `[start, end)`, in which durable records are damaged or missing."""

    start: int
    end: int
    reason: str
    lost_records: tuple[TrailEntry, ...] = ()
    """The known lost records, in the order of the log."""
    explained: bool = False
    """True if `lost_records` contains all lost records."""
    damage: tuple[int, int] | None = None
    """The start and end positions of the damaged region, if this hole is one of several parts of
    it.
    """


class Visitor(Protocol):
    """Receives the records and holes of a log, in order."""

    def on_record(self, header: Header, body: memoryview) -> None:
        """Handle an intact record. The body is valid only during the call."""
        ...

    def on_hole(self, hole: Hole) -> None:
        """Handle a hole, whose records are lost."""
        ...
