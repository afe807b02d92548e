"""Acks of a partition are sent by timers, at the same times as those of others, and lost by no
error.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.consumer import ConsumerSettings
from keylane.consumer.pulling.ack_sender import AckSender, linger_s
from keylane.consumer.pulling.messages_in_flight import MessagesInFlight
from keylane.protocol.errors import FencedError, KeylaneError, NotSentError, OverloadedError
from keylane.protocol.frames import Ack, Acked, Request
from keylane.protocol.message import Message
from sim.machines.store import SESSION
from support.cluster import eventually
from support.pulling import FAST, TOKEN, ScriptedBroker


@given(st.floats(0.001, 10), st.floats(0, 10_000_000))
def test_linger_is_never_longer_than_it_may_be(longest_s, now_s):
    assert 0 < linger_s(longest_s, now_s) <= longest_s


@given(st.integers(1, 10_000), st.integers(0, 1_000_000), st.integers(0, 999))
def test_lingers_that_begin_between_two_multiples_end_together(longest_ms, multiple, part):
    """Two partitions whose messages are handled at different times of it send their acks in one
    turn.
    """
    longest_s = longest_ms / 1000
    begin_s = (multiple + 0.1) * longest_s
    later_s = begin_s + 0.8 * longest_s * part / 1000
    first, second = (now_s + linger_s(longest_s, now_s) for now_s in (begin_s, later_s))
    assert first == pytest.approx(second, abs=longest_s / 1000)


def test_no_linger_stays_none():
    assert linger_s(0, 12.5) == 0


class ToldPartition:
    """What a sender needs of its pull client."""

    holds_fence = True
    is_idle = False
    respects_range_limit = False
    renewal_ms = math.inf
    log_name = "s partition 1 in group g"

    def __init__(self, broker: Any) -> None:
        self.broker = broker
        self.cursors: list[int] = []
        self.checked: list[int] = []
        self.failures: list[KeylaneError] = []

    def apply_ack_reply(self, answer: Acked) -> None:
        self.cursors.append(answer.cursor)

    def boot_ns(self) -> int:
        return 0

    def messages_to_renew(self) -> list[Message]:
        return []

    def record_call_error(self, error: KeylaneError) -> None:
        self.failures.append(error)

    def is_parked_current(self, version: int) -> bool:
        return version <= max(self.checked, default=0)

    async def check_parked(self, version: int) -> None:
        if not self.is_parked_current(version):
            self.checked.append(version)


class LateAckBroker(ScriptedBroker):
    """Answers acks once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = asyncio.Event()

    async def call(self, request: Request, payload: bytes = b"", *, wait_ms: int = 0) -> Any:
        self.requests.append(request)
        await self.may.wait()
        self.requests.pop()
        return await super().call(request, payload, wait_ms=wait_ms)


def sender_of(partition: Any, **given: Any) -> AckSender:
    settings = ConsumerSettings(**{"ack_linger_ms": 1, "backoff": FAST} | given)
    return AckSender(
        partition,
        (1, "g", SESSION, TOKEN),
        in_flight=MessagesInFlight(),
        settings=settings,
        rng=random.Random(1),
    )


@asynccontextmanager
async def running(sender: AckSender) -> AsyncIterator[asyncio.Task[None]]:
    """The sender's task; it is cancelled at the end."""
    task = asyncio.create_task(sender.run())
    await asyncio.sleep(0)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_wait_for_acks_ends_when_nothing_was_handled_and_nothing_is_due():
    """The wait makes its request due itself, as no handler that ends would."""
    broker = ScriptedBroker()
    sender = sender_of(ToldPartition(broker))
    async with running(sender):
        assert await asyncio.wait_for(sender.wait_for_ack_reply(0), 5)
        assert [ack.ranges for ack in broker.asked(Ack)] == [()]


async def test_wait_for_acks_ends_at_once_when_the_sender_has_ended():
    sender = sender_of(ToldPartition(ScriptedBroker()))
    sender.handled.mark_handled(0)
    sender.end()
    assert not await asyncio.wait_for(sender.wait_until_durable(0), 5)


async def test_ack_is_in_the_next_request_when_one_is_under_way():
    """No further handler has to end for that."""
    broker = LateAckBroker()
    partition = ToldPartition(broker)
    sender = sender_of(partition)
    async with running(sender):
        sender.handled.mark_handled(0)
        sender.send_soon()
        await eventually(lambda: len(broker.asked(Ack)) == 1)
        sender.handled.mark_handled(1)
        sender.send_soon()
        broker.may.set()
        await eventually(lambda: partition.cursors == [1, 2])


async def test_acks_are_sent_again_after_an_error():
    broker = ScriptedBroker()
    broker.acks = [NotSentError("no"), OverloadedError("no room"), NotSentError("no")]
    partition = ToldPartition(broker)
    sender = sender_of(partition)
    async with running(sender):
        sender.handled.mark_handled(0)
        sender.send_soon()
        await eventually(lambda: len(broker.asked(Ack)) == 2)
        sender.send_soon()
        await eventually(lambda: partition.cursors == [1])
        assert {ack.ranges for ack in broker.asked(Ack)} == {((0, 1),)}
    # A refusal too: it is an answer of a broker that did not answer before.
    kinds = [type(error) for error in partition.failures]
    assert kinds == [NotSentError, OverloadedError, NotSentError]


async def test_request_under_way_is_sent_again_by_a_flush_when_the_task_is_cancelled():
    broker = LateAckBroker()
    partition = ToldPartition(broker)
    sender = sender_of(partition)
    async with running(sender):
        sender.handled.mark_handled(0)
        waits = asyncio.create_task(sender.wait_for_ack_reply(0))
        await eventually(lambda: len(broker.asked(Ack)) == 1)
    broker.may.set()
    await sender.flush()
    assert partition.cursors == [1]
    assert await waits


async def test_task_opens_the_channel_when_there_is_none():
    broker = ScriptedBroker()
    broker.is_connected = False
    partition = ToldPartition(broker)
    sender = sender_of(partition)
    async with running(sender):
        sender.handled.mark_handled(0)
        sender.send_soon()
        await eventually(lambda: partition.cursors == [1])


async def test_task_learns_what_is_parked_when_an_answer_says_so():
    broker = ScriptedBroker()
    broker.parked_version = 3
    partition = ToldPartition(broker)
    sender = sender_of(partition)
    async with running(sender):
        for offset in range(2):
            sender.handled.mark_handled(offset)
            assert await sender.wait_for_ack_reply(0)
        assert partition.checked == [3]
        assert len(broker.asked(Ack)) == 2


async def test_task_ends_with_an_error_that_is_none_of_a_broker():
    """A fault in what is told of acks ends the task, which tells the consumer; it is not lost in a
    callback.
    """

    class FaultyPartition(ToldPartition):
        def apply_ack_reply(self, answer: Acked) -> None:
            raise ValueError(answer)

    sender = sender_of(FaultyPartition(ScriptedBroker()))
    async with running(sender) as task:
        sender.handled.mark_handled(0)
        sender.send_soon()
        await eventually(task.done)
        assert isinstance(task.exception(), ValueError)


async def test_fence_ends_the_task():
    broker = ScriptedBroker()
    broker.acks = [FencedError(partition_id=1, token=TOKEN, current_token=9)]
    sender = sender_of(ToldPartition(broker))
    async with running(sender) as task:
        sender.handled.mark_handled(0)
        sender.send_soon()
        await eventually(task.done)
        assert isinstance(task.exception(), FencedError)


async def test_pull_lock_is_renewed_when_nothing_is_handled():
    """Also if acks linger for longer than the ttl."""
    broker = ScriptedBroker()
    sender = sender_of(ToldPartition(broker), ttl_ms=1_000, ack_linger_ms=10_000)
    sender._idle_s = 0.02
    async with running(sender):
        await eventually(lambda: len(broker.asked(Ack)) >= 3)
        sender.handled.mark_handled(0)
        sender.send_soon()
        await eventually(lambda: ((0, 1),) in [ack.ranges for ack in broker.asked(Ack)])


async def test_pull_lock_is_not_renewed_while_an_idle_partition_has_a_pull():
    """The broker holds it for the time of the pull; acks are sent as ever."""
    broker = ScriptedBroker()
    partition = ToldPartition(broker)
    partition.is_idle = True
    sender = sender_of(partition, ttl_ms=1_000)
    sender._idle_s = 0.01
    async with running(sender):
        await asyncio.sleep(0.1)
        assert broker.asked(Ack) == []
        sender.handled.mark_handled(0)
        sender.send_soon()
        await eventually(lambda: broker.asked(Ack))
        partition.is_idle = False
        await eventually(lambda: len(broker.asked(Ack)) >= 3)
