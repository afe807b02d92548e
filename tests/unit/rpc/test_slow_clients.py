"""Clients that do not take their answers are told and disconnected, and no other client waits for
them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct

import aiohttp
import pytest

from keylane.protocol.endpoints import DATA_PATH
from keylane.protocol.errors import Reason
from keylane.protocol.frames import (
    Append,
    Batches,
    Read,
    Refused,
    Released,
    decode_answer,
    encode_frame,
)
from keylane.rpc.answer_room import AnswerRoom, take_room
from keylane.rpc.plane import data_plane
from keylane.rpc.plane.connection import PlaneConnection
from keylane.rpc.server import Server
from keylane.rpc.websocket import socket as websocket
from keylane.rpc.websocket.framing import Opcode, encode_head
from support.raw_frames import greet

MIB = 1 << 20


class Shop:
    """Reads get as many bytes as they ask for; everything else a word."""

    def __init__(self) -> None:
        self.made = 0

    async def __call__(self, request, _payload):
        if not isinstance(request, Read):
            return Released(), b""
        await take_room(request.bytes_max)
        self.made += 1
        return Batches(0, 1, 1, False), bytes(request.bytes_max)


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


async def stuck_client(session, server: Server, *, reads: int):
    """A client that asks for `reads` MiB and takes nothing; its socket and transport."""
    socket = await session.ws_connect(f"http://{server.address}{DATA_PATH}", max_msg_size=0)
    await greet(socket)
    transport = socket._response.connection.transport
    transport.pause_reading()
    for number in range(reads):
        await socket.send_bytes(encode_frame(number + 1, Read(1, 0, MIB)))
    return socket, transport


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def serving(shop, **settings) -> Server:
    server = Server([], data_handler=shop, **settings)
    await server.start("127.0.0.1", 0)
    return server


async def test_answers_that_are_not_taken_are_not_made(session, network):
    """Of a hundred reads of a client that takes nothing a few are made, and a neighbour is served
    meanwhile.
    """
    shop = Shop()
    room = AnswerRoom()
    server = await serving(shop, room=room)
    socket, transport = await stuck_client(session, server, reads=100)
    await until(lambda: room.reserved >= room.connection_bytes_max)
    neighbour = await network.open_channel(server.address, timeout_ms=5_000)
    for _ in range(50):
        await neighbour.call(Append(1), timeout_ms=10_000)
        await neighbour.call(Read(1, 0, MIB), timeout_ms=10_000)
    # What the machine's own socket buffers took may be some more.
    assert shop.made - 50 < 40
    assert room.reserved <= room.connection_bytes_max + MIB
    transport.resume_reading()
    for _ in range(100):
        assert len((await socket.receive(timeout=20)).data) > MIB
    await until(lambda: room.reserved == 0)
    await neighbour.close()
    await server.stop()


async def test_client_that_takes_nothing_is_told_and_let_go(session, caplog, monkeypatch):
    """After its time it gets a word of what was wrong as its last frame, and the connection
    ends.
    """
    monkeypatch.setattr(data_plane, "GOODBYE_S", 60.0)
    caplog.set_level(logging.WARNING, "keylane.rpc")
    room = AnswerRoom()
    server = await serving(Shop(), room=room, stuck_s=0.4)
    socket, transport = await stuck_client(session, server, reads=100)
    await until(lambda: "is disconnected" in caplog.text)
    transport.resume_reading()
    last = None
    async for message in socket:
        number, last, _ = decode_answer(message.data)
    assert isinstance(last, Refused)
    assert (number, last.code) == (0, Reason.ANSWER_NOT_TAKEN.code)
    await until(lambda: room.reserved == 0)
    await server.stop()


async def test_client_that_never_comes_back_is_cut_off(session, caplog, monkeypatch):
    """The connection of a client that does not even take the last word ends all the same."""
    monkeypatch.setattr(data_plane, "GOODBYE_S", 0.2)
    server = await serving(Shop(), stuck_s=0.4)
    _, transport = await stuck_client(session, server, reads=100)
    async with asyncio.timeout(30):
        while server.connections:
            await asyncio.sleep(0.01)
    transport.resume_reading()
    await server.stop()


async def test_connections_are_watched_on_when_one_cannot_be(session, network, caplog, monkeypatch):
    """The one ends, the log says why, once, and a stuck client is told and let go all the same."""
    monkeypatch.setattr(data_plane, "GOODBYE_S", 0.2)
    broken: list[PlaneConnection] = []
    has_taken_all = PlaneConnection.has_taken_all

    def looked_at(connection: PlaneConnection) -> bool:
        if connection in broken:
            raise LookupError("no such transport")
        return has_taken_all(connection)

    monkeypatch.setattr(PlaneConnection, "has_taken_all", looked_at)
    server = await serving(Shop(), stuck_s=0.4)
    channel = await network.open_channel(server.address, timeout_ms=5_000)
    await channel.call(Append(1), timeout_ms=10_000)
    assert server._plane is not None
    broken += server._plane._connections
    assert len(broken) == 1
    _, transport = await stuck_client(session, server, reads=100)
    await until(lambda: not server.connections)
    assert caplog.text.count("cannot be watched") == 1
    assert "has taken no answer" in caplog.text
    transport.resume_reading()
    await channel.close()
    await server.stop()


async def test_client_is_cut_off_when_it_cannot_be_told_why(session, caplog, monkeypatch):
    async def refuse(_self: object, _error: object, _code: object) -> None:
        raise LookupError("no goodbye")

    monkeypatch.setattr(PlaneConnection, "refuse", refuse)
    server = await serving(Shop(), stuck_s=0.4)
    _, transport = await stuck_client(session, server, reads=100)
    await until(lambda: not server.connections)
    assert "no goodbye" in caplog.text
    transport.resume_reading()
    await server.stop()


async def test_slow_client_is_no_stuck_one(session):
    """A client that takes a little now and then keeps its connection, however long its answers
    take.
    """
    server = await serving(Shop(), stuck_s=1.5)
    socket, transport = await stuck_client(session, server, reads=30)
    taken = 0
    while taken < 30:
        transport.resume_reading()
        _, answer, payload = decode_answer((await socket.receive(timeout=20)).data)
        assert not isinstance(answer, Refused)
        assert len(payload) == MIB
        taken += 1
        transport.pause_reading()
        await asyncio.sleep(0.1)
    await socket.close()
    await server.stop()


async def test_where_others_wait_patience_is_short(session, network, monkeypatch):
    """A client that fills the server's whole room is let go for another that waits, long before its
    time.
    """
    monkeypatch.setattr(data_plane, "GOODBYE_S", 0.2)
    room = AnswerRoom(bytes_max=4 * MIB)
    server = await serving(Shop(), room=room, stuck_s=600.0)
    _, transport = await stuck_client(session, server, reads=100)
    await until(lambda: room.reserved + MIB > room.bytes_max)
    channel = await network.open_channel(server.address, timeout_ms=5_000)
    answer, _ = await channel.call(Read(1, 0, MIB), timeout_ms=30_000)
    assert isinstance(answer, Batches)
    transport.resume_reading()
    await channel.close()
    await server.stop()


async def test_server_logs_no_error_when_clients_leave_in_the_handshake(caplog):
    """A program that dies as it connects is no fault of the server."""
    upgrade = (
        f"GET {DATA_PATH} HTTP/1.1\r\nhost: {{}}\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    server = await serving(Shop())
    try:
        host, _, port = server.address.rpartition(":")
        for _ in range(20):
            leaver = socket.create_connection((host, int(port)))
            leaver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            leaver.sendall(upgrade.format(server.address).encode())
            leaver.close()
        await asyncio.sleep(0.3)
    finally:
        await server.stop()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_client_that_takes_nothing_and_pings_is_let_go(session, caplog, monkeypatch):
    """Answers to pings, which are no answers to calls, do not set its time back."""
    monkeypatch.setattr(websocket, "CONTROL_FRAMES_MAX", 1 << 30)
    caplog.set_level(logging.WARNING, "keylane.rpc")
    server = await serving(Shop(), stuck_s=0.4)
    _, transport = await stuck_client(session, server, reads=0)
    pings = (encode_head(Opcode.PING, 100, masked=True) + bytes(100)) * 1_000

    async def flood() -> None:
        while not transport.is_closing():
            transport.write(pings)
            await asyncio.sleep(0)
            while transport.get_write_buffer_size() and not transport.is_closing():
                await asyncio.sleep(0.001)

    flooding = asyncio.create_task(flood())
    await until(lambda: "is disconnected" in caplog.text)
    flooding.cancel()
    transport.abort()
    await server.stop()
