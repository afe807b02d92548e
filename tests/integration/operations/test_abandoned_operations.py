"""Operations without a driver, whose brokers are silent, say what they wait for."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from keylane.metaserver.catalogue.service import Catalogue
from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.cluster.subjects import open_subject, plan_subject, read_route
from keylane.metaserver.groups.service import GroupService
from keylane.metaserver.operations.begin import begin_operations
from keylane.metaserver.operations.driver import OperationDriver
from keylane.metaserver.operations.journal import finish_round, idle_operations
from keylane.metaserver.settings import MetaserverSettings
from keylane.metaserver.sql.database import SqlDatabase, open_database
from keylane.protocol.control import BrokerHeartbeat, CreateSubject
from keylane.protocol.operations import OperationKind, OperationState, OperationView, Reshape
from keylane.protocol.routing import OrderStrategy
from keylane.rpc.http_network import HttpNetwork
from sim.machines.clock import ManualClock

TTL_MS = 10_000
LEASE_MS = 500


class Abandoned:
    """A move of partition 1 of subject `s` from g1 to g2, journaled by a metaserver that died right
    afterwards.
    """

    def __init__(
        self, database: SqlDatabase, clock: ManualClock, operations: OperationDriver
    ) -> None:
        self.database = database
        self.clock = clock
        self._operations = operations
        self.operation_id = 0
        self.parent = self.child = 0

    async def report(self, *groups: str) -> None:
        for group in groups:
            body = BrokerHeartbeat(broker_group=group, broker_id=group, address=f"{group}:1")
            await self.database.write(store_report, body, ttl_ms=TTL_MS)

    async def begin(self, strategy: OrderStrategy, *, without_source: bool) -> None:
        await self.report("g1", "g2")
        ask = CreateSubject(subject="s", partitions=2, order_strategy=strategy)
        await self.database.write(plan_subject, ask, subjects_max=10)
        await self.database.write(open_subject, "s")
        if without_source:
            await self.silence("g1")
            move = Reshape(kind=OperationKind.EVACUATE, broker_group="g1", without_source=True)
        else:
            route = await self.database.read(read_route, "s")
            (parent,) = (
                partition for partition in route.partitions if partition.broker_group == "g1"
            )
            move = Reshape(
                kind=OperationKind.MOVE, partition_ids=(parent.partition_id,), broker_group="g2"
            )
        ((self.operation_id, _),) = await self.database.write(
            begin_operations, move, driver="dead", lease_ms=LEASE_MS
        )
        view = await self.view()
        (self.parent,), (child,) = view.sealed, view.children
        self.child = child.partition_id

    async def silence(self, *groups: str) -> None:
        """Let these broker groups be silent from now on; the others report themselves."""
        self.clock.advance(TTL_MS)
        await self.report(*({"g1", "g2"} - set(groups)))

    async def hosted(self) -> OperationState:
        """The child is hosted, then the driver dies again."""
        return await self.database.write(finish_round, self.operation_id, {self.child: None})

    async def view(self) -> OperationView:
        (view,) = (await self._operations.list_operations("s")).operations
        return view


@asynccontextmanager
async def abandoned(
    folder: Path, strategy: OrderStrategy = OrderStrategy.STRICT, *, without_source: bool = False
) -> AsyncIterator[Abandoned]:
    clock = ManualClock()
    settings = MetaserverSettings(data=folder)
    network = HttpNetwork()
    try:
        async with open_database(
            folder=folder, url=None, clock=clock, boot="boot", broker_ttl_ms=TTL_MS
        ) as database:
            catalogue, groups = (
                Catalogue(database, network, settings),
                GroupService(database, settings),
            )
            operations = OperationDriver(
                database,
                network,
                settings,
                catalogue=catalogue,
                groups=groups,
                driver="next",
                rng=random.Random(1),
            )
            abandoned = Abandoned(database, clock, operations)
            await abandoned.begin(strategy, without_source=without_source)
            yield abandoned
    finally:
        await network.close()


async def test_operation_names_a_silent_broker_that_is_to_host(tmp_path: Path):
    """No driver asks the broker; the operation names the broker as long as it is silent, and no
    longer.
    """
    async with abandoned(tmp_path) as move:
        assert (await move.view()).problem == ""
        await move.silence("g2")
        assert await move.database.read(idle_operations) == []
        view = await move.view()
        assert (view.state, view.problem) == (OperationState.PLAN, "broker group 'g2' is silent")
        await move.silence()
        assert (await move.view()).problem == ""


async def test_operation_names_a_silent_broker_that_is_to_seal(tmp_path: Path):
    """In PLAN the operation waits for every parent's broker, later for the seal."""
    async with abandoned(tmp_path) as move:
        await move.silence("g1")
        await move.database.write(finish_round, move.operation_id, {move.child: None})
        view = await move.view()
        assert (
            view.problem
            == "silent: g1; no parent is sealed before the brokers of all parents can seal"
        )
        await move.silence()
        assert await move.hosted() is OperationState.SEAL
        await move.silence("g1")
        assert (await move.view()).problem.startswith("broker group 'g1' is silent; the children")


@pytest.mark.parametrize("strategy", OrderStrategy)
async def test_operation_waits_for_a_silent_source_only_when_its_subject_is_strict(
    tmp_path: Path, strategy: OrderStrategy
):
    """Without its source a best_tried subject gets its new route; a strict subject waits and says
    so.
    """
    async with abandoned(tmp_path, strategy, without_source=True) as move:
        state = await move.hosted()
        strict = strategy is OrderStrategy.STRICT
        assert state is (OperationState.PLAN if strict else OperationState.FENCE)
        assert ("no parent is sealed" in (await move.view()).problem) is strict
        route = await move.database.read(read_route, "s")
        places = {partition.broker_group for partition in route.open_partitions()}
        assert ("g1" in places) is strict
        move.clock.advance(LEASE_MS)
        assert await move.database.read(idle_operations) == []


async def test_noted_problem_is_shown_until_the_state_changes(tmp_path: Path):
    """A reason noted by a driver that asked a broker is preferred; a done operation has no
    reason.
    """
    async with abandoned(tmp_path) as move:
        await move.database.write(finish_round, move.operation_id, {}, "the disk of g2 is full")
        await move.silence("g2")
        assert (await move.view()).problem == "the disk of g2 is full"
        await move.silence()
        assert await move.hosted() is OperationState.SEAL
        await move.database.write(finish_round, move.operation_id, {move.parent: 7})
        await move.silence("g1", "g2")
        assert (await move.view()).problem == ""
