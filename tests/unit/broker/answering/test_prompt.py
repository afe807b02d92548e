"""What is answered without a task, and what is not; the answers themselves are those of
`test_service.py`.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane.protocol.errors import FencedError
from keylane.protocol.frames import Ack, Append, Pull, Read
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import SESSION, Desk, batch, open_store

WHO = ("audit", SESSION, 1)


def pull(offset: int, *, wait_ms: int = 0, tags: tuple[str, ...] = ()) -> Pull:
    return Pull(1, *WHO, offset, 1 << 20, wait_ms, tags)


async def test_append_pull_and_ack_need_no_task(desk):
    """What clients ask for all the time."""
    before = desk.prompt_answers
    await desk.say(Append(1), batch())
    await desk.say(pull(0))
    await desk.say(Ack(1, *WHO, ((0, 2),)))
    assert desk.prompt_answers - before == 3


async def test_other_requests_keep_their_task(desk):
    """A read of the past may need the disk."""
    before = desk.prompt_answers
    await desk.say(Append(1), batch())
    await desk.say(Read(1, 0, 1 << 20))
    await desk.say(pull(0, tags=("red",)))
    assert desk.prompt_answers - before == 1


async def test_pull_that_waits_is_answered_when_messages_come(desk):
    """Without a task, and without a wait on the service's side when it is over."""
    pulling = asyncio.create_task(desk.ask(pull(0, wait_ms=30_000)))
    await asyncio.sleep(0)
    assert desk.service.waiting == 1
    await desk.append(batch())
    answer, data = await pulling
    assert (answer.upto, bool(data), desk.service.waiting) == (2, True, 0)


async def test_pull_of_what_is_not_in_memory_is_handed_to_a_task():
    """It reads the disk."""
    clock = ManualClock()
    desk = Desk(open_store(SimDisk(), clock=clock, cache_bytes=0), clock)
    await desk.host()
    await desk.acquire(1)
    pulling = asyncio.create_task(desk.ask(pull(0, wait_ms=30_000)))
    await asyncio.sleep(0)
    await desk.append(batch())
    answer, data = await pulling
    assert (answer.upto, bool(data)) == (2, True)
    before = desk.prompt_answers
    assert (await desk.ask(pull(0)))[1] == data
    assert desk.prompt_answers == before


async def test_pull_of_a_client_that_has_left_waits_no_longer(desk):
    """It is not answered when messages come."""
    pulling = asyncio.create_task(desk.ask(pull(0, wait_ms=30_000)))
    await asyncio.sleep(0)
    pulling.cancel()
    await asyncio.gather(pulling, return_exceptions=True)
    await asyncio.sleep(0)
    assert desk.service.waiting == 0


async def test_waiting_pull_is_refused_after_a_newer_owner_came(desk):
    """The fence is looked at again when it is woken."""
    pulling = asyncio.create_task(desk.ask(pull(0, wait_ms=30_000)))
    await asyncio.sleep(0)
    await desk.acquire(2, "b" * 16)
    await desk.append(batch())
    with pytest.raises(FencedError):
        await pulling
