"""The server closes the connections of clients that are dead or stop within a frame."""

from __future__ import annotations

import asyncio

import pytest

from keylane.protocol.errors import FrameError
from keylane.protocol.frames import SIGN_OF_LIFE, Append, Refused, Released, encode_frame
from keylane.rpc.plane import data_plane
from keylane.rpc.server import Server
from support.raw_frames import RawClient, connect


@pytest.fixture
async def server():
    async def handler(_request, _payload):
        return Released(), b""

    server = Server([], data_handler=handler, stuck_s=0.4)  # a look each 0.8 s
    await server.start("127.0.0.1", 0)
    async with asyncio.timeout(30):
        yield server
    await server.stop()


async def ended(client: RawClient) -> str:
    """Why the server ends a connection."""
    number, answer, _ = await client.answer()
    assert isinstance(answer, Refused)
    assert (number, answer.code) == (0, FrameError.code)
    assert await client.receive() is None
    return answer.message


async def test_connection_is_ended_when_nothing_is_said(server, monkeypatch):
    """A client that sends pings stays connected."""
    monkeypatch.setattr(data_plane, "SILENT_S", 1.6)
    silent, alive = await connect(server.address), await connect(server.address)
    for client in (silent, alive):
        await client.greet()
    ending = asyncio.create_task(ended(silent))
    while not ending.done():
        await alive.send(SIGN_OF_LIFE)
        assert await alive.receive() == SIGN_OF_LIFE
        await asyncio.sleep(0.1)
    assert "nothing was received" in ending.result()
    await alive.send(encode_frame(2, Append(1)))
    assert isinstance((await alive.answer())[1], Released)


async def test_connection_stays_while_the_server_says_something(server, monkeypatch):
    """A client whose pull is answered in parts sends no pings."""
    monkeypatch.setattr(data_plane, "SILENT_S", 1.0)
    client = await connect(server.address)
    await client.greet()
    (connection,) = server._plane._connections
    for _ in range(30):
        connection.socket.write((SIGN_OF_LIFE,))
        await asyncio.sleep(0.1)
    await client.send(encode_frame(2, Append(1)))
    while (data := await client.receive()) == SIGN_OF_LIFE:
        pass
    assert data is not None


async def test_connection_stays_while_its_client_takes_a_large_answer(server, monkeypatch):
    """A slow client sends no pings, because data arrives."""
    monkeypatch.setattr(data_plane, "SILENT_S", 1.6)
    client = await connect(server.address, read_bytes_max=1 << 18)
    await client.greet()
    (connection,) = server._plane._connections
    connection.socket.write((bytes(64 << 20),))
    for _ in range(40):  # 4 s
        await client.reader.readexactly(1 << 20)
        await asyncio.sleep(0.1)
    assert server._plane._disconnect_tasks == {}
    client.abort()


async def test_frame_whose_end_is_late_is_refused(server, monkeypatch):
    """The sender sends a byte now and then."""
    monkeypatch.setattr(data_plane, "FRAME_S", 0.3)
    client = await connect(server.address)
    await client.greet()
    client.transport.write(encode_frame(2, Append(1), bytes(1_000))[:500])
    ending = asyncio.create_task(ended(client))
    while not ending.done():
        client.transport.write(b"x")
        await asyncio.sleep(0.02)
    assert "did not arrive completely" in ending.result()


@pytest.mark.parametrize("data", [b"\x01", encode_frame(1, Append(1))[:6]], ids=["size", "frame"])
async def test_connection_is_ended_when_its_first_frame_never_ends(server, data, monkeypatch):
    monkeypatch.setattr(data_plane, "AUTHENTICATE_S", 0.2)
    client = await connect(server.address)
    client.transport.write(data)
    assert "no Hello" in await ended(client)
