"""`message.lease` is the pair by which a store refuses late owners, and never the rightful one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
import sqlalchemy as sa

from keylane import Admin, Consumer, ConsumerSettings, Lease, Message, Producer, Reader
from keylane.sink import fenced_batch
from keylane.sink.tables import tables_of
from keylane.testing import VirtualCluster, run
from support.consumer_options import consumer_options

KEYS = [b"k%d" % number for number in range(8)]


class Store:
    """Keeps the highest token of each leased partition, and refuses lower ones."""

    def __init__(self) -> None:
        self.highest: dict[int, int] = {}
        self.done_keys: list[bytes] = []
        self.borrowed = 0

    def write(self, message: Message) -> None:
        lease = message.lease
        assert lease is not None
        assert lease.token == message.fencing_token
        if lease.token < self.highest.get(lease.partition_id, 0):
            raise RuntimeError("a late owner")
        self.highest[lease.partition_id] = lease.token
        self.borrowed += lease.partition_id != message.partition_id
        self.done_keys.append(message.key)


async def park_all_behind_a_split(cluster: VirtualCluster, store: Store) -> None:
    """Park every key of one partition, split it, and redrive with a handler that writes to the
    store.
    """
    broken = True

    async def handle(message: Message) -> None:
        if broken:
            raise ValueError("no such customer")
        store.write(message)

    await cluster.create_subject("s", partitions=1)
    consumer = Consumer(
        cluster.address, subject="s", group="g", handler=handle, on_failure="park", tries_max=1
    )
    async with Producer(cluster.address) as producer, Admin(cluster.address) as admin, consumer:
        for key in KEYS:
            await producer.send("s", b"1", key=key)
        await asyncio.sleep(30)
        await admin.wait(await admin.resize("s", 2))
        await asyncio.sleep(30)
        broken = False
        await admin.redrive("s", "g", all=True)
        await asyncio.sleep(60)
        assert [view.key async for view in admin.parked("s", "g")] == []


def test_store_refuses_no_owner_when_children_redrive_what_their_parent_has_parked():
    store = Store()
    run(lambda cluster: park_all_behind_a_split(cluster, store), seed=7)
    assert sorted(store.done_keys) == KEYS
    assert store.borrowed == len(KEYS), "under the leases of the children"
    assert len(store.highest) == 2


def test_redriven_messages_of_two_children_are_fenced_in_one_transaction():
    """A loop that takes them together from both children of the partition that parked them."""
    engine = sa.create_engine("sqlite://", poolclass=sa.pool.StaticPool)
    with engine.begin() as connection:
        tables_of("keylane_sink").create(connection)
    written: list[bytes] = []

    def write(messages: Iterable[Message]) -> None:
        with engine.begin() as connection, fenced_batch(connection, messages) as todo:
            written.extend(message.key for message in todo)

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=1)
        together: set[int] = set()
        async with (
            Producer(cluster.address) as producer,
            Admin(cluster.address) as admin,
            Consumer(
                cluster.address, subject="s", group="g", on_failure="park", tries_max=1
            ) as consumer,
        ):
            for key in KEYS:
                await producer.send("s", b"1", key=key)
            parked = 0
            while parked < len(KEYS):
                messages = await consumer.getmany(max_records=8, timeout_ms=1_000)
                parked += len(messages)
                await consumer.nack(messages)
            resizing = asyncio.create_task(_resize(admin))
            while not resizing.done():
                await consumer.getmany(timeout_ms=1_000)
            await admin.redrive("s", "g", all=True)
            while len(written) < len(KEYS):
                messages = await consumer.getmany(max_records=8, timeout_ms=1_000)
                write(messages)
                together = max(together, _leased(messages), key=len)
                await asyncio.sleep(1)  # so that messages of both children are there at once
                await consumer.ack(messages)
        assert len(together) == 2

    run(story, seed=7)
    engine.dispose()
    assert sorted(written) == KEYS


async def _resize(admin: Admin) -> None:
    await admin.wait(await admin.resize("s", 2))
    await asyncio.sleep(10)


def _leased(messages: list[Message]) -> set[int]:
    return {message.lease.partition_id for message in messages if message.lease is not None}


@pytest.mark.parametrize("shared", [False, True])
def test_lease_is_known_in_every_style(shared: bool):
    """Handlers, batch handlers, loops, several at once, and Arrow batches; a reader and a broadcast
    consumer have none.
    """

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=1)
        leases: dict[str, Lease | None] = {}
        options: dict = {"subject": "s"}
        grouped = options | {"consume_strategy": "shared" if shared else "exclusive"}

        async def one(message: Message) -> None:
            leases["handler" if message.group else "broadcast"] = message.lease

        async def many(messages: list[Message]) -> None:
            leases["batch"] = messages[0].lease

        address = cluster.address
        async with (
            Producer(address) as producer,
            Consumer(address, **consumer_options(group="a", handler=one, **grouped)),
            Consumer(address, **consumer_options(group="b", batch_handler=many, **grouped)),
            Consumer(
                address,
                **consumer_options(
                    settings=ConsumerSettings(broadcast=True), handler=one, **options
                ),
            ),
            Consumer(address, **consumer_options(group="c", **grouped)) as loop,
            Consumer(address, **consumer_options(group="d", **grouped)) as getmany,
            Consumer(address, **consumer_options(group="e", **options)) as arrow,
            Reader(address, "s", follow=True) as reader,
        ):
            await producer.send("s", b"1", key=b"k")
            leases["loop"] = (await anext(aiter(loop))).lease
            leases["getmany"] = (await getmany.getmany(timeout_ms=10_000))[0].lease
            leases["arrow"] = (await anext(aiter(arrow.batches()))).lease
            leases["reader"] = (await anext(aiter(reader))).lease
            await asyncio.sleep(10)
        partition_id = 1
        assert leases.pop("reader") is leases.pop("broadcast") is None
        assert set(leases) == {"handler", "batch", "loop", "getmany", "arrow"}
        for lease in leases.values():
            assert lease is not None
            assert lease.partition_id == partition_id
            assert lease.token > 0

    run(story, seed=3)
