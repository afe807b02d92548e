"""Frame connections at both ends, on asyncio and uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket as sockets

import aiohttp
import pytest
import uvloop
from aiohttp import web

from keylane.protocol.errors import FrameError
from keylane.protocol.frames import SIGN_OF_LIFE
from keylane.rpc.frames import frame_socket
from keylane.rpc.frames.frame_socket import (
    FRAME_BYTES_FIRST,
    QUEUED_BYTES_MAX,
    RECEIVE_BUFFER_BYTES,
    FrameSocket,
)
from keylane.rpc.frames.incoming import IncomingBudget
from keylane.rpc.frames.upgrade import UPGRADE_HEADERS, accept_socket, open_socket
from keylane.rpc.liveness.silence import KEEPALIVE
from support.raw_frames import sized

BYTES_MAX = 4 << 20
SIZES = [
    1,
    255,
    256,
    4_096,
    RECEIVE_BUFFER_BYTES - 5,
    RECEIVE_BUFFER_BYTES - 4,
    RECEIVE_BUFFER_BYTES,
    65_536,
    FRAME_BYTES_FIRST + 1,
    3_000_000,
]
"""Bytes of a frame behind its size."""


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop])
def new_loop(request):
    return request.param


class EchoingDesk:
    """A server that sends each frame back; `socket` is its end of the last connection."""

    def __init__(self) -> None:
        self.socket: FrameSocket | None = None
        self.echoes = True
        self.refused: list[str] = []
        self.ended = asyncio.Event()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        response, socket = await accept_socket(
            request, bytes_max=BYTES_MAX, budget=IncomingBudget()
        )
        self.socket = socket
        try:
            while self.echoes and (frame := await socket.receive()) is not None:
                with contextlib.suppress(ConnectionError):
                    await socket.send((b"", bytes(frame)))
            while not socket.closing:
                await asyncio.sleep(0.01)
        except FrameError as error:
            self.refused.append(str(error))
            await socket.close()
        finally:
            self.ended.set()
        return response


@contextlib.asynccontextmanager
async def serving(desk: EchoingDesk, path: str = ""):
    """A session of a client, and the URL of the desk: over TCP, or over the Unix socket at
    `path`.
    """
    app = web.Application()
    app.router.add_get("/", desk.serve)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = web.UnixSite(runner, path) if path else web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        connector = aiohttp.UnixConnector(path) if path else aiohttp.TCPConnector()
        address = "desk" if path else f"127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(connector=connector) as session:
            yield session, f"http://{address}/"
    finally:
        await runner.cleanup()


def run(new_loop, body):
    async def limited():
        async with asyncio.timeout(30):
            await body()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(limited())


@pytest.mark.parametrize("hold_back", [True, False])
def test_frames_of_every_size_go_there_and_back(new_loop, hold_back, monkeypatch):
    """Frames arrive in order, many at a time, large beside small ones; also without
    `writelines`.
    """
    monkeypatch.setattr(frame_socket, "WRITELINES_APPLIES_BACKPRESSURE", hold_back)

    async def body():
        desk = EchoingDesk()
        async with serving(desk) as (session, url):
            socket = await open_socket(session, url, bytes_max=BYTES_MAX)
            sizes = SIZES * 2
            random.Random(7).shuffle(sizes)
            frames = [sized(os.urandom(size)) for size in sizes]

            async def send():
                for frame in frames:
                    await socket.send((frame[:4], frame[4:]))

            sending = asyncio.create_task(send())
            for frame in frames:
                assert await socket.receive() == frame
            await sending
            await socket.close()
            assert socket.closing
            await desk.ended.wait()

    run(new_loop, body)


@pytest.mark.parametrize(
    "raw",
    [
        sized(bytes(BYTES_MAX - 3)),
        b"\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n",
        b"\x82\x85\x12\x34\x56\x78hello",
    ],
    ids=["long", "huge", "http", "WebSocket"],
)
async def test_bytes_that_are_no_frames_are_refused(raw):
    """Frames that arrived earlier are received first."""
    desk = EchoingDesk()
    async with serving(desk) as (session, url):
        socket = await open_socket(session, url, bytes_max=BYTES_MAX)
        before = sized(b"before")
        socket.transport.write(before + raw)
        assert await socket.receive() == before
        await desk.ended.wait()
        assert f"over the limit of {BYTES_MAX}" in desk.refused[0]
        await socket.close()


async def test_client_refuses_a_frame_over_its_limit():
    desk = EchoingDesk()
    async with serving(desk) as (session, url):
        socket = await open_socket(session, url, bytes_max=100)
        await socket.send((sized(bytes(97)),))
        with pytest.raises(FrameError, match="over the limit of 100"):
            await socket.receive()
        await socket.close()
        await desk.ended.wait()


async def test_server_answers_a_client_that_asks_for_a_sign_of_life():
    """Once for all that it reads at a time, and no frame comes of it."""
    desk = EchoingDesk()
    async with serving(desk) as (session, url):
        socket = await open_socket(session, url, bytes_max=BYTES_MAX)
        frame = sized(b"some")
        await socket.send((frame,))
        assert await socket.receive() == frame
        before = desk.socket.written_bytes
        socket.has_received = False
        socket.write((SIGN_OF_LIFE * 100,))
        while not socket.has_received:
            await asyncio.sleep(0.01)
        assert desk.socket.written_bytes - before == len(SIGN_OF_LIFE)
        await socket.send((SIGN_OF_LIFE, frame, SIGN_OF_LIFE))
        assert await socket.receive() == frame


async def test_memory_grows_with_what_has_come():
    """Whatever size a frame's header announces."""
    desk = EchoingDesk()
    async with serving(desk) as (session, url):
        socket = await open_socket(session, url, bytes_max=BYTES_MAX)
        frame = sized(bytes(BYTES_MAX - 4))
        socket.transport.write(frame[:8])
        while desk.socket is None or not desk.socket._arrived_bytes:
            await asyncio.sleep(0.01)
        assert len(desk.socket._frame) == FRAME_BYTES_FIRST
        socket.transport.write(frame[8:])
        assert await socket.receive() == frame


async def test_socket_reads_nothing_while_frames_wait_to_be_received():
    """The sender is slowed down, and everything arrives once it is received."""
    desk = EchoingDesk()
    desk.echoes = False
    count = 64
    async with serving(desk) as (session, url):
        socket = await open_socket(session, url, bytes_max=BYTES_MAX)

        async def send():
            for number in range(count):
                await socket.send((sized(number.to_bytes(4) + bytes(FRAME_BYTES_FIRST)),))

        sending = asyncio.create_task(send())
        await asyncio.wait([sending], timeout=0.5)
        assert not sending.done()
        assert desk.socket._queued_bytes <= QUEUED_BYTES_MAX + FRAME_BYTES_FIRST + 8
        for number in range(count):
            assert (await desk.socket.receive())[4:8] == number.to_bytes(4)
        await sending


async def test_lost_connection_ends_both_directions():
    """A `receive` and a `send` that wait end; `add_lost_callback` is told."""
    desk = EchoingDesk()
    desk.echoes = False
    told = asyncio.Event()
    async with serving(desk) as (session, url):
        socket = await open_socket(session, url, bytes_max=BYTES_MAX)
        socket.add_lost_callback(told.set)
        receiving = asyncio.create_task(socket.receive())

        async def send():
            while True:
                await socket.send((sized(bytes(1 << 20)),))

        sending = asyncio.create_task(send())
        await asyncio.sleep(0.2)
        assert not sending.done()
        socket.transport.abort()
        assert await receiving is None
        with pytest.raises(ConnectionError):
            await sending
        await told.wait()


async def test_small_frames_of_a_turn_share_a_write(monkeypatch):
    desk = EchoingDesk()
    async with serving(desk) as (session, url):
        socket = await open_socket(session, url, bytes_max=BYTES_MAX)
        writes = []
        real = socket.transport.write
        monkeypatch.setattr(
            socket.transport, "write", lambda data: (writes.append(data), real(data))
        )
        for number in range(10):
            socket.write((sized(b"small"), sized(bytes([number]))))
        for number in range(10):
            assert await socket.receive() == sized(b"small")
            assert await socket.receive() == sized(bytes([number]))
        assert len(writes) == 1
        socket.gather()
        for number in range(3):
            socket.write((sized(b"kept%d" % number),))
        await asyncio.sleep(0.01)
        assert len(writes) == 1
        socket.flush()
        assert len(writes) == 2
        for number in range(3):
            assert await socket.receive() == sized(b"kept%d" % number)


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(status=200),
        web.Response(status=101, headers=UPGRADE_HEADERS | {"Upgrade": "websocket"}),
    ],
    ids=["ok", "another"],
)
async def test_server_that_speaks_another_protocol_is_refused(answer: web.Response):
    async def serve(_request):
        return answer

    desk = EchoingDesk()
    desk.serve = serve
    async with serving(desk) as (session, url):
        with pytest.raises(aiohttp.ClientResponseError, match="does not speak keylane/1"):
            await open_socket(session, url, bytes_max=BYTES_MAX)


def test_kernel_watches_the_connection_of_a_client(new_loop):
    """A broken path is detected within 10 s, even if nothing is sent."""

    async def body():
        async with serving(EchoingDesk()) as (session, url):
            socket = await open_socket(session, url, bytes_max=BYTES_MAX)
            kernel = socket.transport.get_extra_info("socket")
            on, idle_s, between_s, probes = [
                kernel.getsockopt(level, getattr(sockets, name)) for level, name, _ in KEEPALIVE
            ]
            assert on
            assert idle_s + probes * between_s <= 10
            await socket.close()

    run(new_loop, body)


def test_connection_is_opened_when_the_system_cannot_have_its_kernel_watch_it(new_loop, tmp_path):
    """A Unix socket has no TCP options; pings still detect a dead peer."""

    async def body():
        async with serving(EchoingDesk(), path=str(tmp_path / "s")) as (session, url):
            socket = await open_socket(session, url, bytes_max=BYTES_MAX)
            await socket.send((b"", sized(b"message")))
            assert await socket.receive() == sized(b"message")
            await socket.close()

    run(new_loop, body)


def test_frames_arrive_when_their_sender_closes_before_it_has_read_all(new_loop, monkeypatch):
    """The kernel resets a connection that is closed with unread data, and frames would be lost."""
    monkeypatch.setattr(frame_socket, "CLOSE_S", 10)
    count = 3_000
    arrived: list[bytearray] = []

    async def body():
        desk = EchoingDesk()
        desk.echoes = False
        async with serving(desk) as (session, url):
            socket = await open_socket(session, url, bytes_max=BYTES_MAX)
            while desk.socket is None:
                await asyncio.sleep(0)
            desk.socket.write((sized(bytes(2 << 20)),))
            socket._pause_reading()
            for _ in range(count):
                socket.write((sized(bytes(200)),))
            await asyncio.sleep(0.05)
            closing = asyncio.create_task(socket.close())
            await asyncio.sleep(0.2)
            while (frame := await desk.socket.receive()) is not None:
                arrived.append(frame)
            await closing

    run(new_loop, body)
    assert len(arrived) == count
