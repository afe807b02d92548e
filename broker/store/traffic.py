"""Counts what a broker stores and hands out, by subject, since its start or the subject's.  Pure.

    a partition is dropped ─▶ `note_left` ─▶ GONE_MS later, if the broker hosts none of its subject
        ─▶ `free`

A subject that was deleted is scraped for GONE_MS more, so that its last messages are seen.  Then
its series end.  A subject of the same name goes on with them if it is made before that, else it
begins at 0.
"""

from __future__ import annotations

from collections.abc import Collection

from ...rpc.operating.histogram import Histogram

SUBJECTS_MAX = 10_000
"""Subjects that are counted apart; what further ones send and get counts under OTHER."""
OTHER = "(other)"
GONE_MS = 300_000
"""How long the series of a subject stay after its last partition went: Prometheus looks back 5
minutes as well.
"""


class Flow:
    """Messages and bytes that went one way."""

    __slots__ = ("batches", "bytes", "messages")

    def __init__(self) -> None:
        self.batches = 0
        self.messages = 0
        self.bytes = 0


class Traffic:
    """The counts of a broker."""

    def __init__(self) -> None:
        self.stored: dict[str, Flow] = {}
        """Subject → what became durable."""
        self.handed: dict[str, Flow] = {}
        """Subject → what answers of pulls and reads held."""
        self._left_ms: dict[str, int] = {}
        """Subject → when a partition of it was last dropped; bounded, since what is due is taken
        out of it.
        """
        self.appends = Histogram()
        """From the arrival of an append to its ack, the wait for room included."""
        self.commits = Histogram()
        """Write and sync of a commit."""
        self.fences = 0
        """Fences that were raised: partitions that got a new owner, or had a reset."""

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
        """Note that a partition of a subject was dropped; `now_ms` is of the boot-time clock."""
        if subject in self.stored or subject in self.handed:
            self._left_ms[subject] = now_ms

    def due(self, now_ms: int) -> set[str]:
        """Subjects of which a partition was dropped GONE_MS ago, and none since."""
        return {name for name, left_ms in self._left_ms.items() if now_ms - left_ms >= GONE_MS}

    def free(self, due: Collection[str], hosted: Collection[str]) -> None:
        """End the series of the `due` subjects that are not `hosted` any more, so that others get
        their places.
        """
        for subject in due:
            self._left_ms.pop(subject, None)
            if subject not in hosted:
                self.stored.pop(subject, None)
                self.handed.pop(subject, None)


def _added(flows: dict[str, Flow], subject: str) -> Flow:
    return flows.setdefault(subject if len(flows) < SUBJECTS_MAX else OTHER, Flow())
