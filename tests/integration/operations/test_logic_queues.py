"""Logic queues of static subjects on real processes: offsets continue across moves there and
back.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from typing import Any

import pytest

from keylane import Consumer, Message, Producer, QueueReader
from keylane.protocol import endpoints
from keylane.protocol.control import TimeBound
from keylane.protocol.errors import (
    ClosedError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    Reason,
)
from keylane.protocol.operations import OperationKind, Reshape
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually
from support.load import Load
from support.raising import raises
from support.server_process import run_keylane


async def move(cluster: Cluster, reader: QueueReader, queue: int, to: str) -> None:
    """Move a queue's open partition."""
    last = (await reader.queues())[queue].segments[-1].partition
    assert last.broker_group != to
    ask = Reshape(kind=OperationKind.MOVE, partition_ids=(last.partition_id,), broker_group=to)
    await cluster.reshape(ask)


async def other(reader: QueueReader, queue: int) -> str:
    """The one of two broker groups that does not have the queue now."""
    last = (await reader.queues())[queue].segments[-1].partition
    return "g2" if last.broker_group == "g1" else "g1"


async def whole(reader: QueueReader, queue: int, *, bytes_max: int = 1 << 20) -> list[Message]:
    """All messages of a queue, read by logic offset."""
    low, high = await reader.bounds(queue)
    messages: list[Message] = []
    at = low
    while at < high:
        slice_ = await reader.read(queue, at, bytes_max=bytes_max)
        assert slice_.messages
        assert len({message.partition_id for message in slice_.messages}) == 1
        assert slice_.next_offset == at + len(slice_.messages)
        messages += slice_.messages
        at = slice_.next_offset
    return messages


async def send(cluster: Cluster, subject: str, *values: bytes) -> None:
    async with Producer(cluster.meta) as producer:
        for value in values:
            await producer.send(subject, value, key=b"k")


async def test_moves_there_and_back_under_load(shared_cluster: Cluster):
    """Five moves of each queue while messages flow: offsets 0..M without a gap; the group handled
    what is read.
    """
    await shared_cluster.create("moving", partitions=2, static=True)
    async with (
        QueueReader(shared_cluster.meta, subject="moving") as reader,
        Load(shared_cluster.meta, "moving", keys=50) as load,
    ):
        for _ in range(5):
            await load.progress(400)
            for queue in (0, 1):
                await move(shared_cluster, reader, queue, await other(reader, queue))
        await load.progress(400)
        await load.finish()
        load.check()
        handled: dict[int, dict[int, bytes]] = {0: {}, 1: {}}
        for message in load.handled["audit"]:
            handled[message.queue][message.logic_offset] = message.value
        for queue in (0, 1):
            messages = await whole(reader, queue)
            assert [message.logic_offset for message in messages] == list(range(len(messages)))
            assert {message.logic_offset: message.value for message in messages} == handled[queue]
            assert len({message.partition_id for message in messages}) == 6
            progress = await reader.progress(queue, "audit")
            assert progress.max_offset == len(messages)
            assert await reader.bounds(queue) == (0, len(messages))
    await shared_cluster.check_history("moving", load.sent)


async def test_segments_of_one_message_and_of_none(shared_cluster: Cluster):
    """A sealed segment of one message stays readable; an empty segment is passed over; offsets
    continue.
    """
    await shared_cluster.create("short", partitions=1, static=True)
    async with QueueReader(shared_cluster.meta, subject="short") as reader:
        assert await reader.bounds(0) == (0, 0)
        assert (await reader.read(0, 0)).messages == []
        for number, values in enumerate(([b"0"], [], [b"1", b"2"], [b"3"])):
            if number:
                await move(shared_cluster, reader, 0, await other(reader, 0))
            await send(shared_cluster, "short", *values)
        messages = await whole(reader, 0)
        assert [(message.logic_offset, message.value) for message in messages] == [
            (0, b"0"),
            (1, b"1"),
            (2, b"2"),
            (3, b"3"),
        ]
        assert [message.queue for message in messages] == [0] * 4
        slice_ = await reader.read(0, 2)
        assert [message.value for message in slice_.messages] == [b"2"]
        assert slice_.next_offset == 3
        starts = [segment.partition.logic_start for segment in (await reader.queues())[0].segments]
        assert starts[-1] == 3
        with pytest.raises(ClosedError):
            await messages[0].ack()
    seen: list[Message] = []
    async with Consumer(shared_cluster.meta, subject="short", group="g", handler=seen.append):
        await eventually(lambda: len(seen) >= 4)
    assert [message.logic_offset for message in seen] == [0, 1, 2, 3]


async def test_offsets_by_time_over_segments(shared_cluster: Cluster):
    """LOWER and UPPER over four segments, at, before, between and after their messages, and
    none.
    """
    await shared_cluster.create("timed", partitions=1, static=True)
    between: list[int] = [time.time_ns() // 1_000_000 - 1]
    async with QueueReader(shared_cluster.meta, subject="timed") as reader:
        assert await reader.offset_at(0, between[0]) is None
        for number in range(4):
            if number:
                await move(shared_cluster, reader, 0, await other(reader, 0))
            await send(shared_cluster, "timed", b"%d" % number)
            await asyncio.sleep(0.05)
            between.append(time.time_ns() // 1_000_000)
            await asyncio.sleep(0.05)
        lower = [await reader.offset_at(0, at) for at in between]
        upper = [await reader.offset_at(0, at, TimeBound.UPPER) for at in between]
    assert lower == [0, 1, 2, 3, None]
    assert upper == [None, 0, 1, 2, 3]


async def test_group_reads_every_segment_when_it_stopped_before_three_moves(
    shared_cluster: Cluster,
):
    """
    The group continues at its cursor in an earlier segment, and reads all segments in order; cursor
    and lag say so.
    """
    await shared_cluster.create("stopped", partitions=1, static=True)
    values = [b"%d" % number for number in range(40)]
    await send(shared_cluster, "stopped", *values[:10])
    seen: list[Message] = []
    meta = shared_cluster.meta
    async with Consumer(meta, subject="stopped", group="g") as consumer:
        async for message in consumer:
            await message.ack()
            seen.append(message)
            if len(seen) == 7:
                break
    async with QueueReader(meta, subject="stopped") as reader:
        for number in (1, 2, 3):
            await move(shared_cluster, reader, 0, await other(reader, 0))
            await send(shared_cluster, "stopped", *values[10 * number : 10 * number + 10])
        progress = await reader.progress(0, "g")
        assert (progress.cursor, progress.max_offset, progress.lag) == (7, 40, 33)
        fresh = await reader.progress(0, "new")
        assert (fresh.cursor, fresh.lag) == (0, 40)
        async with Consumer(meta, subject="stopped", group="g", handler=seen.append):
            await eventually(lambda: len(seen) >= 40)
        progress = await reader.progress(0, "g")
        assert (progress.cursor, progress.lag) == (40, 0)
    assert [message.value for message in seen] == values
    assert [message.logic_offset for message in seen] == list(range(40))


async def test_requests_that_static_subjects_do_not_allow_are_refused(shared_cluster: Cluster):
    """Each bad request has an error of its own and changes nothing."""
    route = await shared_cluster.create("fixed", partitions=2, static=True)
    await shared_cluster.create("loose", partitions=2)
    first, second = (partition.partition_id for partition in route.partitions)
    network = HttpNetwork()
    meta = MetaClient(network, [shared_cluster.meta])
    try:
        for ask in (
            Reshape(kind=OperationKind.RESIZE, subject="fixed", partitions=4),
            Reshape(kind=OperationKind.SPLIT, partition_ids=(first,)),
            Reshape(kind=OperationKind.MERGE, partition_ids=(first, second)),
        ):
            with raises(Reason.SUBJECT_STATIC):
                await meta.call(endpoints.RESHAPE, ask)
        assert await meta.route("fixed") == route
        with raises(Reason.SUBJECT_NOT_STATIC):
            await meta.call(endpoints.QUEUES, subject="loose")
    finally:
        await network.close()
    await send(shared_cluster, "fixed", b"only")
    async with QueueReader(shared_cluster.meta, subject="fixed") as reader:
        bounds = [await reader.bounds(queue) for queue in (0, 1)]
        queue = bounds.index((0, 1))
        for wrong, error in (
            ((2, 0), Reason.QUEUE_UNKNOWN),
            ((-1, 0), Reason.QUEUE_UNKNOWN),
            ((queue, -1), Reason.OFFSET_INVALID),
            ((queue, 2**63), Reason.OFFSET_INVALID),
            ((queue, 2), OffsetOutOfRangeError),
            ((1 - queue, 1), OffsetOutOfRangeError),
        ):
            with raises(error):
                await reader.read(*wrong)
        for number in ("0", None, 0.0, [0]):
            with raises(Reason.QUEUE_UNKNOWN, match=re.escape(f"not {number!r}")):
                await reader.read(number, 0)  # type: ignore[arg-type]
        for bytes_max in (0, -1, 1.5, "1", True, 10**30):
            with pytest.raises(InvalidRequestError, match="bytes_max must be a whole number"):
                await reader.read(queue, 0, bytes_max=bytes_max)  # type: ignore[arg-type]
        for at_ms in (-1, 1.5, "1", 10**30):
            with pytest.raises(InvalidRequestError, match="at_ms must be milliseconds"):
                await reader.offset_at(queue, at_ms)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="bound must be lower or upper, not 'first'"):
            await reader.offset_at(queue, 0, "first")  # type: ignore[arg-type]
        parts = await asyncio.gather(*(reader.read(queue, 0) for _ in range(20)))
        assert [len(part.messages) for part in parts] == [1] * 20
    with pytest.raises(ClosedError):
        await reader.queues()


async def keylane(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run_keylane, *words, "--meta", cluster.meta)


async def answer(cluster: Cluster, *words: str) -> Any:
    done = await keylane(cluster, *words, "--output", "json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


async def test_queue_commands_make_move_show_and_read(shared_cluster: Cluster):
    """A static subject is made, moved, shown and read from the command line."""
    done = await keylane(shared_cluster, "subject", "create", "cmd", "--static", "--queues", "1")
    assert done.returncode == 0, done.stderr
    assert "static" in done.stdout
    await send(shared_cluster, "cmd", b"a", b"b")
    async with QueueReader(shared_cluster.meta, subject="cmd") as reader:
        await move(shared_cluster, reader, 0, await other(reader, 0))
    await send(shared_cluster, "cmd", b"c")
    ((shown,),) = [
        subject["queues"] for subject in await answer(shared_cluster, "subject", "queues", "cmd")
    ]
    assert (shown["queue"], shown["min_offset"], shown["max_offset"]) == (0, 0, 3)
    assert [(segment["logic_start"], segment["logic_end"]) for segment in shown["segments"]] == [
        (0, 2),
        (2, None),
    ]
    table = await keylane(shared_cluster, "subject", "queues", "cmd")
    assert "[2, …" in table.stdout
    lines = await keylane(shared_cluster, "queue", "read", "cmd", "0", "--offset", "1")
    assert lines.stdout == "0:1 k b\n0:2 k c\n"
    (message,) = await answer(shared_cluster, "queue", "read", "cmd", "0", "--count", "1")
    assert (message["logic_offset"], message["value"]) == (0, "a")
    (lookup,) = await answer(
        shared_cluster, "queue", "offsets", "cmd", "0", "--at", "1970-01-02T00:00:00"
    )
    assert (lookup["min_offset"], lookup["max_offset"], lookup["offset"]) == (0, 3, 0)
    for words, text in (
        (("subject", "resize", "cmd", "--partitions", "2"), "SUBJECT_STATIC"),
        (("queue", "read", "cmd", "0", "--offset", "9"), "not in [0, 3]"),
        (("queue", "offsets", "cmd", "0", "--at", "noon"), "not a time"),
        (("queue", "offsets", "cmd", "7"), "QUEUE_UNKNOWN"),
        (("subject", "create", "x", "--queues", "2"), "--static"),
        (("subject", "create", "x", "--static", "--queues", "1025"), "--queues"),
    ):
        refused = await keylane(shared_cluster, *words)
        assert refused.returncode != 0
        assert text in refused.stderr, refused.stderr
