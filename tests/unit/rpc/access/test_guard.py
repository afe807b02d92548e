"""Cached decisions of access control, and what counts against subjects' rate limits."""

from __future__ import annotations

from typing import Any

import pytest

from keylane.protocol.access.rights import AccessGrant, Rights
from keylane.protocol.clock import SystemClock
from keylane.protocol.endpoints import POST_MESSAGES, SCHEDULE_MESSAGES
from keylane.protocol.errors import (
    AccessDeniedError,
    QuotaExceededError,
    Reason,
)
from keylane.protocol.frames import Acquire, Authenticate, CancelScheduled, Pull, Schedule
from keylane.protocol.ids import NAME_CHARS_MAX
from keylane.rpc.access.caller import AccessTarget, Caller
from keylane.rpc.access.guard import ConnectionAccess, Guard
from support.raising import raises

SHOP = Caller("shop", (AccessGrant(Rights.PRODUCE, "orders.*"), AccessGrant(Rights.CONSUME)))
SERVER = Caller("broker.g1", (AccessGrant(Rights.CLUSTER),))
RATE = 1_000_000


class ShopsCapability:
    """A capability that never expires."""

    caller = SHOP
    ends_in_ms = 60_000

    def check(self) -> None:
        """It never expires."""


class ShopsCapabilities:
    """Accepts all capabilities, and takes a frame's subject from the frame."""

    async def authenticate(self, _nonce: bytes, _asked: Authenticate) -> ShopsCapability:
        return ShopsCapability()

    def target(self, request: Any) -> AccessTarget:
        subject = getattr(request, "subject", "orders.eu")
        return AccessTarget(subject, getattr(request, "group", ""))


def guarding(caller: Caller = SHOP) -> Guard:
    async def identify(_text: str) -> Caller:
        return caller

    async def targets(_endpoint: Any, _body: Any, params: Any) -> list[AccessTarget]:
        return [AccessTarget(params["subject"])]

    return Guard(
        identify,
        targets,
        clock=SystemClock(),
        authorizer=ShopsCapabilities(),
        subject_rate=lambda subject: RATE * (subject == "orders.eu"),
    )


async def connection() -> ConnectionAccess:
    access = guarding().connection("10.0.0.1")
    assert access is not None
    await access.authenticate(Authenticate("", b"", ""))
    return access


@pytest.mark.parametrize(
    "frame",
    [
        Pull(1, "g" * (NAME_CHARS_MAX + 1), "s", 1, 0, 1, 0),
        Acquire(1, "g\n", "s", 1, 1),
        Schedule("orders." + "x" * 200_000, 0, bytes(16)),
    ],
    ids=lambda frame: type(frame).__name__,
)
async def test_name_that_is_none_is_refused_and_not_kept(frame: Any):
    """A connection caches at most 10,000 decisions with their names, because a frame can have 256
    KiB of them.
    """
    access = await connection()
    with raises(Reason.NAME_INVALID):
        access.check(frame)
    assert not access._cached_decisions


async def test_scheduled_messages_share_one_decision():
    """About each subject; a message that is canceled has none that is kept."""
    access = await connection()
    for number in range(100):
        access.check(Schedule("orders.eu", number, b"%016d" % number))
        access.check(CancelScheduled(b"%016d" % number))
    assert list(access._cached_decisions.values()) == [AccessTarget("orders.eu")]


@pytest.mark.parametrize("endpoint", [POST_MESSAGES, SCHEDULE_MESSAGES])
async def test_posted_messages_count_against_the_limit_of_their_subject(endpoint: Any):
    """Frames were counted, but messages posted over HTTP had no limit."""

    async def post(guard: Guard, subject: str) -> int:
        async def read() -> tuple[bytes, dict[str, str], int]:
            return b"", {"subject": subject}, 4 * RATE

        async def store(_body: Any, _params: Any) -> None:
            return None

        authorization = ("Bearer x",)
        passed = await guard.handle_request(endpoint, authorization, "10.0.0.1", read, store)
        return passed.waited_ms

    guard = guarding()
    assert await post(guard, "orders.eu") == 0
    with pytest.raises(QuotaExceededError, match=r"bytes of subject 'orders\.eu'"):
        await post(guard, "orders.eu")
    assert await post(guard, "orders.us") == 0
    servers = guarding(SERVER)
    assert [await post(servers, "orders.eu") for _ in range(2)] == [0, 0]


async def test_call_has_the_rights_of_when_its_body_has_come():
    """A body may take 30 s: a right that is revoked meanwhile must not apply."""
    rights = [SHOP]
    calls: list[Any] = []

    async def identify(_text: str) -> Caller:
        return rights[-1]

    async def targets(_endpoint: Any, _body: Any, params: Any) -> list[AccessTarget]:
        return [AccessTarget(params["subject"])]

    async def read_slowly() -> tuple[bytes, dict[str, str], int]:
        rights.append(Caller("shop", ()))
        return b"", {"subject": "orders.eu"}, 0

    async def store(body: Any, _params: Any) -> None:
        calls.append(body)

    guard = Guard(identify, targets, clock=SystemClock(), version=lambda: len(rights))
    with pytest.raises(AccessDeniedError):
        await guard.handle_request(POST_MESSAGES, ["Bearer x"], "10.0.0.1", read_slowly, store)
    assert calls == []
