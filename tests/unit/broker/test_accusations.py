"""What a broker tells an owner of messages that may have ended the process of an earlier one."""

from __future__ import annotations

from typing import Any

import pytest

from keylane.broker.partition.suspects import BEGUN_MAX
from keylane.broker.store.group_changes import set_cursor
from keylane.protocol.errors import InvalidRequestError, OverloadedError
from keylane.protocol.frames import Ack
from keylane.protocol.ids import MAX_I64
from keylane.protocol.progress import SetCursor
from keylane.testing.machines.disk import SimDisk
from sim.machines.store import SESSION
from support.parked.desk import ParkedDesk

OTHER, THIRD, FOURTH = "b" * 16, "c" * 16, "d" * 16


@pytest.fixture
async def desk() -> ParkedDesk:
    """Token 1 has pulled 40 messages, and acked five."""
    desk = await ParkedDesk(SimDisk()).fill()
    await desk.pull(1, 0)
    await desk.ack(1, (0, 5))
    return desk


async def begin(desk: ParkedDesk, token: int, session: str, *begun: tuple[int, int]) -> Any:
    return await desk.say(Ack(1, "audit", session, token, (), begun=begun))


def told(answer: Any) -> tuple[int, tuple[tuple[int, int], ...]]:
    return answer.suspects_upto, answer.begun


async def test_next_owner_learns_what_two_have_pulled_and_what_was_begun(desk: ParkedDesk):
    """Also when it asks again under its token. Behind the first end nothing that is not acked is a
    suspect.
    """
    assert told(await desk.acquire(2, OTHER)) == (0, ())
    await desk.pull(2, 5, OTHER)
    assert told(await desk.acquire(3, THIRD)) == (40, ())
    await begin(desk, 3, THIRD, (5, 1))
    assert told(await desk.acquire(4, FOURTH)) == (40, ((5, 1),))
    assert told(await desk.acquire(4, FOURTH)) == (40, ((5, 1),))


async def test_release_leaves_no_suspects(desk: ParkedDesk):
    await begin(desk, 1, SESSION, (6, 1))
    await desk.release(1)
    assert told(await desk.acquire(2, OTHER)) == (0, ())
    assert told(await desk.again().acquired(3)) == (0, ()), "that is durable"


async def test_session_that_gets_a_new_token_has_no_suspects(desk: ParkedDesk):
    await begin(desk, 1, SESSION, (6, 1))
    assert told(await desk.acquire(2, SESSION)) == (0, ())


@pytest.mark.parametrize("snapshot", [True, False])
async def test_begun_messages_survive_a_restart_of_the_broker(desk: ParkedDesk, snapshot: bool):
    """What was only pulled is not known any more, until the owner pulls on."""
    await desk.acquire(2, OTHER)
    await begin(desk, 2, OTHER, (5, 1), (6, 2))
    await desk.say(Ack(1, "audit", OTHER, 2, ((5, 6),)))
    if snapshot:
        await desk.store.snapshotter.write()
    desk = desk.again(snapshot=snapshot)
    assert told(await desk.acquire(2, OTHER)) == (0, ((6, 2),))
    await desk.pull(2, 20, OTHER, bytes_max=1)
    await desk.acquire(3, THIRD)
    await desk.pull(3, 30, THIRD)
    upto, begun = told(await desk.acquire(4, FOURTH))
    assert 20 <= upto < 40
    assert begun == ((6, 2),)


async def test_begun_message_is_not_accused_when_its_try_failed(desk: ParkedDesk):
    await begin(desk, 1, SESSION, (6, 1))
    await desk.say(Ack(1, "audit", SESSION, 1, (), ((6, 1),)))
    answer = await desk.acquire(2, OTHER)
    assert (answer.attempts, answer.begun) == (((6, 1),), ())


async def test_reset_ends_every_suspicion(desk: ParkedDesk):
    await begin(desk, 1, SESSION, (6, 1))
    ask = SetCursor(group="audit", token=2, cursor=0)
    await set_cursor(desk.store, desk.store.state.partition(1), ask)
    assert told(await desk.acquire(3, OTHER)) == (0, ())


async def test_impossible_beginnings_are_refused(desk: ParkedDesk):
    for begun in ((40, 1), (-1, 1), (6, 0), (6, MAX_I64 + 1)):
        with pytest.raises(InvalidRequestError):
            await begin(desk, 1, SESSION, begun)
    with pytest.raises(OverloadedError):
        await begin(desk, 1, SESSION, *((n, 1) for n in range(BEGUN_MAX + 1)))
    assert told(await desk.acquire(2, OTHER)) == (0, ())
