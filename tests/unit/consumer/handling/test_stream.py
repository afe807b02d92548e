"""How long the hand-over of a partition waits for messages that an iteration has taken."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import pytest

from keylane.consumer.delivery.filter import MessageFilter
from keylane.consumer.handling import stream as stream_module
from keylane.consumer.handling.failing import FailureRules
from keylane.consumer.handling.filtered import Filtering
from keylane.consumer.handling.stream import Stream
from keylane.consumer.pulling.messages_in_flight import MessagesInFlight
from keylane.consumer.settings import FailurePolicy
from keylane.protocol.backoff import Backoff
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import Reason
from keylane.protocol.message import Message
from keylane.protocol.parked import Failure
from sim.machines.clock import ManualClock
from support import handling
from support.cluster import eventually
from support.handling import virtual_loop
from support.raising import raises


class StreamClient:
    """The part of a pull client that a stream uses."""

    deadline_ns = 2**62
    may_be_unregistered = False

    def __init__(self, left_ms: int = 60_000) -> None:
        self.partition_id = self.leased_id = 1
        self.log_name = "s partition 1 in group g"
        self.client = self
        self.left_ms = left_ms
        self.in_flight = MessagesInFlight()
        self.failed: list[tuple[int, int]] = []
        self.set_aside: list[tuple[str, int, list[int], Failure]] = []
        self.is_loose = self.is_apart = self.sealed = False

    def report_failure(self, message: Message, _failure: Failure) -> None:
        self.failed.append((message.offset, message.attempt))

    def report_hang(self, _message: Message, _why: Failure, _running_ms: int) -> None:
        pass

    def park(self, message: Message, failure: Failure, waiting: list[Message]) -> None:
        behind = [each.offset for each in waiting]
        self.set_aside.append(("parked", message.offset, behind, failure))
        self.discard_in_flight(1 + len(waiting))

    def dead_letter(self, message: Message, failure: Failure) -> None:
        self.set_aside.append(("buried", message.offset, [], failure))
        self.discard_in_flight(1)

    @property
    def outstanding(self) -> int:
        return self.in_flight.count

    def register_delivered(self, message: Message) -> None:
        pass

    def register_all_delivered(self, messages: list[Message]) -> None:
        pass

    def has_handed_out(self, message: Message) -> bool:
        return message.delivery is self

    def discard_in_flight(self, count: int) -> None:
        self.in_flight.remove(count)

    async def wait_handled(self) -> None:
        await self.in_flight.wait_until_empty()


def stream_of(client: StreamClient, *, handover_ms: int, count: int = 3) -> Stream:
    stream = Stream(clock=SystemClock(), handover_ms=handover_ms, check=lambda: None)
    client.in_flight.count += count
    keys = [b"k%d" % offset for offset in range(count)]
    stream.put([Message("s", key, b"", at, 1, 0, delivery=client) for at, key in enumerate(keys)])
    return stream


async def waiting(stream: Stream, client: StreamClient) -> asyncio.Task[None]:
    """Start a hand-over that has to wait."""
    quiesced = asyncio.create_task(stream.quiesce(client))
    await asyncio.sleep(0.1)
    assert not quiesced.done()
    return quiesced


async def test_hand_over_waits_for_the_message_in_the_loop_body(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It waits for the ack, however short `handover_ms` and the lease are; one warning is
    logged.
    """
    monkeypatch.setattr(stream_module, "HANDOVER_WARN_MS", 10)
    client = StreamClient(left_ms=0)
    stream = stream_of(client, handover_ms=0)
    await stream.next()
    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        quiesced = asyncio.create_task(stream.quiesce(client))
        await eventually(lambda: caplog.messages)
        await asyncio.sleep(0.05)
        assert not quiesced.done()
    assert client.outstanding == 1, "what was not taken is forgotten"
    assert len(caplog.messages) == 1
    assert (
        "s partition 1 in group g moves to another consumer, but 1 of its messages"
        in caplog.messages[0]
    )
    client.discard_in_flight(1)
    await asyncio.wait_for(quiesced, 30)


async def test_hand_over_waits_handover_ms_for_messages_passed_over():
    """A user who requests the next message is no longer working on earlier ones."""
    client = StreamClient()
    stream = stream_of(client, handover_ms=20)
    await stream.next()
    quiesced = await waiting(stream, client)
    asked = asyncio.create_task(stream.next())
    await asyncio.wait_for(quiesced, 30)
    await asyncio.wait_for(stream.quiesce(client), 30)
    asked.cancel()


async def test_hand_over_waits_for_a_collected_batch_while_the_body_runs():
    """A user who requested more in vain and then works on the collected messages is in the loop
    body.
    """
    client = StreamClient()
    stream = stream_of(client, handover_ms=0)
    for _ in range(3):
        await stream.next()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.next(), 0.01)
    quiesced = asyncio.create_task(stream.quiesce(client))
    client.discard_in_flight(2)
    await asyncio.sleep(0.05)
    assert not quiesced.done()
    client.discard_in_flight(1)
    await asyncio.wait_for(quiesced, 30)


async def test_hand_over_waits_for_acks_as_long_as_the_lease_is_renewed():
    """Within `handover_ms` the lease's current end counts, not its end when the hand-over
    started.
    """
    client = StreamClient(left_ms=20)
    stream = stream_of(client, handover_ms=600_000)
    await stream.next()
    asked = [asyncio.create_task(stream.next()) for _ in range(3)]
    await asyncio.gather(*asked[:2])
    quiesced = await waiting(stream, client)
    client.left_ms = 0
    await asyncio.wait_for(quiesced, 30)
    asked[2].cancel()


async def test_hand_over_ends_at_once_when_the_consumer_closes():
    """Closing drops unacked messages, also in the middle of the loop body."""
    client = StreamClient()
    stream = stream_of(client, handover_ms=600_000)
    await stream.next()
    quiesced = await waiting(stream, client)
    stream.leave()
    await asyncio.wait_for(quiesced, 30)


def test_long_running_loop_body_is_logged(caplog: pytest.LogCaptureFixture):
    """After ten and twenty seconds, and once when the next message is requested; a quick body is
    never logged.
    """
    loop, machine = virtual_loop()
    client = handling.Client()
    client.register_delivered = lambda message: None  # type: ignore[attr-defined]

    async def story() -> None:
        stream = Stream(clock=machine, handover_ms=0, check=lambda: None)
        stream.put(client.messages(b"a", b"k", b"c"))
        for seconds in (1, 25, 1):
            await stream.next()
            for _ in range(seconds):
                await asyncio.sleep(1)
                stream.check_long_running()
        await stream.close()

    with caplog.at_level(logging.INFO, "keylane.consumer"):
        handling.in_virtual_time(story(), loop)
    assert len(caplog.messages) == 3
    assert "body of the loop has been running for 10 s on s partition 1 offset 1" in caplog.text
    assert "offset 1 (key digest ac52cb5ff985d463) is left by the loop" in caplog.messages[2]
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING, logging.WARNING, logging.INFO]


def look(stream: Stream, clock: ManualClock, *, seconds: int) -> None:
    """Call the stream's periodic check once a second."""
    for _ in range(seconds):
        clock.advance(1_000)
        stream.check_long_running()


async def test_consumer_that_is_never_iterated_is_logged(caplog):
    """A consumer created without its handler by mistake keeps its partitions idle: this is logged,
    and rarely repeated.
    """
    clock = ManualClock()
    stream = Stream(clock=clock, handover_ms=1_000, check=lambda: None)
    stream.put([Message("orders", b"k", b"v", 0, 1, 0, delivery=StreamClient())])
    look(stream, clock, seconds=60)
    (record,) = caplog.records
    assert "no handler and is not iterated" in record.message


async def test_consumer_that_was_iterated_once_is_not_logged(caplog):
    clock = ManualClock()
    stream = Stream(clock=clock, handover_ms=1_000, check=lambda: None)
    asking = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    asking.cancel()
    stream.put([Message("orders", b"k", b"v", 0, 1, 0, delivery=StreamClient())])
    look(stream, clock, seconds=60)
    assert not caplog.records


async def test_step_is_refused_while_another_task_waits_for_a_message():
    """The first task gets the message. With a time-out, each step may run in a task of its own."""
    client = StreamClient()
    stream = stream_of(client, handover_ms=0, count=0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.next(), 0.01)
    first = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    with raises(Reason.OTHER_TASK, match="waits for the next message"):
        await stream.next()
    client.in_flight.count += 1
    stream.put([Message("s", b"k", b"", 0, 1, 0, delivery=client)])
    assert (await first).offset == 0


async def offset_of_next(stream: Stream, gate: asyncio.Event | None = None) -> int:
    """Take a message, and wait for `gate` before acking it."""
    message = await stream.next()
    if gate is not None:
        await gate.wait()
    return message.offset


@pytest.mark.parametrize("taken", [1, 2])
async def test_step_is_refused_until_the_other_task_has_acked_its_messages(taken: int):
    """Including those that the other task skipped. Then any task may continue, and the first one
    must wait.
    """
    client = StreamClient()
    stream = stream_of(client, handover_ms=0)
    for _ in range(taken):
        await stream.next()
    for left in range(taken, 0, -1):
        with raises(Reason.OTHER_TASK, match=f"it took {left} message") as refused:
            await asyncio.create_task(offset_of_next(stream))
        assert refused.value.unacked == left
        client.discard_in_flight(1)
    gate = asyncio.Event()
    second = asyncio.create_task(offset_of_next(stream, gate))
    await asyncio.sleep(0)
    with raises(Reason.OTHER_TASK):
        await stream.next()
    gate.set()
    assert await second == taken
    if taken < 2:
        assert await stream.next(), "the other task has ended"


async def test_step_within_a_time_limit_is_a_step_of_the_task_that_waits():
    """`wait_for` runs it in a task; the message collected before it is not acked yet."""
    stream = stream_of(StreamClient(), handover_ms=0)
    await stream.next()
    assert (await asyncio.wait_for(stream.next(), 30)).offset == 1
    assert (await stream.next()).offset == 2


async def test_step_of_another_task_is_taken_after_the_hand_over_of_unacked_messages():
    """Their next owner delivers them again, so they do not block other partitions."""
    client, other = StreamClient(left_ms=0), StreamClient()
    stream = stream_of(client, handover_ms=0)
    await stream.next()
    stream.leave()
    await stream.quiesce(client)
    other.in_flight.count += 1
    stream.put([Message("s", b"k", b"", 7, 2, 0, delivery=other)])
    assert await asyncio.create_task(offset_of_next(stream)) == 7


PARKING = FailureRules(policy=FailurePolicy.PARK, tries_max=2, client="c")


def keyed(client: StreamClient, *keys: bytes, **given: Any) -> Stream:
    """Return a stream with a message of each key, which the test acks with `release_acked_keys`."""
    stream = Stream(clock=SystemClock(), handover_ms=0, check=lambda: None, **given)
    client.in_flight.count += len(keys)
    stream.put([Message("s", key, b"", at, 1, 0, delivery=client) for at, key in enumerate(keys)])
    return stream


async def test_later_message_of_a_key_waits_for_the_ack():
    stream = keyed(StreamClient(), b"a", b"a", b"b")
    first = await stream.next()
    assert (await stream.next()).offset == 2
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    stream.release_acked_keys([first])
    assert (await asyncio.wait_for(waiting, 30)).offset == 1


async def test_many_are_taken_with_several_of_a_key_and_come_again_together():
    stream = keyed(StreamClient(), b"a", b"a", b"b", b"a", b"b")
    taken = await stream.take_many(3, 1_000)
    assert [message.offset for message in taken] == [0, 1, 2]
    assert await stream.take_many(10, 10) == [], "their keys are in hand"
    back = stream.nack(taken[0], 0)
    assert [message.offset for message in back] == [0, 1]
    again = await stream.take_many(10, 1_000)
    assert [(message.offset, message.attempt) for message in again] == [(0, 2), (1, 2), (3, 1)]
    stream.release_acked_keys([taken[2]])
    assert [message.offset for message in await stream.take_many(10, 1_000)] == [4]


async def test_messages_are_taken_in_one_way():
    stream = keyed(StreamClient(), b"a", b"b")
    await stream.take_many(1, 1_000)
    with raises(Reason.MIXED_USE, match=r"iteration on a consumer .* getmany"):
        await stream.next()
    with raises(Reason.MIXED_USE):
        await stream.take_arrow()
    assert [message.offset for message in await stream.take_many(1, 1_000)] == [1]
    await stream.close()
    for ask in (stream.next, stream.take_arrow):
        with pytest.raises(StopAsyncIteration):
            await ask()


async def test_paused_partition_is_held_back_in_its_order():
    """Also messages that were given back or wait for those."""
    stream = keyed(StreamClient(), b"a", b"a", b"b", b"a")
    (first,) = await stream.take_many(1, 1_000)
    assert await stream.take_many(1, 1_000), "the other key"
    stream.pause(1)
    stream.nack(first, 0)
    assert await stream.take_many(10, 30) == []
    stream.resume(1)
    assert [message.offset for message in await stream.take_many(10, 1_000)] == [0, 1, 3]


async def test_wait_for_messages_behind_unacked_ones_is_logged(caplog):
    clock = ManualClock()
    stream = Stream(clock=clock, handover_ms=1_000, check=lambda: None)
    client = StreamClient()
    stream.put([Message("s", b"k", b"", offset, 1, 0, delivery=client) for offset in range(3)])
    await stream.next()
    asking = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    look(stream, clock, seconds=60)
    asking.cancel()
    (record,) = caplog.records
    assert "iteration waits for acks: 2 messages wait" in record.message
    assert "s partition 1 offset 0" in record.message


async def test_message_that_is_given_back_too_often_is_parked_with_those_behind_it():
    """Later messages in hand, waiting or just arrived are parked too; other keys proceed, and each
    attempt is reported to the broker.
    """
    client = StreamClient()
    stream = keyed(client, b"a", b"a", b"b", b"a", b"b", failure_rules=PARKING)
    taken = await stream.take_many(3, 1_000)
    assert await stream.take_many(10, 10) == [], "one waits for the messages in hand"
    stream.nack(taken[0], 0)
    again = await stream.take_many(2, 1_000)
    assert [message.offset for message in again] == [0, 1]
    stream.put([Message("s", b"a", b"", 5, 1, 0, delivery=client)])
    client.in_flight.count += 1
    back = stream.nack(again[0], 0)
    assert [message.offset for message in back] == [0, 1]
    ((how, offset, behind, failure),) = client.set_aside
    assert (how, offset, behind) == ("parked", 0, [1, 3, 5])
    assert (failure.kind, failure.attempts, failure.client) == ("nack", 2, "c")
    assert client.failed == [(0, 1)]
    stream.release_acked_keys([taken[2]])
    assert [message.offset for message in await stream.take_many(10, 1_000)] == [4]
    assert client.outstanding == 2


@pytest.mark.parametrize("ordered", [True, False])
async def test_message_that_is_given_back_too_often_is_buried_alone(ordered: bool):
    """As a dead letter, or in a shared group: later messages of its key proceed."""
    policy = FailurePolicy.PARK if not ordered else FailurePolicy.DEAD
    client = StreamClient()
    failure_rules = FailureRules(policy=policy, tries_max=1)
    stream = keyed(client, b"a", b"a", failure_rules=failure_rules, ordered=ordered)
    first = await stream.next()
    stream.nack(first, 0)
    assert [each[:3] for each in client.set_aside] == [("buried", 0, [])]
    assert (await stream.next()).offset == 1


async def test_later_messages_in_hand_come_again_at_once_when_one_is_set_aside_alone():
    """Whatever the policy, a program that gives a message back has no later one of its key
    in hand.
    """
    client = StreamClient()
    stream = keyed(
        client,
        b"a",
        b"a",
        b"b",
        b"a",
        failure_rules=FailureRules(policy=FailurePolicy.DEAD, tries_max=1),
    )
    taken = await stream.take_many(3, 1_000)
    back = stream.nack(taken[0], 0)
    assert [message.offset for message in back] == [0, 1]
    assert [each[:3] for each in client.set_aside] == [("buried", 0, [])]
    again = await stream.take_many(10, 1_000)
    assert [(message.offset, message.attempt) for message in again] == [(1, 1), (3, 1)]


async def test_paused_messages_are_parked_behind_a_message_that_is_given_back_too_often():
    client = StreamClient()
    stream = keyed(
        client, b"a", b"b", b"a", failure_rules=FailureRules(policy=FailurePolicy.PARK, tries_max=1)
    )
    (first,) = await stream.take_many(1, 1_000)
    stream.pause(1)
    stream.nack(first, 0)
    assert [each[:3] for each in client.set_aside] == [("parked", 0, [2])]
    stream.resume(1)
    assert [message.offset for message in await stream.take_many(10, 1_000)] == [1]


async def test_message_behind_a_failed_filter_comes_once_when_its_partition_is_paused():
    """A child's message that is collected with its parent's, whose filter fails, waits only for
    that one.
    """
    parent, child, fails = StreamClient(), StreamClient(), [True]
    child.partition_id = child.leased_id = 2

    def wanted(_message: Message) -> bool:
        if fails:
            raise ValueError("no such country")
        return True

    filtering = Filtering(
        MessageFilter(wanted=wanted), Backoff(first_ms=1, max_ms=1), random.Random(1)
    )
    stream = Stream(clock=SystemClock(), handover_ms=0, check=lambda: None, filtering=filtering)
    stream.pause(2)
    for client, offset in ((parent, 3), (child, 4)):
        client.in_flight.count += 1
        stream.put([Message("s", b"k", b"", offset, client.partition_id, 0, delivery=client)])
    assert await stream.take_many(10, 0) == []
    assert stream._waiting_count == 2
    fails.clear()
    stream.resume(2)
    taken: list[int] = []
    while len(taken) < 2:
        for message in await stream.take_many(10, 1_000):
            taken.append(message.offset)
            stream.release_acked_keys([message])
    assert taken == [3, 4]
    assert await stream.take_many(10, 0) == []


def put_more(stream: Stream, client: StreamClient, *offsets: int) -> None:
    """Add further messages of the key "a"."""
    client.in_flight.count += len(offsets)
    stream.put([Message("s", b"a", b"", at, 1, 0, delivery=client) for at in offsets])


async def test_message_that_was_paused_comes_before_a_later_one_that_waits_for_its_key():
    """The later one arrived during the pause, and waits in the lane that the ack looks at first."""
    client = StreamClient()
    stream = keyed(client, b"a", b"a")
    first = await stream.next()
    stream.pause(1)
    put_more(stream, client, 2)
    asked = asyncio.create_task(stream.next())
    await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.wait([asked])
    stream.resume(1)
    taken: list[int] = []
    for _ in range(2):
        stream.release_acked_keys([first])
        first = await asyncio.wait_for(stream.next(), 30)
        taken.append(first.offset)
    assert taken == [1, 2]
    assert stream._waiting_count == 0


async def test_message_that_was_paused_comes_at_once_when_its_key_is_free():
    client = StreamClient()
    stream = keyed(client, b"a", b"a")
    first = await stream.next()
    stream.pause(1)
    stream.release_acked_keys([first])
    stream.resume(1)
    assert (await asyncio.wait_for(stream.next(), 30)).offset == 1


class Redriven(StreamClient):
    """A delivery of redriven messages, such as dead letters: they arrive in offset order, after
    those in hand.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_loose = self.is_apart = True


@pytest.mark.parametrize("policy", [FailurePolicy.BLOCK, FailurePolicy.DEAD, FailurePolicy.PARK])
async def test_dead_letters_handed_out_behind_a_message_are_given_back_with_it(
    policy: FailurePolicy,
):
    """Their offsets are lower; a program that continues with other keys would otherwise hold them,
    and their key, forever.
    """
    client, dead = StreamClient(), Redriven()
    stream = keyed(client, failure_rules=FailureRules(policy=policy, tries_max=1))
    put_more(stream, client, 5, 6)
    put_more(stream, dead, 1, 2)
    taken = await stream.take_many(4, 1_000)
    assert [message.offset for message in taken] == [5, 6, 1, 2]
    back = stream.nack(taken[0], 0)
    assert sorted(message.offset for message in back) == [1, 2, 5, 6]
    again: list[int] = []
    while messages := await stream.take_many(4, 10):
        again += [message.offset for message in messages]
        stream.release_acked_keys(messages)
    left = {FailurePolicy.BLOCK: [1, 2, 5, 6], FailurePolicy.DEAD: [1, 2, 6]}
    assert again == left.get(policy, [1, 2])
    assert stream._waiting_count == 0
    assert dead.set_aside == []


async def test_messages_of_a_shared_group_come_again_when_one_beside_them_is_set_aside():
    """The message that is set aside was handed out before any of its key was given back."""
    client = StreamClient()
    failure_rules = FailureRules(policy=FailurePolicy.DEAD, tries_max=2)
    stream = keyed(client, b"a", b"a", failure_rules=failure_rules, ordered=False)
    first, second = await stream.take_many(2, 1_000)
    stream.nack(second, 0)
    assert [each.offset for each in await stream.take_many(2, 1_000)] == [1]
    first.attempt = 2
    assert stream.nack(first, 0) == [first, second]
    assert [each.offset for each in await stream.take_many(2, 1_000)] == [1]
