"""Tracks suspects on the broker: messages that may have crashed the process of their consumer.
Pure.

    an owner pulls ─▶ _pulled_to
        ─ the next owner acquires without a release in between ─▶ _pulled_once_to
        ─ the same happens to the next owner ─▶ upto: all suspects are below it
    an owner begins a suspect, with no other message ─▶ begun, durable
        ─┬─ acked, or the try failed: it is no longer a suspect
         ├─ released: the owner did not crash
         ╰─ the next owner acquires: it is accused

In a shared group the broker knows which messages each session has in flight, so consumers do not
have to report suspects:

    in flight at a session that expires without a release, once ─▶ counted
        ─ twice ─▶ isolated: a session has it in flight without other messages of the partition
        ─ this session expires, too ─▶ counted again; consumers park it

A single crash does not make any message a suspect: most crashes have other causes, and everything
that was pulled would have to be handled one message at a time.

`_pulled_to`, `_pulled_once_to` and `upto` are in memory only. After a restart of the broker,
`_pulled_to` is set by the next pull, which reports how far its owner has read. Begun messages are
stored with the progress of the group.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from ...protocol.offsets import AckedOffsets, Range

BEGUN_MAX = 1_000
"""The maximum number of begun messages that are remembered per group and partition. The ones with
the lowest offsets are kept.
"""

ISOLATED_FROM = 2
"""The number of sessions that must crash with a message of a shared group before it is isolated."""

Begun = tuple[int, int]
"""The offset of a begun message, and its number of crashes: how often the process of an owner has
crashed while the message was begun, assuming that the present owner crashes, too.
"""


class Suspects:
    """The suspects of a group on a partition."""

    __slots__ = ("_pulled_once_to", "_pulled_to", "begun", "upto")

    def __init__(self, begun: Iterable[Begun] = ()) -> None:
        self.begun: dict[int, int] = dict(begun)
        """Maps the offset of each message that is begun and not finished to its number of
        crashes.
        """
        self.upto = 0
        """Unacked messages below this offset may have been handled by two successive owners that
        ended without a release.
        """
        self._pulled_once_to = -1
        """Like `upto`, but for one owner; -1 if no owner has ended without a release."""
        self._pulled_to = -1
        """The offset that follows the last message pulled under the current token; -1 if nothing is
        known about the owner.
        """

    def record_pull(self, upto: int) -> None:
        """Record that the owner may have received all messages below `upto`."""
        self._pulled_to = max(self._pulled_to, upto)

    def on_new_owner(self, *, is_released: bool) -> bool:
        """
        Record that a new token was acquired. Return True if this changes `begun`.

        Args:
            is_released: True if the previous owner has released the partition, or the same session
                acquires it again.
        """
        has_changed = self.on_released() if is_released else False
        self.upto = max(self.upto, min(self._pulled_once_to, self._pulled_to))
        self._pulled_once_to = max(self._pulled_once_to, self._pulled_to)
        self._pulled_to = 0
        return has_changed

    @property
    def unreleased(self) -> bool:
        """True if an owner, even one without messages, has ended without a release, and no later
        owner has released the partition.
        """
        return self._pulled_once_to >= 0

    def on_session_expired(self, ranges: Iterable[Range], acked: AckedOffsets) -> bool:
        """
        Count a crash for the messages that a session of a shared group had in flight when it
        expired. Return True if it had any.

        Only the lowest BEGUN_MAX messages are counted.
        """
        offsets = islice(
            (offset for start, end in ranges for offset in range(start, end)), BEGUN_MAX
        )
        crashes = [(offset, self.begun.get(offset, 0) + 1) for offset in offsets]
        if crashes:
            self.begin(crashes, acked)
        return bool(crashes)

    @property
    def isolated(self) -> list[int]:
        """The sorted offsets of a shared group's messages that are handed out only on their own."""
        return sorted(offset for offset, crashes in self.begun.items() if crashes >= ISOLATED_FROM)

    def begin(self, begun: Iterable[Begun], acked: AckedOffsets) -> None:
        """Record messages that will be handled as soon as this is durable."""
        self.begun.update(begun)
        self.begun = dict(sorted(self.unacked(acked))[:BEGUN_MAX])

    def remove_failed(self, offsets: Iterable[int]) -> None:
        """Remove messages whose handlers failed, because the process survived them."""
        for offset in offsets:
            self.begun.pop(offset, None)

    def on_released(self) -> bool:
        """Clear everything, because the owner has released the partition. Return True if this
        changes `begun`.
        """
        self.upto = 0
        self._pulled_once_to = -1
        self._pulled_to = -1
        has_changed = bool(self.begun)
        self.begun = {}
        return has_changed

    def unacked(self, acked: AckedOffsets) -> list[Begun]:
        """Return the begun messages that are unacked."""
        return [pair for pair in self.begun.items() if pair[0] not in acked] if self.begun else []
