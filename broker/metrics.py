"""The metrics of a broker for operators: its traffic, its disk, and the lag of each group.

Lag is counted over at most SCANNED_MAX partitions of a scrape, a few at a time, so that it never
delays clients.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..protocol.clock import Clock
from ..protocol.errors import StorageError
from ..rpc.operating.metrics import Labels, counter, gauge, histogram, labelled, largest
from .partition.partition import Group, HostedPartition
from .storage.files import Files
from .store.store import Store
from .store.traffic import OTHER, Flow

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("keylane.broker")
SCANNED_MAX = 20_000
"""The number of partitions that are examined in one scrape."""
AT_ONCE = 500
"""The number of partitions between two turns of the event loop, which take about a millisecond."""
AGED_MAX = 1_000
"""The number of partitions for which one scrape looks up the age of the oldest message that is not
acked.
"""
SERIES_MS = 10_000
"""The time in milliseconds between two searches for subjects that are gone."""
OTHERS: Labels = (("subject", OTHER),)


class _Behind(NamedTuple):
    """A group that has not acked all of a partition."""

    messages: int
    partition_id: int
    group: str
    subject: str
    cursor: int
    readable_offset: int


class _LagScan:
    """The results of one pass over the partitions."""

    def __init__(self) -> None:
        self.lag: dict[Labels, float] = {}
        self.parked: dict[Labels, float] = {}
        self.removed_unread: dict[Labels, float] = {}
        self.behind: list[_Behind] = []
        """A heap of the AGED_MAX partitions and groups with the greatest lag."""
        self.locks = 0
        self.scanned = 0

    def add(self, partition: HostedPartition, now_ms: int) -> None:
        """Add a partition to the results."""
        self.scanned += 1
        subject = partition.facts.subject
        for group in partition.groups.values():
            labels = (("subject", subject), ("group", group.name))
            messages = lag_of(partition, group)
            self.lag[labels] = self.lag.get(labels, 0) + messages
            self.locks += group.lock.holder(now_ms) is not None
            if group.parked_messages:
                self.parked[labels] = self.parked.get(labels, 0) + group.parked_messages
            if group.removed_unread:
                self.removed_unread[labels] = (
                    self.removed_unread.get(labels, 0) + group.removed_unread
                )
            if messages:
                cursor = max(group.acked.cursor, partition.first_offset)
                behind = _Behind(
                    messages,
                    partition.partition_id,
                    group.name,
                    subject,
                    cursor,
                    partition.readable_offset,
                )
                if len(self.behind) < AGED_MAX:
                    heapq.heappush(self.behind, behind)
                else:
                    heapq.heappushpop(self.behind, behind)


class _MonotonicSum:
    """A sum of counters that may lose some of them, for example those of a deleted subject. It is
    reported as a counter that never falls.
    """

    def __init__(self) -> None:
        self.told = 0.0
        self._sum = 0.0

    def tell(self, present: float) -> float:
        """Return the value to report for the present sum: it rises as the sum does, and stays while
        the sum falls.
        """
        self.told += max(0.0, present - self._sum)
        self._sum = present
        return self.told


def lag_of(partition: HostedPartition, group: Group) -> int:
    """Return the number of messages of a partition that a group has not acked."""
    return group.acked.unacked(partition.first_offset, partition.readable_offset)


class BrokerMetrics:
    """Collects the metrics of one broker."""

    def __init__(
        self, store: Store, files: Files, *, clock: Clock, waiting: Callable[[], int] = lambda: 0
    ) -> None:
        """
        Args:
            waiting: returns the number of pulls that wait for messages.
        """
        self._store = store
        self._files = files
        self._clock = clock
        self._waiting = waiting
        self._rests: dict[str, _MonotonicSum] = {}
        """Family of counters → its sample for the subjects that have none of their own."""

    async def collect(self) -> Iterable[Metric]:
        """Return all metrics as they are now."""
        scan = await self._scan()
        ages = await self._store.run_read(self._ages, scan.behind) if scan.behind else {}
        return [*self._traffic(), *self._state(), *self._groups(scan, ages)]

    async def _scan(self) -> _LagScan:
        scan = _LagScan()
        table = self._store.state.partitions
        now_ms = self._clock.boot_ms()
        ids = table.ids()[:SCANNED_MAX]
        for start in range(0, len(ids), AT_ONCE):
            for partition_id in ids[start : start + AT_ONCE]:
                partition = table.look(partition_id)
                if partition is not None:
                    scan.add(partition, now_ms)
            await asyncio.sleep(0)
        return scan

    def _ages(self, behind: list[_Behind]) -> dict[Labels, float]:
        """Return (subject, group) → the seconds since its oldest message that is not acked was
        stored. Blocks.
        """
        now_ms = self._clock.wall_ms()
        ages: dict[Labels, float] = {}
        for left in behind:
            try:
                units = self._store.queues.find(
                    left.partition_id, left.cursor, end=left.readable_offset, bytes_max=1
                )
            except StorageError:
                continue  # the damage is reported by the read that needs the message
            if units:
                labels = (("subject", left.subject), ("group", left.group))
                age_s = max(0, now_ms - units[0].appended_at_ms) / 1000
                ages[labels] = max(ages.get(labels, 0), age_s)
        return ages

    def _traffic(self) -> Iterable[Metric]:
        traffic = self._store.traffic
        yield from self._flows("stored", "became durable", traffic.stored)
        yield from self._flows("handed", "went to consumers and readers", traffic.handed)
        yield histogram(
            "keylane_broker_append_seconds", "From an append's arrival to its ack.", traffic.appends
        )
        yield histogram(
            "keylane_broker_commit_seconds", "Write and sync of a group commit.", traffic.commits
        )
        yield counter(
            "keylane_broker_fences_total", "Times that a partition got a new owner.", traffic.fences
        )

    def _flows(self, name: str, text: str, flows: dict[str, Flow]) -> Iterable[Metric]:
        for unit in ("messages", "bytes", "batches"):
            samples: dict[Labels, float] = {
                (("subject", subject),): getattr(flow, unit) for subject, flow in flows.items()
            }
            family = f"keylane_broker_{name}_{unit}_total"
            samples = largest(samples)
            rest = self._rests.setdefault(family, _MonotonicSum())
            if OTHERS in samples or rest.told:
                samples[OTHERS] = rest.tell(samples.get(OTHERS, 0))
            yield labelled(family, f"{unit.capitalize()} that {text}.", samples, counts=True)

    def _state(self) -> Iterable[Metric]:
        store = self._store
        commit = store.commit
        yield gauge(
            "keylane_broker_writable", "1 if messages are taken.", 0 if commit.reason else 1
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

    def _groups(self, scan: _LagScan, ages: dict[Labels, float]) -> Iterable[Metric]:
        yield labelled(
            "keylane_group_lag_messages", "Messages that a group has not acked.", largest(scan.lag)
        )
        kept = {labels: ages.get(labels, 0.0) for labels in largest(scan.lag) if labels in scan.lag}
        yield labelled(
            "keylane_group_lag_seconds", "Age of the oldest message that is not acked.", kept
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
        yield gauge("keylane_broker_pull_locks", "Pull locks that are held.", scan.locks)
        left_out = max(0, len(self._store.state.partitions) - scan.scanned)
        yield gauge(
            "keylane_broker_partitions_left_out", "Partitions whose lag is not counted.", left_out
        )


async def keep_series(store: Store, clock: Clock) -> None:
    """Search every SERIES_MS for series of subjects that are gone, until cancelled."""
    while True:
        try:
            await free_series(store, now_ms=clock.boot_ms())
        except Exception:
            log.exception("series of metrics")
        await asyncio.sleep(SERIES_MS / 1000)


async def free_series(store: Store, *, now_ms: int) -> None:
    """End the series of subjects whose last partition was dropped `traffic.GONE_MS` ago. Other
    tasks get turns meanwhile.
    """
    due = store.traffic.due(now_ms)
    if not due:
        return
    hosted: set[str] = set()
    ids = store.state.partitions.ids()
    for start in range(0, len(ids), AT_ONCE):
        for partition_id in ids[start : start + AT_ONCE]:
            partition = store.state.partitions.look(partition_id)
            if partition is not None:
                hosted.add(partition.facts.subject)
        await asyncio.sleep(0)
    store.traffic.free(due, hosted)
