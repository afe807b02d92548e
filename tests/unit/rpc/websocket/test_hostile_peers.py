"""Peers that send what programs of keylane never do: what they make the other end hold has a
bound.
"""

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
from keylane.rpc.websocket.incoming import PATIENCE_S, IncomingRoom
from keylane.rpc.websocket.socket import (
    LANDING_BYTES,
    MESSAGE_BYTES,
    QUEUED_BYTES_MAX,
    DataSocket,
)

BYTES_MAX = 1 << 20
EMPTY = encode_head(Opcode.BINARY, 0, masked=True)


@contextlib.asynccontextmanager
async def both_ends(**settings):
    """A client's socket and the server's, made with `settings`; neither end receives by itself."""
    settings = {"bytes_max": BYTES_MAX, "heartbeat_s": 15.0} | settings
    ours: asyncio.Future[DataSocket] = asyncio.get_running_loop().create_future()

    async def serve(request: web.Request) -> web.StreamResponse:
        response, socket = await accept_socket(request, **settings)
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
    """Send `data` again and again, `size` bytes of it, or as many as the other end reads in a
    second.
    """
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


@pytest.mark.parametrize("size", [0, 1, socket.FRAGMENT_BYTES_MIN - 1])
def test_peer_that_floods_with_small_fragments_is_refused(run, size: int):
    async def body():
        async with both_ends(bytes_max=4 << 20) as (theirs, ours):
            fragment = bytearray(encode_head(Opcode.CONTINUATION, size, masked=True) + bytes(size))
            fragment[0] &= 0x7F
            theirs.transport.write(b"\x02\x80\0\0\0\0")
            theirs.transport.write(fragment * (socket.CONTROL_FRAMES_MAX + 1))
            assert await theirs.receive() is None
            assert theirs.close_code == CloseCode.POLICY_VIOLATION
            assert ours.problem == "too many small fragments"

    run(body)


def test_message_of_large_fragments_is_taken_whatever_their_number(run, monkeypatch):
    monkeypatch.setattr(socket, "CONTROL_FRAMES_MAX", 10)

    async def body():
        async with both_ends() as (theirs, ours):
            size = socket.FRAGMENT_BYTES_MIN
            fragment = bytearray(encode_head(Opcode.CONTINUATION, size, masked=True) + bytes(size))
            last = bytes(fragment)
            fragment[0] &= 0x7F
            theirs.transport.write(b"\x02\x80\0\0\0\0" + fragment * 100 + last)
            assert await ours.receive() == bytes(101 * size)

    run(body)


@pytest.mark.parametrize("begin", [b"\x82", b"\x02"])
def test_message_whose_end_is_late_is_given_up(run, begin: bytes, monkeypatch):
    """Its sender goes on to send a byte now and then."""
    monkeypatch.setattr(socket, "MESSAGE_S", 0.3)

    async def body():
        async with both_ends(heartbeat_s=0.1) as (theirs, ours):
            head = begin + encode_head(Opcode.BINARY, 1000, masked=True)[1:]
            theirs.transport.write(head + bytes(500 if begin == b"\x82" else 1000))
            fragment = b"\x00\x81\0\0\0\0"
            while not ours.closed:
                theirs.transport.write(b"x" if begin == b"\x82" else fragment + b"x")
                await asyncio.sleep(0.02)
            assert ours.problem == "a message whose end is late"
            assert ours._joiner.begun_bytes + len(ours._frame) <= 2000

    run(body)


def test_message_is_not_late_when_it_is_the_server_that_reads_nothing(run, monkeypatch):
    monkeypatch.setattr(socket, "MESSAGE_S", 0.3)

    async def body():
        async with both_ends(heartbeat_s=0.1) as (theirs, ours):
            half = QUEUED_BYTES_MAX // 2 + 1
            for _ in range(2):
                await theirs.send((bytes(half),))
            theirs.transport.write(encode_head(Opcode.BINARY, 1000, masked=True) + bytes(500))
            await asyncio.sleep(1.0)
            assert [len(await ours.receive()) for _ in range(2)] == [half, half]
            theirs.transport.write(bytes(500))
            assert await ours.receive() == bytes(1000)

    run(body)


def test_messages_without_an_end_hold_a_bounded_amount_together(run):
    """The one that has come to a stop is given up for the later ones, and its memory is free."""

    async def body():
        room = IncomingRoom(1 << 20)
        async with both_ends(room=room) as (theirs, ours):
            theirs.transport.write(encode_head(Opcode.BINARY, BYTES_MAX, masked=True) + bytes(100))
            while not room.held_bytes:
                await asyncio.sleep(0.01)
            assert room.held_bytes == 100  # whatever memory it has
            theirs.transport.write(bytes(BYTES_MAX - 200))
            while ours._filled < BYTES_MAX - 100:
                await asyncio.sleep(0.01)
            assert room.held_bytes == BYTES_MAX - 100
            given_up: list[int] = []
            for step in (1, 2, 3):
                later = asyncio.get_running_loop().time() + step * (PATIENCE_S + 1)
                room.note("a later one", 100_000 * step, later, lambda: given_up.append(1))
            assert await theirs.receive() is None
            assert theirs.close_code == CloseCode.TRY_AGAIN_LATER
            assert (room.held_bytes, given_up, len(ours._frame)) == (300_000, [], 0)

    run(body)


def test_message_is_not_given_up_for_others_when_the_server_reads_nothing(run):
    """As while a quota holds the connection."""

    async def body():
        room = IncomingRoom(256 << 10)
        async with both_ends(room=room) as (theirs, ours):
            half = QUEUED_BYTES_MAX // 2 + 1
            await theirs.send((bytes(half),))
            while not ours._messages:
                await asyncio.sleep(0.01)
            theirs.transport.write(encode_head(Opcode.BINARY, 1_000, masked=True) + bytes(500))
            while room.held_bytes != 500:
                await asyncio.sleep(0.01)
            ours._keep(Opcode.BINARY, bytearray(half))
            for step in (1, 2, 3):
                later = asyncio.get_running_loop().time() + step * (PATIENCE_S + 1)
                room.note("another", 300_000 * step, later, lambda: None)
            assert not ours.closed
            assert [len(await ours.receive()) for _ in range(2)] == [half, half]
            theirs.transport.write(bytes(500))
            assert await ours.receive() == bytes(1_000)
            assert room.held_bytes == 900_000

    run(body)


def test_peer_that_sends_many_small_frames_leaves_turns_to_others(run):
    """Between two turns of the event loop a bounded number of its frames is taken, and none is
    lost.
    """

    async def body():
        async with both_ends() as (theirs, ours):
            taken = 0
            most = 0

            def take(_message: bytearray) -> bool:
                nonlocal taken
                taken += 1
                return True

            ours.on_message = take
            receiving = asyncio.create_task(ours.receive())
            await asyncio.sleep(0.05)
            sent_frames = 100_000
            theirs.transport.write(EMPTY * sent_frames)
            while taken < sent_frames:
                before = taken
                await asyncio.sleep(0)
                most = max(most, taken - before)
            assert most <= socket.TURN_FRAMES_MAX + LANDING_BYTES // len(EMPTY)
            await theirs.send((b"served",))
            while taken == sent_frames:
                await asyncio.sleep(0.01)
            receiving.cancel()

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
