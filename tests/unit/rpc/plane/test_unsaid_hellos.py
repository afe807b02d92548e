"""Connections of the data plane that say no Hello, or say it again and again, at a server without access control."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from keylane.protocol.endpoints import DATA_PATH
from keylane.protocol.errors import FrameError
from keylane.protocol.frames import Hello, Read, Refused, Released, decode_answer, encode_frame
from keylane.protocol.membership.versions import VERSION
from keylane.rpc.plane import data_plane
from keylane.rpc.plane.data_plane import INTRODUCTIONS_MAX
from keylane.rpc.server import Server
from support.raw_frames import greet


@pytest.fixture
async def connect():
    async def handler(_request, _payload):
        return Released(), b""

    server = Server([], data_handler=handler)
    await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession() as session, asyncio.timeout(30):
        yield lambda: session.ws_connect(f"http://{server.address}{DATA_PATH}")
    await server.stop()


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


async def test_connection_that_repeats_its_hello_without_end_is_refused(connect):
    socket = await connect()
    for _ in range(INTRODUCTIONS_MAX):
        await greet(socket)
    await socket.send_bytes(encode_frame(1, Hello(VERSION)))
    _, told, _ = decode_answer((await socket.receive()).data)
    assert isinstance(told, Refused)
    assert (told.code, "say who calls" in told.message) == (FrameError.code, True)
    assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
