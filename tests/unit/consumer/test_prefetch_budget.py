"""Partitions of a consumer share a room for what they have pulled; none of them can keep the others
out.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane.consumer import ConsumerSettings
from keylane.consumer.prefetch_budget import MESSAGE_BYTES, BudgetShare, PrefetchBudget
from keylane.consumer.session_shell import SessionShell
from keylane.protocol.errors import NotSentError
from keylane.protocol.frames import Pull
from support.cluster import eventually
from support.pulling import FAST, NotingOwner, ScriptedBroker, opened, stored

BUDGET = 100
MANY = 1_000_000
"""Messages that are ready: a pull brings all that it may."""


def budget_of(
    *, stall_s: float = 60.0, partitions: int = 3
) -> tuple[PrefetchBudget, list[BudgetShare]]:
    budget = PrefetchBudget(BUDGET, stall_s=stall_s)
    return budget, [budget.new_share() for _ in range(partitions)]


async def waiting(share: BudgetShare, size: int) -> asyncio.Task[None]:
    """A task that waits for room."""
    task = asyncio.create_task(share.reserve(MANY, size))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_partition_without_messages_waits_for_nothing_when_the_room_is_full():
    _, (first, second, _) = budget_of()
    assert first.try_reserve(MANY, BUDGET)
    assert second.try_reserve(0, BUDGET)
    assert second.try_reserve(-1, BUDGET)
    assert not second.try_reserve(1, BUDGET)


async def test_room_of_a_pull_is_free_when_what_it_brought_is_opened():
    budget, (first, second, _) = budget_of()
    assert first.try_reserve(MANY, BUDGET)
    first.add_buffered(60)
    first.end_pull(60, 3)
    assert budget.used == 60
    assert not second.try_reserve(MANY, 60)
    first.release_buffered(60)
    assert second.try_reserve(MANY, 60)


async def test_pull_takes_what_its_messages_have_when_an_earlier_one_has_shown_it():
    budget, (first, _, _) = budget_of()
    first.try_reserve(MANY, BUDGET)
    first.end_pull(30, 3)
    assert budget.used == 0
    assert first.try_reserve(2, BUDGET)
    assert budget.used == 20
    first.end_pull()
    assert first.try_reserve(MESSAGE_BYTES, BUDGET)
    assert budget.used == BUDGET


async def test_pull_larger_than_the_room_is_taken_when_nothing_else_is():
    budget, (first, second, _) = budget_of()
    assert first.try_reserve(MANY, 5 * BUDGET)
    assert not second.try_reserve(MANY, 1)
    first.end_pull()
    assert budget.used == 0


async def test_partitions_get_room_in_turn():
    """A small pull does not overtake a larger one that waits."""
    _, (first, second, third) = budget_of()
    assert first.try_reserve(MANY, 60)
    turn = await waiting(second, 80)
    assert not third.try_reserve(MANY, 10)
    later = await waiting(third, 30)
    first.end_pull()
    await turn
    assert not later.done()
    second.end_pull()
    await later


async def test_cancelled_wait_keeps_no_room_and_no_turn():
    """Also if its turn comes while it is cancelled, before its task has run."""
    budget, (first, second, third) = budget_of()
    assert first.try_reserve(MANY, BUDGET)
    gone, next_one = await waiting(second, 50), await waiting(third, 50)
    gone.cancel()
    first.end_pull()  # before the cancelled task has run
    await next_one
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert budget.used == 50
    assert not budget.has_waiters
    third.end_pull()
    assert first.try_reserve(MANY, BUDGET)


async def test_wait_that_is_cancelled_once_it_has_its_room_gives_it_back():
    budget, (first, second, third) = budget_of()
    assert first.try_reserve(MANY, BUDGET)
    granted, next_one = await waiting(second, BUDGET), await waiting(third, BUDGET)
    first.end_pull()
    granted.cancel()  # it has the room, and has not run
    with pytest.raises(asyncio.CancelledError):
        await granted
    await next_one
    assert budget.used == BUDGET


async def test_first_of_those_that_wait_makes_way_when_it_is_cancelled():
    _, (first, second, third) = budget_of()
    assert first.try_reserve(MANY, 60)
    large, small = await waiting(second, 80), await waiting(third, 40)
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    await small


async def test_room_that_does_not_move_delays_others_for_a_limited_time():
    """A paused partition, or a broker that does not answer, is no reason to serve no other
    partition.
    """
    budget, (first, second, third) = budget_of(stall_s=0.02)
    first.try_reserve(MANY, BUDGET)
    first.add_buffered(BUDGET)
    first.end_pull(BUDGET, 1)
    await asyncio.wait_for(second.reserve(MANY, BUDGET), 10)
    assert budget.used == BUDGET
    first.release_buffered(BUDGET)  # it did not count any more
    assert budget.used == BUDGET
    turn = await waiting(third, BUDGET)
    second.end_pull()
    await turn


async def test_room_that_moves_is_waited_for():
    budget, (first, second, _) = budget_of(stall_s=0.05)
    first.add_buffered(BUDGET)
    turn = await waiting(second, BUDGET)
    for _ in range(20):
        await asyncio.sleep(0.01)
        first.release_buffered(1)
    assert not turn.done()
    assert budget.used == BUDGET - 20
    first.release_buffered(BUDGET)
    await turn


async def trickle(share: BudgetShare, *, until: asyncio.Task[None], limit_s: float = 5.0) -> None:
    """Pull one small message after another at the end of a partition, and open each, until a wait
    is over.
    """
    async with asyncio.timeout(limit_s):
        while not until.done():
            await asyncio.sleep(0.005)
            assert share.try_reserve(0, BUDGET)
            share.end_pull(1, 1)
            share.add_buffered(1)
            share.release_buffered(1)


async def test_room_that_does_not_move_delays_others_no_longer_when_a_third_partition_moves():
    """A trickle on one partition is no reason to wait for what another one, which is paused,
    has.
    """
    budget, (paused, waits, trickles) = budget_of(stall_s=0.1)
    paused.add_buffered(BUDGET)
    turn = await waiting(waits, 50)
    await trickle(trickles, until=turn)
    assert budget.used == 50
    paused.release_buffered(BUDGET)
    assert budget.used == 50


async def test_pull_without_an_answer_delays_others_no_longer_when_its_partition_opens_what_it_has():
    budget, (silent, waits, _) = budget_of(stall_s=0.1)
    silent.add_buffered(20)
    assert silent.try_reserve(MANY, BUDGET - 20)
    turn = await waiting(waits, 50)
    async with asyncio.timeout(5):
        while not turn.done():
            await asyncio.sleep(0.005)
            silent.add_buffered(1)
            silent.release_buffered(1)
    assert budget.used == 70
    silent.end_pull()
    assert budget.used == 70


async def test_partition_that_opens_nothing_delays_others_no_longer_when_it_pulls_a_trickle():
    """What it pulls does not have the rest of what it has count again."""
    budget, (slow, waits, _) = budget_of(stall_s=0.1)
    slow.add_buffered(BUDGET)
    turn = await waiting(waits, 50)
    async with asyncio.timeout(5):
        while not turn.done():
            await asyncio.sleep(0.005)
            assert slow.try_reserve(0, BUDGET)
            slow.end_pull(1, 1)
    slow.hold(10)
    slow.end_pull(10, 1)
    assert budget.used == 50


async def test_room_that_was_just_taken_is_waited_for():
    """It has the whole time to move, also if it is taken right before the next look."""
    budget, (first, second, third) = budget_of(stall_s=0.2)
    first.add_buffered(BUDGET)
    turn = await waiting(second, BUDGET)
    await asyncio.sleep(0.15)
    third.add_buffered(BUDGET)
    await asyncio.sleep(0.1)
    assert not turn.done()
    assert budget.used == BUDGET
    await turn


async def test_partition_that_ends_leaves_its_room():
    budget, (first, second, _) = budget_of()
    first.try_reserve(MANY, 40)
    first.add_buffered(60)
    turn = await waiting(second, BUDGET)
    first.close()
    await turn
    first.release_buffered(60)  # of a batch that was opened all the same
    assert budget.used == BUDGET


class StoringOwner(NotingOwner):
    """Opens batches when it is told to."""

    def __init__(self, room_bytes: int, *, stall_s: float = 60) -> None:
        super().__init__()
        self.budget = PrefetchBudget(room_bytes, stall_s=stall_s)
        self.shells: list[SessionShell] = []

    def offer(self, shell: SessionShell) -> None:
        if shell not in self.shells:
            self.shells.append(shell)

    @property
    def stored(self) -> int:
        """The number of batches that are not opened."""
        return sum(len(shell.state.lanes.stored) for shell in self.shells)

    def open(self) -> None:
        """Open a batch, as a worker does that has nothing else."""
        shell = next(each for each in self.shells if each.state.lanes.stored)
        self.shells.remove(shell)
        self.shells.append(shell)
        self.take(shell)


def offsets_of(shell: SessionShell, owner: NotingOwner) -> list[int]:
    """Of the messages that came by this shell."""
    return [message.offset for message in owner.messages if message.delivery is shell.delivery]


async def test_clients_pull_in_turn_when_their_room_is_full():
    """Each message comes once, and in order; at the end nothing is taken."""
    size = len(stored(0))
    owner, settings = StoringOwner(2 * size), ConsumerSettings(pull_bytes=size, backoff=FAST)
    brokers = [ScriptedBroker(batches=4), ScriptedBroker(batches=4)]
    brokers[1].pulls = [NotSentError("no")]
    async with (
        opened(brokers[0], owner, settings) as first,
        opened(brokers[1], owner, settings) as second,
    ):
        await eventually(lambda: owner.stored == 2)
        await asyncio.sleep(0.05)
        assert owner.stored == 2
        assert "other partitions" in (first.waiting_for, second.waiting_for)
        for _ in range(8):
            await eventually(lambda: owner.stored)
            owner.open()
            assert owner.budget.used <= 2 * size
        await eventually(lambda: all(len(broker.asked(Pull)) >= 5 for broker in brokers))
        for client in (first, second):
            assert offsets_of(client, owner) == list(range(8))
    assert owner.budget.used == 0


class TricklingBroker(ScriptedBroker):
    """Gets a batch every few milliseconds, once a pull has come to its end."""

    async def call(self, request, payload=b"", *, wait_ms=0):
        if isinstance(request, Pull) and request.offset >= self.end:
            await asyncio.sleep(0.005)
            self.end += 2
        return await super().call(request, payload, wait_ms=wait_ms)


class PausingOwner(StoringOwner):
    """Opens every batch at once, but for those of a partition that is paused."""

    def __init__(self, room_bytes: int) -> None:
        super().__init__(room_bytes, stall_s=0.1)
        self.paused: SessionShell | None = None

    def offer(self, shell: SessionShell) -> None:
        super().offer(shell)
        if self.paused is not None and shell is not self.paused:
            asyncio.get_running_loop().call_soon(self.take, shell)


async def test_client_is_served_when_another_is_paused_and_a_third_has_a_trickle():
    """What the paused one has fills the room; the trickle goes on all the time."""
    size = len(stored(0))
    owner, settings = PausingOwner(2 * size), ConsumerSettings(pull_bytes=size, backoff=FAST)
    trickling = TricklingBroker(batches=0)
    async with opened(ScriptedBroker(batches=20), owner, settings) as paused:
        owner.paused = paused
        await eventually(lambda: owner.stored >= 2)
        async with (
            opened(trickling, owner, settings) as third,
            opened(ScriptedBroker(batches=4), owner, settings) as waits,
        ):
            await eventually(lambda: offsets_of(waits, owner) == list(range(8)), seconds=20)
            assert third.waiting_for == "messages"
            assert len(offsets_of(third, owner)) > 20
    assert owner.budget.used == 0


async def test_hand_over_leaves_the_room_of_what_was_not_opened():
    size = len(stored(0))
    owner, settings = StoringOwner(size), ConsumerSettings(pull_bytes=size, backoff=FAST)
    async with opened(ScriptedBroker(batches=4), owner, settings) as client:
        await eventually(lambda: owner.stored)
        client.stop()
        await client.hand_over(flush_ms=1_000)
        assert owner.budget.used == 0
        assert not owner.budget.has_waiters
