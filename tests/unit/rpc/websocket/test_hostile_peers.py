"""Peers that send what programs of keylane never do: what they make the other end hold has a bound."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc

import aiohttp
import pytest
import uvloop
from aiohttp import web

from keylane.rpc.websocket import socket
from keylane.rpc.websocket.accepting import accept_socket
from keylane.rpc.websocket.framing import CloseCode, Joiner, Opcode, decode_head, encode_head
from keylane.rpc.websocket.handshake import open_socket
from keylane.rpc.websocket.socket import (
    LANDING_BYTES,
    MESSAGE_BYTES,
    QUEUED_BYTES_MAX,
    DataSocket,
)

BYTES_MAX = 1 << 20
EMPTY = encode_head(Opcode.BINARY, 0, masked=True)


@contextlib.asynccontextmanager
async def both_ends():
    """A client's socket and the server's; neither end receives by itself."""
    ours: asyncio.Future[DataSocket] = asyncio.get_running_loop().create_future()

    async def serve(request: web.Request) -> web.StreamResponse:
        response, socket = await accept_socket(request, bytes_max=BYTES_MAX, heartbeat_s=15.0)
        lost = asyncio.Event()
        socket.when_lost(lost.set)
        ours.set_result(socket)
        await lost.wait()
        return response

    app = web.Application()
    app.router.add_get("/", serve)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(30):
            theirs = await open_socket(session, url, bytes_max=BYTES_MAX, heartbeat_s=15.0)
            yield theirs, await ours
            theirs.transport.abort()
    finally:
        await runner.cleanup()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop])
def run(request):
    def run_body(body):
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(body())

    return run_body


async def sent(theirs: DataSocket, data: bytes, size: int) -> None:
    """Send `data` again and again, `size` bytes of it, or as many as the other end reads in a second."""
    many = data * max(1, LANDING_BYTES // len(data))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            for _ in range(size // len(many)):
                theirs.transport.write(many)
                await asyncio.sleep(0)
                while theirs.transport.get_write_buffer_size():
                    await asyncio.sleep(0.001)


def test_pings_of_a_peer_that_does_not_read_are_answered_once(run, monkeypatch):
    answered: list[bytes] = []
    take = DataSocket._take

    def noting(self, head, payload):
        if head.opcode is Opcode.PONG:
            answered.append(bytes(payload))
        take(self, head, payload)

    monkeypatch.setattr(DataSocket, "_take", noting)
    monkeypatch.setattr(socket, "CONTROL_FRAMES_MAX", 1 << 30)

    async def body():
        async with both_ends() as (theirs, ours):
            theirs.transport.pause_reading()
            ping = encode_head(Opcode.PING, 100, masked=True) + bytes(100)
            await sent(theirs, ping, 32 << 20)
            assert ours.transport.get_write_buffer_size() < 2 * LANDING_BYTES + (64 << 10)
            theirs.transport.write(encode_head(Opcode.PING, 4, masked=True) + b"last")
            await asyncio.sleep(0.1)
            theirs.transport.resume_reading()
            while b"last" not in answered:
                await asyncio.sleep(0.01)
            await ours.send((b"served ", b"on"))
            assert await theirs.receive() == b"served on"

    run(body)


@pytest.mark.parametrize("opcode", [Opcode.PING, Opcode.PONG])
def test_peer_that_floods_with_control_frames_is_refused(run, opcode):
    async def body():
        async with both_ends() as (theirs, ours):
            frame = encode_head(opcode, 0, masked=True)
            theirs.transport.write(frame * socket.CONTROL_FRAMES_MAX)
            await theirs.send((b"served",))
            assert await ours.receive() == b"served"
            theirs.transport.write(frame)
            assert await theirs.receive() is None
            assert theirs.close_code == CloseCode.POLICY_VIOLATION
            assert ours.problem == "too many pings"

    run(body)


def test_empty_messages_wait_in_a_bounded_number(run):
    async def body():
        async with both_ends() as (theirs, ours):
            await sent(theirs, EMPTY, 4 << 20)
            most = QUEUED_BYTES_MAX // MESSAGE_BYTES + LANDING_BYTES // len(EMPTY) + 1
            assert 0 < len(ours._messages) <= most
            for _ in range(most):
                assert await ours.receive() == b""

    run(body)


@pytest.mark.parametrize("size", [0, 1])
def test_small_fragments_take_no_more_memory_than_their_message(size):
    joiner = Joiner(BYTES_MAX)
    begun = decode_head(memoryview(b"\x02\x00"))
    going_on = decode_head(memoryview(bytes((0, size))))
    assert begun is not None
    assert going_on is not None
    joiner.check(begun)
    joiner.add(begun, bytearray())
    tracemalloc.start()
    try:
        for _ in range(50_000):
            joiner.check(going_on)
            assert joiner.add(going_on, bytearray(size)) is None
        taken, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 128 << 10


async def test_client_refuses_masked_frames():
    async with both_ends() as (theirs, ours):
        ours.transport.write(encode_head(Opcode.BINARY, 4, masked=True) + b"mask")
        assert await theirs.receive() is None
        assert theirs.close_code == CloseCode.PROTOCOL_ERROR
        assert "mask" in theirs.problem
