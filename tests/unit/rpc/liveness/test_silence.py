"""When a silent connection is closed: a probe decides, and a paused server loses none."""

from __future__ import annotations

import asyncio

import pytest

from keylane.rpc.liveness import silence
from keylane.rpc.liveness.silence import SILENCE_TIMEOUT_S_MAX, SilenceTimeouts, SilenceWatchdog


class SilentSocket:
    """A connection on which nothing arrives until `received` is set to True."""

    reading = True

    def __init__(self) -> None:
        self.has_received = False
        self.asked = 0
        self.given_up: list[str] = []

    def ping(self) -> None:
        self.asked += 1

    def abort(self, why: str) -> None:
        self.given_up.append(why)


class Path:
    """Whether the server answers on a new connection."""

    def __init__(self, *, answers: bool) -> None:
        self.answers = answers
        self.asked = 0

    async def __call__(self) -> bool:
        self.asked += 1
        return self.answers


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(silence, "GRACE_S", 0.02)
    monkeypatch.setattr(silence, "PROBE_PAUSE_S", 0.05)


def judge(
    socket: SilentSocket,
    path: Path,
    patience: SilenceTimeouts | None = None,
    *,
    has_received: bool = True,
) -> SilenceWatchdog:
    """Return the watchdog of a connection that was pinged."""
    judged = SilenceWatchdog(
        socket,
        "a:1",
        path,
        patience or SilenceTimeouts(),
        has_received=lambda: has_received,
        is_reply_outstanding=lambda: True,
    )
    judged.ping()
    return judged


@pytest.mark.parametrize(("owed", "asked_s"), [(True, 0.1), (False, 0.4)])
async def test_sign_of_life_is_asked_for_sooner_when_an_answer_is_owed(
    owed: bool, asked_s: float, monkeypatch
):
    """An idle connection, whose calls are long polls, is pinged less often."""
    monkeypatch.setattr(silence, "CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(silence, "IDLE_S", 0.4)
    socket = SilentSocket()
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    judged = SilenceWatchdog(
        socket,
        "a:1",
        Path(answers=True),
        SilenceTimeouts(),
        has_received=lambda: True,
        is_reply_outstanding=lambda: owed,
    )
    while not socket.asked:
        await asyncio.sleep(0.005)
    assert loop.time() - begun_s >= asked_s - 0.05
    while not socket.given_up:
        await asyncio.sleep(0.005)
    judged.end()


async def test_connection_that_is_heard_is_not_asked_for_a_sign_of_life(monkeypatch):
    monkeypatch.setattr(silence, "CHECK_INTERVAL_S", 0.05)
    socket = SilentSocket()
    judged = judge(socket, Path(answers=True))
    for _ in range(60):
        socket.has_received = True
        await asyncio.sleep(0.005)
    assert (socket.asked, socket.given_up) == (1, [])
    judged.end()


async def test_connection_is_given_up_when_the_server_answers_on_a_new_one():
    socket, path = SilentSocket(), Path(answers=True)
    assert judge(socket, path).is_alive(3.0)
    await asyncio.sleep(0.1)
    assert (path.asked, socket.asked) == (1, 2)
    assert len(socket.given_up) == 1


async def test_connection_goes_on_when_its_server_answers_nowhere():
    """Probes become rarer, and after LOST_S the connection is lost."""
    socket, path = SilentSocket(), Path(answers=False)
    judged = judge(socket, path)
    for _ in range(40):
        assert judged.is_alive(3.0)
        await asyncio.sleep(0.01)
    assert 2 <= path.asked <= 4
    assert not socket.given_up
    assert not judged.is_alive(silence.LOST_S)


async def test_connection_goes_on_when_something_comes_after_all():
    """A server that was paused also answers on the old connection."""
    socket, path = SilentSocket(), Path(answers=True)
    judged = judge(socket, path)
    assert judged.is_alive(3.0)
    await asyncio.sleep(0.01)
    socket.has_received = True
    await asyncio.sleep(0.1)
    assert not socket.given_up


async def test_silence_is_excused_while_a_quota_holds_calls_back():
    socket, path = SilentSocket(), Path(answers=True)
    judged = judge(socket, path)
    judged.excuse(0.1)
    assert judged.is_alive(silence.LOST_S + 1)
    await asyncio.sleep(0.02)
    assert path.asked == 0
    await asyncio.sleep(0.1)
    assert judged.is_alive(3.0)
    await asyncio.sleep(0.05)
    assert len(socket.given_up) == 1


async def test_patience_doubles_when_connections_bring_no_answers():
    """After a connection that brought answers, the next one is as impatient as the first."""
    patience, waited = SilenceTimeouts(), []
    for _ in range(7):
        judged = judge(SilentSocket(), Path(answers=True), patience, has_received=False)
        assert judged.is_alive(SILENCE_TIMEOUT_S_MAX)
        await asyncio.sleep(0.05)
        waited.append(patience.timeout_s("a:1"))
    assert waited == [
        1,
        2,
        4,
        8,
        SILENCE_TIMEOUT_S_MAX,
        SILENCE_TIMEOUT_S_MAX,
        SILENCE_TIMEOUT_S_MAX,
    ]
    path = Path(answers=True)
    judged = judge(SilentSocket(), path, patience, has_received=False)
    assert judged.is_alive(SILENCE_TIMEOUT_S_MAX - 1)
    await asyncio.sleep(0.05)
    assert path.asked == 0


async def test_patience_ends_when_a_connection_brings_an_answer():
    """A connection that had answered for hours was probed only after 16 s, because of earlier
    ones.
    """
    patience = SilenceTimeouts()
    for _ in range(7):
        patience.record_closed("a:1", has_received=False)
    path, socket = Path(answers=True), SilentSocket()
    judged = judge(socket, path, patience, has_received=True)
    assert judged.is_alive(3.0)
    await asyncio.sleep(0.05)
    assert (path.asked, len(socket.given_up), patience.timeout_s("a:1")) == (1, 1, 0)


async def test_connection_is_not_given_up_when_it_has_ended_by_itself():
    socket, path = SilentSocket(), Path(answers=True)
    judged = judge(socket, path)
    assert judged.is_alive(3.0)
    judged.end()
    await asyncio.sleep(0.1)
    assert not socket.given_up


def test_patience_is_kept_for_the_latest_addresses_when_servers_come_back_at_others(monkeypatch):
    monkeypatch.setattr(silence, "ADDRESSES_KNOWN_MAX", 3)
    patience = SilenceTimeouts()
    for number in range(100):
        patience.record_closed("b:1", has_received=False)
        patience.record_closed(f"c:{number}", has_received=False)
    assert len(patience._seconds) == 3
    assert patience.timeout_s("b:1") == SILENCE_TIMEOUT_S_MAX
    assert patience.timeout_s("c:99") == 1.0
