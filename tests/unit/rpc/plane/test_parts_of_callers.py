"""A caller whose rights or quota change gets no further part of a pull."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from keylane.protocol.access.quota import Quota
from keylane.protocol.access.rights import AccessGrant, Rights
from keylane.protocol.clock import SystemClock
from keylane.protocol.frames import (
    Authenticate,
    Authenticated,
    Batches,
    Pull,
    Request,
    encode_frame,
)
from keylane.rpc.access.caller import AccessTarget, Caller
from keylane.rpc.access.guard import Guard
from keylane.rpc.plane.prompt import PromptCall
from keylane.rpc.server import Server
from support.raw_frames import connect

PULL = Pull(1, "g", "a" * 16, 1, 0, 1 << 20, 30_000, (), 32)
MAY = (AccessGrant(Rights.CONSUME),)
CALLERS = {
    "member": Caller("shop", MAY),
    "without": Caller("shop", (AccessGrant(Rights.PRODUCE),)),
    "paced": Caller("shop", MAY, Quota(bytes_per_s=1_000)),
}


class Held:
    """A capability that never expires."""

    ends_in_ms = 60_000

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    def check(self) -> None:
        """It never expires."""


class NamedCallers:
    """Knows callers by the names that they say."""

    async def authenticate(self, _nonce: bytes, asked: Authenticate) -> Held:
        return Held(CALLERS[asked.capability])

    def target(self, _request: Any) -> AccessTarget:
        return AccessTarget("orders", "g")


@pytest.fixture
async def member():
    """The connection of a member whose pull is open, the call of that pull, and how to say another
    caller.
    """
    nothing: Any = None
    begun: asyncio.Queue[PromptCall] = asyncio.Queue()

    async def handle(_request: Request, _payload: memoryview) -> tuple[Batches, bytes]:
        return Batches(0, 0, 0, False), b""

    def begin(_request: Request, _payload: memoryview, call: PromptCall) -> bool:
        begun.put_nowait(call)
        return True

    guard = Guard(nothing, nothing, clock=SystemClock(), authorizer=NamedCallers())
    server = Server([], data_handler=handle, data_begin=begin, guard=guard)
    await server.start("127.0.0.1", 0)
    async with asyncio.timeout(30):
        client = await connect(server.address)
        await client.greet()

        async def say(caller: str) -> None:
            await client.send(encode_frame(7, Authenticate(caller, b"", "")))
            assert isinstance((await client.answer())[1], Authenticated)

        await say("member")
        await client.send(encode_frame(8, PULL))  # the first one is decided in a task
        assert isinstance((await client.answer())[1], Batches)
        await client.send(encode_frame(9, PULL))
        yield await begun.get(), say
    await server.stop()


async def test_call_takes_parts_while_its_caller_stays_the_same(member):
    call, _ = member
    assert call.accepts_parts


@pytest.mark.parametrize("caller", ["without", "paced"])
async def test_call_takes_no_parts_when_the_rights_of_its_caller_have_changed(member, caller):
    """The next answer is the last one, and the next pull is checked and counted."""
    call, say = member
    await say(caller)
    assert not call.accepts_parts
