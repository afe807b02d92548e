"""Watches the partitions of a stream: it asks the metaserver for their lineage, and the brokers for
their stored offsets. Network only.

The lineage is read again only after a partition was sealed or a call failed, because every new
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
from ...rpc.connections import Connections, clean_up, in_turns
from ...rpc.environment import Environment, environment_of
from ...rpc.http_network import HttpNetwork
from ...rpc.metaservers import CALL_TIMEOUT_MS
from .batches import finished
from .lineage import Branch, Lineage, StoredOffsets, View, branches_of
from .offset import StreamOffset
from .progress import GroupProgress

log = logging.getLogger("keylane.spark")

PATIENCE_MS = 60_000
"""Milliseconds that a metaserver or a broker may be unreachable before the query fails."""
LINEAGE_MS = 1_000
"""Shortest time in milliseconds between two requests for the children of the same sealed
partitions.
"""
_PAUSES = Backoff(first_ms=100, max_ms=2_000)
T = TypeVar("T")


class Watch:
    """
    The partitions of a stream, as the cluster reports them.

    Each method retries for PATIENCE_MS while a server is unreachable.

    Raises:
        UnreachableError: a server was unreachable for longer.
        SubjectUnknownError, PartitionUnknownError: a subject or a partition of the options does not
            exist.
    """

    def __init__(self, options: ReadOptions, *, environment: Environment | None = None) -> None:
        self._options = options
        self._environment = environment_of(environment)
        self._clock = self._environment.clock
        self._own: HttpNetwork | None = None
        self._pauses = _PAUSES.pauses(self._environment.new_rng())
        self._lineage: Lineage | None = None
        self._every: set[int] = set()
        """All partitions that the subjects ever had, also those that the stream does not read."""
        self._continued: set[int] = set()
        """Partitions whose children are open, or were."""
        self._unknown: set[int] = set()
        """Sealed partitions without known children, although the lineage was read after they were
        sealed.
        """
        self._learnt_ms = 0
        self.subjects: dict[str, int] = {}
        """Ids of the subjects by name; known after the first look."""

    def open(self) -> None:
        """Open the connections in the running event loop; raise ConfigError if a file of TLS or
        with a token cannot be used.
        """
        network = self._environment.network
        if network is None:
            network = self._own = open_network(self._options.secured)
        self._connections = Connections(network, timeout_ms=CALL_TIMEOUT_MS, what="stream")
        self._meta = MetaClient(self._connections.open(), self._options.meta)

    async def close(self) -> None:
        """Close all connections; a cancellation is raised after that."""
        await clean_up(self._end)

    async def _end(self) -> None:
        try:
            await self._connections.close()
        finally:
            if self._own is not None:
                await self._own.close()

    async def look(self, offset: StreamOffset | None = None) -> View:
        """
        Return what there is to read now.

        Args:
            offset: partitions that were read to their end at this offset are left out.
        """
        view = await self.patiently(lambda: self._look(offset))
        missing = sorted((self._options.partitions or set()) - self._every)
        if missing:
            raise self._no_partition("partitions", missing[0])
        return view

    async def look_until(
        self, offset: StreamOffset, check: Callable[[View], KeylaneError | None]
    ) -> View:
        """
        Repeat `look` for READ_GIVE_UP_MS, until `check` returns no error.

        Raises:
            KeylaneError: the error that `check` still returns after that time.
        """
        until_ms = self._clock.boot_ms() + READ_GIVE_UP_MS
        while True:
            view = await self.look(offset)
            error = check(view)
            if error is None:
                return view
            if self._clock.boot_ms() >= until_ms:
                raise error
            log.info("stream of %s: %s", ", ".join(self._options.subjects), error.message)
            self._lineage = None
            await asyncio.sleep(self._pauses.next_ms() / 1000)

    async def places(self, view: View, bound: ReadBound) -> dict[int, int]:
        """Return the offset of a bound in each partition of a view whose data is not gone; times
        are placed in order.
        """
        lineage = view.lineage
        # A backfill or a bound may name partitions that the options exclude because they hold none
        # of the keys.
        unknown = sorted(bound.by_partition.keys() - self._every)
        if unknown:
            option = "start" if bound is self._options.start else "end"
            raise self._no_partition(option, unknown[0])
        numbers = [number for number, branch in lineage.branches.items() if not branch.gone]
        offsets = await self.patiently(
            lambda: in_turns(lambda number: self._place(view, number, bound.at(number)), numbers)
        )
        places = dict(zip(numbers, offsets, strict=True))
        own = {
            number: LocalPoint(stored.first, stored.end, places[number])
            for number, stored in view.stored.items()
            if number in places and isinstance(bound.at(number), StoredAt)
        }
        return places | order_points(own, lineage.parents)

    def progress_of(self, group: str) -> GroupProgress:
        """Return the progress of a group that follows this stream; call it after `open`."""
        return GroupProgress(self._meta, group, self._clock)

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call, which is retried for PATIENCE_MS while a server is
        unreachable.
        """
        since: int | None = None
        while True:
            try:
                result = await call()
            except KeylaneError as error:
                if error.retry is RetryRule.NEVER:
                    raise
                now = self._clock.boot_ms()
                since = now if since is None else since
                if now - since >= PATIENCE_MS:
                    raise
                log.info("stream of %s: %s", ", ".join(self._options.subjects), error.message)
                self._lineage = None
                await asyncio.sleep(self._pauses.next_ms() / 1000)
                continue
            self._pauses.reset()
            return result

    # ── lineage ───────────────────────────────────────────────────────────────────────────────────
    async def _learn(self) -> Lineage:
        branches: list[Branch] = []
        subjects: dict[str, int] = {}
        excluded: set[int] = set()
        for subject in self._options.subjects:
            route, history = await asyncio.gather(
                self._meta.route(subject), self._meta.call(endpoints.HISTORY, subject=subject)
            )
            subjects[subject] = route.subject_id
            branches += branches_of(subject, history.partitions)
            excluded |= self._excluded(route, branches)
        self.subjects = subjects
        self._every = {
            int(branch.partition.partition_id)
            for branch in branches
            if branch.partition.state is not PartitionState.PLANNED
        }
        self._continued = {
            int(parent)
            for branch in branches
            if branch.partition.state is not PartitionState.PLANNED
            for parent in branch.partition.parents
        }
        self._learnt_ms = self._clock.boot_ms()
        self._lineage = Lineage(branches, lambda each: int(each.partition_id) not in excluded)
        return self._lineage

    def _excluded(self, route: Route, branches: Iterable[Branch]) -> set[int]:
        """Return the ids of the partitions of the route's subject that the stream does not read."""
        only = self._options.partitions
        # In a best_tried subject that is not static, a keyed message may be in any partition.
        keys = None if route.may_leave else self._options.keys
        wanted = None if keys is None else {int(logical_partition(key)) for key in keys}
        return {
            int(branch.partition.partition_id)
            for branch in branches
            if branch.subject == route.subject
            and (
                (only is not None and branch.partition.partition_id not in only)
                or (wanted is not None and not _holds(branch.partition, wanted))
            )
        }

    def no_data(self, option: str, partition_id: int) -> PartitionUnknownError:
        """Return the error of a stream whose `option` names a partition without data."""
        subjects = ", ".join(self._options.subjects)
        return PartitionUnknownError(
            f"{option}: subject {subjects} has no data in partition {partition_id}",
            partition_id=partition_id,
            subject=subjects,
        )

    def _no_partition(self, option: str, partition_id: int) -> PartitionUnknownError:
        subjects = ", ".join(self._options.subjects)
        return PartitionUnknownError(
            f"{option}: subject {subjects} has no partition {partition_id}",
            partition_id=partition_id,
            subject=subjects,
        )

    # ── what is stored ────────────────────────────────────────────────────────────────────────────
    async def _look(self, offset: StreamOffset | None) -> View:
        lineage = self._lineage or await self._learn()
        stored: dict[int, StoredOffsets] = {}
        while True:
            stored = await self._stored(lineage, offset, stored)
            unknown = {
                number
                for number, each in stored.items()
                if each.sealed
                and (number not in self._continued or lineage.branches[number].end is None)
            }
            recent = self._clock.boot_ms() - self._learnt_ms < LINEAGE_MS
            if not unknown or (recent and unknown <= self._unknown):
                return View(lineage, stored)
            lineage = await self._learn()
            self._unknown = unknown

    async def _stored(
        self, lineage: Lineage, offset: StreamOffset | None, known: dict[int, StoredOffsets]
    ) -> dict[int, StoredOffsets]:
        """Ask the brokers for the stored offsets of each partition that is neither gone, nor
        finished, nor known already.
        """
        done = set() if offset is None else finished(View(lineage), offset)
        numbers = [
            number
            for number, branch in lineage.branches.items()
            if number not in done and number not in known and not branch.gone
        ]
        answers = await in_turns(self._status, [lineage.branches[number] for number in numbers])
        statuses = zip(numbers, answers, strict=True)
        return known | {
            number: StoredOffsets(
                status.first_offset, status.next_offset, status.state is PartitionState.SEALED
            )
            for number, status in statuses
            if status is not None
        }

    async def _status(self, branch: Branch) -> PartitionStatus | None:
        """Return the status of a partition; None if it was abandoned and its broker does not
        answer.
        """
        try:
            return await self._broker(branch.partition).control(
                endpoints.PARTITION, id=branch.partition.partition_id
            )
        except UnreachableError:
            if branch.abandoned and branch.end is None:
                return None
            raise
        except PartitionUnknownError:
            await self._learn()  # raises a clearer error if the subject was deleted
            raise

    def _broker(self, partition: Partition) -> BrokerClient:
        if partition.address is None:
            raise NotSentError(
                f"broker group {partition.broker_group} is not available",
                partition_id=partition.partition_id,
                broker_group=partition.broker_group,
            )
        return self._connections.broker_at(partition.address)

    async def _place(self, view: View, number: int, point: Point) -> int:
        stored = view.stored.get(number)
        if isinstance(point, int) or stored is None:
            return point if isinstance(point, int) else 0
        if isinstance(point, Edge):
            return stored.first if point is Edge.EARLIEST else stored.end
        broker = self._broker(view.lineage.branches[number].partition)
        if isinstance(point, StoredAt):
            by_time = await broker.control(
                endpoints.OFFSET_AT,
                query={"at_ms": point.at_ms, "bound": TimeBound.LOWER},
                id=number,
            )
            return stored.end if by_time.offset is None else max(by_time.offset, stored.first)
        assert isinstance(point, CursorOf)
        groups = (await broker.control(endpoints.PARTITION, id=number)).groups
        return next((each.cursor for each in groups if each.group == point.group), stored.first)


def _holds(partition: Partition, logical_partitions: set[int]) -> bool:
    """Return True if one of these logical partitions is in the partition's range."""
    return any(
        partition.range_start <= number < partition.range_end for number in logical_partitions
    )
