"""Connections of the data plane that say no Hello, or say it again and again, at a server without
access control.
"""

from __future__ import annotations

import asyncio
import resource

import aiohttp
import pytest

from keylane.protocol.endpoints import DATA_PATH
from keylane.protocol.errors import FrameError
from keylane.protocol.frames import Hello, Read, Refused, Released, decode_answer, encode_frame
from keylane.protocol.limits import CONNECTIONS_MAX
from keylane.protocol.membership.versions import VERSION
from keylane.rpc.plane import data_plane
from keylane.rpc.plane.data_plane import INTRODUCTIONS_MAX
from keylane.rpc.server import Server
from support.raw_frames import greet


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
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.timeout(30):
        yield lambda: session.ws_connect(f"http://{server.address}{DATA_PATH}")
    await server.stop()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def served(socket: aiohttp.ClientWebSocketResponse) -> bool:
    await socket.send_bytes(encode_frame(8, Read(1, 0, 1000)))
    answer = await socket.receive()
    return answer.type is aiohttp.WSMsgType.BINARY and isinstance(
        decode_answer(answer.data)[1], Released
    )


async def test_connection_that_says_no_hello_is_ended_in_time(connect, monkeypatch):
    monkeypatch.setattr(data_plane, "AUTHENTICATE_S", 0.2)
    silent, greeted = await connect(), await connect()
    await greet(greeted)
    _, told, _ = decode_answer((await silent.receive()).data)
    assert isinstance(told, Refused)
    assert told.code == FrameError.code
    assert (await silent.receive()).type is aiohttp.WSMsgType.CLOSE
    assert await served(greeted)


async def test_oldest_connection_without_hello_is_closed_when_there_are_too_many(
    connect, monkeypatch
):
    monkeypatch.setattr(data_plane, "UNKNOWN_MAX", 2)
    greeted = await connect()
    await greet(greeted)
    silent = [await connect() for _ in range(3)]
    assert (await silent[0].receive()).type is not aiohttp.WSMsgType.BINARY
    for socket in silent[1:]:
        await greet(socket)
        assert await served(socket)
    assert await served(greeted)


@pytest.mark.slow
async def test_connections_stay_when_over_a_thousand_come_at_once(connect, monkeypatch):
    """As behind a restart of their broker: all have had their handshakes before the first Hello is
    read.
    """
    monkeypatch.setattr(data_plane, "AUTHENTICATE_S", 60.0)
    first = await connect()
    there = first.get_extra_info("peername")
    request = (
        f"GET {DATA_PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: "
        f"upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    ).encode()
    writers = []
    for _ in range(1_010):
        reader, writer = await asyncio.open_connection(*there[:2])
        writer.write(request)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        writers.append(writer)
    await greet(first)
    assert await served(first)
    for writer in writers:
        writer.transport.abort()


@pytest.mark.parametrize("places", [3])
async def test_oldest_connection_without_hello_is_closed_when_all_places_are_taken(connect):
    greeted = [await connect() for _ in range(2)]
    for socket in greeted:
        await greet(socket)
    silent = await connect()
    late = await connect()
    assert (await silent.receive()).type is not aiohttp.WSMsgType.BINARY
    await greet(late)
    for socket in [*greeted, late]:
        assert await served(socket)
    with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):
        await connect()


async def test_connection_that_repeats_its_hello_without_end_is_refused(connect):
    socket = await connect()
    for _ in range(INTRODUCTIONS_MAX):
        await greet(socket)
    await socket.send_bytes(encode_frame(1, Hello(VERSION)))
    _, told, _ = decode_answer((await socket.receive()).data)
    assert isinstance(told, Refused)
    assert (told.code, "say who calls" in told.message) == (FrameError.code, True)
    assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
