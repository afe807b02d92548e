"""A disk with static queues is lost for good: an operator accepts the loss, and every queue
continues behind it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from keylane import Consumer, Message, Producer, QueueReader
from keylane.consumer import ConsumerSettings
from keylane.producer import ProducerSettings
from keylane.protocol import endpoints
from keylane.protocol.errors import Reason
from keylane.protocol.limits import PARTITION_MESSAGES_MAX
from keylane.protocol.message import Receipt
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.routing import ConsumeStrategy, Route, logical_partition
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, alert_cluster, eventually, pause, silent
from support.lost_database import rebuild_lost_database
from support.server_process import run_keylane

SENDING = ProducerSettings(call_timeout_ms=1_000)
ALONE = ConsumerSettings(ttl_ms=1_500)
SHARED = ConsumerSettings(ttl_ms=1_500, consume_strategy=ConsumeStrategy.SHARED)
LOSE = Reshape(kind=OperationKind.EVACUATE, broker_group="g2", accept_loss=True)
KEYS = [b"k%d" % number for number in range(20)]


async def keylane(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run_keylane, *words, "--meta", cluster.meta)


async def send_all(producer: Producer, value: bytes) -> list[Receipt]:
    """Each key gets the value."""
    return await asyncio.gather(*(producer.send("s", value, key=key) for key in KEYS))


async def starts(reader: QueueReader) -> dict[int, int]:
    """Partition id → logic start, of all that have data."""
    return {
        segment.partition.partition_id: segment.partition.logic_start
        for view in await reader.queues()
        for segment in view.segments
    }


async def read_on(
    reader: QueueReader, queue: int, offset: int, count: int
) -> tuple[list[Message], list[int]]:
    """`count` messages from a logic offset on, and the offsets before which some were told as
    lost.
    """
    messages: list[Message] = []
    losses: list[int] = []
    async with asyncio.timeout(60):
        while len(messages) < count:
            part = await reader.read(queue, offset)
            if part.lost:
                losses.append(offset)
            messages += part.messages
            assert part.messages or part.next_offset > offset
            offset = part.next_offset
    return messages, losses


async def verified(meta: MetaClient) -> None:
    """Wait until `meta verify` reports no violation."""
    async with asyncio.timeout(60):
        while any(check.violations for check in (await meta.call(endpoints.VERIFY)).checks):
            await asyncio.sleep(0.2)


def by_key(messages: list[Message]) -> dict[bytes, list[bytes]]:
    values: dict[bytes, list[bytes]] = {}
    for message in messages:
        values.setdefault(message.key, []).append(message.value)
    return values


async def lose_the_disk(
    cluster: Cluster, folder: Path, producer: Producer, meta: MetaClient
) -> None:
    """The disk of g2, where both queues are, goes while messages are on their way to it; these
    fail, their fate unknown.
    """
    broker = cluster.brokers[1]
    pause(broker.process.pid)
    doubtful = [producer.send("s", b"2", key=key) for key in KEYS]
    await asyncio.sleep(2.5)
    newer = [producer.send("s", b"3", key=key) for key in KEYS]
    broker.kill()
    shutil.rmtree(folder / "broker-2")
    await silent(meta, "g2")
    done = await keylane(cluster, "subject", "evacuate", "g2", "--accept-loss")
    assert done.returncode == 0, done.stdout + done.stderr
    async with asyncio.timeout(60):
        told = await asyncio.gather(*doubtful, return_exceptions=True)
        stored = await asyncio.gather(*newer)
    assert {error.reason for error in told} == {Reason.ACCEPTED_AS_LOST}
    assert not any(receipt.reordered for receipt in stored)


def assert_handled_over_the_loss(alone: list[Message], shared: list[Message], route: Route) -> None:
    """Both groups have every value but the lost one; the exclusive group has them in order, at
    growing logic offsets.
    """
    for seen in (alone, shared):
        assert {key: sorted(values) for key, values in by_key(seen).items()} == {
            key: [b"0", b"1", b"3"] for key in KEYS
        }
    assert set(map(tuple, by_key(alone).values())) == {(b"0", b"1", b"3")}
    for partition in route.partitions:
        offsets = [each.logic_offset for each in alone if each.queue == partition.queue]
        assert offsets == sorted(set(offsets))
        assert offsets[-1] >= PARTITION_MESSAGES_MAX


async def assert_queue_is_read_over_the_loss(
    reader: QueueReader, queue: int, keys: list[bytes], *, end: int, moved: bool
) -> None:
    """From its `end` before the loss the queue has the values behind the loss, and the consumers
    have read them all.

    Args:
        keys: the keys of the queue.
        moved: whether the queue has a partition that was sealed on another disk before the loss.
    """
    behind, losses = await read_on(reader, queue, end, len(keys))
    assert by_key(behind) == {key: [b"3"] for key in keys}
    assert losses == [end]
    if moved:
        whole, losses = await read_on(reader, queue, 0, 2 * len(keys))
        assert by_key(whole) == {key: [b"0", b"3"] for key in keys}
        assert losses == [len(keys)]
    async with asyncio.timeout(60):
        while (progress := await reader.progress(queue, "a")).lag:
            await asyncio.sleep(0.05)
    assert progress.cursor == behind[-1].logic_offset + 1


async def test_static_queues_continue_behind_a_lost_disk(tmp_path: Path) -> None:
    """Both kinds of consumers handle keys in order, logic offsets grow, and every other reader sees
    the loss and passes it; after a rebuild from the broker that is left every partition begins
    where it began.
    """
    with alert_cluster(tmp_path) as cluster:
        route = await cluster.create("s", partitions=2, static=True)
        places = {partition.broker_group: partition for partition in route.partitions}
        there, queues = places["g1"], [0] * 1024
        for partition in route.partitions:
            for logical in range(partition.range_start, partition.range_end):
                queues[logical] = partition.queue
        network = HttpNetwork()
        meta = MetaClient(network, [cluster.meta])
        alone: list[Message] = []
        shared: list[Message] = []
        try:
            async with (
                QueueReader(cluster.meta, subject="s") as reader,
                Producer(cluster.meta, settings=SENDING) as producer,
                Consumer(
                    cluster.meta, subject="s", group="a", handler=alone.append, settings=ALONE
                ),
                Consumer(
                    cluster.meta, subject="s", group="b", handler=shared.append, settings=SHARED
                ),
            ):
                await send_all(producer, b"0")
                move = Reshape(
                    kind=OperationKind.MOVE, partition_ids=(there.partition_id,), broker_group="g2"
                )
                await cluster.reshape(move)
                await send_all(producer, b"1")
                await eventually(lambda: len(alone) == len(shared) == 2 * len(KEYS))
                read = {
                    partition.queue: (await reader.bounds(partition.queue))[1]
                    for partition in route.partitions
                }

                await lose_the_disk(cluster, tmp_path, producer, meta)
                await eventually(lambda: len(alone) >= 3 * len(KEYS) <= len(shared), seconds=60)
                assert_handled_over_the_loss(alone, shared, route)
                for queue, end in read.items():
                    mine = [key for key in KEYS if queues[logical_partition(key)] == queue]
                    moved = queue == there.queue
                    await assert_queue_is_read_over_the_loss(
                        reader, queue, mine, end=end, moved=moved
                    )
                before = await starts(reader)
            await commands_tell_the_loss(cluster, there.queue, len(KEYS))
            await verified(meta)
            await rebuild_lost_database(cluster, tmp_path, gone="g2")
            async with QueueReader(cluster.meta, subject="s") as reader:
                assert await starts(reader) == before
            await verified(meta)
        finally:
            await network.close()


async def commands_tell_the_loss(cluster: Cluster, queue: int, keys: int) -> None:
    """The command line shows the loss, reads over it, and sets groups to offsets that are lost."""
    table = await keylane(cluster, "subject", "queues", "s")
    assert f"queue {queue}: messages before logic offset" in table.stdout
    shown = json.loads((await keylane(cluster, "subject", "queues", "s", "--output=json")).stdout)
    flags = [segment["behind_loss"] for segment in shown["queues"][queue]["segments"]]
    assert flags == [False, True]
    assert [segment["behind_loss"] for segment in shown["queues"][1 - queue]["segments"]] == [True]
    lines = 0
    for number, told in ((queue, "0"), (1 - queue, "3")):
        done = await keylane(cluster, "queue", "read", "s", str(number), "--offset", told)
        assert done.returncode == 0, done.stderr
        assert "are lost with a disk" in done.stderr
        lines += len(done.stdout.splitlines())
    assert keys < lines < 2 * keys
    for number in (0, 1):
        done = await keylane(
            cluster, "group", "reset", "s", "a", "--to", "1000", "--queue", str(number)
        )
        assert done.returncode == 0, done.stderr
    handled: list[Message] = []
    async with Consumer(
        cluster.meta, subject="s", group="a", handler=handled.append, settings=ALONE
    ):
        await eventually(lambda: len(handled) >= keys)
    assert by_key(handled) == {key: [b"3"] for key in KEYS}


@pytest.mark.parametrize("strategy", ["strict", "best_tried"])
async def test_queue_continues_above_all_offsets_when_two_disks_are_lost(
    tmp_path: Path, strategy: str
) -> None:
    """After each loss the queue begins again above all its earlier offsets, under either order
    strategy.
    """
    with alert_cluster(tmp_path, brokers=3) as cluster:
        await cluster.create("s", partitions=1, strategy=strategy, static=True)
        async with (
            QueueReader(cluster.meta, subject="s") as reader,
            Producer(cluster.meta, settings=SENDING) as producer,
        ):
            for _ in range(2):
                (only,) = [view.segments[-1].partition for view in await reader.queues()]
                await send_all(producer, b"0")
                number = int(only.broker_group[1:])
                cluster.brokers[number - 1].kill()
                shutil.rmtree(tmp_path / f"broker-{number}")
                network = HttpNetwork()
                try:
                    await silent(MetaClient(network, [cluster.meta]), only.broker_group)
                finally:
                    await network.close()
                await cluster.reshape(
                    Reshape(
                        kind=OperationKind.EVACUATE,
                        broker_group=only.broker_group,
                        accept_loss=True,
                    )
                )
                await send_all(producer, b"1")
                begins, ends = await reader.bounds(0)
                assert begins % PARTITION_MESSAGES_MAX == 0
                assert (begins > only.logic_start, ends - begins) == (True, len(KEYS))
