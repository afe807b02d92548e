"""Tells ancestor partitions that none of their parked messages is needed any more. Pure.

    a key is freed, loose messages are unparked ─▶ list the keys ─▶ ancestors of which nothing is
        parked ─▶ LeaveAncestor, one at a time ─▶ told ─▶ the partition's broker stores that ─▶ not
        named by the next list

Invariants
    An ancestor is told only what the partition's own broker says. That it was told is stored only
    once it has answered, or is gone.
"""

from __future__ import annotations

from collections.abc import Iterable


class PartitionAncestors:
    """
    The ancestors that keep parked messages for one partition.

    Args:
        exist: False for a partition without parents.
    """

    __slots__ = ("_told", "exist", "must_list", "unneeded")

    def __init__(self, *, exist: bool) -> None:
        self.exist = exist
        self.must_list = False
        """True if an ancestor may have become unneeded since the last list was asked for."""
        self.unneeded: list[int] = []
        """Those that are to be told; one is told at a time."""
        self._told: set[int] = set()

    def note_freed(self) -> None:
        """Note that a key is free, or that loose messages have ended, which may have been an
        ancestor's last ones.
        """
        self.must_list = self.exist

    def set_unneeded(self, sources: Iterable[int]) -> None:
        """Set the ancestors that keep messages, although none of those is parked any more."""
        self.unneeded = [source for source in sources if source not in self._told]

    def end(self, source: int, *, is_told: bool) -> None:
        """End the call to an ancestor: it was told, or has refused. If it has refused, the list
        after the next freed key may name it again.
        """
        self.unneeded = [each for each in self.unneeded if each != source]
        if is_told:
            self._told.add(source)
