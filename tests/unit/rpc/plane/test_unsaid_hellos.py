"""Data-plane connections without a Hello, or with many, at a server without access control."""

from __future__ import annotations

import asyncio
import resource

import pytest

from keylane.protocol.errors import FrameError
from keylane.protocol.frames import Hello, Read, Refused, Released, encode_frame
from keylane.protocol.limits import CONNECTIONS_MAX
from keylane.protocol.membership.versions import VERSION
from keylane.rpc.plane import data_plane
from keylane.rpc.plane.data_plane import AUTH_FRAMES_MAX
from keylane.rpc.server import Server
from support import raw_frames
from support.raw_frames import RawClient, UpgradeRefusedError


@pytest.fixture
def places() -> int:
    """Connections that there may be."""
    return CONNECTIONS_MAX


@pytest.fixture
async def connect(places: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4_096), hard), hard))

    async def handler(_request, _payload):
        return Released(), b""

    server = Server([], data_handler=handler, data_connections_max=places)
    await server.start("127.0.0.1", 0)
    async with asyncio.timeout(30):
        yield lambda: raw_frames.connect(server.address)
    await server.stop()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def served(client: RawClient) -> bool:
    await client.send(encode_frame(8, Read(1, 0, 1000)))
    return isinstance((await client.answer())[1], Released)


async def test_connection_that_says_no_hello_is_ended_in_time(connect, monkeypatch):
    monkeypatch.setattr(data_plane, "AUTHENTICATE_S", 0.2)
    silent, greeted = await connect(), await connect()
    await greeted.greet()
    _, told, _ = await silent.answer()
    assert isinstance(told, Refused)
    assert told.code == FrameError.code
    assert await silent.receive() is None
    assert await served(greeted)


async def test_oldest_connection_without_hello_is_closed_when_there_are_too_many(
    connect, monkeypatch
):
    monkeypatch.setattr(data_plane, "UNAUTHENTICATED_MAX", 2)
    greeted = await connect()
    await greeted.greet()
    silent = [await connect() for _ in range(3)]
    assert await silent[0].receive() is None
    for socket in silent[1:]:
        await socket.greet()
        assert await served(socket)
    assert await served(greeted)


@pytest.mark.slow
async def test_connections_stay_when_over_a_thousand_come_at_once(connect, monkeypatch):
    """As after a restart of the broker: all handshakes are done before the first Hello is read."""
    monkeypatch.setattr(data_plane, "AUTHENTICATE_S", 60.0)
    first = await connect()
    others = [await connect() for _ in range(1_010)]
    await first.greet()
    assert await served(first)
    for client in others:
        client.abort()


@pytest.mark.parametrize("places", [3])
async def test_oldest_connection_without_hello_is_closed_when_all_places_are_taken(connect):
    greeted = [await connect() for _ in range(2)]
    for socket in greeted:
        await socket.greet()
    silent = await connect()
    late = await connect()
    assert await silent.receive() is None
    await late.greet()
    for socket in [*greeted, late]:
        assert await served(socket)
    with pytest.raises(UpgradeRefusedError, match="503"):
        await connect()


async def test_connection_that_repeats_its_hello_without_end_is_refused(connect):
    socket = await connect()
    for _ in range(AUTH_FRAMES_MAX):
        await socket.greet()
    await socket.send(encode_frame(1, Hello(VERSION)))
    _, told, _ = await socket.answer()
    assert isinstance(told, Refused)
    assert (told.code, "authentication frames" in told.message) == (FrameError.code, True)
    assert await socket.receive() is None
