"""Messages that may have ended the process that handled them, as the broker of their partition
knows them. Pure.

    pulls of an owner ─▶ pulled_to
        ─ the next owner acquires, and there was no release ─▶ once
        ─ pulled again, and the next owner acquires in the same way
        ─▶ upto: suspects are all below it
    an owner begins a suspect, alone ─▶ begun, durable
        ─┬─ acked, or its try failed: it is no longer a suspect
         ├─ released: the owner has ended well
         ╰─ the next owner acquires: it is accused

In a shared group the broker knows which messages a session had in flight, so nothing is written
before a message begins:

    in flight at a session that ends without a release, once ─▶ counted
        ─ twice ─▶ alone: its session has nothing else of the partition in flight
        ─ that session ends so too ─▶ counted again; consumers set it aside

A first end accuses no message: most processes are ended by something else, and then everything that
was pulled would be handled one message at a time.

`pulled_to`, `once` and `upto` are in memory only. After a restart of the broker the first is known
again from the next pull, which reports how far its owner has read. The begun messages are written
with the group's progress.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from ...protocol.offsets import AckedOffsets, Range

BEGUN_MAX = 1_000
"""The number of messages of a group on a partition that are remembered as begun: those with the
lowest offsets.
"""

ALONE_FROM = 2
"""The number of sessions that ended with a message of a shared group in flight, from which on the
message is handled alone.
"""

Begun = tuple[int, int]
"""(offset, crashes): how often the process of an owner ended while the message was begun, including
the present time.
"""


class Suspects:
    """The suspects of one group on one partition."""

    __slots__ = ("_once", "_pulled_to", "begun", "upto")

    def __init__(self, begun: Iterable[Begun] = ()) -> None:
        self.begun: dict[int, int] = dict(begun)
        """Offset → crashes, for messages that are begun and have not ended."""
        self.upto = 0
        """The offset below which messages that are not acked may have been with handlers of two
        owners that ended without a release.
        """
        self._once = -1
        """The offset below which the same may hold for one owner; -1 if no owner ended like that.
        """
        self._pulled_to = -1
        """The offset after the highest one that was pulled under the present token; -1 if nothing
        is known about its owner.
        """

    def pulled(self, upto: int) -> None:
        """Note that the owner may have all messages below `upto`."""
        self._pulled_to = max(self._pulled_to, upto)

    def next_owner(self, *, released: bool) -> bool:
        """
        Note that a new token is acquired. Return True if that changes which messages are begun.

        Args:
            released: the previous owner has released the partition, or is the session that acquires
                it again.
        """
        changed = self.released() if released else False
        self.upto = max(self.upto, min(self._once, self._pulled_to))
        self._once = max(self._once, self._pulled_to)
        self._pulled_to = 0
        return changed

    @property
    def unreleased(self) -> bool:
        """True if an owner has ended without a release, even one that had nothing to pull, and the
        next owner has not released.
        """
        return self._once >= 0

    def session_ended(self, ranges: Iterable[Range], acked: AckedOffsets) -> bool:
        """
        Note which messages a session of a shared group had in flight when it ended without a
        release. Return True if that changes anything.

        Only the lowest BEGUN_MAX of these messages are remembered.
        """
        had = islice((offset for start, end in ranges for offset in range(start, end)), BEGUN_MAX)
        crashes = [(offset, self.begun.get(offset, 0) + 1) for offset in had]
        if crashes:
            self.begin(crashes, acked)
        return bool(crashes)

    @property
    def alone(self) -> list[int]:
        """The messages of a shared group that a session handles with no other beside it, by
        offset.
        """
        return sorted(offset for offset, crashes in self.begun.items() if crashes >= ALONE_FROM)

    def begin(self, begun: Iterable[Begun], acked: AckedOffsets) -> None:
        """Note messages that may be with a handler once this is durable."""
        self.begun.update(begun)
        self.begun = dict(sorted(self.left(acked))[:BEGUN_MAX])

    def failed(self, offsets: Iterable[int]) -> None:
        """Note that tries of messages failed, so the process did not end."""
        for offset in offsets:
            self.begun.pop(offset, None)

    def released(self) -> bool:
        """Note that the owner has released the partition. Return True if that changes which
        messages are begun.
        """
        self.upto = 0
        self._once = -1
        self._pulled_to = -1
        changed = bool(self.begun)
        self.begun = {}
        return changed

    def left(self, acked: AckedOffsets) -> list[Begun]:
        """Return the begun messages that are not acked."""
        return [pair for pair in self.begun.items() if pair[0] not in acked] if self.begun else []
