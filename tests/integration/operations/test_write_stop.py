"""The transactions of an operation, counted: writers to a sealed parent wait for one of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from keylane.metaserver.catalogue.service import Catalogue
from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.cluster.subjects import read_route
from keylane.metaserver.groups.service import GroupService
from keylane.metaserver.operations.driver import OperationDriver
from keylane.metaserver.settings import MetaserverSettings
from keylane.metaserver.sql.database import SqlDatabase, open_database
from keylane.protocol.clock import SystemClock
from keylane.protocol.control import BrokerHeartbeat, CreateSubject, Join, PartitionStatus
from keylane.protocol.operations import OperationKind, OperationState, OperationView, Reshape
from keylane.rpc.http_network import HttpNetwork
from keylane.rpc.server import Params
from support.brokers.hosting_broker import HostingBroker

RESIZE = Reshape(kind=OperationKind.RESIZE, subject="s", partitions=3)
SEAL, ROUTE = "a broker seals", "a new route"


class LoggedDatabase:
    """A database that logs its writing transactions, and each that changes the route of subject
    `s`.
    """

    def __init__(self, database: SqlDatabase, events: list[str]) -> None:
        self._database = database
        self._events = events
        self.version = 0
        self.read = database.read
        self.write_urgent = database.write_urgent
        self.renew = database.renew

    async def write(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def logged(connection: Any) -> Any:
            result = work(connection, *args, **kwargs)
            self._events.append(getattr(work, "__name__", "a call"))
            if self.version:
                version = read_route(connection, "s").version
                if version != self.version:
                    self._events.append(ROUTE)
                self.version = version
            return result

        return await self._database.write(logged)


class SealingBroker(HostingBroker):
    """A broker that logs each seal."""

    def __init__(self, broker_group: str, events: list[str]) -> None:
        super().__init__(broker_group)
        self._events = events
        self.when_sealed: Callable[[], Any] | None = None

    async def _seal(self, body: object, params: Params) -> PartitionStatus:
        if self.when_sealed is not None:
            await self.when_sealed()
        self._events.append(SEAL)
        return await super()._seal(body, params)


class DriverAndBrokers:
    """A driver of operations, its database, and two brokers with one partition of subject `s`
    each.
    """

    def __init__(self, folder: Path) -> None:
        self.settings = MetaserverSettings(data=folder)
        self.events: list[str] = []
        self.brokers = [SealingBroker(group, self.events) for group in ("g1", "g2")]

    async def open(self, stack: AsyncExitStack) -> None:
        network = HttpNetwork()
        stack.push_async_callback(network.close)
        opened = await stack.enter_async_context(
            open_database(
                folder=self.settings.data,
                url=None,
                clock=SystemClock(),
                boot="",
                broker_ttl_ms=60_000,
            )
        )
        self.database = LoggedDatabase(opened, self.events)
        for broker in self.brokers:
            await broker.start()
            stack.push_async_callback(broker.stop)
            report = BrokerHeartbeat(
                broker_group=broker.broker_group, broker_id=broker.broker_id, address=broker.address
            )
            await self.database.write(store_report, report, ttl_ms=60_000)
        catalogue = Catalogue(self.database, network, self.settings)
        self.groups = GroupService(self.database, self.settings)
        self.driver = OperationDriver(
            self.database,
            network,
            self.settings,
            catalogue=catalogue,
            groups=self.groups,
            driver="d",
            rng=random.Random(1),
        )
        stack.push_async_callback(self.driver.stop)
        await catalogue.create_subject(CreateSubject(subject="s", partitions=2))
        self.database.version = (await self.database.read(read_route, "s")).version
        self.events.clear()

    async def resize(self) -> list[str]:
        """Resize the subject; what happened up to the new route, and the next transaction of the
        operation.
        """
        await self.driver.begin(RESIZE)
        operations: tuple[OperationView, ...] = ()
        while not operations or operations[0].state is not OperationState.DONE:
            await asyncio.sleep(0.01)
            operations = (await self.driver.list_operations("s")).operations
        return self.events[: self.events.index(ROUTE) + 1]


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DriverAndBrokers]:
    """A call of a broker waits for as long as a busy machine takes: one that is given up costs
    transactions that are counted.
    """
    monkeypatch.setattr("keylane.metaserver.operations.driver.CALL_TIMEOUT_MS", 60_000)
    house = DriverAndBrokers(tmp_path)
    async with AsyncExitStack() as stack:
        await house.open(stack)
        yield house


async def test_resize_changes_the_route_in_the_transaction_that_notes_the_last_seal(
    house: DriverAndBrokers,
):
    """Five transactions in all, one of them after the seals."""
    events = await house.resize()
    assert events == [
        "begin_operations",
        "claim_operation",
        "finish_round",
        "claim_operation",
        SEAL,
        SEAL,
        "finish_round",
        ROUTE,
    ]


async def test_group_is_told_before_the_route_changes_when_it_is_made_during_seal(
    house: DriverAndBrokers,
):
    """The operation waits in OPEN for the brokers of its children: two transactions more."""

    async def join() -> None:
        for broker in house.brokers:
            broker.when_sealed = None
        await house.groups.join(Join(subject="s", group="late", session="a" * 16, ttl_ms=10_000))

    house.brokers[0].when_sealed = join
    events = await house.resize()
    journal = [
        event for event in events if event in {"claim_operation", "finish_round", SEAL, ROUTE}
    ]
    assert journal[-6:] == [
        SEAL,
        SEAL,
        "finish_round",
        "claim_operation",
        "finish_round",
        ROUTE,
    ]
    route = await house.database.read(read_route, "s")
    places = {broker.broker_group: broker for broker in house.brokers}
    for child in route.open_partitions():
        assert places[child.broker_group].known[child.partition_id] == {"late"}
