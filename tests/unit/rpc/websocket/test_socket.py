"""Sockets of the data plane: ours at both ends, and each beside aiohttp's."""

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
from keylane.rpc.liveness.keepalive import KEEPALIVE
from keylane.rpc.websocket import socket as socket_module
from keylane.rpc.websocket.accepting import accept_socket
from keylane.rpc.websocket.framing import CloseCode, Opcode, encode_head
from keylane.rpc.websocket.handshake import open_socket
from keylane.rpc.websocket.socket import (
    FRAME_BYTES_FIRST,
    LANDING_BYTES,
    QUEUED_BYTES_MAX,
    DataSocket,
)

BYTES_MAX = 4 << 20
SIZES = [
    0,
    1,
    125,
    126,
    4_096,
    LANDING_BYTES - 14,
    LANDING_BYTES,
    65_535,
    65_536,
    FRAME_BYTES_FIRST + 1,
    3_000_000,
]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop])
def new_loop(request):
    return request.param


class EchoingDesk:
    """A server that sends each message back; `socket` is its end of the last connection."""

    def __init__(self, heartbeat_s: float = 15.0) -> None:
        self.heartbeat_s = heartbeat_s
        self.socket: DataSocket | None = None
        self.echoes = True
        self.refused: list[str] = []
        self.ended = asyncio.Event()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        response, socket = await accept_socket(
            request, bytes_max=BYTES_MAX, heartbeat_s=self.heartbeat_s
        )
        self.socket = socket
        try:
            while self.echoes and (message := await socket.receive()) is not None:
                with contextlib.suppress(ConnectionError):
                    await socket.send((b"", bytes(message)))
            while not socket.closed:
                await asyncio.sleep(0.01)
        except FrameError as error:
            self.refused.append(str(error))
            await socket.close(CloseCode.PROTOCOL_ERROR, "text")
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
def test_messages_of_every_size_go_there_and_back(new_loop, hold_back, monkeypatch):
    """In order, many under way at once, with small ones beside large ones; also where `writelines`
    is not used.
    """
    monkeypatch.setattr(socket_module, "WRITELINES_HOLD_BACK", hold_back)

    async def body():
        desk = EchoingDesk()
        async with serving(desk) as (session, url):
            socket = await open_socket(session, url, bytes_max=BYTES_MAX, heartbeat_s=15.0)
            sizes = SIZES * 2
            random.Random(7).shuffle(sizes)
            messages = [os.urandom(size) for size in sizes]

            async def send():
                for message in messages:
                    await socket.send((message[:3], message[3:]))

            sending = asyncio.create_task(send())
            for message in messages:
                assert await socket.receive() == message
            await sending
            await socket.close()
            assert socket.closed
            assert socket.close_code == CloseCode.OK
            await desk.ended.wait()

    run(new_loop, body)


def test_client_of_aiohttp_is_understood(new_loop):
    """Its frames are masked by random keys; it pings, and says goodbye."""

    async def body():
        desk = EchoingDesk()
        async with serving(desk) as (session, url):
            theirs = await session.ws_connect(url, max_msg_size=0, autoping=False)
            for size in SIZES:
                message = os.urandom(size)
                await theirs.send_bytes(message)
                assert (await theirs.receive()).data == message
            await theirs.ping(b"are you there")
            pong = await theirs.receive()
            assert (pong.type, pong.data) == (aiohttp.WSMsgType.PONG, b"are you there")
            await theirs.close(code=1001)
            await desk.ended.wait()
            assert desk.socket.close_code == CloseCode.GOING_AWAY

    run(new_loop, body)


def test_server_of_aiohttp_is_understood(new_loop):
    """It takes frames of the key zero, is answered when it pings, and its goodbye is heard."""

    async def body():
        async def serve(request):
            theirs = web.WebSocketResponse(max_msg_size=0, heartbeat=0.05)
            await theirs.prepare(request)
            for _ in SIZES:
                await theirs.send_bytes((await theirs.receive()).data)
            await asyncio.sleep(0.3)  # several pings
            await theirs.close(code=1013, message=b"later")
            return theirs

        desk = EchoingDesk()
        desk.serve = serve
        async with serving(desk) as (session, url):
            socket = await open_socket(session, url, bytes_max=BYTES_MAX, heartbeat_s=15.0)
            for size in SIZES:
                message = os.urandom(size)
                await socket.send((message,))
                assert await socket.receive() == message
            assert await socket.receive() is None
            assert socket.close_code == CloseCode.TRY_AGAIN_LATER
            with pytest.raises(ConnectionError):
                await socket.send((b"x",))

    run(new_loop, body)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"\xc2\x00", CloseCode.PROTOCOL_ERROR),
        (b"\x00\x00", CloseCode.PROTOCOL_ERROR),
        (encode_head(Opcode.BINARY, BYTES_MAX + 1, masked=True), CloseCode.MESSAGE_TOO_BIG),
        (b"\x82\xff" + b"\xff" * 12, CloseCode.MESSAGE_TOO_BIG),
        (encode_head(Opcode.BINARY, 4, masked=False) + b"bare", CloseCode.PROTOCOL_ERROR),
        (encode_head(Opcode.PING, 126, masked=True) + bytes(126), CloseCode.PROTOCOL_ERROR),
        (b"\x09\x80" + bytes(4), CloseCode.PROTOCOL_ERROR),
    ],
)
async def test_connection_is_closed_when_its_bytes_are_no_frames(raw, code):
    """The peer is told why, and what came before is delivered."""
    desk = EchoingDesk()
    async with serving(desk) as (session, url):
        socket = await open_socket(session, url, bytes_max=BYTES_MAX, heartbeat_s=15.0)
        await socket.send((b"before",))
        assert await socket.receive() == b"before"
        socket.transport.write(raw)
        assert await socket.receive() is None
        assert socket.close_code == code
        await desk.ended.wait()
        assert desk.socket.problem


async def test_text_is_refused():
    desk = EchoingDesk()
    async with serving(desk) as (session, url):
        theirs = await session.ws_connect(url)
        await theirs.send_str("text")
        assert (await theirs.receive()).type is aiohttp.WSMsgType.CLOSE
        assert "a text frame" in desk.refused[0]


async def test_memory_grows_with_what_has_come():
    """Whatever length a head claims."""
    desk = EchoingDesk()
    async with serving(desk) as (session, url):
        socket = await open_socket(session, url, bytes_max=BYTES_MAX, heartbeat_s=15.0)
        socket.transport.write(encode_head(Opcode.BINARY, BYTES_MAX, masked=True) + b"some")
        while desk.socket is None or not desk.socket._filled:
            await asyncio.sleep(0.01)
        assert len(desk.socket._frame) == FRAME_BYTES_FIRST
        socket.transport.write(bytes(BYTES_MAX - 4))
        message = await socket.receive()
        assert message == b"some" + bytes(BYTES_MAX - 4)


async def test_socket_reads_nothing_while_messages_wait_to_be_received():
    """A sender is held back; all of it comes when they are received."""
    desk = EchoingDesk()
    desk.echoes = False
    count = 64
    async with serving(desk) as (session, url):
        socket = await open_socket(session, url, bytes_max=BYTES_MAX, heartbeat_s=15.0)

        async def send():
            for number in range(count):
                await socket.send((number.to_bytes(4), bytes(FRAME_BYTES_FIRST)))

        sending = asyncio.create_task(send())
        await asyncio.wait([sending], timeout=0.5)
        assert not sending.done()
        assert desk.socket._queued_bytes <= QUEUED_BYTES_MAX + FRAME_BYTES_FIRST + 4
        for number in range(count):
            assert (await desk.socket.receive())[:4] == number.to_bytes(4)
        await sending


async def test_peer_that_is_silent_is_lost():
    """One that answers pings is not, though it sends nothing."""
    desk = EchoingDesk(heartbeat_s=1.0)
    async with serving(desk) as (session, url):
        socket = await open_socket(session, url, bytes_max=BYTES_MAX, heartbeat_s=15.0)
        await asyncio.sleep(2.5)
        assert not socket.closed
        assert not desk.socket.closed
        socket.transport.pause_reading()
        await desk.ended.wait()
        assert "nothing came" in desk.socket.problem


async def test_lost_connection_ends_both_directions():
    """A `receive` and a `send` that wait end; `when_lost` is told."""
    desk = EchoingDesk()
    desk.echoes = False
    told = asyncio.Event()
    async with serving(desk) as (session, url):
        socket = await open_socket(session, url, bytes_max=BYTES_MAX, heartbeat_s=15.0)
        socket.when_lost(told.set)
        receiving = asyncio.create_task(socket.receive())

        async def send():
            while True:
                await socket.send((bytes(1 << 20),))

        sending = asyncio.create_task(send())
        await asyncio.sleep(0.2)
        assert not sending.done()
        socket.transport.abort()
        assert await receiving is None
        with pytest.raises(ConnectionError):
            await sending
        await told.wait()
        assert socket.close_code == CloseCode.ABNORMAL


async def test_small_messages_of_a_turn_share_a_write(monkeypatch):
    desk = EchoingDesk()
    async with serving(desk) as (session, url):
        socket = await open_socket(session, url, bytes_max=BYTES_MAX, heartbeat_s=15.0)
        writes = []
        real = socket.transport.write
        monkeypatch.setattr(
            socket.transport, "write", lambda data: (writes.append(data), real(data))
        )
        for number in range(10):
            socket.write((b"small", bytes([number])))
        for number in range(10):
            assert await socket.receive() == b"small" + bytes([number])
        assert len(writes) == 1
        socket.gather()
        for number in range(3):
            socket.write((b"kept", bytes([number])))
        await asyncio.sleep(0.01)
        assert len(writes) == 1
        socket.flush()
        assert len(writes) == 2
        for number in range(3):
            assert await socket.receive() == b"kept" + bytes([number])


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Upgrade": "websocket", "Connection": "Upgrade"},
        {
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "short",
        },
    ],
)
async def test_request_that_is_no_handshake_is_refused(headers):
    async with serving(EchoingDesk()) as (session, url):
        async with session.get(url, headers=headers) as response:
            assert response.status == 400


async def test_server_that_opens_no_websocket_is_refused():
    async def serve(_request):
        return web.Response(status=200)

    desk = EchoingDesk()
    desk.serve = serve
    async with serving(desk) as (session, url):
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await open_socket(session, url, bytes_max=BYTES_MAX, heartbeat_s=15.0)


def test_kernel_watches_the_connection_of_a_client(new_loop):
    """A path that is gone is found within 10 s, while nothing is sent."""

    async def body():
        async with serving(EchoingDesk()) as (session, url):
            socket = await open_socket(session, url, bytes_max=BYTES_MAX, heartbeat_s=15.0)
            kernel = socket.transport.get_extra_info("socket")
            on, idle_s, between_s, probes = [
                kernel.getsockopt(level, getattr(sockets, name)) for level, name, _ in KEEPALIVE
            ]
            assert on
            assert idle_s + probes * between_s <= 10
            await socket.close()

    run(new_loop, body)


def test_connection_is_opened_when_the_system_cannot_have_its_kernel_watch_it(new_loop, tmp_path):
    """As a Unix socket, which has no options of TCP; pings still find a peer that is gone."""

    async def body():
        async with serving(EchoingDesk(), path=str(tmp_path / "s")) as (session, url):
            socket = await open_socket(session, url, bytes_max=BYTES_MAX, heartbeat_s=15.0)
            await socket.send((b"", b"message"))
            assert await socket.receive() == b"message"
            await socket.close()

    run(new_loop, body)
