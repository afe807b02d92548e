"""A real broker over real sockets: it refuses wrong calls by type, stores nothing of them, and
keeps serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from keylane.broker.app import running_broker
from keylane.broker.control import LISTED_MAX
from keylane.broker.storage.files import RealFiles
from keylane.protocol import endpoints
from keylane.protocol.batch import batch_starts
from keylane.protocol.control import BrokerHeartbeat, BrokerWelcome, PartitionStatusList
from keylane.protocol.errors import (
    AddressError,
    CorruptBatchError,
    DataFolderError,
    FencedError,
    FrameError,
    InvalidRequestError,
    KeylaneError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    Reason,
    TokenUnknownError,
    WrongBrokerError,
)
from keylane.protocol.frames import (
    Ack,
    Acquire,
    Append,
    Pull,
    Read,
    Refused,
    encode_frame,
    refusal_error,
)
from keylane.protocol.limits import FRAME_BYTES_MAX
from keylane.rpc.client import BrokerClient
from keylane.rpc.http_network import HttpNetwork
from keylane.rpc.server import ControlRoute, Server
from sim.machines.store import SESSION, batch, facts, settings_of
from support.brokers.broker_process import BrokerProcess
from support.raising import raises
from support.raw_frames import connect, sized


@pytest.fixture(scope="module")
def process(tmp_path_factory) -> Iterator[BrokerProcess]:
    """One broker for all tests of this file: it serves each of them after the others."""
    process = BrokerProcess(tmp_path_factory.mktemp("broker") / "data").start()
    yield process
    assert process.end() == 0


@pytest.fixture
async def network() -> AsyncIterator[HttpNetwork]:
    network = HttpNetwork()
    yield network
    await network.close()


_next_partition = iter(range(1, 1 << 20))
AT_ONCE = 50
"""Calls; a client gives up a connection that takes long, as on a busy machine."""


@pytest.fixture
async def client(process, network) -> AsyncIterator[BrokerClient]:
    client = BrokerClient(network, process.address, timeout_ms=60_000)
    yield client
    await client.close()


@pytest.fixture
async def partition_id(client) -> int:
    """A partition of this test alone, with two messages."""
    number = next(_next_partition)
    await client.control(endpoints.HOST_PARTITION, facts(number))
    await client.call(Append(number), batch(partition_id=number))
    return number


async def test_broker_serves_every_call_of_a_message(client, partition_id):
    """Host, append, acquire, pull, ack and look: over a real connection."""
    again, _ = await client.call(Append(partition_id), batch(partition_id=partition_id))
    assert (again.base_offset, again.duplicate, again.durable) == (0, True, "fsync")
    acquired, _ = await client.call(Acquire(partition_id, "audit", SESSION, 3, 2000))
    assert (acquired.cursor, acquired.next_offset) == (0, 2)
    answer, payload = await client.call(Pull(partition_id, "audit", SESSION, 3, 0, 1 << 20, 1000))
    assert answer.upto == 2
    assert [header.count for _, header in batch_starts(payload)] == [2]
    waiting = asyncio.create_task(
        client.call(Pull(partition_id, "audit", SESSION, 3, 2, 1 << 20, 10_000))
    )
    await client.call(Append(partition_id), batch(partition_id=partition_id, sequence=2))
    assert (await waiting)[0].upto == 4
    acked, _ = await client.call(Ack(partition_id, "audit", SESSION, 3, ((0, 2), (3, 4))))
    assert acked.cursor == 2

    status = await client.control(endpoints.PARTITION, id=partition_id)
    assert status.next_offset == 4
    group = status.groups[0]
    assert (group.group, group.token, group.cursor) == ("audit", 3, 2)
    assert (group.acked_above, group.lag, group.holder) == (1, 1, SESSION)
    assert status in (await client.partitions()).partitions


async def test_long_list_comes_in_parts(client, network, partition_id):
    """Every partition is listed once, by id, and no answer has more than some hundreds of them."""
    numbers = [next(_next_partition) for _ in range(LISTED_MAX + 50)]
    for first in range(0, len(numbers), AT_ONCE):
        some = numbers[first : first + AT_ONCE]
        await asyncio.gather(
            *(client.control(endpoints.HOST_PARTITION, facts(number)) for number in some)
        )
    listed = [partition.partition_id for partition in (await client.partitions()).partitions]
    assert listed == sorted(set(listed))
    assert {partition_id, *numbers} <= set(listed)
    path = f"/v1/partitions?after={numbers[0]}&limit=3"
    part = await network.control(
        "GET", client.address, path, PartitionStatusList, timeout_ms=60_000
    )
    assert [partition.partition_id for partition in part.partitions] == numbers[1:4]
    assert part.more_after == numbers[3]


async def _raw(address: str, data: bytes) -> KeylaneError:
    """Send bytes; the error in the answer, after which the connection is closed."""
    client = await connect(address)
    client.transport.write(data)
    _, answer, _ = await client.answer(60)
    assert isinstance(answer, Refused)
    assert await client.receive(60) is None
    return refusal_error(answer)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x01\x00\x00\x00\x01",
        sized(struct.pack("<I", 1 << 31) + b"xxxx"),
        sized(struct.pack("<I", 0) + b"xxxx"),
        sized(struct.pack("<I", 3) + b"\x93\x01\x01"),
        sized(struct.pack("<I", 4) + b"\x93\x63\x01\x01"),  # an unknown type
        sized(struct.pack("<I", 4) + b"\x93\x01\x01\xa1x"),
        sized(encode_frame(1, Append(1))[4:-1]),
        sized(bytes(FRAME_BYTES_MAX)),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["byte", "long", "short", "cut", "type", "field", "end", "huge", "http"],
)
async def test_bytes_that_are_no_frame_end_their_connection_only(
    network, process, client, partition_id, frame
):
    """A lying length, an unknown type or fields that do not fit: FrameError, and others are served
    on.
    """
    before = (await client.health()).details["next_position"]
    assert isinstance(await _raw(process.address, frame), FrameError)
    assert (await client.health()).details["next_position"] == before
    assert (await client.call(Read(partition_id, 0, 100)))[0].upto == 2


def _damaged(partition_id: int) -> bytes:
    data = bytearray(batch(partition_id=partition_id, sequence=2))
    data[-1] ^= 0x10
    return bytes(data)


BAD_CALLS = {
    "wrong crc": (Append, _damaged, CorruptBatchError),
    "other partition": (Append, lambda n: batch(partition_id=n + 1), InvalidRequestError),
    "no batch": (Append, lambda n: b"hello", CorruptBatchError),
    "unknown partition": (lambda n: Read(1 << 40, 0, 100), None, PartitionUnknownError),
    "negative partition": (lambda n: Read(-1, 0, 100), None, PartitionUnknownError),
    "negative offset": (lambda n: Read(n, -1, 100), None, Reason.OFFSET_INVALID),
    "huge offset": (lambda n: Read(n, 1 << 63, 100), None, Reason.OFFSET_INVALID),
    "future offset": (lambda n: Read(n, 3, 100), None, OffsetOutOfRangeError),
    "negative bytes": (lambda n: Read(n, 0, -1), None, InvalidRequestError),
    "token unknown": (lambda n: Pull(n, "audit", SESSION, 9, 0, 100, 0), None, TokenUnknownError),
    "token fenced": (lambda n: Ack(n, "g", SESSION, 4, ((0, 1),)), None, FencedError),
    "session fenced": (lambda n: Ack(n, "g", "z" * 16, 5, ((0, 1),)), None, FencedError),
    "token 0": (lambda n: Acquire(n, "g", SESSION, 0, 1000), None, InvalidRequestError),
    "ack beyond": (lambda n: Ack(n, "g", SESSION, 5, ((0, 9),)), None, InvalidRequestError),
}


@pytest.mark.parametrize("name", BAD_CALLS)
async def test_bad_calls_are_typed_errors_and_change_nothing(client, partition_id, name):
    """Each wrong call is refused by type; no byte is stored, and the connection stays usable."""
    make, payload, error = BAD_CALLS[name]
    await client.call(Acquire(partition_id, "g", SESSION, 5, 1000))
    before = (await client.health()).details["next_position"]
    with raises(error):
        await client.call(make(partition_id), payload(partition_id) if payload else b"")

    assert (await client.health()).details["next_position"] == before
    assert (await client.control(endpoints.PARTITION, id=partition_id)).groups[0].cursor == 0
    good = await client.call(Append(partition_id), batch(partition_id=partition_id, sequence=2))
    assert good[0].base_offset == 2


async def test_bad_control_calls_are_typed_errors(network, process, client, partition_id):
    """Wrong group, other facts, odd ids and bodies: typed errors over HTTP."""
    with pytest.raises(WrongBrokerError):
        await client.control(
            endpoints.HOST_PARTITION, facts(next(_next_partition), broker_group="g2")
        )
    with pytest.raises(InvalidRequestError):
        await client.control(endpoints.HOST_PARTITION, facts(partition_id, subject="other"))
    with pytest.raises(PartitionUnknownError):
        await client.control(endpoints.PARTITION, id=1 << 40)
    for path in ("/v1/partitions/x", "/v1/partitions/-1", "/v1/partitions/%C2%B2", "/v1/nothing"):
        with pytest.raises(InvalidRequestError):
            await network.control("GET", process.address, path, dict, timeout_ms=60_000)
    for body in ({}, {"subject": 5}, "x"):
        with pytest.raises(InvalidRequestError):
            await network.control(
                "POST", process.address, "/v1/partitions", dict, body=body, timeout_ms=5000
            )


async def test_health_tells_group_writes_and_registration(client, process):
    """Health tells the group, that writes are taken, and why the metaserver does not know the
    broker.
    """
    health = await client.health()
    assert health.ready
    assert health.details["broker_group"] == "g1"
    assert "127.0.0.1:1" in health.details["registration"]


def test_broker_that_cannot_start_tells_the_reason(process, tmp_path):
    """Port in use, folder in use, a folder of others, impossible settings: one readable error, exit
    status 1.
    """
    port = process.address.rpartition(":")[2]
    other = BrokerProcess(tmp_path / "data")
    assert "AddressError" in other.refused("--port", port)
    assert "INSECURE_HOST" in other.refused("--host", "0.0.0.0")
    assert not (tmp_path / "data").exists()
    assert "another broker is using" in BrokerProcess(process.data).refused()
    (tmp_path / "file").write_text("")
    assert "DataFolderError" in BrokerProcess(tmp_path / "file").refused()
    config = tmp_path / "bad.toml"
    config.write_text("colour = 1\nsegment_bytes = 1\n")
    problem = other.refused("--config", str(config), "--port", "99999")
    assert all(word in problem for word in ("ConfigError", "colour", "segment_bytes", "port"))
    assert (
        "belongs to broker group g1"
        in BrokerProcess(_copied(process, tmp_path), group="g2").refused()
    )


def _copied(process: BrokerProcess, tmp_path: Path, name: str = "copy") -> Path:
    target = tmp_path / name
    target.mkdir()
    (target / "identity.json").write_bytes((process.data / "identity.json").read_bytes())
    return target


# ── in this process ───────────────────────────────────────────────────────────────────────────────
@contextlib.asynccontextmanager
async def metaserver(reports: list[BrokerHeartbeat]) -> AsyncIterator[str]:
    """The one call of a metaserver that a broker makes."""

    async def welcome(body: object, _params: object) -> BrokerWelcome:
        assert isinstance(body, BrokerHeartbeat)
        reports.append(body)
        return BrokerWelcome(heartbeat_ms=10, ttl_ms=1000)

    server = Server([ControlRoute(endpoints.BROKER_HEARTBEAT, welcome)])
    await server.start("127.0.0.1", 0)
    yield server.address
    await server.stop()


async def test_broker_in_another_loop_reports_and_stops(tmp_path, network):
    """A broker run inside another program serves, registers, and leaves nothing open."""
    reports: list[BrokerHeartbeat] = []
    async with metaserver(reports) as meta:
        settings = settings_of(data=tmp_path / "data", meta=(meta,))
        async with running_broker(settings, network=network) as broker:
            client = BrokerClient(network, broker.address)
            await client.control(endpoints.HOST_PARTITION, facts())
            await client.call(Append(1), batch())
            while len(reports) < 3:
                await asyncio.sleep(0.01)
            assert (await client.health()).details["registration"] == "registered"
            waiting = asyncio.create_task(_poll(client))
            await asyncio.sleep(0.05)
            await client.close()
            with pytest.raises(DataFolderError):
                async with running_broker(settings, network=network):
                    pass
        await asyncio.gather(waiting, return_exceptions=True)
        assert {(report.address, report.broker_group) for report in reports} == {
            (broker.address, "g1")
        }
        async with running_broker(settings, network=network) as broker:
            assert broker.store.state.partition(1).next_offset == 2
            assert reports[-1].broker_id == broker.identity.broker_id


async def _poll(client: BrokerClient) -> None:
    await client.call(Acquire(1, "audit", SESSION, 1, 1000))
    await client.call(Pull(1, "audit", SESSION, 1, 2, 100, 20_000), wait_ms=20_000)


async def test_folder_stays_locked_until_the_last_thread_ends(tmp_path, network):
    """No other broker gets the folder's lock while a thread of a stopping broker may touch the
    folder.
    """
    settings = settings_of(data=tmp_path / "data")
    store_closed = threading.Event()
    refused = []

    def linger() -> None:
        assert store_closed.wait(60)
        for _ in range(30):
            other = RealFiles(settings.data)
            try:
                other.lock()
            except DataFolderError:
                refused.append(True)
            else:
                refused.append(False)
            finally:
                other.close()
            time.sleep(0.01)

    async with running_broker(settings, network=network) as broker:
        store = broker.store
        reading = store.run_read(linger)
        close = store._close

        def closed() -> None:
            close()
            store_closed.set()

        store._close = closed
    await reading
    assert refused == [True] * 30
    async with running_broker(settings, network=network):
        pass


async def test_port_in_use_leaves_the_folder_free(tmp_path, network):
    """A start that fails lets go of everything, so that the next may succeed."""
    settings = settings_of(data=tmp_path / "data")
    async with running_broker(settings, network=network) as broker:
        port = int(broker.address.rpartition(":")[2])
        other = settings_of(data=tmp_path / "other", port=port)
        with pytest.raises(AddressError):
            async with running_broker(other, network=network):
                pass
    async with running_broker(settings_of(data=tmp_path / "other"), network=network):
        pass
