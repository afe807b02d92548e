"""A key whose message keeps failing is parked with all that follows it; everything else goes on;
then it is redriven.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from keylane import Admin, Consumer, Message, Producer
from keylane.protocol import endpoints
from keylane.protocol.backoff import Backoff
from keylane.protocol.control import PartitionStatus
from keylane.protocol.errors import Reason
from keylane.protocol.limits import ACK_RANGES_MAX
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.parked import ChangeParkedKey, ParkedList, ParkState
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually
from support.consumer_options import consumer_options
from support.raising import raises
from support.server_process import ServerProcess

FAST = Backoff(first_ms=5, max_ms=5)


class Handler:
    """Fails for the messages of `poison` keys; remembers what it handled, by key."""

    def __init__(self) -> None:
        self.poison: set[bytes] = set()
        self.handled: dict[bytes, list[int]] = defaultdict(list)
        self.tried: list[tuple[bytes, int, int]] = []

    async def __call__(self, message: Message) -> None:
        self.tried.append((message.key, int(message.value), message.attempt))
        if message.key in self.poison:
            raise ValueError(f"cannot take {message.value.decode()}")
        self.handled[message.key].append(int(message.value))


class ParkedBrokers:
    """What the brokers of a subject say."""

    def __init__(self, network: HttpNetwork, meta: str, subject: str) -> None:
        self._network = network
        self._meta = MetaClient(network, [meta])
        self._subject = subject

    async def partitions(self) -> dict[int, BrokerClient]:
        """Every partition with the client of its broker, by id."""
        history = await self._meta.call(endpoints.HISTORY, subject=self._subject)
        return {
            int(part.partition.partition_id): BrokerClient(
                self._network, str(part.partition.address)
            )
            for part in history.partitions
        }

    async def parked(self, group: str = "g") -> dict[int, ParkedList]:
        """What the group has parked, by partition; frozen ones are left out."""
        lists = {}
        for number, broker in (await self.partitions()).items():
            status: PartitionStatus = await broker.control(endpoints.PARTITION, id=number)
            if any(known.group == group for known in status.groups):
                page = await broker.control(
                    endpoints.PARKED, query={"count": 1000, "group": group}, id=number
                )
                if page.keys and not page.frozen:
                    lists[number] = page
        return lists

    async def kept(self, number: int, group: str = "g") -> int:
        """Parked messages that a partition keeps for its children."""
        broker = (await self.partitions())[number]
        page = await broker.control(
            endpoints.PARKED, query={"group": group, "count": 1000}, id=number
        )
        return sum(key.messages for key in page.keys)

    async def count(self) -> int:
        """Parked messages, of all partitions."""
        return sum(key.messages for page in (await self.parked()).values() for key in page.keys)

    async def adopted(self, parent: int, count: int) -> None:
        """Wait until the children of a partition have `count` parked messages, and it has none."""
        while True:
            lists = await self.parked()  # at one moment: two calls may see both sides of a change
            if parent not in lists:
                messages = [key.messages for page in lists.values() for key in page.keys]
                if sum(messages) >= count:
                    return
            await asyncio.sleep(0.05)

    async def redrive(self, key: bytes) -> None:
        """Have a key's messages handled again."""
        for number, page in (await self.parked()).items():
            if any(view.key_hex == key.hex() for view in page.keys):
                broker = (await self.partitions())[number]
                await broker.control(
                    endpoints.CHANGE_PARKED,
                    ChangeParkedKey(group="g", key_hex=key.hex()),
                    id=number,
                )


@asynccontextmanager
async def brokers_of(cluster: Cluster, subject: str) -> AsyncIterator[ParkedBrokers]:
    network = HttpNetwork()
    try:
        yield ParkedBrokers(network, cluster.meta, subject)
    finally:
        await network.close()


def consumer_of(cluster: Cluster, subject: str, handler: Handler, **given: object) -> Consumer:
    """A consumer that parks after three tries."""
    options = {
        "on_failure": "park",
        "tries_max": 3,
        "handler_backoff": FAST,
        "backoff": FAST,
        **given,
    }
    return Consumer(
        cluster.meta, **consumer_options(subject=subject, group="g", handler=handler, **options)
    )


async def send(producer: Producer, subject: str, key: bytes, *numbers: int) -> None:
    for number in numbers:
        await producer.send(subject, b"%d" % number, key=key)


async def test_failing_key_is_parked_and_others_go_on(shared_cluster: Cluster):
    """Its later messages follow it; a redrive handles all of them in order, while new ones
    arrive.
    """
    subject, handler = "park-key", Handler()
    await shared_cluster.create(subject, partitions=1)
    handler.poison = {b"bad"}
    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        consumer_of(shared_cluster, subject, handler),
        brokers_of(shared_cluster, subject) as brokers,
    ):
        await send(producer, subject, b"bad", 0, 1)
        await send(producer, subject, b"good", 0, 1)
        await eventually(lambda: handler.handled[b"good"] == [0, 1])
        await send(producer, subject, b"bad", 2)
        await send(producer, subject, b"good", 2)
        await eventually(lambda: handler.handled[b"good"] == [0, 1, 2])
        while await brokers.count() < 3:
            await asyncio.sleep(0.05)
        ((_, page),) = (await brokers.parked()).items()
        (view,) = page.keys
        assert (view.key_hex, view.state, view.messages) == (b"bad".hex(), ParkState.PARKED, 3)
        assert view.failure is not None
        assert (view.failure.kind, view.failure.attempts) == ("ValueError", 3)
        assert view.failure.text == "cannot take 0"
        assert [tried for tried in handler.tried if tried[0] == b"bad"] == [
            (b"bad", 0, 1),
            (b"bad", 0, 2),
            (b"bad", 0, 3),
        ]
        handler.poison = set()
        await brokers.redrive(b"bad")
        await send(producer, subject, b"bad", *range(3, 8))
        await eventually(lambda: handler.handled[b"bad"] == list(range(8)))
        while await brokers.parked():
            await asyncio.sleep(0.05)
        await send(producer, subject, b"bad", 8)
        await eventually(lambda: handler.handled[b"bad"] == list(range(9)))


async def test_key_is_redriven_while_new_messages_of_it_never_pause(shared_cluster: Cluster):
    """Some of them always wait to be parked, also when the consumer hears of the redrive."""
    subject, handler = "park-stream", Handler()
    await shared_cluster.create(subject, partitions=1)
    keys = [b"bad-%d" % number for number in range(4)]
    handler.poison = set(keys)
    sent, stopped = 0, asyncio.Event()
    async with (
        asyncio.timeout(120),
        Producer(shared_cluster.meta) as producer,
        consumer_of(shared_cluster, subject, handler),
        brokers_of(shared_cluster, subject) as brokers,
    ):

        async def stream() -> None:
            nonlocal sent
            while not stopped.is_set():
                await asyncio.gather(
                    *[producer.send(subject, b"%d" % sent, key=key) for key in keys]
                )
                sent += 1

        streaming = asyncio.create_task(stream())
        try:
            while await brokers.count() < 200:
                await asyncio.sleep(0.05)
            handler.poison = set()
            for (
                key
            ) in keys:  # one by one: the next change at the broker has the consumer look again
                await brokers.redrive(key)
                await eventually(lambda key=key: handler.handled[key])
        finally:
            stopped.set()
            await streaming
        await eventually(
            lambda: all(handler.handled[key] == list(range(sent)) for key in keys), seconds=60
        )


async def test_parked_key_stays_parked_through_a_new_owner_and_a_restart_of_its_broker(
    tmp_path: Path,
):
    """Nothing of it is handled until the redrive; then everything, in order."""
    subject, handler = "orders", Handler()
    handler.poison = {b"bad"}
    with Cluster(tmp_path, brokers=1) as cluster:
        await cluster.create(subject, partitions=1)
        async with (
            asyncio.timeout(60),
            Producer(cluster.meta) as producer,
            brokers_of(cluster, subject) as brokers,
        ):
            await send(producer, subject, b"bad", 0, 1)
            async with consumer_of(cluster, subject, handler):
                while await brokers.count() < 2:
                    await asyncio.sleep(0.05)
            handler.poison = set()
            cluster.brokers[0].kill()
            cluster.brokers[0].restart()
            await send(producer, subject, b"bad", 2)
            async with consumer_of(cluster, subject, handler):
                await send(producer, subject, b"good", 0)
                await eventually(lambda: handler.handled[b"good"] == [0])
                while await brokers.count() < 3:
                    await asyncio.sleep(0.05)
                assert not handler.handled[b"bad"]
                await brokers.redrive(b"bad")
                await eventually(lambda: handler.handled[b"bad"] == [0, 1, 2])


async def test_message_of_a_skipped_key_is_set_aside_alone_when_the_next_owner_does_so(
    shared_cluster: Cluster,
):
    """Nothing of the key was parked any more: the message is like any other, and is not redriven."""
    subject, handler = "park-emptied", Handler()
    await shared_cluster.create(subject, partitions=1)
    handler.poison = {b"bad"}
    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        Admin(shared_cluster.meta) as admin,
    ):

        async def parked() -> list[tuple[bytes | None, int]]:
            return [(view.key, view.messages) async for view in admin.parked(subject, "g")]

        await send(producer, subject, b"bad", 0, 1)
        async with consumer_of(shared_cluster, subject, handler):
            while await parked() != [(b"bad", 2)]:
                await asyncio.sleep(0.05)
        await admin.skip(subject, "g", key=b"bad", first=2)
        await send(producer, subject, b"bad", 2)
        async with consumer_of(shared_cluster, subject, handler, on_failure="dead"):
            while not await parked() or await admin.lag(subject, "g"):
                await asyncio.sleep(0.05)
            assert await parked() == [(None, 1)]


@pytest.mark.parametrize("kind", [OperationKind.RESIZE, OperationKind.MOVE])
async def test_parked_key_goes_with_its_children(file_cluster: Cluster, kind: OperationKind):
    """A resize or a move after the parking: the child parks what follows, and the redrive begins
    with the parent's.
    """
    subject, handler = f"park-{kind}", Handler()
    await file_cluster.create(subject, partitions=1)
    handler.poison = {b"bad", b"worse"}
    async with (
        asyncio.timeout(60),
        Producer(file_cluster.meta) as producer,
        consumer_of(file_cluster, subject, handler),
        brokers_of(file_cluster, subject) as brokers,
    ):
        for key in (b"bad", b"worse"):
            await send(producer, subject, key, 0, 1)
        while await brokers.count() < 4:
            await asyncio.sleep(0.05)
        (parent,) = await brokers.partitions()
        if kind is OperationKind.RESIZE:
            ask = Reshape(kind=kind, subject=subject, partitions=2)
        else:
            broker_group = "g2" if await hosted(file_cluster, parent, "g1") else "g1"
            ask = Reshape(kind=kind, partition_ids=(parent,), broker_group=broker_group)
        await file_cluster.reshape(ask)
        for key in (b"bad", b"good", b"worse"):
            await send(producer, subject, key, 2)
        await eventually(lambda: handler.handled[b"good"] == [2])
        while await brokers.count() < 6:
            await asyncio.sleep(0.05)
        assert parent not in await brokers.parked()
        handler.poison = set()
        for key in (b"bad", b"worse"):
            await brokers.redrive(key)
            await send(producer, subject, key, 3)
        await eventually(lambda: handler.handled[b"bad"] == [0, 1, 2, 3])
        await eventually(lambda: handler.handled[b"worse"] == [0, 1, 2, 3])
        while await brokers.parked():
            await asyncio.sleep(0.05)
        while await brokers.kept(parent):
            await asyncio.sleep(0.05)


async def test_change_is_refused_when_the_children_have_taken_over(shared_cluster: Cluster):
    """An operator's call that comes late to the parent; the child has the key."""
    subject, handler = "park-frozen", Handler()
    await shared_cluster.create(subject, partitions=1)
    handler.poison = {b"bad"}
    async with (
        asyncio.timeout(60),
        Admin(shared_cluster.meta) as admin,
        Producer(shared_cluster.meta) as producer,
        consumer_of(shared_cluster, subject, handler),
        brokers_of(shared_cluster, subject) as brokers,
    ):
        await send(producer, subject, b"bad", 0, 1)
        while await brokers.count() < 2:
            await asyncio.sleep(0.05)
        ((parent, broker),) = (await brokers.partitions()).items()
        await admin.wait(await admin.resize(subject, 2))
        await brokers.adopted(parent, 2)
        for skip in (None, [(parent, 0, 1)]):
            change = ChangeParkedKey(group="g", key_hex=b"bad".hex(), skip=skip)
            with raises(Reason.PARK_MOVED):
                await broker.control(endpoints.CHANGE_PARKED, change, id=parent)
        (view,) = [each async for each in admin.parked(subject, "g")]
        assert view.partition_id != parent
        assert (view.key, view.messages, view.state) == (b"bad", 2, ParkState.PARKED)


async def hosted(cluster: Cluster, partition_id: int, broker_group: str) -> bool:
    """True if the partition is on this broker group."""
    network = HttpNetwork()
    try:
        broker = cluster.brokers[int(broker_group[1:]) - 1]
        listed = await BrokerClient(network, broker.address).partitions()
        return any(status.partition_id == partition_id for status in listed.partitions)
    finally:
        await network.close()


async def test_attempts_go_on_when_the_owner_changes(shared_cluster: Cluster):
    """With `block` too: the next owner counts on."""
    subject, handler = "park-attempts", Handler()
    await shared_cluster.create(subject, partitions=1)
    handler.poison = {b"bad"}
    async with asyncio.timeout(60), Producer(shared_cluster.meta) as producer:
        await send(producer, subject, b"bad", 0)
        async with consumer_of(shared_cluster, subject, handler, on_failure="block"):
            await eventually(lambda: len(handler.tried) >= 5)
        first = len(handler.tried)
        async with consumer_of(shared_cluster, subject, handler, on_failure="block"):
            await eventually(lambda: len(handler.tried) > first)
    assert handler.tried[first][2] == handler.tried[first - 1][2] + 1


COUNTER = """
import asyncio, sys
from keylane import Consumer, ConsumerSettings
from keylane.protocol.backoff import Backoff

async def handle(message):
    print(message.attempt, flush=True)
    raise ValueError("never")

asyncio.run(Consumer(
    sys.argv[1], subject="orders", group="g", handler=handle,
    settings=ConsumerSettings(ttl_ms=1_000, handler_backoff=Backoff(first_ms=100, max_ms=100)),
).run())
"""


async def test_attempts_go_on_when_consumer_and_broker_are_killed(tmp_path: Path):
    """What was told to the broker is durable: the next owner counts on from it."""
    with Cluster(tmp_path, brokers=1) as cluster:
        await cluster.create("orders", partitions=1)
        async with Producer(cluster.meta) as producer:
            await producer.send("orders", b"0", key=b"bad")
        process = ServerProcess(COUNTER, [cluster.meta])
        counted = [await asyncio.to_thread(process.stdout.readline) for _ in range(6)]
        process.kill()
        process.wait()
        process.stdout.close()
        assert [int(line) for line in counted] == [1, 2, 3, 4, 5, 6]
        cluster.brokers[0].kill()
        cluster.brokers[0].restart()
        handler = Handler()
        handler.poison = {b"bad"}
        async with consumer_of(cluster, "orders", handler, on_failure="block"):
            await eventually(lambda: handler.tried)
    (_, _, attempt), *_ = handler.tried
    assert 5 <= attempt <= 8, "the last try may not have been told, or one more have begun"


async def test_busy_key_that_is_parked_stops_neither_its_partition_nor_its_cursor(
    shared_cluster: Cluster,
):
    """More messages of it than a consumer buffers and the broker keeps ranges of; none of them
    stays in the consumer.
    """
    subject, handler, count = "park-busy", Handler(), 2 * ACK_RANGES_MAX + 25_000
    await shared_cluster.create(subject, partitions=1)
    handler.poison = {b"bad"}
    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        Admin(shared_cluster.meta) as admin,
        consumer_of(shared_cluster, subject, handler) as consumer,
    ):
        for number in range(count):
            await producer.drain()
            producer.send(subject, b"%d" % number, key=b"bad")
            if not number % 2:
                producer.send(subject, b"%d" % number, key=b"good")
        await producer.flush()
        await eventually(lambda: len(handler.handled[b"good"]) == -(-count // 2))
        while sum([view.messages async for view in admin.parked(subject, "g")]) < count:
            await asyncio.sleep(0.05)
        while await admin.lag(subject, "g"):
            await asyncio.sleep(0.05)
        (owned,) = consumer.assignment
        assert owned.outstanding == 0
    assert len([tried for tried in handler.tried if tried[0] == b"bad"]) == 3


async def test_dead_letter_is_set_aside_alone(shared_cluster: Cluster):
    """Later messages of its key go on; a redrive handles it late."""
    subject, handler = "park-dead", Handler()
    await shared_cluster.create(subject, partitions=1)
    handler.poison = {b"bad"}
    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        consumer_of(shared_cluster, subject, handler, on_failure="dead"),
        brokers_of(shared_cluster, subject) as brokers,
    ):
        await send(producer, subject, b"bad", 0)
        while await brokers.count() < 1:
            await asyncio.sleep(0.05)
        handler.poison = set()
        await send(producer, subject, b"bad", 1)
        await eventually(lambda: handler.handled[b"bad"] == [1])
        ((number, page),) = (await brokers.parked()).items()
        assert [(view.key_hex, view.messages) for view in page.keys] == [(None, 1)]
        broker = (await brokers.partitions())[number]
        await broker.control(
            endpoints.CHANGE_PARKED, ChangeParkedKey(group="g", key_hex=None), id=number
        )
        await eventually(lambda: handler.handled[b"bad"] == [1, 0])
        while await brokers.parked():
            await asyncio.sleep(0.05)
