"""Counts what a broker stores and hands out, by subject, since the start of the broker or the
creation of the subject. Pure.

    a partition is dropped ─▶ `note_left` ─▶ GONE_MS later, if the broker hosts none of its subject
        ─▶ `free`

A deleted subject is still exported for GONE_MS, so that its last messages are seen. Then its series
end. If a subject of the same name is created before that, it continues them; otherwise it begins at
0.
"""

from __future__ import annotations

from collections.abc import Collection

from ...rpc.operating.histogram import Histogram

SUBJECTS_MAX = 10_000
"""The number of subjects that are counted separately. The messages of further subjects are counted
under OTHER.
"""
OTHER = "(other)"
GONE_MS = 300_000
"""The time in milliseconds for which the series of a subject stay after its last partition was
dropped. Prometheus looks back 5 minutes as well.
"""


class Flow:
    """Messages and bytes that went in one direction."""

    __slots__ = ("batches", "bytes", "messages")

    def __init__(self) -> None:
        self.batches = 0
        self.messages = 0
        self.bytes = 0


class Traffic:
    """The counts of a broker."""

    def __init__(self) -> None:
        self.stored: dict[str, Flow] = {}
        """Subject → the messages that became durable."""
        self.handed: dict[str, Flow] = {}
        """Subject → the messages in answers to pulls and reads."""
        self._left_ms: dict[str, int] = {}
        """Subject → the time of the boot clock, in milliseconds, at which a partition of it was
        last dropped. It is bounded, because subjects that are due are removed.
        """
        self.appends = Histogram()
        """The times from the arrival of an append to its ack, including the wait for room."""
        self.commits = Histogram()
        """The times that writing and syncing a commit took."""
        self.fences = 0
        """The number of fences that were raised: a partition got a new owner, or was reset."""

    def note_stored(self, subject: str, *, messages: int, size_bytes: int) -> None:
        """Count a durable batch."""
        flow = self.stored.get(subject) or _added(self.stored, subject)
        flow.batches += 1
        flow.messages += messages
        flow.bytes += size_bytes

    def note_handed(self, subject: str, *, messages: int, size_bytes: int) -> None:
        """Count an answer with messages."""
        flow = self.handed.get(subject) or _added(self.handed, subject)
        flow.batches += 1
        flow.messages += messages
        flow.bytes += size_bytes

    def note_left(self, subject: str, now_ms: int) -> None:
        """Note that a partition of a subject was dropped; `now_ms` is a time of the boot clock."""
        if subject in self.stored or subject in self.handed:
            self._left_ms[subject] = now_ms

    def due(self, now_ms: int) -> set[str]:
        """Return the subjects of which a partition was dropped GONE_MS ago or earlier, and none
        since.
        """
        return {name for name, left_ms in self._left_ms.items() if now_ms - left_ms >= GONE_MS}

    def free(self, due: Collection[str], hosted: Collection[str]) -> None:
        """End the series of the `due` subjects that are no longer `hosted`, so that others get
        their places.
        """
        for subject in due:
            self._left_ms.pop(subject, None)
            if subject not in hosted:
                self.stored.pop(subject, None)
                self.handed.pop(subject, None)


def _added(flows: dict[str, Flow], subject: str) -> Flow:
    return flows.setdefault(subject if len(flows) < SUBJECTS_MAX else OTHER, Flow())
