"""Clients that do not read their answers get an error and are disconnected, and no other client
waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct

from keylane.protocol.errors import Reason
from keylane.protocol.frames import (
    SIGN_OF_LIFE,
    Append,
    Batches,
    Read,
    Refused,
    Released,
    decode_answer,
    encode_frame,
)
from keylane.rpc.answer_budget import AnswerBudget, reserve_bytes
from keylane.rpc.plane import data_plane
from keylane.rpc.plane.connection import PlaneConnection
from keylane.rpc.server import Server
from support.raw_frames import RawClient, connect, upgrade_request

MIB = 1 << 20


class Shop:
    """Reads get as many bytes as they ask for; everything else a word."""

    def __init__(self) -> None:
        self.made = 0

    async def __call__(self, request, _payload):
        if not isinstance(request, Read):
            return Released(), b""
        await reserve_bytes(request.bytes_max)
        self.made += 1
        return Batches(0, 1, 1, False), bytes(request.bytes_max)


async def stuck_client(server: Server, *, reads: int) -> tuple[RawClient, asyncio.Transport]:
    """Return the transport of a client that requests `reads` MiB and reads nothing."""
    client = await connect(server.address, read_bytes_max=64 << 10)
    await client.greet()
    client.transport.pause_reading()
    for number in range(reads):
        await client.send(encode_frame(number + 1, Read(1, 0, MIB)))
    return client, client.transport


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def serving(shop, **settings) -> Server:
    server = Server([], data_handler=shop, **settings)
    await server.start("127.0.0.1", 0)
    return server


async def test_answers_that_are_not_taken_are_not_made(network):
    """Of a hundred reads of a client that reads nothing, a few are answered, and another client is
    served meanwhile.
    """
    shop = Shop()
    room = AnswerBudget()
    server = await serving(shop, answer_budget=room)
    client, transport = await stuck_client(server, reads=100)
    await until(lambda: room.reserved_bytes >= room.connection_bytes_max)
    neighbour = await network.open_channel(server.address, timeout_ms=5_000)
    for _ in range(50):
        await neighbour.call(Append(1), timeout_ms=10_000)
        await neighbour.call(Read(1, 0, MIB), timeout_ms=10_000)
    # What the machine's own socket buffers took may be some more.
    assert shop.made - 50 < 40
    assert room.reserved_bytes <= room.connection_bytes_max + MIB
    transport.resume_reading()
    for _ in range(100):
        assert len(await client.receive()) > MIB
    await until(lambda: room.reserved_bytes == 0)
    await neighbour.close()
    await server.stop()


async def test_client_that_takes_nothing_is_told_and_let_go(caplog, monkeypatch):
    """After its time it gets a word of what was wrong as its last frame, and the connection
    ends.
    """
    monkeypatch.setattr(data_plane, "GOODBYE_S", 60.0)
    caplog.set_level(logging.WARNING, "keylane.rpc")
    room = AnswerBudget()
    server = await serving(Shop(), answer_budget=room, stuck_s=0.4)
    client, transport = await stuck_client(server, reads=100)
    await until(lambda: "is disconnected" in caplog.text)
    transport.resume_reading()
    while (data := await client.receive(60)) is not None:
        number, last, _ = decode_answer(data)
    assert isinstance(last, Refused)
    assert (number, last.code) == (0, Reason.ANSWER_NOT_TAKEN.code)
    await until(lambda: room.reserved_bytes == 0)
    await server.stop()


async def test_client_that_never_comes_back_is_cut_off(caplog, monkeypatch):
    """A client that does not even read the error is disconnected all the same."""
    monkeypatch.setattr(data_plane, "GOODBYE_S", 0.2)
    server = await serving(Shop(), stuck_s=0.4)
    _, transport = await stuck_client(server, reads=100)
    async with asyncio.timeout(30):
        while server.connections:
            await asyncio.sleep(0.01)
    transport.abort()
    await server.stop()


async def test_connections_are_watched_on_when_one_cannot_be(network, caplog, monkeypatch):
    """A check that fails closes its connection and is logged once; a stuck client is disconnected
    all the same.
    """
    monkeypatch.setattr(data_plane, "GOODBYE_S", 0.2)
    broken: list[PlaneConnection] = []
    stuck_s = PlaneConnection.stuck_s

    def looked_at(connection: PlaneConnection, now_s: float) -> float:
        if connection in broken:
            raise LookupError("no such transport")
        return stuck_s(connection, now_s)

    monkeypatch.setattr(PlaneConnection, "stuck_s", looked_at)
    server = await serving(Shop(), stuck_s=0.4)
    channel = await network.open_channel(server.address, timeout_ms=5_000)
    await channel.call(Append(1), timeout_ms=10_000)
    assert server._plane is not None
    broken += server._plane._connections
    assert len(broken) == 1
    _, transport = await stuck_client(server, reads=100)
    await until(lambda: not server.connections)
    assert caplog.text.count("cannot be watched") == 1
    assert "has read no answer" in caplog.text
    transport.abort()
    await channel.close()
    await server.stop()


async def test_client_is_cut_off_when_it_cannot_be_told_why(caplog, monkeypatch):
    async def refuse(_self: object, _error: object) -> None:
        raise LookupError("no goodbye")

    monkeypatch.setattr(PlaneConnection, "refuse", refuse)
    server = await serving(Shop(), stuck_s=0.4)
    _, transport = await stuck_client(server, reads=100)
    await until(lambda: not server.connections)
    assert "no goodbye" in caplog.text
    transport.abort()
    await server.stop()


async def test_slow_client_is_no_stuck_one():
    """A client that takes a little now and then keeps its connection, however long its answers
    take.
    """
    server = await serving(Shop(), stuck_s=1.5)
    client, transport = await stuck_client(server, reads=30)
    taken = 0
    while taken < 30:
        transport.resume_reading()
        _, answer, payload = await client.answer()
        assert not isinstance(answer, Refused)
        assert len(payload) == MIB
        taken += 1
        transport.pause_reading()
        await asyncio.sleep(0.1)
    client.abort()
    await server.stop()


async def test_where_others_wait_patience_is_short(network, monkeypatch):
    """A client that uses up the server's budget is disconnected early if another one waits."""
    monkeypatch.setattr(data_plane, "GOODBYE_S", 0.2)
    room = AnswerBudget(bytes_max=4 * MIB)
    server = await serving(Shop(), answer_budget=room, stuck_s=600.0)
    _, transport = await stuck_client(server, reads=100)
    await until(lambda: room.reserved_bytes + MIB > room.bytes_max)
    channel = await network.open_channel(server.address, timeout_ms=5_000)
    answer, _ = await channel.call(Read(1, 0, MIB), timeout_ms=30_000)
    assert isinstance(answer, Batches)
    transport.abort()
    await channel.close()
    await server.stop()


async def test_server_logs_no_error_when_clients_leave_in_the_handshake(caplog):
    """A program that dies while it connects is not an error of the server."""
    server = await serving(Shop())
    try:
        host, _, port = server.address.rpartition(":")
        for _ in range(20):
            leaver = socket.create_connection((host, int(port)))
            leaver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            leaver.sendall(upgrade_request(server.address))
            leaver.close()
        await asyncio.sleep(0.3)
    finally:
        await server.stop()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_client_that_takes_nothing_and_asks_for_signs_of_life_is_let_go(caplog):
    """They are no answers to calls, and do not set its time back."""
    caplog.set_level(logging.WARNING, "keylane.rpc")
    server = await serving(Shop(), stuck_s=0.4)
    _, transport = await stuck_client(server, reads=100)
    asked = SIGN_OF_LIFE * 10_000

    async def flood() -> None:
        while not transport.is_closing():
            transport.write(asked)
            await asyncio.sleep(0)
            while transport.get_write_buffer_size() and not transport.is_closing():
                await asyncio.sleep(0.001)

    flooding = asyncio.create_task(flood())
    await until(lambda: "is disconnected" in caplog.text)
    flooding.cancel()
    transport.abort()
    await server.stop()
