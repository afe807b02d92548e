"""Looks at the partitions of a stream: their lineage at the metaserver, what is stored at the
brokers.  Network only.

The lineage is asked for again only after a partition was sealed or a call failed: what is new
continues something sealed.
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
from ...protocol.reading.placing import OwnPlace, place_in_order
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
"""How long a metaserver or a broker may be away before the query fails."""
LINEAGE_MS = 1_000
"""The least time between two questions for what continues the same sealed partitions."""
_PAUSES = Backoff(first_ms=100, max_ms=2_000)
T = TypeVar("T")


class Watch:
    """
    The partitions of a stream, as the cluster has them.

    Each method tries again for PATIENCE_MS while a server is away.

    Raises:
        UnreachableError: it was away for longer.
        SubjectUnknownError, PartitionUnknownError: there is no such subject, or no such partition
            in the options.
    """

    def __init__(self, options: ReadOptions, *, environment: Environment | None = None) -> None:
        self._options = options
        self._environment = environment_of(environment)
        self._clock = self._environment.clock
        self._own: HttpNetwork | None = None
        self._pauses = _PAUSES.pauses(self._environment.new_rng())
        self._lineage: Lineage | None = None
        self._every: set[int] = set()
        """The partitions that the subjects ever had, also those that the stream does not read."""
        self._continued: set[int] = set()
        """Partitions that have children, which are open or were."""
        self._unknown: set[int] = set()
        """Sealed partitions whose continuation was asked for after they were seen sealed, and was
        not known.
        """
        self._learnt_ms = 0
        self.subjects: dict[str, int] = {}
        """Subject → its id; known after a look."""

    def open(self) -> None:
        """Open the connections in the running event loop.  Raises ConfigError: a file of the TLS or
        the token.
        """
        network = self._environment.network
        if network is None:
            network = self._own = open_network(self._options.secured)
        self._connections = Connections(network, timeout_ms=CALL_TIMEOUT_MS, what="stream")
        self._meta = MetaClient(self._connections.open(), self._options.meta)

    async def close(self) -> None:
        """Close every connection; a cancellation is raised when that is done."""
        await clean_up(self._end)

    async def _end(self) -> None:
        try:
            await self._connections.close()
        finally:
            if self._own is not None:
                await self._own.close()

    async def look(self, offset: StreamOffset | None = None) -> View:
        """
        What there is to read now.

        Args:
            offset: partitions that it has finished are not asked for.
        """
        view = await self.patiently(lambda: self._look(offset))
        missing = sorted((self._options.partitions or set()) - self._every)
        if missing:
            raise self._no_partition("partitions", missing[0])
        return view

    async def look_behind(
        self, offset: StreamOffset, check: Callable[[View], KeylaneError | None]
    ) -> View:
        """
        As `look`, again and again for READ_GIVE_UP_MS while `check` says that a broker stores too
        little.

        Raises:
            KeylaneError: what `check` says still.
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
        """The offset that a bound means in each partition of a view whose data is not gone; times
        are placed in order.
        """
        lineage = view.lineage
        # The options may leave out partitions that a backfill has, or that a bound names: keys may
        # lie in others.
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
            number: OwnPlace(stored.first, stored.end, places[number])
            for number, stored in view.stored.items()
            if number in places and isinstance(bound.at(number), StoredAt)
        }
        return places | place_in_order(own, lineage.parents)

    def progress_of(self, group: str) -> GroupProgress:
        """The cursors of a group that follow this stream; call it when it is open."""
        return GroupProgress(self._meta, group, self._clock)

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a call, which is tried again for PATIENCE_MS while a server is away."""
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
        """The ids of the partitions of the route's subject that the stream does not read."""
        only = self._options.partitions
        # Of a best_tried subject that is not static a keyed message may lie in any partition.
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
        """The error of a stream that is to begin in a partition whose data is gone; `option` names
        it.
        """
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
        """What the brokers store of each partition that is neither gone nor finished, beside what
        is known.
        """
        done = set() if offset is None else finished(View(lineage), offset)
        asked = [
            number
            for number, branch in lineage.branches.items()
            if number not in done and number not in known and not branch.gone
        ]
        answers = await in_turns(self._status, [lineage.branches[number] for number in asked])
        statuses = zip(asked, answers, strict=True)
        return known | {
            number: StoredOffsets(
                status.first_offset, status.next_offset, status.state is PartitionState.SEALED
            )
            for number, status in statuses
            if status is not None
        }

    async def _status(self, branch: Branch) -> PartitionStatus | None:
        """None: the partition was abandoned, and its broker is silent still."""
        try:
            return await self._broker(branch.partition).control(
                endpoints.PARTITION, id=branch.partition.partition_id
            )
        except UnreachableError:
            if branch.abandoned and branch.end is None:
                return None
            raise
        except PartitionUnknownError:
            await self._learn()  # a deleted subject says so
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
    """True if one of these logical partitions is in the partition's range."""
    return any(
        partition.range_start <= number < partition.range_end for number in logical_partitions
    )
