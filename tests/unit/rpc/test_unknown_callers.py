"""Connections of the data plane whose callers are not known: bounded in number and in what they may send."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from keylane.protocol.access.rights import AccessGrant, Rights
from keylane.protocol.clock import SystemClock
from keylane.protocol.endpoints import DATA_PATH
from keylane.protocol.errors import OverloadedError
from keylane.protocol.frames import Append, Authenticate, Authenticated, Released, encode_frame
from keylane.protocol.frames import decode_answer as decoded
from keylane.rpc.access.caller import AccessTarget, Caller
from keylane.rpc.access.guard import Guard
from keylane.rpc.plane import data_plane
from keylane.rpc.plane.data_plane import INTRODUCTION_BYTES_MAX
from keylane.rpc.server import Server
from keylane.rpc.websocket.framing import CloseCode
from support.raw_frames import greet

MOST = 3


class Known:
    """A capability of someone who may produce."""

    caller = Caller("shop", (AccessGrant(Rights.PRODUCE),))
    ends_in_ms = 60_000

    def check(self) -> None:
        """It does not end."""


class Believing:
    """Believes all capabilities."""

    async def authenticate(self, _nonce: bytes, _asked: Authenticate) -> Known:
        return Known()

    def target(self, _request: Any) -> AccessTarget:
        return AccessTarget("orders")


@pytest.fixture
async def server(monkeypatch):
    monkeypatch.setattr(data_plane, "UNKNOWN_MAX", MOST)
    refused = []
    nothing: Any = None
    guard = Guard(nothing, nothing, clock=SystemClock(), judge=Believing(), on_audit=refused.append)

    async def handler(_request, _payload):
        return Released(), b""

    server = Server([], data_handler=handler, guard=guard)
    await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession() as session, asyncio.timeout(30):

        async def connect(*, known: bool) -> aiohttp.ClientWebSocketResponse:
            socket = await session.ws_connect(f"http://{server.address}{DATA_PATH}")
            await greet(socket)
            if known:
                await socket.send_bytes(encode_frame(7, Authenticate("kc_", b"", "")))
                assert isinstance(decoded((await socket.receive()).data)[1], Authenticated)
            return socket

        yield connect, refused
    await server.stop()


async def appended(socket: aiohttp.ClientWebSocketResponse, payload: bytes) -> bool:
    """True if the broker has taken the frame; False if it has closed the connection."""
    await socket.send_bytes(encode_frame(8, Append(1), payload))
    answer = await socket.receive()
    return answer.type is aiohttp.WSMsgType.BINARY and isinstance(decoded(answer.data)[1], Released)


async def test_oldest_unknown_caller_is_closed_when_there_are_too_many(server):
    connect, refused = server
    known = await connect(known=True)
    unknown = [await connect(known=False) for _ in range(MOST + 1)]
    assert (await unknown[0].receive()).type is not aiohttp.WSMsgType.BINARY
    assert [event.code for event in refused] == [OverloadedError.code]
    assert not any(socket.closed for socket in unknown[1:])
    assert await appended(known, b"some")


async def test_large_frame_is_taken_from_known_callers_alone(server):
    connect, _refused = server
    large = bytes(INTRODUCTION_BYTES_MAX)
    assert await appended(await connect(known=True), large)
    unknown = await connect(known=False)
    await unknown.send_bytes(encode_frame(8, Append(1), large))
    answer = await unknown.receive()
    assert (answer.type, answer.data) == (aiohttp.WSMsgType.CLOSE, CloseCode.MESSAGE_TOO_BIG)
