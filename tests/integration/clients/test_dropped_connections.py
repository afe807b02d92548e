"""Clients behind a proxy that drops their connections without a word: each makes another, and goes
on in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import pytest

from keylane import Admin, Consumer, Message, Producer, Reader, sync
from keylane.spark.source import KeylaneSource
from support.cluster import Cluster, pause, resume
from support.hosts.dropping_way import OUTSIDE, DroppingWay

pytestmark = pytest.mark.cluster(brokers=1, broker_settings=f'advertised_host = "{OUTSIDE}"\n')
SOON_S = 19.0
"""
The silence of calls that wait is found after 11 s at most, and another ping has 1.5 s; a new
connection answers at once. The rest is for a busy machine.
"""


class Ways:
    """The proxies before the metaserver and the broker."""

    def __init__(self, meta: DroppingWay, broker: DroppingWay) -> None:
        self.meta, self.broker = meta, broker

    def drop(self) -> None:
        self.meta.drop()
        self.broker.drop()


@contextlib.contextmanager
def ways_to(cluster: Cluster, *, idle_s: float = float("inf")) -> Iterator[Ways]:
    ports = [int(each.address.split(":")[1]) for each in (cluster.meta_program, cluster.brokers[0])]
    with (
        DroppingWay(ports[0], idle_s=idle_s) as meta,
        DroppingWay(ports[1], idle_s=idle_s) as broker,
    ):
        yield Ways(meta, broker)


@contextlib.contextmanager
def soon() -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < SOON_S


async def stored(ways: Ways, subject: str) -> list[bytes]:
    async with Reader(ways.meta.address, subject) as reader:
        return [message.value async for message in reader]


async def test_clients_go_on_when_their_connections_are_dropped(cluster: Cluster):
    """Batches are stored once and in order; a consumer pulls and acks, a reader reads, an admin is
    answered.
    """
    with ways_to(cluster) as ways:
        await cluster.create("orders", partitions=1)
        handled: list[bytes] = []

        async def handle(message: Message) -> None:
            handled.append(message.value)

        async with (
            Producer(ways.meta.address) as producer,
            Consumer(ways.meta.address, subject="orders", group="g", handler=handle),
            Reader(ways.meta.address, "orders", follow=True, start="earliest") as reader,
            Admin(ways.meta.address) as admin,
        ):
            sent: list[bytes] = []
            for round_ in range(2):
                for number in range(20):
                    sent.append(b"%d-%d" % (round_, number))
                    producer.send("orders", sent[-1], key=b"k")
                with soon():
                    await producer.flush()
                with soon():
                    read = [(await anext(reader)).value for _ in range(20)]
                assert read == sent[-20:]
                with soon():
                    while handled != sent or await admin.lag("orders", "g"):
                        await asyncio.sleep(0.05)
                ways.drop()
                with soon():
                    assert "orders" in str(await admin.list_subjects())
                ways.drop()
                with soon():
                    await admin.create_subject(f"other-{round_}", partitions=1)
                    await admin.delete_subject(f"other-{round_}")
        assert await stored(ways, "orders") == sent


def test_blocking_clients_go_on_when_their_connections_are_dropped(cluster: Cluster):
    """A producer and a consumer without an event loop, and the reader that Spark has."""
    with ways_to(cluster) as ways:
        asyncio.run(cluster.create("orders", partitions=1))
        meta = ways.meta.address
        with (
            sync.Producer(meta) as producer,
            sync.Consumer(meta, subject="orders", group="g") as consumer,
        ):
            for round_ in range(2):
                sent = [b"%d-%d" % (round_, number) for number in range(20)]
                with soon():
                    for value in sent:
                        producer.send("orders", value, key=b"k")
                    producer.flush()
                got: list[bytes] = []
                with soon():
                    for message in consumer:
                        got.append(message.value)
                        message.ack()
                        if len(got) == len(sent):
                            break
                assert got == sent
                with soon():
                    assert spark_rows(meta) == list(range(20 * (round_ + 1)))
                ways.drop()
        assert len(asyncio.run(stored(ways, "orders"))) == 40


def spark_rows(meta: str) -> list[int]:
    source = KeylaneSource({"meta": meta, "subject": "orders", "columns": "offset"})
    reader = source.reader(source.schema())
    return [
        offset
        for task in reader.partitions()
        for batch in reader.read(task)
        for offset in batch["offset"].to_pylist()
    ]


async def test_idle_connections_to_brokers_are_not_dropped_when_a_proxy_forgets_them(
    cluster: Cluster,
):
    """Of those of a consumer, a producer and a reader none is silent for 11 s."""
    with ways_to(cluster, idle_s=11.0) as ways:
        await cluster.create("orders", partitions=1)
        meta = ways.meta.address
        async with (
            Producer(meta) as producer,
            Consumer(meta, subject="orders", group="g", handler=lambda _message: None),
            Reader(meta, "orders", follow=True) as reader,
        ):
            await producer.send("orders", b"first", key=b"k")
            assert (await anext(reader)).value == b"first"
            accepted = ways.broker.accepted
            waiting = asyncio.ensure_future(anext(reader))
            await asyncio.sleep(14)
            began_s = time.monotonic()
            await producer.send("orders", b"second", key=b"k")
            assert (await waiting).value == b"second"
            assert time.monotonic() - began_s < 2
            assert ways.broker.idle == 0
            assert ways.broker.accepted - accepted <= 1  # a control call of the metaserver


async def test_paused_broker_keeps_its_connections_when_it_answers_again(cluster: Cluster):
    """While it is paused, few new connections are tried; then the old ones go on."""
    with ways_to(cluster) as ways:
        await cluster.create("orders", partitions=1)
        meta = ways.meta.address
        async with Producer(meta) as producer:
            await producer.send("orders", b"first", key=b"k")
            (channel,) = [each.live_channel for each in producer._connections._brokers.values()]
            accepted = ways.broker.accepted
            pause(cluster.brokers[0].process.pid)
            try:
                sending = producer.send("orders", b"second", key=b"k")
                await asyncio.sleep(12)
            finally:
                resume(cluster.brokers[0].process.pid)
            assert (await sending).offset == 1
            assert not channel.closed
            assert ways.broker.accepted - accepted <= 6  # the metaserver's calls too
