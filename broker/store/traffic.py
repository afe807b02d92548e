"""Counts the messages that a broker stores and delivers, by subject, since the start of the broker
or the creation of the subject. Pure.

    a partition is dropped ─▶ `record_drop` ─▶ SERIES_KEPT_MS later, if the broker hosts no
        partition of the subject ─▶ `remove_series`

The metrics of a deleted subject are exported for another SERIES_KEPT_MS, so that its last messages
are scraped. Then its series end. A new subject of the same name continues the series if it is
created before that; otherwise its series begin at 0.
"""

from __future__ import annotations

from collections.abc import Collection

from ...rpc.operating.histogram import Histogram

SUBJECTS_MAX = 10_000
"""The most subjects that are counted separately. Messages of further subjects are counted
as OTHER.
"""
OTHER = "(other)"
SERIES_KEPT_MS = 300_000
"""The time, in milliseconds, for which a subject's series continue after its last partition was
dropped. It is Prometheus' look-back of 5 minutes.
"""


class Flow:
    """Counts of one subject's stored, or delivered, messages."""

    __slots__ = ("batches", "bytes", "messages")

    def __init__(self) -> None:
        self.batches = 0
        self.messages = 0
        self.bytes = 0


class Traffic:
    """A broker's counters and histograms."""

    def __init__(self) -> None:
        self.stored: dict[str, Flow] = {}
        """Subject → counts of the messages that became durable."""
        self.delivered: dict[str, Flow] = {}
        """Subject → counts of the messages in replies to pulls and reads."""
        self._drop_times_ms: dict[str, int] = {}
        """Subject → the time of the boot clock, in milliseconds, at which its partition was last
        dropped. Bounded, because due subjects are removed.
        """
        self.appends = Histogram()
        """Durations from the arrival of an append to its ack, including the wait for room."""
        self.commits = Histogram()
        """Durations of writing and syncing a commit."""
        self.fences = 0
        """The number of raised fences, for new owners and resets."""

    def count_stored(self, subject: str, *, messages: int, size_bytes: int) -> None:
        """Count a durable batch."""
        flow = self.stored.get(subject) or _add_flow(self.stored, subject)
        flow.batches += 1
        flow.messages += messages
        flow.bytes += size_bytes

    def count_delivered(self, subject: str, *, messages: int, size_bytes: int) -> None:
        """Count the messages of a reply, unless it has none."""
        if not size_bytes:
            return
        flow = self.delivered.get(subject) or _add_flow(self.delivered, subject)
        flow.batches += 1
        flow.messages += messages
        flow.bytes += size_bytes

    def record_drop(self, subject: str, now_ms: int) -> None:
        """Record that a subject's partition was dropped at `now_ms`, a time of the boot clock."""
        if subject in self.stored or subject in self.delivered:
            self._drop_times_ms[subject] = now_ms

    def due_subjects(self, now_ms: int) -> set[str]:
        """Return the subjects whose last drop of a partition was at least SERIES_KEPT_MS ago."""
        return {
            name
            for name, dropped_ms in self._drop_times_ms.items()
            if now_ms - dropped_ms >= SERIES_KEPT_MS
        }

    def remove_series(self, subjects: Collection[str], hosted: Collection[str]) -> None:
        """End the series of `subjects` that are no longer `hosted`, so that other
        subjects can be counted separately.
        """
        for subject in subjects:
            self._drop_times_ms.pop(subject, None)
            if subject not in hosted:
                self.stored.pop(subject, None)
                self.delivered.pop(subject, None)


def _add_flow(flows: dict[str, Flow], subject: str) -> Flow:
    return flows.setdefault(subject if len(flows) < SUBJECTS_MAX else OTHER, Flow())
