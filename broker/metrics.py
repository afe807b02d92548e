"""Collects the metrics of a broker: its traffic, its disk, its subjects, and what each consumer
group does and how far it is behind.

A scrape counts the lag of at most SCANNED_MAX partitions, a few at a time, to avoid delaying
clients.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..protocol.clock import Clock
from ..protocol.errors import StorageError
from ..rpc.operating.histogram import Histogram
from ..rpc.operating.metrics import (
    Labels,
    counter,
    gauge,
    histogram,
    histograms,
    labelled,
    largest,
)
from .partition.partition import Group, HostedPartition
from .storage.files import Files
from .store.store import Store
from .store.traffic import LATENCY_BOUNDS_S, OTHER, Flow, GroupFlow

if TYPE_CHECKING:
    from prometheus_client import Metric

    from .copies.copy_reads import CopyReads
    from .copies.follow_service import FollowService
    from .copies.follower import Follower
    from .copies.set_keeper import SetKeeper
    from .scheduled.scheduler import Scheduler

log = logging.getLogger("keylane.broker")
SCANNED_MAX = 20_000
"""The maximum number of partitions that are examined in one scrape."""
SCANNED_PER_TURN = 500
"""The number of partitions that are scanned before yielding to the event loop: about a
millisecond.
"""
AGED_MAX = 1_000
"""The maximum number of partitions for which one scrape reads the age of the oldest message, and
the same for that of the oldest unacked one.
"""
SERIES_MS = 10_000
"""The interval between two searches for removed subjects, in milliseconds."""
LATENCIES_MAX = 200
"""The maximum number of groups that have a histogram of their own. A histogram is 18 samples: those
of 200 groups take 30 ms to write, those of 2,000 groups 300 ms, in which the broker does nothing
else.
"""
OTHER_SUBJECTS: Labels = (("subject", OTHER),)
OTHER_GROUPS: Labels = (("subject", OTHER), ("group", OTHER))
GROUP_COUNTS = (
    ("failed_tries", "failed_tries", "Tries of messages that failed."),
    ("newly_parked_messages", "parked", "Messages that a group has set aside with their keys."),
    ("dead_letters", "dead", "Messages that a group gave up."),
    ("redrives", "redrives", "Times that parked messages of a key were to be handled again."),
)
"""(name of the metric, field of GroupFlow, text) of each count of a group."""


class _Aged(NamedTuple):
    """A message whose age is reported: the oldest that a group has not acked, or the oldest of a
    partition.
    """

    messages: int
    """The number of messages from this one on, without acked ones."""
    partition_id: int
    offset: int
    readable_offset: int
    labels: Labels


class _SubjectScan:
    """The figures of a subject, summed over its partitions."""

    __slots__ = ("end_offset", "messages")

    def __init__(self) -> None:
        self.end_offset = 0
        self.messages = 0


class _LagScan:
    """Accumulates lag and other figures in one pass over the partitions."""

    def __init__(self) -> None:
        self.lag: dict[Labels, float] = {}
        self.parked: dict[Labels, float] = {}
        self.removed_unread: dict[Labels, float] = {}
        self.subjects: dict[str, _SubjectScan] = {}
        self.oldest: list[_Aged] = []
        """The oldest messages of up to AGED_MAX partitions."""
        self.lagging_groups: list[_Aged] = []
        """A heap of the AGED_MAX (partition, group) pairs with the greatest lag."""
        self.locks = 0
        self.partition_count = 0

    @property
    def group_names(self) -> set[tuple[str, str]]:
        """The (subject, group) of each group."""
        return {(subject, group) for (_, subject), (_, group) in self.lag}

    def add(self, partition: HostedPartition, now_ms: int) -> None:
        """Add a partition to the results."""
        self.partition_count += 1
        subject = partition.facts.subject
        figures = self.subjects.get(subject)
        if figures is None:
            figures = self.subjects[subject] = _SubjectScan()
        end = partition.readable_offset
        figures.end_offset += end
        stored = end - partition.first_offset
        if stored:
            figures.messages += stored
            if len(self.oldest) < AGED_MAX:
                self.oldest.append(
                    _Aged(
                        stored,
                        partition.partition_id,
                        partition.first_offset,
                        end,
                        (("subject", subject),),
                    )
                )
        for group in partition.groups.values():
            labels = (("subject", subject), ("group", group.name))
            messages = lag_of(partition, group)
            self.lag[labels] = self.lag.get(labels, 0) + messages
            self.locks += group.lock.holder_at(now_ms) is not None
            if group.parked_messages:
                self.parked[labels] = self.parked.get(labels, 0) + group.parked_messages
            # Also 0: an alert on its growth has to see the first loss.
            self.removed_unread[labels] = self.removed_unread.get(labels, 0) + group.removed_unread
            if messages:
                cursor = max(group.acked.cursor, partition.first_offset)
                lagging_group = _Aged(messages, partition.partition_id, cursor, end, labels)
                if len(self.lagging_groups) < AGED_MAX:
                    heapq.heappush(self.lagging_groups, lagging_group)
                else:
                    heapq.heappushpop(self.lagging_groups, lagging_group)


class _MonotonicSum:
    """A sum of counters that is reported as a counter. It never decreases, although counters may be
    removed, for example when a subject is deleted.
    """

    def __init__(self) -> None:
        self.reported_sum = 0.0
        self._sum = 0.0

    def update(self, new_sum: float) -> float:
        """Return the value to report. It rises with the sum, and stays the same when the sum
        falls.
        """
        self.reported_sum += max(0.0, new_sum - self._sum)
        self._sum = new_sum
        return self.reported_sum


def lag_of(partition: HostedPartition, group: Group) -> int:
    """Return the number of messages of a partition that a group has not acked."""
    return group.acked.count_unacked(partition.first_offset, partition.readable_offset)


class BrokerMetrics:
    """Collects the metrics of one broker."""

    def __init__(
        self, store: Store, files: Files, *, clock: Clock, waiting: Callable[[], int] = lambda: 0
    ) -> None:
        """
        Args:
            waiting: returns the number of waiting pulls.
        """
        self._store = store
        self._files = files
        self._clock = clock
        self._waiting = waiting
        self._times_ms: dict[tuple[int, int], int] = {}
        """Maps (partition id, offset) to when that message was stored, for the messages that the
        last scrape looked up.
        """
        self._others: dict[str, _MonotonicSum] = {}
        """Maps each metric family to the combined sample of the subjects or groups that have no
        sample of their own.
        """
        self._rest_sum = Histogram(LATENCY_BOUNDS_S)
        """The latencies of the groups that had no histogram of their own in the last scrape."""
        self._rest_latency = Histogram(LATENCY_BOUNDS_S)
        """What was reported of them, which never falls."""

    async def collect(self) -> Iterable[Metric]:
        """Scan the partitions, and return all metrics."""
        scan = await self._scan_partitions()
        ages = await self._measure_ages([*scan.oldest, *scan.lagging_groups])
        if scan.partition_count >= len(self._store.state.partitions):
            self._store.traffic.remove_groups(scan.group_names)
        return [
            *self._collect_traffic(),
            *self._collect_state(),
            *self._collect_subjects(scan, ages),
            *self._collect_groups(scan, ages),
        ]

    async def _scan_partitions(self) -> _LagScan:
        scan = _LagScan()
        table = self._store.state.partitions
        now_ms = self._clock.boot_ms()
        ids = table.ids()[:SCANNED_MAX]
        for start in range(0, len(ids), SCANNED_PER_TURN):
            for partition_id in ids[start : start + SCANNED_PER_TURN]:
                partition = table.peek(partition_id)
                if partition is not None:
                    scan.add(partition, now_ms)
            await asyncio.sleep(0)
        return scan

    async def _measure_ages(self, messages: list[_Aged]) -> dict[Labels, float]:
        """Return a dict that maps labels to the age of the oldest message with these labels, in
        seconds. Only messages that the last scrape did not look up are looked up.
        """
        times_ms = {
            place: at_ms
            for message in messages
            if (at_ms := self._times_ms.get(place := (message.partition_id, message.offset)))
            is not None
        }
        unknown = [each for each in messages if (each.partition_id, each.offset) not in times_ms]
        if unknown:
            times_ms |= await self._store.run_read(self._look_up_times, unknown)
        self._times_ms = times_ms
        now_ms = self._clock.wall_ms()
        ages: dict[Labels, float] = {}
        for message in messages:
            at_ms = times_ms.get((message.partition_id, message.offset))
            if at_ms is not None:
                age_s = max(0, now_ms - at_ms) / 1000
                ages[message.labels] = max(ages.get(message.labels, 0), age_s)
        return ages

    def _look_up_times(self, messages: list[_Aged]) -> dict[tuple[int, int], int]:
        """Return a dict that maps (partition id, offset) to when the message was stored. Blocks."""
        times_ms = {}
        for message in messages:
            try:
                units = self._store.queues.find(
                    message.partition_id,
                    message.offset,
                    end=message.readable_offset,
                    bytes_max=1,
                )
            except StorageError:
                continue  # the read that needs the message reports the damage
            if units:
                times_ms[message.partition_id, message.offset] = units[0].appended_at_ms
        return times_ms

    def _collect_traffic(self) -> Iterable[Metric]:
        traffic = self._store.traffic
        yield from self._collect_flows("stored", "became durable", traffic.stored)
        yield from self._collect_flows("handed", "went to consumers and readers", traffic.delivered)
        yield histograms(
            "keylane_broker_request_seconds",
            "From the arrival of a request of the data plane to its answer, by kind; without the "
            "wait of a pull for messages.",
            {
                (("kind", _kind_name(kind)),): values
                for kind, values in sorted(
                    traffic.requests.items(), key=lambda each: each[0].__name__
                )
            },
        )
        yield histogram(
            "keylane_broker_commit_seconds", "Write and sync of a group commit.", traffic.commits
        )
        yield counter(
            "keylane_broker_fences_total", "Times that a partition got a new owner.", traffic.fences
        )

    def _collect_flows(self, name: str, text: str, flows: dict[str, Flow]) -> Iterable[Metric]:
        for unit in ("messages", "bytes", "batches"):
            yield self._counts(
                f"keylane_broker_{name}_{unit}_total",
                f"{unit.capitalize()} that {text}.",
                {(("subject", subject),): getattr(flow, unit) for subject, flow in flows.items()},
                OTHER_SUBJECTS,
            )

    def _counts(
        self, family: str, text: str, samples: dict[Labels, float], others: Labels
    ) -> Metric:
        """Return a counter of the largest samples, and of the sum of the rest, which never
        falls.
        """
        samples = largest(samples)
        rest = self._others.setdefault(family, _MonotonicSum())
        if others in samples or rest.reported_sum:
            samples[others] = rest.update(samples.get(others, 0))
        return labelled(family, text, samples, counts=True)

    def _latencies(self, flows: dict[Labels, GroupFlow]) -> dict[Labels, Histogram]:
        """Return the histograms of the groups that have acked most often, and that of the rest,
        which never falls.
        """
        largest_flows = heapq.nlargest(
            LATENCIES_MAX,
            (each for each in flows.items() if each[0] != OTHER_GROUPS),
            key=lambda each: each[1].latency.count,
        )
        samples = {labels: flow.latency for labels, flow in largest_flows}
        rest = Histogram(LATENCY_BOUNDS_S)
        for labels, flow in flows.items():
            if labels not in samples:
                rest.add(flow.latency)
        self._rest_latency.add_growth(self._rest_sum, rest)
        self._rest_sum = rest
        if self._rest_latency.count:
            samples[OTHER_GROUPS] = self._rest_latency
        return samples

    def _collect_state(self) -> Iterable[Metric]:
        store = self._store
        commit = store.commit
        yield gauge(
            "keylane_broker_writable", "1 if messages are taken.", 0 if commit.refusal_reason else 1
        )
        yield gauge("keylane_broker_partitions", "Hosted partitions.", len(store.state.partitions))
        yield gauge(
            "keylane_broker_damaged_partitions",
            "Partitions that have lost messages.",
            len(store.state.damaged),
        )
        yield gauge(
            "keylane_broker_queued_bytes", "Bytes that wait for the disk.", commit.queued_bytes
        )
        yield gauge(
            "keylane_broker_waiting_pulls", "Pulls that wait for messages.", self._waiting()
        )
        yield counter(
            "keylane_broker_failed_commits_total", "Commits that failed.", commit.failures
        )
        yield gauge(
            "keylane_broker_log_bytes",
            "Bytes of the commit log.",
            store.log.end - store.log.first_position,
        )
        yield gauge("keylane_broker_disk_free_bytes", "Free on its disk.", self._files.free_bytes())
        yield gauge("keylane_broker_disk_bytes", "Size of its disk.", self._files.total_bytes())

    def _collect_subjects(self, scan: _LagScan, ages: dict[Labels, float]) -> Iterable[Metric]:
        ends: dict[Labels, float] = {}
        messages: dict[Labels, float] = {}
        for subject, figures in scan.subjects.items():
            ends[("subject", subject),] = figures.end_offset
            messages[("subject", subject),] = figures.messages
        yield labelled(
            "keylane_subject_end_offset",
            "Sum of the end offsets of the subject's partitions.",
            largest(ends),
        )
        messages = largest(messages)
        yield labelled("keylane_subject_messages", "Messages that can be read.", messages)
        yield labelled(
            "keylane_subject_oldest_message_seconds",
            "Age of the oldest message that can be read.",
            {labels: ages[labels] for labels in messages if labels in ages},
        )

    def _collect_groups(self, scan: _LagScan, ages: dict[Labels, float]) -> Iterable[Metric]:
        yield labelled(
            "keylane_group_lag_messages", "Messages that a group has not acked.", largest(scan.lag)
        )
        reported_ages = {
            labels: ages.get(labels, 0.0) for labels in largest(scan.lag) if labels in scan.lag
        }
        yield labelled(
            "keylane_group_lag_seconds",
            "Age of the oldest message that is not acked.",
            reported_ages,
        )
        yield labelled(
            "keylane_group_parked_messages",
            "Messages that a group has set aside.",
            largest(scan.parked),
        )
        yield labelled(
            "keylane_group_removed_unread_messages",
            "Messages that retention removed before the group had acked them.",
            largest(scan.removed_unread),
        )
        flows: dict[Labels, GroupFlow] = {
            (("subject", subject), ("group", group)): flow
            for (subject, group), flow in self._store.traffic.groups.items()
        }
        yield histograms(
            "keylane_group_latency_seconds",
            "From the send of a message to its ack; a sample of the messages.",
            self._latencies(flows),
        )
        for name, field, text in GROUP_COUNTS:
            samples: dict[Labels, float] = {
                labels: getattr(flow, field) for labels, flow in flows.items()
            }
            yield self._counts(f"keylane_group_{name}_total", text, samples, OTHER_GROUPS)
        yield gauge("keylane_broker_pull_locks", "Pull locks that are held.", scan.locks)
        group_count_without_age = max(0, len(self._store.state.partitions) - scan.partition_count)
        yield gauge(
            "keylane_broker_partitions_left_out",
            "Partitions whose lag is not counted.",
            group_count_without_age,
        )


def _kind_name(kind: type[object]) -> str:
    """Return the name of a kind of frame as a label: "pull_shared" for PullShared."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


async def collect_scheduled(scheduler: Scheduler) -> Iterable[Metric]:
    """Return the metrics of the scheduled messages."""
    count, size_bytes = scheduler.amount
    return [
        gauge(
            "keylane_broker_scheduled_messages",
            "Messages that wait for their times.",
            count,
        ),
        gauge("keylane_broker_scheduled_bytes", "Bytes of these messages.", size_bytes),
        gauge(
            "keylane_broker_scheduled_overdue_seconds",
            "How long ago the earliest of these messages was due; 0 if none is.",
            scheduler.overdue_ms / 1000,
        ),
        counter(
            "keylane_broker_scheduled_delivered_total",
            "Scheduled messages that were stored in their subjects.",
            scheduler.delivered_count,
        ),
        counter(
            "keylane_broker_scheduled_dropped_total",
            "Scheduled messages that could not be stored when they were due, and never will be.",
            scheduler.dropped_count,
        ),
    ]


async def collect_copies(following: FollowService) -> Iterable[Metric]:
    """Return how far the copies of the data folder are behind, and what they were sent."""
    return [
        labelled(
            "keylane_broker_copy_lag_bytes",
            "Bytes of the commit log that a copy does not have yet.",
            {(("copy", copy_id),): lag for copy_id, lag in following.lag_bytes().items()},
        ),
        labelled(
            "keylane_broker_copy_lag_seconds",
            "How long ago a copy had the whole durable log; 0 if it has it now.",
            {(("copy", copy_id),): lag / 1000 for copy_id, lag in following.lag_ms().items()},
        ),
        counter(
            "keylane_broker_copy_bytes_total",
            "Bytes of the commit log that copies were sent.",
            following.bytes_sent,
        ),
    ]


async def collect_cuts(follower: Follower) -> Iterable[Metric]:
    """Return what a copy has cut, because its broker has lost it."""
    text = "Bytes of its log that this copy has cut, because its broker does not have them."
    return [counter("keylane_copy_cut_bytes_total", text, follower.bytes_cut)]


async def collect_copy_reads(reads: CopyReads) -> Iterable[Metric]:
    """Return what clients have read from the copy of a follower."""
    text = "Bytes of messages that clients have read from this copy."
    return [counter("keylane_copy_read_bytes_total", text, reads.bytes_read)]


async def collect_copy_set(keeper: SetKeeper) -> Iterable[Metric]:
    """Return the metrics of the set of copies that acks wait for. How many there are to be is left
    out while the broker does not know it.
    """
    stored = keeper.stored
    wanted: dict[Labels, float] = {} if stored is None else {(): stored.wanted - 1}
    in_set: dict[Labels, float] = {} if stored is None else {(): len(stored.members)}
    term: dict[Labels, float] = {} if stored is None else {(): stored.term}
    quarantined: dict[Labels, float] = {} if stored is None else {(): int(bool(stored.quarantine))}
    text = "Copies that acks are to wait for: the data folders wanted, without the broker's own."
    return [
        labelled("keylane_broker_copies_wanted", text, wanted),
        labelled("keylane_broker_copies_in_set", "Copies that acks wait for.", in_set),
        labelled("keylane_broker_copies_term", "How often a copy was promoted.", term),
        labelled(
            "keylane_broker_copies_quarantined",
            "1 while the set may not change, because the metaservers' database fell back.",
            quarantined,
        ),
        histogram(
            "keylane_broker_copy_wait_seconds",
            "From the sync of a group commit here until all copies of the set have synced it.",
            keeper.waits,
        ),
        labelled(
            "keylane_broker_copy_waiting_seconds",
            "How long the group commit that waits for copies has waited; 0 if none waits.",
            {(): keeper.waiting_ms / 1000},
        ),
        labelled(
            "keylane_broker_copies_sharing_machine",
            "Copies on a machine with the broker or a copy of the set, where that is not allowed.",
            {(): len(keeper.shared_machines())},
        ),
        counter(
            "keylane_broker_set_changes_total",
            "Changes of the set of copies that acks wait for.",
            keeper.changes,
        ),
    ]


async def expire_series_loop(store: Store, clock: Clock) -> None:
    """Remove the series of dropped subjects every SERIES_MS. Runs until cancelled."""
    while True:
        try:
            await expire_series(store, now_ms=clock.boot_ms())
        except Exception:
            log.exception("cannot remove the series of dropped subjects")
        await asyncio.sleep(SERIES_MS / 1000)


async def expire_series(store: Store, *, now_ms: int) -> None:
    """Remove the series of subjects whose last partition was dropped `traffic.SERIES_KEPT_MS` ago.
    Yields to other tasks between partitions.
    """
    subjects = store.traffic.due_subjects(now_ms)
    if not subjects:
        return
    hosted_subjects: set[str] = set()
    ids = store.state.partitions.ids()
    for start in range(0, len(ids), SCANNED_PER_TURN):
        for partition_id in ids[start : start + SCANNED_PER_TURN]:
            partition = store.state.partitions.peek(partition_id)
            if partition is not None:
                hosted_subjects.add(partition.facts.subject)
        await asyncio.sleep(0)
    store.traffic.remove_series(subjects, hosted_subjects)
