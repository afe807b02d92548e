"""Connections of unidentified callers are limited in number and in what they may send, and take no
slots.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from keylane.protocol.access.rights import AccessGrant, Rights
from keylane.protocol.clock import SystemClock
from keylane.protocol.control import Done
from keylane.protocol.errors import ConnectionQuotaError, FrameError, OverloadedError
from keylane.protocol.frames import (
    Append,
    Authenticate,
    Authenticated,
    Refused,
    Released,
    encode_frame,
)
from keylane.protocol.http.endpoint import Endpoint
from keylane.rpc import intake
from keylane.rpc.access.caller import AccessTarget, Caller
from keylane.rpc.access.guard import Guard
from keylane.rpc.intake import HttpLimits
from keylane.rpc.plane import data_plane
from keylane.rpc.plane.data_plane import AUTH_FRAME_BYTES_MAX
from keylane.rpc.server import ControlRoute, Server
from support import raw_frames
from support.raw_frames import RawClient

MOST = 3


class Known:
    """A capability of someone who may produce."""

    caller = Caller("shop", (AccessGrant(Rights.PRODUCE),))
    ends_in_ms = 60_000

    def check(self) -> None:
        """It never expires."""


class Believing:
    """Accepts all capabilities."""

    async def authenticate(self, _nonce: bytes, _asked: Authenticate) -> Known:
        return Known()

    def target(self, _request: Any) -> AccessTarget:
        return AccessTarget("orders")


@pytest.fixture
async def server(monkeypatch):
    monkeypatch.setattr(data_plane, "UNAUTHENTICATED_MAX", MOST)
    refused = []
    nothing: Any = None
    guard = Guard(
        nothing, nothing, clock=SystemClock(), authorizer=Believing(), on_audit=refused.append
    )

    async def handler(_request, _payload):
        return Released(), b""

    server = Server([], data_handler=handler, guard=guard)
    await server.start("127.0.0.1", 0)

    async def connect(*, known: bool) -> RawClient:
        client = await raw_frames.connect(server.address)
        await client.greet()
        if known:
            await client.send(encode_frame(7, Authenticate("kc_", b"", "")))
            assert isinstance((await client.answer())[1], Authenticated)
        return client

    async with asyncio.timeout(30):
        yield connect, refused
    await server.stop()


async def appended(client: RawClient, payload: bytes) -> bool:
    """True if the broker has taken the frame."""
    await client.send(encode_frame(8, Append(1), payload))
    return isinstance((await client.answer())[1], Released)


async def test_oldest_unknown_caller_is_closed_when_there_are_too_many(server):
    connect, refused = server
    known = await connect(known=True)
    unknown = [await connect(known=False) for _ in range(MOST + 1)]
    assert await unknown[0].receive() is None
    assert [event.code for event in refused] == [OverloadedError.code]
    for client in unknown[1:]:
        await client.greet()
    assert await appended(known, b"some")


async def test_large_frame_is_taken_from_known_callers_alone(server):
    connect, _refused = server
    large = bytes(AUTH_FRAME_BYTES_MAX)
    assert await appended(await connect(known=True), large)
    unknown = await connect(known=False)
    await unknown.send(encode_frame(8, Append(1), large))
    number, answer, _ = await unknown.answer()
    assert isinstance(answer, Refused)
    assert (number, answer.code) == (0, FrameError.code)
    assert f"over the limit of {AUTH_FRAME_BYTES_MAX}" in answer.message


PLACES = 4


async def soon(_token: str) -> None:
    """It is known at once whose a token is."""


@contextlib.asynccontextmanager
async def http_server(
    noted: list[Any],
    *,
    on_identify: Callable[[str], Awaitable[None]] = soon,
    places: int = PLACES,
) -> AsyncIterator[Server]:
    """A server with access control and few slots for plain HTTP; a call waits for as long as its
    query says.
    """

    async def identify(text: str) -> Caller:
        await on_identify(text)
        right = Rights.CLUSTER if text == "broker" else Rights.READ
        return Caller("shop" if text == "x" else text, (AccessGrant(right),))

    async def targets(_endpoint: Any, _body: Any, _params: Any) -> list[AccessTarget]:
        return [AccessTarget("orders")]

    async def ask(_body: object, params: Any) -> Done:
        await asyncio.sleep(float(params.get("s", 0)))
        return Done()

    async def handle(_request: Any, _payload: Any) -> tuple[Released, bytes]:
        return Released(), b""

    guard = Guard(
        identify, targets, clock=SystemClock(), authorizer=Believing(), on_audit=noted.append
    )
    routes = [
        ControlRoute(Endpoint("GET", "/v1/asked", None, Done, Rights.ANY, "", ("s",)), ask),
        ControlRoute(Endpoint("GET", "/health/live", None, Done, Rights.OPEN, ""), ask),
    ]
    limits = HttpLimits(connections_max=places)
    server = Server(routes, data_handler=handle, limits=limits, guard=guard)
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.stop()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /v1/asked HTTP/1.1\r\nHost: loc",
        b"GET /health/live?s=60 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\n\r\n",
        b"GET /v1/asked?s=60 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/data HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["silent", "half a head", "a call for all", "no token", "no handshake"],
)
async def test_http_callers_that_are_not_known_keep_no_place_from_those_who_are(said: bytes):
    """As many strangers as there were slots locked all others out, of the data plane too."""
    noted: list[Any] = []
    writers: list[asyncio.StreamWriter] = []
    token = {"Authorization": "Bearer x"}

    async def strangers(number: int) -> None:
        for _ in range(number):
            _reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(said)
            writers.append(writer)
        await asyncio.sleep(0.1)

    async with (
        http_server(noted) as server,
        aiohttp.ClientSession(f"http://{server.address}", headers=token) as session,
        asyncio.timeout(30),
    ):
        try:
            await strangers(2 * PLACES)
            plane = await raw_frames.connect(server.address)
            waits = asyncio.create_task(session.get("/v1/asked?s=0.5"))
            await strangers(2 * PLACES)
            for _ in range(2):
                async with session.get("/v1/asked") as answer:
                    assert answer.status == 200
            await strangers(2 * PLACES)
            assert (await waits).status == 200
            await plane.greet()
        finally:
            for writer in writers:
                writer.transport.abort()
    assert OverloadedError.code in {event.code for event in noted}


async def test_known_http_callers_keep_their_places():
    noted: list[Any] = []
    token = {"Authorization": "Bearer x"}
    async with (
        http_server(noted) as server,
        aiohttp.ClientSession(f"http://{server.address}", headers=token) as session,
        asyncio.timeout(30),
    ):
        waits = [asyncio.create_task(session.get("/v1/asked?s=1")) for _ in range(PLACES)]
        await asyncio.sleep(0.3)
        async with session.get("/v1/asked") as answer:
            assert answer.status == 503
        assert [(await call).status for call in waits] == [200] * PLACES


async def _calls(server: Server, name: str, seconds: float = 0) -> int:
    """The status of a call on a connection of its own; 0: the server closed the connection."""
    request = (
        f"GET /v1/asked?s={seconds} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {name}\r\n"
        "Connection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(request.encode())
        head = await reader.readline()
    except ConnectionError:
        return 0
    finally:
        writer.transport.abort()
    return int(head.split()[1]) if head else 0


async def test_principal_with_most_http_places_makes_room_for_others():
    """A known principal held all of them for as long as it liked; its oldest calls go on, and none
    of others ends.
    """
    noted: list[Any] = []
    async with http_server(noted) as server, asyncio.timeout(30):
        other = asyncio.create_task(_calls(server, "other", 1))
        await asyncio.sleep(0.1)
        greedy = []
        for _ in range(PLACES - 1):
            greedy.append(asyncio.create_task(_calls(server, "greedy", 1)))
            await asyncio.sleep(0.05)
        assert (
            await _calls(server, "greedy") == 503
        )  # its own newer calls get no place of its older ones
        assert await _calls(server, "shop") == 200
        assert await _calls(server, "broker") == 200
        assert [await call for call in (other, *greedy)] == [200, 200, 200, 0]
    told = [event for event in noted if event.code == ConnectionQuotaError.code]
    assert len(told) == 1


class HttpClient:
    """Its connection stays open between its calls."""

    def __init__(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self._reader, self.writer = streams

    async def asks(self, name: str) -> int:
        """The status of a call; 0: the server closed the connection."""
        text = f"GET /v1/asked HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {name}\r\n\r\n"
        try:
            self.writer.write(text.encode())
            head = await self._reader.readuntil(b"\r\n\r\n")
            await self._reader.readuntil(b"}")
        except (ConnectionError, asyncio.IncompleteReadError):
            return 0
        return int(head.split()[1])


@contextlib.asynccontextmanager
async def clients(server: Server) -> AsyncIterator[Callable[..., Awaitable[list[HttpClient]]]]:
    """Opens connections, and has each of them asked once by a name; all are closed at the end."""
    opened: list[HttpClient] = []

    async def connect(name: str, number: int = 1, *, status: int = 200) -> list[HttpClient]:
        for _ in range(number):
            opened.append(HttpClient(await asyncio.open_connection("127.0.0.1", server.port)))
            assert await opened[-1].asks(name) == status
        return opened[-number:]

    try:
        yield connect
    finally:
        for client in opened:
            client.writer.transport.abort()


@pytest.mark.parametrize("number", [1, 2, PLACES + 2])
async def test_newcomer_gets_a_place_when_servers_and_one_principal_have_the_room(number: int):
    """Two connections of servers used up what new callers need to identify themselves."""
    noted: list[Any] = []
    async with http_server(noted) as server, clients(server) as connect, asyncio.timeout(30):
        servers = await connect("broker", number)
        greedy = await connect("greedy", PLACES)
        await connect("shop")
        await connect("other")
        assert [await client.asks("broker") for client in servers] == [200] * number
        assert [await client.asks("greedy") for client in greedy] == [200, 200, 0, 0]
    assert {event.code for event in noted} == {ConnectionQuotaError.code}


async def test_newcomer_gets_its_share_when_several_principals_hold_all_places():
    """Four principals with a quarter of the slots each locked out a fifth."""
    noted: list[Any] = []
    async with (
        http_server(noted, places=8) as server,
        clients(server) as connect,
        asyncio.timeout(30),
    ):
        held = [client for name in "abcd" for client in await connect(name, 2)]
        await connect("shop")
        await connect("shop", status=503)  # five share eight places: one each is sure
        asked = [await client.asks(name) for client, name in zip(held, "aabbccdd", strict=True)]
        assert asked.count(200) == 7
        await connect("a", status=503)
    assert [event.code for event in noted].count(ConnectionQuotaError.code) == 1


async def test_connections_of_servers_take_places_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(intake, "SERVERS_MAX", 2)
    async with http_server([]) as server, clients(server) as connect, asyncio.timeout(30):
        servers = await connect("broker", PLACES + 3)
        await connect("shop", status=503)
        servers[0].writer.close()
        await servers[0].writer.wait_closed()
        while await _calls(server, "shop") != 200:
            await asyncio.sleep(0.01)


async def test_http_callers_take_no_place_when_they_left_before_they_were_known():
    """Their slots were never released, because the calls of a client that has left continue."""
    asked, told = 0, asyncio.Event()

    async def wait_told(token: str) -> None:
        nonlocal asked
        if token in ("left", "broker"):
            asked += 1
            await told.wait()

    async with (
        http_server([], on_identify=wait_told) as server,
        clients(server) as connect,
        asyncio.timeout(30),
    ):
        for name in ("left", "broker"):
            for _ in range(PLACES):
                before = asked
                _reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(
                    f"GET /v1/asked HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
                    f"{name}\r\n\r\n".encode()
                )
                while asked == before:
                    await asyncio.sleep(0.001)
                writer.transport.abort()
        await asyncio.sleep(0.05)
        told.set()
        await asyncio.sleep(0.05)
        for number in range(PLACES):
            await connect(f"p{number}")


async def test_http_places_are_free_again_when_their_callers_have_left():
    noted: list[Any] = []
    async with http_server(noted) as server, asyncio.timeout(30):
        for _ in range(3):
            calls = [asyncio.create_task(_calls(server, f"p{n}", 0.2)) for n in range(PLACES)]
            assert [await call for call in calls] == [200] * PLACES
