"""Counts the messages that a broker stores and delivers, by subject, and what consumer groups do
with them, since the broker started or the subject was created. Pure.

    a partition is dropped ─▶ `record_drop` ─▶ SERIES_KEPT_MS later, if the broker hosts no
        partition of the subject ─▶ `remove_series`

The metrics of a deleted subject are exported for another SERIES_KEPT_MS, so that its last messages
are scraped. Then its series ends. A new subject with the same name continues the series if it is
created before that; otherwise its series begins at 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ...protocol.frames import Request
from ...protocol.offsets import Range
from ...protocol.parked import RETRIED, DeadLetterKey, FailAgain, Park, ParkChange, Redrive, Shift
from ...rpc.operating.histogram import Histogram

SUBJECTS_MAX = 10_000
"""The maximum number of subjects that are counted separately. Messages of further subjects are
counted as OTHER.
"""
GROUPS_MAX = 10_000
"""The maximum number of consumer groups that are counted separately, in 1.3 kB each. What further
groups do is counted as that of group OTHER of subject OTHER.
"""
OTHER = "(other)"
LATENCY_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 600, 3600)
"""The bounds of the times from send to ack: from an idle consumer that waits for messages to one
that is an hour behind.
"""
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


class GroupFlow:
    """Counts of what one consumer group does, on all partitions of its subject here."""

    __slots__ = ("dead", "failed_tries", "latency", "parked", "redrives")

    def __init__(self) -> None:
        self.latency = Histogram(LATENCY_BOUNDS_S)
        """The times from send to ack. The last message of a reply's first batch stands for the
        reply.
        """
        self.failed_tries = 0
        self.parked = 0
        """The number of messages that were parked under their keys."""
        self.dead = 0
        """The number of messages that became dead letters."""
        self.redrives = 0
        """The number of times that an operator redrove a key, or selected dead letters."""

    def count_park_changes(self, changes: Iterable[ParkChange]) -> None:
        """Count durable changes of the group's parked messages."""
        for change in changes:
            if isinstance(change, Redrive):
                self.redrives += 1
            elif isinstance(change, DeadLetterKey):
                self.dead += _count(change.ranges)
            elif isinstance(change, Park):
                self._count_park(change)
            elif isinstance(change, FailAgain):
                self.failed_tries += _count(change.ranges)
            elif isinstance(change, Shift):
                self._count_shift(change)

    def _count_park(self, change: Park) -> None:
        messages = _count(change.ranges)
        if change.key is None:
            self.dead += messages
        elif isinstance(change.key, bytes):
            self.parked += messages
        elif change.failure is not None:  # it waits for its next try
            self.failed_tries += messages

    def _count_shift(self, change: Shift) -> None:
        if change.to is None:
            self.dead += _count(change.ranges)
        elif change.to == RETRIED:
            self.redrives += 1
        elif change.failure is not None:
            self.failed_tries += _count(change.ranges)


def _count(ranges: Iterable[Range]) -> int:
    return sum(end - start for start, end in ranges)


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
        self.requests: dict[type[Request], Histogram] = {}
        """Maps each kind of frame to the durations from its arrival to its answer, including waits
        for room and for the disk, but not the wait of a pull or read for messages.
        """
        self.groups: dict[tuple[str, str], GroupFlow] = {}
        """Maps (subject, group) to what the group did."""
        self.commits = Histogram()
        """The durations of writing and syncing a commit."""
        self.fences = 0
        """The number of fences that were raised, for new owners and resets."""

    def requests_of(self, kind: type[Request]) -> Histogram:
        """Return the histogram of a kind of frame."""
        return self.requests.setdefault(kind, Histogram())

    def group(self, subject: str, group: str) -> GroupFlow:
        """Return the counts of a consumer group."""
        key = subject, group
        flow = self.groups.get(key)
        if flow is None:
            key = key if len(self.groups) < GROUPS_MAX else (OTHER, OTHER)
            flow = self.groups.setdefault(key, GroupFlow())
        return flow

    def remove_groups(self, hosted: Collection[tuple[str, str]]) -> None:
        """End the series of those groups that are no longer `hosted`."""
        for key in [key for key in self.groups if key not in hosted and key != (OTHER, OTHER)]:
            del self.groups[key]

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
