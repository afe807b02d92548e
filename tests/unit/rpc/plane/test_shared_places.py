"""Connection slots of the data plane: one principal cannot hold all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from keylane.protocol.access.quota import Quota
from keylane.protocol.access.rights import AccessGrant, Rights
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import ConnectionQuotaError
from keylane.protocol.frames import (
    Answer,
    Append,
    Authenticate,
    Authenticated,
    Refused,
    Released,
    encode_frame,
)
from keylane.rpc.access.caller import AccessTarget, Caller
from keylane.rpc.access.guard import Guard
from keylane.rpc.server import Server
from support import raw_frames
from support.raw_frames import RawClient

PLACES = 4


class NamedCapability:
    """A capability of the principal that its text names."""

    ends_in_ms = 60_000

    def __init__(self, name: str) -> None:
        right = Rights.CLUSTER if name == "broker" else Rights.PRODUCE
        quota = Quota(connections=1) if name == "bounded" else Quota()
        self.caller = Caller(name, (AccessGrant(right),), (), quota)

    def check(self) -> None:
        """It never expires."""


class NamingJudge:
    """Believes that callers are who they say."""

    def __init__(self) -> None:
        self.may_judge = asyncio.Event()
        """Until it is set, nothing is known of who says that it is "slow"."""

    async def authenticate(self, _nonce: bytes, asked: Authenticate) -> NamedCapability:
        if asked.capability == "slow":
            await self.may_judge.wait()
        return NamedCapability(asked.capability)

    def target(self, _request: Any) -> AccessTarget:
        return AccessTarget("orders")


class PlaneClient:
    """A data-plane connection."""

    def __init__(self, socket: RawClient) -> None:
        self.socket = socket

    async def says(self, name: str) -> Answer:
        """What the server answers to who says that it is `name`."""
        await self.begins_to_say(name)
        return (await self.socket.answer())[1]

    async def begins_to_say(self, name: str) -> None:
        """Tell the server that it is `name`; the answer is not read."""
        await self.socket.send(encode_frame(7, Authenticate(name, b"", "")))

    async def is_served(self) -> bool:
        """True if a frame is answered; False if the connection was ended, with a reason."""
        await self.socket.send(encode_frame(8, Append(1)))
        _, answer, _ = await self.socket.answer()
        if isinstance(answer, Released):
            return True
        assert isinstance(answer, Refused)
        assert answer.code == ConnectionQuotaError.code
        assert "data_connections_max" in answer.hint
        return False


Connect = Callable[[str], Awaitable[tuple[PlaneClient, Answer]]]


@pytest.fixture
def judge() -> NamingJudge:
    return NamingJudge()


@pytest.fixture
async def plane(judge: NamingJudge) -> AsyncIterator[tuple[Connect, Guard, Server]]:
    async def handler(_request: Any, _payload: Any) -> tuple[Released, bytes]:
        return Released(), b""

    nothing: Any = None
    guard = Guard(nothing, nothing, clock=SystemClock(), authorizer=judge)
    server = Server([], data_handler=handler, guard=guard, data_connections_max=PLACES)
    await server.start("127.0.0.1", 0)

    async def connect(name: str) -> tuple[PlaneClient, Answer]:
        client = PlaneClient(await raw_frames.connect(server.address))
        await client.socket.greet()
        return client, await client.says(name)

    async with asyncio.timeout(30):
        yield connect, guard, server
    await server.stop()


async def test_newest_connection_is_ended_when_another_principal_comes(plane):
    connect, guard, server = plane
    greedy = [(await connect("greedy"))[0] for _ in range(PLACES)]
    shop, answer = await connect("shop")
    assert isinstance(answer, Authenticated)
    assert [await each.is_served() for each in greedy] == [True, True, True, False]
    assert await shop.is_served()
    assert await greedy[-1].socket.receive() is None
    while guard.pacing.connections["greedy"] > 3:
        await asyncio.sleep(0.01)
    assert server.data_connections_max == PLACES


async def test_principal_with_its_share_is_refused_and_loses_nothing(plane):
    connect, guard, _server = plane
    held = [(await connect(name))[0] for name in ("greedy", "greedy", "shop", "shop")]
    late, answer = await connect("greedy")
    assert isinstance(answer, Refused)
    assert (answer.code, answer.details["limit"]) == (ConnectionQuotaError.code, PLACES)
    assert answer.details["retry_after_ms"] > 0
    assert [await each.is_served() for each in held] == [True] * PLACES
    assert guard.pacing.connections == {"greedy": 2, "shop": 2}
    held[0].socket.abort()
    while guard.pacing.connections["greedy"] > 1:
        await asyncio.sleep(0.01)
    assert isinstance(await late.says("greedy"), Authenticated)


async def test_connections_of_servers_take_no_place_and_are_never_ended(plane):
    connect, _guard, _server = plane
    servers = [(await connect("broker"))[0] for _ in range(PLACES + 2)]
    greedy = [(await connect("greedy"))[0] for _ in range(PLACES)]
    _shop, answer = await connect("shop")
    assert isinstance(answer, Authenticated)
    assert all([await each.is_served() for each in servers])
    assert [await each.is_served() for each in greedy].count(False) == 1


async def test_connection_over_its_quota_takes_no_place(plane):
    connect, _guard, _server = plane
    first, _answer = await connect("bounded")
    _second, answer = await connect("bounded")
    assert isinstance(answer, Refused)
    greedy = [(await connect("greedy"))[0] for _ in range(PLACES - 1)]
    assert all([await each.is_served() for each in (first, *greedy)])


async def test_connection_that_was_closed_before_it_is_known_takes_no_place_of_others(plane, judge):
    """A client left before a metaserver had told its broker the key, and another principal lost a
    connection.
    """
    connect, guard, server = plane
    greedy = [(await connect("greedy"))[0] for _ in range(PLACES)]
    socket = await raw_frames.connect(server.address)
    await socket.greet()
    await PlaneClient(socket).begins_to_say("slow")
    await asyncio.sleep(0.05)
    later = await raw_frames.connect(server.address)  # the older one makes room
    assert await socket.receive() is None
    judge.may_judge.set()
    await asyncio.sleep(0.05)
    assert all([await each.is_served() for each in greedy])
    later.abort()
    assert guard.pacing.connections["slow"] == 0
