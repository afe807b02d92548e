"""A subject is reprocessed into itself and cut over, again and again, while producers send, groups
consume and programs die.

An operator hides a subject with a cut, holds what lies before it, fills the hidden subject from
there, each row once however often a piece is begun again, and publishes it in the place of the
messages. Consumers stand still for the publication.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa

from keylane.broker.partition.partition import HostedPartition
from keylane.checker.findings import Findings
from keylane.consumer.reading.reader import Reader
from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject, DeleteSubject
from keylane.protocol.errors import (
    BusyError,
    FlushFailedError,
    KeylaneError,
    NotSentError,
    OffsetOutOfRangeError,
    PublishError,
    Reason,
    RetryRule,
    RowsError,
    SubjectDeletedError,
    SubjectUnknownError,
)
from keylane.protocol.groups import CreateGroup
from keylane.protocol.operations import (
    ROUTE_FINAL,
    HideSubject,
    OperationKind,
    OperationState,
    Publication,
    PublishSubject,
    Reshape,
)
from keylane.protocol.reprocess.holds import SetHold
from keylane.protocol.routing import Partition, PartitionState, Route
from keylane.rpc.client import BrokerClient
from keylane.spark.reprocess.carrying import positions
from keylane.spark.writing.lanes import TaskSender
from keylane.spark.writing.rows import RowReader
from keylane.testing.machines.network import SimNetwork
from sim.actors.clients import ProducerHost
from sim.actors.consumers import ConsumerHost
from sim.features.carried import GROUP, Judged, Round, Row, astray
from sim.features.feature import Feature
from sim.service import cursor_of
from sim.swarm import Swarm

CUT = "reworked"
HOLD_MS = 60_000
SOURCE = "keylane.source"
T = TypeVar("T")


class CutProducer(ProducerHost):
    """Sends to the subject from its creation on."""

    subject = CUT
    gives_up = (*ProducerHost.gives_up, SubjectUnknownError)


class CarriedConsumer(ConsumerHost):
    """Consumes the subject; it is not started before that is made, nor while its group is to stand
    still.
    """

    subject = CUT
    stands_still = True

    def start(self) -> None:
        if not self.stands_still:
            super().start()


class CutOvers(Feature):
    """See the module."""

    faults = frozenset({"broker_crash", "meta_step", "meta_crash"})
    never = frozenset({"evacuate", "cordon", "broker_full"})
    consumer_kind = ConsumerHost

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        few = {"segment_bytes": 4_096, "retention_bytes": rng.choice((1, 1, 8_192))}
        return replace(
            swarm,
            fault_s=10.0,
            messages=rng.choice((60, 120)),
            pace=3.0,
            padding_bytes=300,
            broker=swarm.broker | few,
        )

    def build(self) -> None:
        rng = self.rng
        self.rounds: list[Round] = []
        self.lineage: dict[int, tuple[int, ...]] = {}
        self.parents: dict[int, tuple[int, ...]] = {}
        """Also those of partitions that have expired."""
        self.members: set[int] | None = None
        """The partitions of the subject at the end; None while it has not looked."""
        self._hidden: set[int] = set()
        """Partitions of hidden subjects that were not published."""
        self._made = False
        self._since = 0
        self._number = 0
        self._senders = [self.add_producer(CutProducer, f"v{n}") for n in range(rng.choice((1, 2)))]
        self._consumers = [
            self.world.add_consumer(CarriedConsumer, group=GROUP) for _ in range(rng.choice((1, 2)))
        ]
        self._network = SimNetwork(self.world.internet, self.world._operator)

    @property
    def drained(self) -> bool:
        brokers = self.world.brokers
        if not self._made or not all(each.running and each.store is not None for each in brokers):
            return False
        return all(
            cursor_of(partition, GROUP) >= partition.readable_offset == partition.next_offset
            for broker in brokers
            if broker.store is not None
            for number, partition in broker.store.state.partitions.items()
            if partition.facts.subject == CUT and number not in self._hidden
        )

    # ── deeds ─────────────────────────────────────────────────────────────────────────────────────
    async def work(self) -> None:
        """Cut over until all is healed, and once more then."""
        self.idle = False
        try:
            await self._work()
        except Exception as error:  # noqa: BLE001 - no one awaits an operator
            self.problems.append(f"the operator has failed: {error!r}")
        self.idle = True

    async def _work(self) -> None:
        count = self.rng.choice((1, 2, 3))
        await self._until_done(
            lambda: self._meta.create_subject(CreateSubject(subject=CUT, partitions=count))
        )
        await self._until_done(
            lambda: self._meta.call(endpoints.CREATE_GROUP, CreateGroup(), subject=CUT, group=GROUP)
        )
        self._since = len(self.world.history)
        self._made = True
        self._stand_still(False)
        last = False
        while not last:
            last = self.world.faults.healed
            await self.pause(0.5 if last else 2.0)
            if self.rng.random() < 0.3:
                await self._resize()
            await self._cut_over()
        self._stand_still(False)
        while self._dropping():
            await asyncio.sleep(0.2)
        await asyncio.sleep(
            3.0
        )  # also those of partitions without messages, and the drops become durable

    def _dropping(self) -> bool:
        """Whether a broker has still to drop what was replaced."""
        replaced = frozenset[int]().union(*(each.replaced for each in self.rounds))
        stores = [broker.store for broker in self.world.brokers]
        return any(
            store is None
            or any(
                number in replaced and partition.first_offset < partition.next_offset
                for number, partition in store.state.partitions.items()
            )
            for store in stores
        )

    @property
    def _meta(self) -> Any:
        return self.world._operator_meta

    async def _resize(self) -> None:
        ask = Reshape(
            kind=OperationKind.RESIZE, subject=CUT, partitions=self.rng.choice((1, 2, 3, 4))
        )
        await self.world._reshape(ask)

    async def _cut_over(self) -> None:
        """One round; the actor may be killed at any of its steps, and then deletes what it has
        hidden.
        """
        world = self.world
        world.faults.done += 1
        self._number += 1
        round_ = Round(f"{CUT}.h{self._number}")
        view = await self._hide(round_)
        if view is None:
            return
        ids = {int(each.partition_id) for each in view.partitions}
        self._hidden |= ids
        round_.partitions = frozenset(ids)
        parents = {int(parent) for each in view.partitions for parent in each.parents}
        older = await self._sealed(parents, before=min(ids))
        round_.replaced = frozenset(int(each.partition_id) for each in older)
        await self._hold(round_, older)
        self._leave_out(round_)
        await self.pause(2.5)
        if await self._read(round_, older):
            await self._fill(round_, older)
            await self.pause(1.0)
            if self.rng.random() < 0.85:
                await self._publish(round_)
        if round_.published_at is None:
            await self._delete(round_.hidden)
        else:
            self._hidden -= ids
            self.rounds.append(round_)

    async def _hide(self, round_: Round) -> Route | None:
        """Hide a subject with a cut; None if the subject has changed meanwhile."""
        ask = HideSubject(hidden=round_.hidden, cut=True)
        try:
            view = await self._until_done(lambda: self._meta.hide_subject(CUT, ask))
        except PublishError as error:
            if error.reason is not Reason.PUBLISH_OUTDATED:
                raise
            route = await self._until_done(lambda: self._meta.route(round_.hidden))
            self._hidden |= {int(each.partition_id) for each in route.partitions}
            await self._delete(round_.hidden)
            return None
        return view.route

    async def _sealed(self, parents: Collection[int], *, before: int) -> list[Partition]:
        """What lies before the cut, once it is sealed."""
        while True:
            route: Route = await self._until_done(lambda: self._meta.route(CUT))
            waits = [
                each
                for each in route.partitions
                if each.partition_id in parents and each.state is PartitionState.OPEN
            ]
            if not waits:
                older = [each for each in route.partitions if each.partition_id < before]
                return sorted(older, key=lambda each: each.partition_id)
            await asyncio.sleep(0.1)

    async def _hold(self, round_: Round, older: Sequence[Partition]) -> None:
        """Hold all that is there."""
        for partition in older:
            number = int(partition.partition_id)

            async def held(number: int = number) -> Any:
                broker = await self._broker_of(number)
                status = await broker.control(endpoints.PARTITION, id=number)
                body = SetHold(job="cut", from_offset=status.first_offset, ttl_ms=HOLD_MS)
                await broker.control(endpoints.HOLD, body, id=number)
                return status.first_offset, status.next_offset

            while True:
                try:
                    first, end = await self._until_done(held)
                    break
                except OffsetOutOfRangeError:
                    continue  # retention was quicker
                except SubjectUnknownError:  # it had taken all
                    round_.taken.add(number)
                    first, end = 0, 0
                    break
            round_.starts[number], round_.ends[number] = first, end

    def _leave_out(self, round_: Round) -> None:
        """At times, end before the latest message of a partition, as a job does that is told to."""
        some = [number for number, end in round_.ends.items() if round_.starts[number] < end]
        if some and self.rng.random() < 0.2:
            round_.short = self.rng.choice(some)
            start, end = round_.starts[round_.short], round_.ends[round_.short]
            round_.ends[round_.short] = self.rng.randrange(start, end)

    async def _read(self, round_: Round, older: Sequence[Partition]) -> bool:
        """Read what is held; returns False if the subject's partitions have gone otherwise."""
        for partition in older:
            number = int(partition.partition_id)
            start, end = round_.starts[number], round_.ends[number]
            rows: list[Row] = []

            async def read(number: int = number, start: int = start, end: int = end) -> list[Row]:
                if start == end:
                    return []
                async with Reader(
                    self.world._meta,
                    CUT,
                    partition=number,
                    start=start,
                    stop=end,
                    call_timeout_ms=1_000,
                ) as reader:
                    return [
                        Row((number, message.offset), message.key, message.value)
                        async for message in reader
                    ]

            try:
                rows = await self._until_done(read)
            except (OffsetOutOfRangeError, SubjectUnknownError) as error:
                self.problems.append(
                    f"held messages [{start}, {end}) of {number} are gone: {error}"
                )
                return False
            if [row.place[1] for row in rows] != list(range(start, end)):
                self.problems.append(
                    f"held messages [{start}, {end}) of {number}: {len(rows)} of them are there"
                )
                return False
            round_.rows += rows
        return True

    async def _fill(self, round_: Round, older: Sequence[Partition]) -> None:
        """Store the rows of each partition behind those that it continues; at times a task dies and
        is run again.
        """
        for partition in older:
            number = int(partition.partition_id)
            rows = [row for row in round_.rows if row.place[0] == number]
            if not rows:
                continue
            while True:
                task = asyncio.ensure_future(self._store(round_.hidden, partition, rows))
                if self.rng.random() < 0.3:
                    await asyncio.sleep(0.02 * self.rng.random())
                    task.cancel()
                await asyncio.wait([task])
                if not task.cancelled() and task.exception() is None:
                    break
                error = None if task.cancelled() else task.exception()
                if not (task.cancelled() or isinstance(error, KeylaneError)) or isinstance(
                    error, RowsError
                ):
                    self.problems.append(f"rows of {number} are refused: {error!r}")
                    break
                await asyncio.sleep(0.2)

    async def _store(self, hidden: str, partition: Partition, rows: Sequence[Row]) -> None:
        number = int(partition.partition_id)
        sender = TaskSender(
            self._network,
            self._meta,
            hidden,
            identity=("cut", hidden, number),
            task=number,
            sent_at_ns=1,
            timeout_ms=3_000,
            clock=self.world.metas[0].machine,
            rng=self.rng,
        )
        try:
            route = await sender.open()
            limit = route.message_bytes_max
            reader = RowReader(
                salt=b"%d" % number,
                message_bytes_max=limit,
                task=number,
                allow_reserved=True,
                keyless_bounds=(partition.range_start, partition.range_end),
            )
            sources = [[(SOURCE, f"{row.place[0]}/{row.place[1]}")] for row in rows]
            batch = pa.record_batch(
                {
                    "key": pa.array([row.key for row in rows], pa.binary()),
                    "value": pa.array([row.value for row in rows], pa.binary()),
                    "properties": pa.array(sources, pa.map_(pa.string(), pa.string())),
                }
            )
            await sender.put(reader.read(batch))
            await sender.finish()
        finally:
            await sender.close()

    # ── the publication ───────────────────────────────────────────────────────────────────────────
    async def _publish(self, round_: Round) -> None:
        """Publish the rows; the group stands still from the look at its cursors until they are
        there.
        """
        self._stand_still(True)
        ask: PublishSubject | None = None
        asked_s = float("inf")
        try:
            while True:
                try:
                    ask = await self._asked(round_)
                except SubjectUnknownError:
                    # A copy of a refused request may come late, and publish. A repeat says whether
                    # it did.
                    if ask is None:
                        raise
                asked_s = min(asked_s, self.world.loop.now)
                try:
                    # The group is busy: a consumer that was about to open could not leave.
                    answer = await self._answered(round_, ask, asked_s, but=BusyError)
                    break
                except (BusyError, PublishError) as error:
                    if error.reason is Reason.PUBLISH_BEHIND:
                        raise
                    await asyncio.sleep(0.3)
                    self._stand_still(True)
            round_.accepted_at = len(self.world.history)
            if self.rng.random() < 0.5:  # consumers may be back before the route has changed
                self._stand_still(False)
            while answer.state not in ROUTE_FINAL:
                await asyncio.sleep(0.1)
                answer = await self._answered(round_, ask, asked_s)
            if answer.state is OperationState.DONE:
                round_.published_at = len(self.world.history)
            if round_.short:
                self.problems.append(f"published without all messages of {round_.short}")
        except PublishError as error:
            if error.partition_id != round_.short:
                self.problems.append(f"what is sealed has grown: {error}")
        finally:
            self._stand_still(False)

    async def _answered(
        self,
        round_: Round,
        ask: PublishSubject,
        asked_s: float,
        *,
        but: type[KeylaneError] | tuple[()] = (),
    ) -> Publication:
        """
        What became of a publication that was first asked for at `asked_s`.

        A repeat that comes when it is over and forgotten is told that there is no such subject, as
        is one for a hidden subject that was lost: the route tells them apart. A canceled one is
        never forgotten.
        """
        try:
            answer: Publication = await self._until_done(
                lambda: self._meta.call(endpoints.PUBLISH_SUBJECT, ask, subject=round_.hidden),
                but=but,
            )
        except SubjectUnknownError:
            if not self.may_be_forgotten(asked_s):
                raise
            history = await self._until_done(
                lambda: self._meta.call(endpoints.HISTORY, subject=CUT)
            )
            shown = {
                int(each.partition.partition_id)
                for each in history.partitions
                if each.partition.state is not PartitionState.PLANNED
            }
            if not round_.partitions <= shown:
                raise
            return Publication(hidden=round_.hidden, target=CUT)
        return answer

    async def _asked(self, round_: Round) -> PublishSubject:
        """The publication, with where the groups are now."""
        revisions: dict[str, str] = {}
        cursors, rows, ends = await self._until_done(lambda: self._look_at(round_, revisions))
        round_.cursors = dict(cursors.get(GROUP, {}))
        batch = pa.record_batch(
            {
                "partition": pa.array([each.partition_id for each in rows], pa.int32()),
                "offset": pa.array([each.offset for each in rows], pa.int64()),
                "properties": pa.array(
                    [list(each.properties.items()) for each in rows],
                    pa.map_(pa.string(), pa.string()),
                ),
            }
        )
        starts = positions(cursors, [batch] if rows else [], ends)
        return PublishSubject(
            target=CUT, replace=True, starts=starts, ends=round_.ends, revisions=revisions
        )

    async def _look_at(
        self, round_: Round, revisions: dict[str, str]
    ) -> tuple[dict[str, dict[int, int]], list[Any], dict[int, int]]:
        """The cursors of the groups, the rows, and the ends of the hidden subject; before the
        cursors the groups' revisions.
        """
        cursors: dict[str, dict[int, int]] = {}
        for group in (await self._meta.call(endpoints.GROUPS, subject=CUT)).groups:
            revisions[group] = (
                await self._meta.call(endpoints.GROUP, subject=CUT, group=group)
            ).revision
            by_partition = cursors.setdefault(group, {})
            for number, end in round_.ends.items():
                if end == round_.starts[number]:
                    continue  # retention may have taken it out of the route
                status = await self._status(number)
                at = {each.group: each.cursor for each in status.groups}
                by_partition[number] = at.get(group, status.first_offset)
        route = await self._meta.route(round_.hidden)
        ends = {}
        for each in route.partitions:
            ends[int(each.partition_id)] = (await self._status(int(each.partition_id))).next_offset
        async with Reader(self.world._meta, round_.hidden, call_timeout_ms=1_000) as reader:
            rows = [message async for message in reader]
        if len(rows) != len(round_.rows) or sum(ends.values()) != len(rows):
            self.problems.append(f"{round_.hidden} has {len(rows)} rows of {len(round_.rows)}")
        round_.stored = {row.value: (row.partition_id, row.offset) for row in rows}
        return cursors, sorted(rows, key=lambda row: (row.partition_id, row.offset)), ends

    def _stand_still(self, stands: bool) -> None:
        """Have the group's consumers leave, or start those that are gone; once all is healed, also
        those that are still leaving.
        """
        for consumer in self._consumers:
            assert isinstance(consumer, CarriedConsumer)
            consumer.stands_still = stands
            if stands:
                consumer.leave()
            else:
                self.world.faults.restart(consumer)

    async def _delete(self, hidden: str) -> None:
        while True:
            try:
                view = await self._meta.call(
                    endpoints.DELETE_SUBJECT, DeleteSubject(force=True), subject=hidden
                )
                if not view.left:
                    return
            except (SubjectUnknownError, SubjectDeletedError):
                return
            except KeylaneError as error:
                self.world.trace(f"{hidden} is not deleted: {error!r}")
            await asyncio.sleep(0.2)

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────
    async def _until_done(self, ask: Any, *, but: type[KeylaneError] | tuple[()] = ()) -> Any:
        """Ask until it is answered; refusals that do not pass are raised, and those of the kind
        `but`.
        """
        while True:
            try:
                return await ask()
            except KeylaneError as error:
                passes = error.retry is not RetryRule.NEVER or (
                    error.reason is Reason.OPERATION_FORWARD or isinstance(error, FlushFailedError)
                )  # the last: the broker is started again
                if not passes or isinstance(error, but):
                    raise
                self.world.trace(f"again: {error!r}")
            await asyncio.sleep(0.2)

    async def _broker_of(self, number: int) -> BrokerClient:
        for name in (CUT, *(f"{CUT}.h{at}" for at in range(self._number, 0, -1))):
            try:
                route: Route = await self._meta.route(name)
            except (SubjectUnknownError, SubjectDeletedError):
                continue
            for each in route.partitions:
                if each.partition_id == number:
                    if each.address is None:
                        raise NotSentError(f"broker group {each.broker_group} is silent")
                    return BrokerClient(self._network, each.address, timeout_ms=1_000)
        raise SubjectUnknownError(f"partition {number} is in no route", subject=CUT)

    async def _status(self, number: int) -> Any:
        return await (await self._broker_of(number)).control(endpoints.PARTITION, id=number)

    # ── the judge ─────────────────────────────────────────────────────────────────────────────────
    async def look(self) -> None:
        history = await self._meta.call(endpoints.HISTORY, subject=CUT)
        self.parents = {
            int(each.partition.partition_id): tuple(map(int, each.partition.parents))
            for each in history.partitions
        }
        self.lineage = {
            int(each.partition.partition_id): self.parents[int(each.partition.partition_id)]
            for each in history.partitions
            if each.partition.state is not PartitionState.EXPIRED
        }
        removed = [
            int(each.partition.partition_id)
            for each in history.partitions
            if each.partition.state is PartitionState.EXPIRED
        ]
        replaced = frozenset().union(*(each.replaced for each in self.rounds))
        self.members = set(self.lineage) | (set(removed) - replaced - self._hidden)

    def check(self, findings: Findings, hosted: dict[int, HostedPartition]) -> None:
        members = self.members or ()
        seen = Judged(self.world.history, {host.name for host in self._senders}, members)
        if self.members is not None:  # else the world has not drained, which is a finding itself
            self.problems += seen.lost(self.rounds, since=self._since)
            self.problems += seen.out_of_order(self.lineage)
            self.problems += astray(self.rounds, self.parents)
        self.problems += seen.again(self.rounds)
        self.problems += seen.early(self.rounds)
        self.problems = self.problems[:8]
