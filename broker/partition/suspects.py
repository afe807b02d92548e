"""Messages that may have ended the process that handled them, as the broker of their partition
knows them.  Pure.

    pulls of an owner ─▶ pulled_to ─ the next owner acquires, and there was no release ─▶ once ─ pulled again, and the next
    owner acquires in the same way ─▶ upto: suspects are all below it
    an owner begins a suspect, alone ─▶ begun, durable ─┬─ acked, or its try failed: no suspect any more
                                                        ├─ released: the owner has ended well
                                                        ╰─ the next owner acquires: it is accused

In a shared group the broker knows what a session had in flight, so nothing is written before a
message begins:

    in flight at a session that ends without a release, once ─▶ counted ─ twice ─▶ alone: its session has nothing else of
    the partition in flight ─ that ends so too ─▶ counted again; consumers set it aside

A first end accuses no message: most processes are ended by something else, and then all of what was
pulled would be handled one at a time.

`pulled_to`, `once` and `upto` are in memory only: behind a restart of the broker the first is known
again from the next pull, which says how far its owner has come.  What is begun is written with the
group's progress.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from ...protocol.offsets import AckedOffsets, Range

BEGUN_MAX = 1_000
"""Messages of a group on a partition that are remembered as begun; those of the lowest offsets."""

ALONE_FROM = 2
"""A message of a shared group that was in flight at the ends of two sessions is handled alone."""

Begun = tuple[int, int]
"""Offset, and how often the process of an owner ended while the message was begun, the present time
included.
"""


class Suspects:
    """The suspects of one group on one partition."""

    __slots__ = ("_once", "_pulled_to", "begun", "upto")

    def __init__(self, begun: Iterable[Begun] = ()) -> None:
        self.begun: dict[int, int] = dict(begun)
        """Offset → crashes, of messages that are begun and have not ended."""
        self.upto = 0
        """What is not acked below this may have been with handlers of two owners that ended without
        a release.
        """
        self._once = -1
        """The same of one owner; -1: none ended so."""
        self._pulled_to = -1
        """One past the highest offset that was pulled under the present token; -1: nothing is known
        of its owner.
        """

    def pulled(self, upto: int) -> None:
        """Note that the owner may have all messages below `upto`."""
        self._pulled_to = max(self._pulled_to, upto)

    def next_owner(self, *, released: bool) -> bool:
        """
        Note that a new token is acquired; True if that changes what is begun.

        Args:
            released: the owner before has given the partition back, or is the session that acquires
                it again.
        """
        changed = self.released() if released else False
        self.upto = max(self.upto, min(self._once, self._pulled_to))
        self._once = max(self._once, self._pulled_to)
        self._pulled_to = 0
        return changed

    @property
    def unreleased(self) -> bool:
        """True if an owner has ended without a release, also one that had nothing to pull, and the
        next one has not released.
        """
        return self._once >= 0

    def session_ended(self, ranges: Iterable[Range], acked: AckedOffsets) -> bool:
        """
        Note what a session of a shared group had in flight when it ended without a release; True if
        that changes anything.

        Only the lowest BEGUN_MAX of these messages are remembered.
        """
        had = islice((offset for start, end in ranges for offset in range(start, end)), BEGUN_MAX)
        crashes = [(offset, self.begun.get(offset, 0) + 1) for offset in had]
        if crashes:
            self.begin(crashes, acked)
        return bool(crashes)

    @property
    def alone(self) -> list[int]:
        """Messages of a shared group that a session handles with no other beside it, by offset."""
        return sorted(offset for offset, crashes in self.begun.items() if crashes >= ALONE_FROM)

    def begin(self, begun: Iterable[Begun], acked: AckedOffsets) -> None:
        """Note messages that may be with a handler from when this is durable."""
        self.begun.update(begun)
        self.begun = dict(sorted(self.left(acked))[:BEGUN_MAX])

    def failed(self, offsets: Iterable[int]) -> None:
        """Note that tries of messages failed: the process did not end."""
        for offset in offsets:
            self.begun.pop(offset, None)

    def released(self) -> bool:
        """Note that the owner has given the partition back; True if that changes what is begun."""
        self.upto, self._once, self._pulled_to = 0, -1, -1
        changed = bool(self.begun)
        self.begun = {}
        return changed

    def left(self, acked: AckedOffsets) -> list[Begun]:
        """What is begun, and not acked."""
        return [pair for pair in self.begun.items() if pair[0] not in acked] if self.begun else []
