"""A parent's broker answers, and cannot seal: no parent is sealed before all parents can be
sealed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from keylane.broker.app import RunningBroker, running_broker
from keylane.broker.settings import BrokerSettings
from keylane.cli.commands.broker.groups import list_brokers
from keylane.cli.options import OutputFormat
from keylane.metaserver.running import running_metaserver
from keylane.metaserver.settings import MetaserverSettings
from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject, Route
from keylane.protocol.errors import FlushFailedError, Reason, StaleRouteError
from keylane.protocol.frames import Append, Appended
from keylane.protocol.operations import (
    OperationKind,
    OperationState,
    OperationView,
    Reshape,
)
from keylane.protocol.routing import OrderStrategy, Partition
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork
from sim.machines.store import batch
from support.raising import raises

THREE = Reshape(kind=OperationKind.RESIZE, subject="s", partitions=3)


class SealingCluster:
    """A metaserver and two brokers in this loop; subject `s` has a partition on each."""

    def __init__(self, folder: Path, stack: AsyncExitStack, network: HttpNetwork) -> None:
        self._folder = folder
        self._stack = stack
        self.network = network
        self.meta_address = ""
        self.brokers: dict[str, RunningBroker] = {}
        self._running: dict[str, AsyncExitStack] = {}
        self._sequence = 0

    async def open(self) -> None:
        settings = MetaserverSettings(
            data=self._folder / "meta", port=0, poll_ms=100, broker_heartbeat_ms=100
        )
        running = await self._stack.enter_async_context(running_metaserver(settings))
        self.meta_address = running.address
        self.meta = MetaClient(self.network, [running.address])
        for group in ("g1", "g2"):
            await self.start(group)
        await self.reported(2)
        ask = CreateSubject(subject="s", partitions=2, order_strategy=OrderStrategy.STRICT)
        await self.meta.create_subject(ask)

    async def start(self, group: str, port: int = 0) -> None:
        settings = BrokerSettings(
            group=group, data=self._folder / group, meta=(self.meta_address,), port=port
        )
        stack = self._running[group] = AsyncExitStack()
        self._stack.push_async_callback(stack.aclose)
        self.brokers[group] = await stack.enter_async_context(
            running_broker(settings, network=self.network)
        )

    async def restart(self, group: str) -> None:
        port = int(self.brokers[group].address.rsplit(":", 1)[1])
        await self._running[group].aclose()
        await self.start(group, port)

    async def reported(self, count: int) -> None:
        """Wait until `count` brokers take new partitions."""
        until = time.monotonic() + 60
        while True:
            brokers = (await self.meta.health()).details.get("brokers", [])
            if sum(bool(broker["available"]) for broker in brokers) == count:
                return
            assert time.monotonic() < until, brokers
            await asyncio.sleep(0.05)

    async def route(self) -> Route:
        return (await self.meta.call(endpoints.SUBJECT, subject="s")).route

    async def on(self, group: str) -> Partition:
        """The open partition of a broker group."""
        (partition,) = (
            partition
            for partition in (await self.route()).open_partitions()
            if partition.broker_group == group
        )
        return partition

    async def begin(self, ask: Reshape) -> OperationView:
        (view,) = (await self.meta.call(endpoints.RESHAPE, ask)).operations
        return view

    async def until(self, view: OperationView, state: OperationState) -> OperationView:
        until = time.monotonic() + 60
        while view.state is not state:
            assert time.monotonic() < until, view
            await asyncio.sleep(0.02)
            view = await self.look(view)
        return view

    async def look(self, view: OperationView) -> OperationView:
        operations = (await self.meta.call(endpoints.OPERATIONS, subject="s")).operations
        return next(
            operation for operation in operations if operation.operation_id == view.operation_id
        )

    async def waits(self, view: OperationView) -> OperationView:
        """The operation, as soon as it names the reason why it waits."""
        until = time.monotonic() + 60
        while not view.problem:
            assert time.monotonic() < until, view
            await asyncio.sleep(0.02)
            view = await self.look(view)
        return view

    async def takes_messages(self, partition: Partition) -> bool:
        assert partition.address is not None
        broker = BrokerClient(self.network, partition.address)
        try:
            self._sequence += 1
            data = batch(partition_id=partition.partition_id, sequence=self._sequence - 1, count=1)
            answer, _ = await broker.call(Append(partition.partition_id), data)
        except StaleRouteError:
            return False
        finally:
            await broker.close()
        return isinstance(answer, Appended)

    async def break_disk(self, group: str) -> None:
        """After a failed write the broker takes no writes until it is restarted, and no partition
        is planned there.
        """
        store = self.brokers[group].store

        def fail(*_args: object, **_named: object) -> None:
            raise FlushFailedError("the disk does not answer")

        store.log.write = store.log.begin_write = fail  # type: ignore[method-assign]
        _, durable = store.seal((await self.on(group)).partition_id)
        with pytest.raises(FlushFailedError):
            await durable
        await self.gets_no_partitions(group)

    async def gets_no_partitions(self, group: str) -> None:
        """Wait until its report that it takes no writes has come."""
        dry = replace(THREE, dry_run=True)
        while any(
            partition.broker_group == group for partition in (await self.begin(dry)).children
        ):
            await asyncio.sleep(0.02)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[SealingCluster]:
    async with AsyncExitStack() as stack:
        network = HttpNetwork()
        stack.push_async_callback(network.close)
        house = SealingCluster(tmp_path, stack, network)
        await house.open()
        yield house


async def test_evacuation_moves_a_broker_that_takes_no_messages(house: SealingCluster):
    """A disk that is too full for messages has room for seals: its open partitions move
    elsewhere.
    """
    commit = house.brokers["g2"].store.commit
    commit.refuse_messages("the disk is 90 % full, and 90 % is the limit")
    commit.hold = lambda _reason: None  # type: ignore[method-assign]
    view = await house.begin(Reshape(kind=OperationKind.EVACUATE, broker_group="g2"))
    await house.until(view, OperationState.DONE)
    assert {partition.broker_group for partition in (await house.route()).open_partitions()} == {
        "g1"
    }


async def test_broker_list_and_a_refused_move_say_why_a_broker_takes_no_writes(
    house: SealingCluster, capsys: pytest.CaptureFixture[str]
):
    """The reason comes with the broker's next report."""
    commit = house.brokers["g2"].store.commit
    full = "the disk is 91 % full, and 90 % is the limit"
    commit.refuse_messages(full)
    commit.hold = lambda _reason: None  # type: ignore[method-assign]
    await house.gets_no_partitions("g2")
    move = Reshape(
        kind=OperationKind.MOVE,
        partition_ids=((await house.on("g1")).partition_id,),
        broker_group="g2",
    )
    with raises(Reason.NOT_ENOUGH_BROKERS, match=f"'g2' takes no writes: {full}"):
        await house.begin(move)
    evacuation = Reshape(kind=OperationKind.EVACUATE, broker_group="g1")
    with raises(Reason.NOT_ENOUGH_BROKERS, match=f"no other broker group .*: {full}"):
        await house.begin(evacuation)
    capsys.readouterr()
    await list_brokers(house.meta_address, OutputFormat.TABLE)
    line = next(line for line in capsys.readouterr().out.splitlines() if " g2 " in line)
    assert "takes no writes: the disk is 91 %" in line
    assert "gets none" in line


async def test_no_parent_is_sealed_when_one_cannot_be(house: SealingCluster):
    """The operation stays in PLAN and says why; the healthy parent takes messages; a cancel frees
    the subject.
    """
    healthy, broken = await house.on("g1"), await house.on("g2")
    store = house.brokers["g2"].store
    store.state.add_lost_range(store.state.partition(broken.partition_id), 0, -1, position=0)
    view = await house.waits(await house.begin(THREE))
    assert view.state is OperationState.PLAN
    assert f"partition {broken.partition_id} on 'g2' cannot be sealed" in view.problem
    assert await house.takes_messages(healthy)
    canceled = await house.meta.call(endpoints.CANCEL_OPERATION, id=view.operation_id)
    assert canceled.state is OperationState.CANCELED
    assert await house.takes_messages(healthy)
    move = Reshape(
        kind=OperationKind.MOVE, partition_ids=(healthy.partition_id,), broker_group="g2"
    )
    await house.until(await house.begin(move), OperationState.DONE)


async def test_operation_continues_when_the_broker_can_seal_again(house: SealingCluster):
    """After a failed write a broker seals nothing; after its restart it seals, and the operation is
    done.
    """
    healthy = await house.on("g1")
    await house.break_disk("g2")
    view = await house.waits(await house.begin(THREE))
    assert view.state is OperationState.PLAN
    assert "takes no writes: the disk does not answer" in view.problem
    assert await house.takes_messages(healthy)
    await house.restart("g2")
    done = await house.until(view, OperationState.DONE)
    assert done.problem == ""
    assert not await house.takes_messages(healthy)
    assert len((await house.route()).open_partitions()) == 3
