"""When a silent connection is given up: a new connection decides, and a server that pauses loses
none.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane.rpc.liveness import silence
from keylane.rpc.liveness.silence import IDLE_S, PATIENCE_S_MAX, Silence, SilencePatience


class SilentSocket:
    """A connection from which nothing comes, until `silent` is set to False."""

    def __init__(self) -> None:
        self.silent = True
        self.pings = 0
        self.given_up: list[str] = []

    def ping(self) -> None:
        self.pings += 1

    def give_up(self, why: str) -> None:
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
    monkeypatch.setattr(silence, "ASK_AGAIN_S", 0.05)


def judge(
    socket: SilentSocket,
    path: Path,
    patience: SilencePatience | None = None,
    *,
    had_answers: bool = True,
    owed: bool = True,
) -> Silence:
    return Silence(
        socket,
        "a:1",
        path,
        patience or SilencePatience(),
        had_answers=lambda: had_answers,
        owed=lambda: owed,
    )


@pytest.mark.parametrize("owed", [True, False])
async def test_silence_is_asked_about_at_once_when_an_answer_is_owed(owed: bool):
    """An idle connection, whose calls wait for messages, has fewer pings."""
    mine = judge(SilentSocket(), Path(answers=True), owed=owed)
    assert mine.asks(2.0) is owed
    assert mine.asks(IDLE_S)


async def test_connection_is_given_up_when_the_server_answers_on_a_new_one():
    socket, path = SilentSocket(), Path(answers=True)
    assert judge(socket, path).goes_on(3.0)
    await asyncio.sleep(0.1)
    assert (path.asked, socket.pings) == (1, 1)
    assert len(socket.given_up) == 1


async def test_connection_goes_on_when_its_server_answers_nowhere():
    """The server is asked ever more rarely, and after LOST_S the connection is lost."""
    socket, path = SilentSocket(), Path(answers=False)
    judged = judge(socket, path)
    for _ in range(40):
        assert judged.goes_on(3.0)
        await asyncio.sleep(0.01)
    assert 2 <= path.asked <= 4
    assert not socket.given_up
    assert not judged.goes_on(silence.LOST_S)


async def test_connection_goes_on_when_something_comes_after_all():
    """A server that has paused answers on the old connection too."""
    socket, path = SilentSocket(), Path(answers=True)
    judged = judge(socket, path)
    assert judged.goes_on(3.0)
    await asyncio.sleep(0.01)
    socket.silent = False
    judged.heard()
    await asyncio.sleep(0.1)
    assert not socket.given_up


async def test_silence_is_excused_while_a_quota_holds_calls_back():
    socket, path = SilentSocket(), Path(answers=True)
    judged = judge(socket, path)
    judged.excuse(0.1)
    assert judged.goes_on(silence.LOST_S + 1)
    await asyncio.sleep(0.02)
    assert path.asked == 0
    await asyncio.sleep(0.1)
    assert judged.goes_on(3.0)
    await asyncio.sleep(0.05)
    assert len(socket.given_up) == 1


async def test_patience_doubles_when_connections_bring_no_answers():
    """One that has brought answers makes the next one as impatient as the first."""
    patience, waited = SilencePatience(), []
    for _ in range(7):
        judged = judge(SilentSocket(), Path(answers=True), patience, had_answers=False)
        assert judged.goes_on(PATIENCE_S_MAX)
        await asyncio.sleep(0.05)
        waited.append(patience.of("a:1"))
    assert waited == [1, 2, 4, 8, PATIENCE_S_MAX, PATIENCE_S_MAX, PATIENCE_S_MAX]
    path = Path(answers=True)
    judged = judge(SilentSocket(), path, patience, had_answers=False)
    assert judged.goes_on(PATIENCE_S_MAX - 1)
    await asyncio.sleep(0.05)
    assert path.asked == 0


async def test_patience_ends_when_a_connection_brings_an_answer():
    """One that had answered for hours was judged after 16 s, for the sake of those before it."""
    patience = SilencePatience()
    for _ in range(7):
        patience.given_up("a:1", had_answers=False)
    path, socket = Path(answers=True), SilentSocket()
    judged = judge(socket, path, patience, had_answers=True)
    assert judged.goes_on(3.0)
    await asyncio.sleep(0.05)
    assert (path.asked, len(socket.given_up), patience.of("a:1")) == (1, 1, 0)


async def test_connection_is_not_given_up_when_it_has_ended_by_itself():
    socket, path = SilentSocket(), Path(answers=True)
    judged = judge(socket, path)
    assert judged.goes_on(3.0)
    judged.end()
    await asyncio.sleep(0.1)
    assert not socket.given_up


def test_patience_is_kept_for_the_latest_addresses_when_servers_come_back_at_others(monkeypatch):
    monkeypatch.setattr(silence, "ADDRESSES_KNOWN_MAX", 3)
    patience = SilencePatience()
    for number in range(100):
        patience.given_up("b:1", had_answers=False)
        patience.given_up(f"c:{number}", had_answers=False)
    assert len(patience._of) == 3
    assert patience.of("b:1") == PATIENCE_S_MAX
    assert patience.of("c:99") == 1.0
