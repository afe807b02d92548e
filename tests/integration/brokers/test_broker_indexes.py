"""A real broker with either index: killed, started again, with the other one, and asked by time."""

from __future__ import annotations

import asyncio
import time

import pytest

from keylane.broker.offline.index_work import verify_indexes
from keylane.broker.storage.files import RealFiles
from keylane.protocol import endpoints
from keylane.protocol.batch import batch_starts
from keylane.protocol.control import TimeBound
from keylane.protocol.errors import InvalidRequestError, PartitionUnknownError
from keylane.protocol.frames import Append, Read
from keylane.protocol.reading.bounds import AskBounds, BoundsOf, PartitionBounds
from keylane.rpc.client import BrokerClient
from keylane.rpc.http_network import HttpNetwork
from sim.machines.store import batch, facts
from support.brokers.broker_process import BrokerProcess
from support.indexes import KINDS
from support.server_process import run_keylane

PARTITIONS = 5


async def with_client(process, work):
    network = HttpNetwork()
    client = BrokerClient(network, process.address)
    try:
        return await work(client, network)
    finally:
        await client.close()
        await network.close()


async def append(client, first, count):
    """Send `count` batches of two messages to each partition, beginning with number `first`."""

    async def append_batch(partition_id, number):
        await client.call(
            Append(partition_id), batch(partition_id=partition_id, sequence=2 * number)
        )

    for number in range(first, first + count):
        await asyncio.gather(
            *(append_batch(partition_id, number) for partition_id in range(1, PARTITIONS + 1))
        )


async def stored(client):
    """Batches of each partition, read to the end."""
    counts = []
    for partition_id in range(1, PARTITIONS + 1):
        offset = count = 0
        while True:
            answer, payload = await client.call(Read(partition_id, offset, 3000))
            if answer.upto == offset:
                break
            count += len(list(batch_starts(payload)))
            offset = answer.upto
        counts.append(count)
    return counts


@pytest.mark.crash
@pytest.mark.parametrize("index", KINDS)
def test_broker_loses_nothing_when_killed_repeatedly(index, tmp_path):
    """Everything acked before a SIGKILL is read after it, and the index agrees with the log;
    snapshots or not.
    """
    data = tmp_path / "data"
    process = BrokerProcess(data, "--index", index)

    async def host(client, _network):
        for partition_id in range(1, PARTITIONS + 1):
            await client.control(endpoints.HOST_PARTITION, facts(partition_id))

    async def more(client, _network):
        assert await stored(client) == [50 * turn] * PARTITIONS
        await append(client, 50 * turn, 50)

    for turn in range(3):
        process.start()
        if not turn:
            asyncio.run(with_client(process, host))
        asyncio.run(with_client(process, more))
        process.kill()
    process.start()
    turn = 3
    asyncio.run(with_client(process, more))
    assert process.end() == 0
    files = RealFiles(data)
    (report,) = verify_indexes(files)
    files.close()
    assert (report.batches, report.problems) == (200 * PARTITIONS, [])


@pytest.mark.parametrize("index", KINDS)
async def test_broker_finds_offsets_by_time(index, tmp_path):
    """The broker tells the offset around a time, and that there is none, of unknown and empty
    partitions too.
    """
    process = BrokerProcess(tmp_path / "data", "--index", index).start()

    async def work(client, network):
        await client.control(endpoints.HOST_PARTITION, facts(1))
        await client.control(endpoints.HOST_PARTITION, facts(2))
        before = time.time_ns() // 1_000_000
        for number in range(3):
            await client.call(Append(1), batch(sequence=2 * number))
        lower, upper = TimeBound.LOWER, TimeBound.UPPER
        later = before + 3_600_000
        offsets = {
            (at_ms, bound): (
                await client.control(
                    endpoints.OFFSET_AT, query={"at_ms": at_ms, "bound": bound}, id=1
                )
            ).offset
            for at_ms in (0, before, later)
            for bound in TimeBound
        }
        assert offsets == {
            (0, lower): 0,
            (before, lower): 0,
            (later, lower): None,
            (0, upper): None,
            (before, upper): offsets[before, upper],
            (later, upper): 5,
        }
        answer = await client.control(endpoints.OFFSET_AT, query={"at_ms": 0, "bound": lower}, id=2)
        assert (answer.offset, answer.first_offset, answer.next_offset) == (None, 0, 0)
        with pytest.raises(PartitionUnknownError):
            await client.control(endpoints.OFFSET_AT, query={"at_ms": 0, "bound": lower}, id=3)
        asked = [
            BoundsOf(partition_id=1, at_ms=(before, later), groups=("audit",)),
            BoundsOf(partition_id=3),
            BoundsOf(partition_id=2, at_ms=(0,)),
        ]
        full, empty = (
            await client.control(endpoints.PARTITION_BOUNDS, AskBounds(partitions=asked))
        ).partitions
        assert (full.first_offset, full.next_offset, full.offsets_at) == (0, 6, (0, None))
        assert full.cursors == (None,)
        assert before <= (full.first_at_ms or 0) <= later
        assert full.message_bytes > 0
        assert (full.removed_from_ms or 0) > (full.first_at_ms or 0)
        assert empty == PartitionBounds(
            partition_id=2, first_offset=0, next_offset=0, offsets_at=(None,)
        )
        for query in ("at_ms=x", "at_ms=-1", "", "at_ms=1&bound=middle", "at_ms=" + "9" * 30):
            path = f"/v1/partitions/1/offset?{query}"
            with pytest.raises(InvalidRequestError):
                await network.control("GET", process.address, path, dict, timeout_ms=60_000)

    try:
        await with_client(process, work)
    finally:
        assert process.end() == 0


def test_index_commands_rebuild_convert_and_compare(tmp_path):
    """`keylane broker index` rebuilds, converts and compares the index of a stopped broker."""
    data = tmp_path / "data"

    def command(*words, status=0):
        ran = run_keylane("broker", "index", *words)
        assert ran.returncode == status, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    process = BrokerProcess(data).start()

    async def fill(client, _network):
        for partition_id in range(1, PARTITIONS + 1):
            await client.control(endpoints.HOST_PARTITION, facts(partition_id))
        await append(client, 0, 20)

    asyncio.run(with_client(process, fill))
    assert "a broker or a follower is using" in command("verify", str(data), status=1)
    process.kill()
    command("rebuild", str(data))
    assert str(20 * PARTITIONS) in command("switch", str(data), "--index", "rocksdb")
    assert "rocksdb" in command("verify", str(data))
    assert "neither" in command("rebuild", str(data), "--index", "btree", status=2)
    assert "has no file index" in command("switch", str(data), "--index", "rocksdb", status=1)
    assert "not a broker's" in command("verify", str(tmp_path / "nothing"), status=1)

    process = BrokerProcess(data, "--index", "rocksdb").start()
    assert asyncio.run(with_client(process, lambda client, _: stored(client))) == [20] * PARTITIONS
    assert process.end() == 0
    assert "index must be file or rocksdb" in BrokerProcess(data).refused("--index", "btree")
