"""Watches the partitions of a stream: fetches their lineage from the metaserver, and their stored
offsets from the brokers. Performs network I/O.

The lineage is only fetched again after a partition was sealed or a call failed, because every new
partition continues a sealed one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from ...arrow.opening import open_network
from ...arrow.selection import CursorOf, Edge, Point, ReadBound, ReadOptions, StoredAt
from ...protocol import endpoints
from ...protocol.backoff import Backoff
from ...protocol.control import PartitionStatus, TimeBound
from ...protocol.errors import (
    KeylaneError,
    NotSentError,
    PartitionUnknownError,
    RetryRule,
    UnreachableError,
)
from ...protocol.limits import READ_GIVE_UP_MS
from ...protocol.reading.bounds import LocalPoint, order_points
from ...protocol.routing import Partition, PartitionState, Route, logical_partition
from ...rpc.client import BrokerClient, MetaClient
from ...rpc.connections import Connections, clean_up, gather_limited
from ...rpc.environment import Environment, environment_of
from ...rpc.http_network import HttpNetwork
from ...rpc.metaservers import CALL_TIMEOUT_MS
from .batches import finished_partitions
from .lineage import Branch, Lineage, StoredOffsets, View, branches_of
from .offset import StreamOffset
from .progress import GroupProgress

log = logging.getLogger("keylane.spark")

RETRY_MS = 60_000
"""The time in milliseconds for which an unreachable metaserver or broker is retried before the
query fails.
"""
LINEAGE_MS = 1_000
"""The minimum time in milliseconds between two requests for the children of the same sealed
partitions.
"""
_BACKOFF = Backoff(first_ms=100, max_ms=2_000)
T = TypeVar("T")


class PartitionWatcher:
    """
    Fetches the partitions of a stream from the cluster.

    Each method retries for RETRY_MS while a server is unreachable.

    Raises:
        UnreachableError: a server was unreachable for longer than that.
        SubjectUnknownError, PartitionUnknownError: a subject or partition in the options does not
            exist.
    """

    def __init__(self, options: ReadOptions, *, environment: Environment | None = None) -> None:
        self._options = options
        self._environment = environment_of(environment)
        self._clock = self._environment.clock
        self._own_network: HttpNetwork | None = None
        self._pauses = _BACKOFF.pauses(self._environment.new_rng())
        self._lineage: Lineage | None = None
        self._all_ids: set[int] = set()
        """All partitions that the subjects have ever had, including those that the stream does not
        read.
        """
        self._continued_ids: set[int] = set()
        """Partitions whose children have opened."""
        self._childless_ids: set[int] = set()
        """Sealed partitions that had no known children when the lineage was last fetched."""
        self._lineage_fetched_ms = 0
        self.subjects: dict[str, int] = {}
        """The ids of the subjects by name; empty before the first `fetch_view`."""

    def open(self) -> None:
        """Open the connections in the running event loop. Raises ConfigError if a TLS file or the
        token file cannot be used.
        """
        network = self._environment.network
        if network is None:
            network = self._own_network = open_network(self._options.security)
        self._connections = Connections(network, timeout_ms=CALL_TIMEOUT_MS, what="stream")
        self._meta = MetaClient(self._connections.open(), self._options.meta)

    async def close(self) -> None:
        """Close all connections. A cancellation takes effect afterwards."""
        await clean_up(self._close_all)

    async def _close_all(self) -> None:
        try:
            await self._connections.close()
        finally:
            if self._own_network is not None:
                await self._own_network.close()

    async def fetch_view(self, offset: StreamOffset | None = None) -> View:
        """
        Fetch the lineage and the stored offsets of the partitions.

        Args:
            offset: partitions that are finished at this offset are omitted; None omits none.
        """
        view = await self.retry(lambda: self._fetch_view_once(offset))
        missing_ids = sorted((self._options.partitions or set()) - self._all_ids)
        if missing_ids:
            raise self._unknown_partition_error("partitions", missing_ids[0])
        return view

    async def fetch_view_until(
        self, offset: StreamOffset, check: Callable[[View], KeylaneError | None]
    ) -> View:
        """
        Repeat `fetch_view` for up to READ_GIVE_UP_MS until `check` returns no error.

        Raises:
            KeylaneError: the error that `check` still returns at the end of that time.
        """
        deadline_ms = self._clock.boot_ms() + READ_GIVE_UP_MS
        while True:
            view = await self.fetch_view(offset)
            error = check(view)
            if error is None:
                return view
            if self._clock.boot_ms() >= deadline_ms:
                raise error
            log.info("stream of %s: %s", ", ".join(self._options.subjects), error.message)
            self._lineage = None
            await asyncio.sleep(self._pauses.next_pause_ms() / 1000)

    async def resolve_bound(self, view: View, bound: ReadBound) -> dict[int, int]:
        """Return the offset that a bound means in each readable partition. Offsets for times follow
        the lineage.
        """
        lineage = view.lineage
        # A backfill or a bound may name partitions that the options exclude because these do not
        # have any of the keys.
        unknown_ids = sorted(bound.by_partition.keys() - self._all_ids)
        if unknown_ids:
            option = "start" if bound is self._options.start else "end"
            raise self._unknown_partition_error(option, unknown_ids[0])
        partition_ids = [
            partition_id for partition_id, branch in lineage.branches.items() if not branch.is_gone
        ]
        offsets = await self.retry(
            lambda: gather_limited(
                lambda partition_id: self._resolve_point(
                    view, partition_id, bound.at(partition_id)
                ),
                partition_ids,
            )
        )
        resolve_bound = dict(zip(partition_ids, offsets, strict=True))
        local_points = {
            partition_id: LocalPoint(stored.first, stored.end, resolve_bound[partition_id])
            for partition_id, stored in view.stored.items()
            if partition_id in resolve_bound and isinstance(bound.at(partition_id), StoredAt)
        }
        return resolve_bound | order_points(local_points, lineage.parents)

    def progress_of(self, group: str) -> GroupProgress:
        """Return the progress of a group that follows this stream. Call this after `open`."""
        return GroupProgress(self._meta, group, self._clock)

    async def retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call, and retry it for up to RETRY_MS if it fails with a retryable
        error.
        """
        failing_since_ms: int | None = None
        while True:
            try:
                result = await call()
            except KeylaneError as error:
                if error.retry is RetryRule.NEVER:
                    raise
                now_ms = self._clock.boot_ms()
                failing_since_ms = now_ms if failing_since_ms is None else failing_since_ms
                if now_ms - failing_since_ms >= RETRY_MS:
                    raise
                log.info("stream of %s: %s", ", ".join(self._options.subjects), error.message)
                self._lineage = None
                await asyncio.sleep(self._pauses.next_pause_ms() / 1000)
                continue
            self._pauses.reset()
            return result

    # ── lineage ───────────────────────────────────────────────────────────────────────────────────
    async def _fetch_lineage(self) -> Lineage:
        branches: list[Branch] = []
        subjects: dict[str, int] = {}
        excluded: set[int] = set()
        for subject in self._options.subjects:
            route, history = await asyncio.gather(
                self._meta.route(subject), self._meta.call(endpoints.HISTORY, subject=subject)
            )
            subjects[subject] = route.subject_id
            branches += branches_of(subject, history.partitions)
            excluded |= self._find_excluded(route, branches)
        self.subjects = subjects
        self._all_ids = {
            int(branch.partition.partition_id)
            for branch in branches
            if branch.partition.state is not PartitionState.PLANNED
        }
        self._continued_ids = {
            int(parent)
            for branch in branches
            if branch.partition.state is not PartitionState.PLANNED
            for parent in branch.partition.parents
        }
        self._lineage_fetched_ms = self._clock.boot_ms()
        self._lineage = Lineage(branches, lambda each: int(each.partition_id) not in excluded)
        return self._lineage

    def _find_excluded(self, route: Route, branches: Iterable[Branch]) -> set[int]:
        """Return the ids of those partitions of the subject that the stream does not read."""
        selected_ids = self._options.partitions
        # In a best_tried subject that is not static, a keyed message may be in any partition.
        keys = None if route.may_reroute_keys else self._options.keys
        logical_partitions = None if keys is None else {int(logical_partition(key)) for key in keys}
        return {
            int(branch.partition.partition_id)
            for branch in branches
            if branch.subject == route.subject
            and (
                (selected_ids is not None and branch.partition.partition_id not in selected_ids)
                or (
                    logical_partitions is not None
                    and not _overlaps(branch.partition, logical_partitions)
                )
            )
        }

    def no_data_error(self, option: str, partition_id: int) -> PartitionUnknownError:
        """Return the error for an `option` that names a partition without data."""
        subjects = ", ".join(self._options.subjects)
        return PartitionUnknownError(
            f"{option}: subject {subjects} has no data in partition {partition_id}",
            partition_id=partition_id,
            subject=subjects,
        )

    def _unknown_partition_error(self, option: str, partition_id: int) -> PartitionUnknownError:
        subjects = ", ".join(self._options.subjects)
        return PartitionUnknownError(
            f"{option}: subject {subjects} has no partition {partition_id}",
            partition_id=partition_id,
            subject=subjects,
        )

    # ── what is stored ────────────────────────────────────────────────────────────────────────────
    async def _fetch_view_once(self, offset: StreamOffset | None) -> View:
        lineage = self._lineage or await self._fetch_lineage()
        stored_offsets: dict[int, StoredOffsets] = {}
        while True:
            stored_offsets = await self._fetch_stored(lineage, offset, stored_offsets)
            childless_ids = {
                partition_id
                for partition_id, each in stored_offsets.items()
                if each.sealed
                and (
                    partition_id not in self._continued_ids
                    or lineage.branches[partition_id].end is None
                )
            }
            is_recent = self._clock.boot_ms() - self._lineage_fetched_ms < LINEAGE_MS
            if not childless_ids or (is_recent and childless_ids <= self._childless_ids):
                return View(lineage, stored_offsets)
            lineage = await self._fetch_lineage()
            self._childless_ids = childless_ids

    async def _fetch_stored(
        self, lineage: Lineage, offset: StreamOffset | None, known: dict[int, StoredOffsets]
    ) -> dict[int, StoredOffsets]:
        """Fetch the stored offsets of each readable partition that is neither finished nor already
        known.
        """
        finished = set() if offset is None else finished_partitions(View(lineage), offset)
        partition_ids = [
            partition_id
            for partition_id, branch in lineage.branches.items()
            if partition_id not in finished and partition_id not in known and not branch.is_gone
        ]
        answers = await gather_limited(
            self._fetch_status, [lineage.branches[partition_id] for partition_id in partition_ids]
        )
        statuses = zip(partition_ids, answers, strict=True)
        return known | {
            partition_id: StoredOffsets(
                status.first_offset, status.next_offset, status.state is PartitionState.SEALED
            )
            for partition_id, status in statuses
            if status is not None
        }

    async def _fetch_status(self, branch: Branch) -> PartitionStatus | None:
        """Return the status of a partition, or None if the partition was abandoned and its broker
        does not respond.
        """
        try:
            return await self._broker_client(branch.partition).control(
                endpoints.PARTITION, id=branch.partition.partition_id
            )
        except UnreachableError:
            if branch.abandoned and branch.end is None:
                return None
            raise
        except PartitionUnknownError:
            await self._fetch_lineage()  # raises a clearer error if the subject was deleted
            raise

    def _broker_client(self, partition: Partition) -> BrokerClient:
        if partition.address is None:
            raise NotSentError(
                f"broker group {partition.broker_group} is not available",
                partition_id=partition.partition_id,
                broker_group=partition.broker_group,
            )
        return self._connections.broker_at(partition.address)

    async def _resolve_point(self, view: View, partition_id: int, point: Point) -> int:
        """Return the offset that a point means in a partition, which may need a call to its
        broker.
        """
        stored_offsets = view.stored.get(partition_id)
        if isinstance(point, int) or stored_offsets is None:
            return point if isinstance(point, int) else 0
        if isinstance(point, Edge):
            return stored_offsets.first if point is Edge.EARLIEST else stored_offsets.end
        broker = self._broker_client(view.lineage.branches[partition_id].partition)
        if isinstance(point, StoredAt):
            by_time = await broker.control(
                endpoints.OFFSET_AT,
                query={"at_ms": point.at_ms, "bound": TimeBound.LOWER},
                id=partition_id,
            )
            return (
                stored_offsets.end
                if by_time.offset is None
                else max(by_time.offset, stored_offsets.first)
            )
        assert isinstance(point, CursorOf)
        groups = (await broker.control(endpoints.PARTITION, id=partition_id)).groups
        return next(
            (each.cursor for each in groups if each.group == point.group), stored_offsets.first
        )


def _overlaps(partition: Partition, logical_partitions: set[int]) -> bool:
    """Return True if the partition's range contains one of these logical partitions."""
    return any(
        partition.range_start <= number < partition.range_end for number in logical_partitions
    )
