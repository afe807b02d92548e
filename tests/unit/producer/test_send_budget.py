"""The limit of a producer's queue, and the count of messages that were given up untold."""

import asyncio

import pytest

from keylane.producer.given_up import CAUSES_KEPT, GivenUpOutcome, UnreportedMessages
from keylane.producer.outgoing_batch import OutgoingBatch
from keylane.producer.send_budget import MEMORY_PER_MESSAGE, SendBudget
from keylane.producer.send_future import BatchFuture
from keylane.protocol.errors import Fate, NotSentError, OutcomeUnknownError, OverloadedError, Reason
from keylane.protocol.message import Receipt

RECEIPT = Receipt(1, 0, "fsync")


def batch_of(size: int) -> OutgoingBatch:
    batch = OutgoingBatch(asyncio.get_running_loop())
    batch.add(b"", b"v" * (size - 20), b"", 0)
    return batch


def entered(budget: SendBudget, count: int) -> OutgoingBatch:
    batch = OutgoingBatch(asyncio.get_running_loop())
    for index in range(count):
        batch.add(b"k", b"%d" % index, b"", 0)
    budget.reserve(count, batch.size)
    return batch


async def test_wait_for_room_ends_when_half_is_free():
    """Senders wait until half of a full queue is answered, not for each answer."""
    budget = SendBudget(1_000)
    batches = [batch_of(250) for _ in range(4)]
    for batch in batches:
        budget.reserve(1, batch.size)
    waiter = asyncio.create_task(budget.wait_for_capacity())
    await asyncio.sleep(0)
    assert not waiter.done()
    for batch in batches[:2]:
        budget.settle_stored(batch, RECEIPT)
    await asyncio.sleep(0)
    assert not waiter.done()
    budget.settle_stored(batches[2], RECEIPT)
    await waiter


async def test_wait_for_room_leaves_a_quarter_to_those_who_call_it_now_and_then():
    """Below three quarters no caller waits; from there on as where the queue is full."""
    budget = SendBudget(1_000)
    batches = [batch_of(250 - MEMORY_PER_MESSAGE) for _ in range(3)]
    for batch in batches[:2]:
        budget.reserve(1, batch.size)
    await asyncio.wait_for(budget.wait_for_capacity(), 1)
    budget.reserve(1, batches[2].size)
    waiter = asyncio.create_task(budget.wait_for_capacity())
    await asyncio.sleep(0)
    assert not budget.full
    assert not waiter.done()
    budget.settle_stored(batches[0], RECEIPT)
    await asyncio.sleep(0)
    assert not waiter.done()
    budget.settle_stored(batches[1], RECEIPT)
    await waiter


async def test_wait_until_empty_ends_when_every_message_is_answered():
    """The wait ends when every message is stored or given up; both are counted."""
    budget = SendBudget(1_000)
    first, second = entered(budget, 1), entered(budget, 1)
    waiter = asyncio.create_task(budget.wait_until_empty())
    await asyncio.sleep(0)
    budget.give_up(first, NotSentError())
    await asyncio.sleep(0)
    assert not waiter.done()
    budget.settle_stored(second, RECEIPT)
    await waiter
    assert (budget.counts.acked, budget.counts.failed) == (1, 1)


async def test_flush_counts_messages_when_a_whole_batch_is_given_up():
    """Of 100 messages that failed together, an awaited future leaves 99 untold; each is told
    once.
    """
    budget = SendBudget(1 << 20)
    batch = entered(budget, 100)
    cause = NotSentError("no broker there")
    budget.give_up(batch, cause)
    for _ in range(2):
        with pytest.raises(NotSentError):
            await BatchFuture(batch, 7)
    told = budget.take_unreported_error()
    assert told is not None
    assert (told.details, told.fate) == ({"messages": 99, "unknown": 0}, Fate.NOT_DONE)
    assert told.__cause__ is cause
    assert budget.take_unreported_error() is None
    with pytest.raises(NotSentError):
        await BatchFuture(batch, 8)
    assert budget.take_unreported_error() is None


async def test_flush_counts_every_batch_when_hundreds_are_given_up():
    """Every failure is counted, also after many others."""
    budget = SendBudget(1 << 20)
    batches = [entered(budget, 1) for _ in range(500)]
    for batch in batches:
        budget.give_up(batch, NotSentError())
    for batch in batches[:400]:
        with pytest.raises(NotSentError):
            await BatchFuture(batch, 0)
    told = budget.take_unreported_error()
    assert told is not None
    assert told.messages == 100


async def test_error_is_new_for_each_future_when_a_batch_is_given_up():
    """Each caller gets an error object of its own, with the fate of its message."""
    budget = SendBudget(1 << 20)
    doubtful, certain = entered(budget, 2), entered(budget, 1)
    doubtful.doubtful = True
    cause = NotSentError("no broker there")
    budget.give_up(doubtful, cause)
    budget.give_up(certain, cause)
    seen = []
    for batch, index in ((doubtful, 0), (doubtful, 1), (doubtful, 1), (certain, 0)):
        with pytest.raises(NotSentError, match="no broker there") as caught:
            await BatchFuture(batch, index)
        seen.append(caught.value)
    assert len({id(error) for error in seen}) == 4
    assert [error.fate for error in seen] == [Fate.UNKNOWN] * 3 + [Fate.NOT_DONE]
    assert cause.__traceback__ is None


async def test_task_may_exceed_the_limit_again_when_there_was_room_meanwhile():
    """`when_full` hears of both changes, and a task that did not await its last message is
    forgotten.
    """
    changes: list[bool] = []
    budget = SendBudget(500, lambda: changes.append(budget.full))
    first, second = batch_of(250), batch_of(250)
    for batch in (first, second):
        budget.reserve(1, batch.size)
    budget.record_unawaited("task")
    assert not budget.may_exceed("task")
    budget.settle_stored(first, RECEIPT)
    assert budget.may_exceed("task")
    assert changes == [True, False]


async def test_several_tasks_wait_until_the_queue_is_empty():
    """Also one that begins to wait when another was woken."""
    budget = SendBudget(1_000)
    for _ in range(2):
        batch = entered(budget, 1)
        waiters = [asyncio.create_task(budget.wait_until_empty()) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(waiter.done() for waiter in waiters)
        budget.settle_stored(batch, RECEIPT)
        await asyncio.gather(*waiters)


def given_up(summary: UnreportedMessages, error) -> GivenUpOutcome:
    """One message."""
    outcome = GivenUpOutcome(error, summary, doubtful=error.fate is Fate.UNKNOWN)
    outcome.add_messages(1, outcome.doubtful)
    return outcome


def test_error_is_of_a_message_that_no_future_has_reported():
    summary = UnreportedMessages("scheduled message")
    refused = given_up(summary, OverloadedError(Reason.SCHEDULE_FULL, "full"))
    doubtful = given_up(summary, OutcomeUnknownError("silent"))
    refused.mark_reported(unknown=False)
    error = summary.build_error()
    assert error is not None
    assert (error.messages, error.unknown, error.fate) == (1, 1, Fate.UNKNOWN)
    assert error.__cause__ is doubtful.cause
    assert error.message.startswith("1 scheduled message was given up, it may be stored")
    doubtful.mark_reported(unknown=True)
    assert summary.build_error() is None


def test_counts_are_exact_when_more_are_given_up_than_causes_are_kept():
    summary = UnreportedMessages()
    outcomes = [
        given_up(summary, OverloadedError(Reason.SCHEDULE_FULL, str(n)))
        for n in range(3 * CAUSES_KEPT)
    ]
    for outcome in outcomes[: 2 * CAUSES_KEPT]:
        outcome.mark_reported(unknown=False)
    left = summary.build_error()
    assert left is not None
    assert (left.messages, left.unknown, left.fate) == (CAUSES_KEPT, 0, Fate.NOT_DONE)
    assert left.__cause__ is None, "the causes that were kept are reported"


def test_cause_is_that_of_a_later_message_when_all_earlier_ones_are_reported():
    summary = UnreportedMessages()
    for number in range(CAUSES_KEPT):
        given_up(summary, OverloadedError(Reason.SCHEDULE_FULL, str(number))).mark_reported(
            unknown=False
        )
    last = given_up(summary, OverloadedError(Reason.SCHEDULE_FULL, "last"))
    error = summary.build_error()
    assert error is not None
    assert error.__cause__ is last.cause
