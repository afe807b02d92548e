"""Counts the messages that a broker stores and delivers, by subject, since the broker started or
the subject was created. Pure.

    a partition is dropped ─▶ `record_drop` ─▶ SERIES_KEPT_MS later, if the broker hosts no
        partition of the subject ─▶ `remove_series`

The metrics of a deleted subject are exported for another SERIES_KEPT_MS, so that its last messages
are scraped. Then its series ends. A new subject with the same name continues the series if it is
created before that; otherwise its series begins at 0.
"""

from __future__ import annotations

from collections.abc import Collection

from ...rpc.operating.histogram import Histogram

SUBJECTS_MAX = 10_000
"""The maximum number of subjects that are counted separately. Messages of further subjects are
counted as OTHER.
"""
OTHER = "(other)"
SERIES_KEPT_MS = 300_000
"""How long a subject's series continues after its last partition was dropped, in milliseconds. This
is Prometheus' look-back of 5 minutes.
"""


class Flow:
    """Counts of one subject's stored or delivered messages."""

    __slots__ = ("batches", "bytes", "messages")

    def __init__(self) -> None:
        self.batches = 0
        self.messages = 0
        self.bytes = 0


class Traffic:
    """A broker's counters and histograms."""

    def __init__(self) -> None:
        self.stored: dict[str, Flow] = {}
        """Maps subjects to the counts of messages that became durable."""
        self.delivered: dict[str, Flow] = {}
        """Maps subjects to the counts of messages in replies to pulls and reads."""
        self._drop_times_ms: dict[str, int] = {}
        """Maps subjects to the time at which a partition of theirs was last dropped, in
        milliseconds since boot. Bounded, because subjects whose time has come are removed.
        """
        self.appends = Histogram()
        """The durations from the arrival of an append to its ack, including the wait for room."""
        self.commits = Histogram()
        """The durations of writing and syncing a commit."""
        self.fences = 0
        """The number of fences that were raised, for new owners and resets."""

    def count_stored(self, subject: str, *, messages: int, size_bytes: int) -> None:
        """Count a durable batch."""
        flow = self.stored.get(subject) or _add_flow(self.stored, subject)
        flow.batches += 1
        flow.messages += messages
        flow.bytes += size_bytes

    def count_delivered(self, subject: str, *, messages: int, size_bytes: int) -> None:
        """Count the messages of a reply, if it has any."""
        if not size_bytes:
            return
        flow = self.delivered.get(subject) or _add_flow(self.delivered, subject)
        flow.batches += 1
        flow.messages += messages
        flow.bytes += size_bytes

    def record_drop(self, subject: str, now_ms: int) -> None:
        """Record that a subject's partition was dropped at `now_ms`, in milliseconds since boot."""
        if subject in self.stored or subject in self.delivered:
            self._drop_times_ms[subject] = now_ms

    def due_subjects(self, now_ms: int) -> set[str]:
        """Return the subjects whose last partition drop was at least SERIES_KEPT_MS ago."""
        return {
            name
            for name, dropped_ms in self._drop_times_ms.items()
            if now_ms - dropped_ms >= SERIES_KEPT_MS
        }

    def remove_series(self, subjects: Collection[str], hosted: Collection[str]) -> None:
        """End the series of those `subjects` that are no longer `hosted`, so that other subjects
        can be counted separately.
        """
        for subject in subjects:
            self._drop_times_ms.pop(subject, None)
            if subject not in hosted:
                self.stored.pop(subject, None)
                self.delivered.pop(subject, None)


def _add_flow(flows: dict[str, Flow], subject: str) -> Flow:
    return flows.setdefault(subject if len(flows) < SUBJECTS_MAX else OTHER, Flow())
