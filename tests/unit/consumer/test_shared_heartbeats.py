"""Heartbeats of the consumers of one program: one request for those that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from keylane.consumer import shared_heartbeats
from keylane.consumer.shared_heartbeats import APART_MS, SharedHeartbeats, heartbeats_for
from keylane.protocol.control import ErrorBody, Grants, Heartbeat
from keylane.protocol.errors import (
    ConfigError,
    InvalidRequestError,
    KeylaneError,
    OutcomeUnknownError,
    SessionUnknownError,
)
from keylane.protocol.http.at_once import HeartbeatAnswers, HeartbeatNews, Heartbeats
from keylane.protocol.limits import SESSIONS_AT_ONCE_MAX
from keylane.rpc.connections import Connections
from sim.machines.clock import ManualClock
from support.call_doubles import MetaDouble
from support.cluster import eventually

LONGEST_MS = 5_000
TOKENS = ("kl_" + "a" * 43, "kl_" + "b" * 43)


class AskedMeta(MetaDouble):
    """Notes what it is asked, and answers as it is told; heartbeats alone get version 9."""

    def __init__(self, answer: Callable[[Heartbeats], HeartbeatAnswers] | None = None) -> None:
        self.together: list[tuple[str, ...]] = []
        self.waited_ms: list[tuple[int, int]] = []
        self.alone: list[str] = []
        self._answer = answer
        self.cancelled = False
        self.first = "meta-0"
        self.last = ""

    def put_last(self, address: str) -> None:
        self.last = address

    async def heartbeats(
        self, body: Heartbeats, *, wait_ms: int, timeout_ms: int
    ) -> HeartbeatAnswers:
        self.together.append(tuple(each.session for each in body.heartbeats))
        self.waited_ms.append((wait_ms, timeout_ms))
        try:
            await asyncio.sleep(0)
            if self._answer is None:
                await asyncio.Event().wait()
                raise AssertionError
            return self._answer(body)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def heartbeat(self, body: Heartbeat, *, timeout_ms: int) -> Grants:
        self.alone.append(body.session)
        return Grants(version=9, ttl_ms=timeout_ms, grants=())


def shared(meta: AskedMeta, clock: ManualClock) -> SharedHeartbeats:
    async def close() -> None: ...

    return SharedHeartbeats(lambda: meta, close, clock)  # type: ignore[arg-type, return-value]


def asking(
    heartbeats: SharedHeartbeats, meta: AskedMeta, session: str, *, wait_ms: int = 4_000
) -> asyncio.Task[Grants | None]:
    """A heartbeat that begins now."""
    body = Heartbeat(session=session, known_version=1, wait_ms=wait_ms)
    alone: Any = meta
    return asyncio.create_task(
        heartbeats.ask(body, longest_ms=LONGEST_MS, beyond_ms=wait_ms, meta=alone, first=False)
    )


async def test_heartbeats_of_one_moment_share_a_request():
    """The shortest wait and the shortest time-out of them count; who is not named has no news."""
    meta, clock = AskedMeta(lambda _body: HeartbeatAnswers()), ManualClock()
    heartbeats = shared(meta, clock)
    asked = [asking(heartbeats, meta, name, wait_ms=ms) for name, ms in (("a", 900), ("b", 700))]
    assert await asyncio.gather(*asked) == [None, None]
    assert meta.together == [("a", "b")]
    assert meta.waited_ms == [(700, 700)]
    assert meta.alone == []


async def test_heartbeat_is_sent_alone_when_no_other_begins():
    """A program with one consumer asks as it always did."""
    meta, clock = AskedMeta(), ManualClock()
    grants = await asking(shared(meta, clock), meta, "a")
    assert grants is not None
    assert (meta.together, meta.alone, grants.version) == ([], ["a"], 9)


async def test_news_reach_their_sessions_only():
    """One gets grants, one the error that ends its session, and one goes on."""

    def answer(_body: Heartbeats) -> HeartbeatAnswers:
        grants = Grants(version=2, ttl_ms=1_000, grants=())
        ended = ErrorBody.of(SessionUnknownError(session="c"))
        return HeartbeatAnswers(
            news=(
                HeartbeatNews(session="b", grants=grants),
                HeartbeatNews(session="c", error=ended),
            )
        )

    meta = AskedMeta(answer)
    heartbeats = shared(meta, ManualClock())
    first, second, third = (asking(heartbeats, meta, name) for name in "abc")
    assert await first is None
    news = await second
    assert news is not None
    assert news.version == 2
    with pytest.raises(SessionUnknownError):
        await third


async def test_every_heartbeat_fails_when_the_request_has_no_answer():
    """Each gets an error of its own, and its consumer asks the next metaserver."""

    def answer(_body: Heartbeats) -> HeartbeatAnswers:
        raise OutcomeUnknownError("no answer")

    meta = AskedMeta(answer)
    heartbeats = shared(meta, ManualClock())
    asked = [asking(heartbeats, meta, name) for name in "ab"]
    errors = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(error) for error in errors] == [OutcomeUnknownError, OutcomeUnknownError]
    assert errors[0] is not errors[1]
    assert meta.alone == []
    assert meta.last == "meta-0"


async def test_each_asks_alone_when_the_metaserver_does_not_know_the_call():
    """As one of the version before; after a minute they are asked together again."""

    def answer(_body: Heartbeats) -> HeartbeatAnswers:
        raise InvalidRequestError("no such call", unknown_call=1)

    meta, clock = AskedMeta(answer), ManualClock()
    heartbeats = shared(meta, clock)
    for _ in range(2):
        asked = [asking(heartbeats, meta, name) for name in "ab"]
        answers = await asyncio.gather(*asked)
        assert [grants.version for grants in answers if grants is not None] == [9, 9]
    assert len(meta.together) == 1
    assert meta.alone == ["a", "b", "a", "b"]
    clock.now_ms += APART_MS
    await asyncio.gather(*(asking(heartbeats, meta, name) for name in "ab"))
    assert len(meta.together) == 2


async def test_request_goes_on_while_one_heartbeat_is_left():
    """It is cancelled when the last one was given up."""
    meta = AskedMeta()
    heartbeats = shared(meta, ManualClock())
    first, second = (asking(heartbeats, meta, name) for name in "ab")
    await eventually(lambda: bool(meta.together))
    first.cancel()
    await asyncio.wait([first])
    await asyncio.sleep(0.01)
    assert not meta.cancelled
    second.cancel()
    await asyncio.wait([second])
    await eventually(lambda: meta.cancelled)


async def test_more_heartbeats_than_a_request_may_have_are_divided():
    meta = AskedMeta(lambda _body: HeartbeatAnswers())
    heartbeats = shared(meta, ManualClock())
    names = [f"{number}" for number in range(SESSIONS_AT_ONCE_MAX + 2)]
    await asyncio.gather(*(asking(heartbeats, meta, name) for name in names))
    assert [len(sessions) for sessions in meta.together] == [SESSIONS_AT_ONCE_MAX, 2]


async def test_heartbeats_end_when_what_they_share_is_closed():
    meta = AskedMeta()
    heartbeats = shared(meta, ManualClock())
    asked = [asking(heartbeats, meta, name) for name in "ab"]
    await eventually(lambda: bool(meta.together))
    await heartbeats.close()
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 2


async def test_waits_end_at_common_ticks():
    """Whenever a heartbeat begins: it waits for a fifth of the longest time at least, and never
    longer than that.
    """
    clock = ManualClock()
    heartbeats = shared(AskedMeta(), clock)
    period_ms = LONGEST_MS * 4 // 5
    began_ms = clock.now_ms
    for at_ms in range(0, 3 * period_ms, 7):
        clock.now_ms = began_ms + at_ms
        wait_ms = heartbeats.wait_ms(LONGEST_MS)
        assert LONGEST_MS // 5 <= wait_ms <= LONGEST_MS
        assert (at_ms + wait_ms) % period_ms == 0


async def test_heartbeats_that_begin_just_after_a_tick_share_a_request(
    monkeypatch: pytest.MonkeyPatch,
):
    """The answers of a tick come one after another."""
    monkeypatch.setattr(shared_heartbeats, "GATHER_MS", 1_000)
    meta, clock = AskedMeta(lambda _body: HeartbeatAnswers()), ManualClock()
    heartbeats = shared(meta, clock)
    first = asking(heartbeats, meta, "a")
    await asyncio.sleep(0.02)
    second = asking(heartbeats, meta, "b")
    assert await asyncio.gather(first, second) == [None, None]
    assert meta.together == [("a", "b")]


async def test_refusal_of_all_does_not_hide_the_answer_of_one():
    """A consumer without a right learns that by itself, and the others are renewed."""

    class MetaWithoutRight(AskedMeta):
        async def heartbeat(self, body: Heartbeat, *, timeout_ms: int) -> Grants:
            if body.session == "a":
                raise InvalidRequestError("no")
            return await super().heartbeat(body, timeout_ms=timeout_ms)

    def answer(_body: Heartbeats) -> HeartbeatAnswers:
        raise KeylaneError("refused")

    meta = MetaWithoutRight(answer)
    heartbeats = shared(meta, ManualClock())
    refused, renewed = (asking(heartbeats, meta, name) for name in "ab")
    with pytest.raises(InvalidRequestError):
        await refused
    assert (await renewed) is not None


def test_heartbeats_share_a_request_in_the_loop_of_uvloop():
    """A timer that is due at once has another handle there, which knows no time."""

    async def ask() -> list[tuple[str, ...]]:
        meta, clock = AskedMeta(lambda _body: HeartbeatAnswers()), ManualClock()
        heartbeats = shared(meta, clock)
        clock.now_ms += LONGEST_MS // 2  # no tick is near: what begins is sent at once
        await asyncio.gather(*(asking(heartbeats, meta, name) for name in "ab"))
        return meta.together

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(ask()) == [("a", "b")]


async def test_others_are_renewed_when_one_gave_up_before_they_ask_alone():
    """Its consumer has closed its connection meanwhile."""

    class ClosedMeta(AskedMeta):
        async def heartbeat(self, body: Heartbeat, *, timeout_ms: int) -> Grants:
            raise RuntimeError("Session is closed")

    refuse = asyncio.Event()

    class SlowMeta(AskedMeta):
        async def heartbeats(
            self, body: Heartbeats, *, wait_ms: int, timeout_ms: int
        ) -> HeartbeatAnswers:
            self.together.append(())
            await refuse.wait()
            raise InvalidRequestError("no such call", unknown_call=1)

    meta = SlowMeta()
    heartbeats = shared(meta, ManualClock())
    given_up = asking(heartbeats, ClosedMeta(), "a")
    renewed = asking(heartbeats, meta, "b")
    await eventually(lambda: bool(meta.together))
    given_up.cancel()
    await asyncio.wait([given_up])
    refuse.set()
    grants = await renewed
    assert grants is not None
    assert grants.version == 9


async def test_error_of_one_that_asks_alone_is_its_own():
    """Also one that no call is expected to raise."""

    class BrokenMeta(AskedMeta):
        async def heartbeat(self, body: Heartbeat, *, timeout_ms: int) -> Grants:
            raise RuntimeError("broken")

    def answer(_body: Heartbeats) -> HeartbeatAnswers:
        raise InvalidRequestError("no such call", unknown_call=1)

    meta = AskedMeta(answer)
    heartbeats = shared(meta, ManualClock())
    broken, renewed = asking(heartbeats, BrokenMeta(), "a"), asking(heartbeats, meta, "b")
    with pytest.raises(RuntimeError, match="broken"):
        await broken
    assert (await renewed) is not None


async def test_each_asks_alone_for_a_minute_when_no_shared_connection_can_be_made():
    """As after the program gave up the right to read its files."""
    meta, clock = AskedMeta(lambda _body: HeartbeatAnswers()), ManualClock()
    tried: list[None] = []

    def unreadable() -> AskedMeta:
        tried.append(None)
        if len(tried) == 1:
            raise ConfigError("cannot read the CA file")
        return meta

    async def close() -> None: ...

    heartbeats = SharedHeartbeats(unreadable, close, clock)  # type: ignore[arg-type]
    for _ in range(2):
        answers = await asyncio.gather(*(asking(heartbeats, meta, name) for name in "ab"))
        assert [grants.version for grants in answers if grants is not None] == [9, 9]
    assert len(tried) == 1
    clock.now_ms += APART_MS
    await asyncio.gather(*(asking(heartbeats, meta, name) for name in "ab"))
    assert meta.together == [("a", "b")]


async def test_wait_ends_at_its_tick_when_it_was_gathered_before():
    """The time for others is part of the wait, so that no lease is shorter for it."""
    meta, clock = AskedMeta(lambda _body: HeartbeatAnswers()), ManualClock()
    heartbeats = shared(meta, clock)
    asked = [asking(heartbeats, meta, name, wait_ms=700) for name in "ab"]
    await asyncio.sleep(0)
    clock.now_ms += 6
    await asyncio.gather(*asked)
    assert meta.waited_ms == [(694, 700)]


async def test_consumers_of_another_ttl_or_token_do_not_share(monkeypatch: pytest.MonkeyPatch):
    """A short ttl makes waits short; a token is that of the opening, wherever it was named."""
    monkeypatch.delenv("KEYLANE_TOKEN_FILE", raising=False)
    clock, addresses = ManualClock(), ("meta-0",)
    opened: list[Connections] = []
    used: list[SharedHeartbeats] = []
    for token, ttl_ms in ((TOKENS[0], 30_000), (TOKENS[0], 1_000), (TOKENS[1], 30_000)):
        monkeypatch.setenv("KEYLANE_TOKEN", token)
        connections = Connections(None, timeout_ms=5_000)
        connections.open()
        opened.append(connections)
        used.append(heartbeats_for(token, connections, addresses, clock, ttl_ms=ttl_ms))
    assert len(set(map(id, used))) == 3
    monkeypatch.setenv("KEYLANE_TOKEN", TOKENS[0])
    again = Connections(None, timeout_ms=5_000)
    again.open()
    opened.append(again)
    assert heartbeats_for("again", again, addresses, clock, ttl_ms=30_000) is used[0]
    for connections in opened:
        await connections.close()


async def test_last_consumer_leaves_while_other_threads_share():
    """Only its own entry is taken from what all threads have."""
    network: Any = object()
    clock = ManualClock()
    connections = Connections(network, timeout_ms=5_000)
    connections.open()
    mine = heartbeats_for("mine", connections, ("meta-0",), clock, ttl_ms=30_000)
    other = heartbeats_for("other", connections, ("meta-0",), clock, ttl_ms=1_000)
    await mine.leave("mine")
    assert heartbeats_for("third", connections, ("meta-0",), clock, ttl_ms=1_000) is other
    assert heartbeats_for("mine", connections, ("meta-0",), clock, ttl_ms=30_000) is not mine
    await connections.close()
