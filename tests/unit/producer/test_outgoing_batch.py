"""A batch from its first message to the receipts."""

import asyncio

import pytest

from keylane.producer.given_up import GivenUpOutcome, UnreportedMessages
from keylane.producer.outgoing_batch import OutgoingBatch
from keylane.producer.send_future import BatchFuture
from keylane.protocol.batch import check_batch, columns
from keylane.protocol.errors import Fate, NotSentError, Reason, StaleRouteError
from keylane.protocol.message import Receipt, pack_properties
from support.raising import raises


def new_batch() -> OutgoingBatch:
    return OutgoingBatch(asyncio.get_running_loop())


def filled(count: int) -> OutgoingBatch:
    batch = new_batch()
    for index in range(count):
        batch.add(b"k%d" % index, b"v%d" % index, b"", index)
    return batch


async def test_packed_batch_keeps_its_bytes():
    """A later call with another sequence returns the same bytes."""
    batch = filled(3)
    first = batch.pack(partition_id=7, producer_id=1, producer_epoch=0, sequence=5)
    again = batch.pack(partition_id=7, producer_id=1, producer_epoch=9, sequence=99)

    assert again is first
    header = check_batch(first)
    assert (header.sequence, header.producer_epoch, header.count) == (5, 0, 3)


async def test_packed_batch_has_the_time_of_each_message():
    """Messages may share a time, and clocks may be set back."""
    batch = new_batch()
    for sent_at_ns in (5, 5, 9, 4, 4):
        batch.add(b"", b"v", b"", sent_at_ns)
    data = batch.pack(partition_id=7, producer_id=1, producer_epoch=0, sequence=0)

    header = check_batch(data)
    assert (header.first_sent_at_ns, header.last_sent_at_ns) == (5, 4)
    assert columns(data, header).sent_at_ns.tolist() == [5, 5, 9, 4, 4]
    assert list(map(batch.sent_at_of, range(5))) == [5, 5, 9, 4, 4]


async def test_message_keeps_its_time_when_it_is_moved():
    batch = filled(3)
    taken, rest = batch.split(lambda index: index == 1)

    assert [part.first_sent_at_ns for part in (taken, rest)] == [1, 0]
    assert [sent_at_ns for _, _, sent_at_ns in rest.iter_unsettled()] == [0, 2]


async def test_properties_that_begin_late_stay_with_their_message():
    """Messages before the first one with properties have none."""
    batch = filled(2)
    packed = pack_properties({"a": "b"})
    batch.add(b"", b"last", packed, 2)
    data = batch.pack(partition_id=7, producer_id=1, producer_epoch=0, sequence=0)
    cut = columns(data, check_batch(data))

    packed_column = [
        cut.blob[start:end]
        for start, end in zip(cut.property_edges, cut.property_edges[1:], strict=False)
    ]
    assert packed_column == [b"", b"", packed]


async def test_receipts_count_up_from_the_first_offset():
    """One answer of the broker gives each message its own offset."""
    batch = filled(3)
    futures = [BatchFuture(batch, index) for index in range(3)]
    batch.settle(Receipt(7, 100, "fsync"))

    assert [(await future).offset for future in futures] == [100, 101, 102]


async def test_unknown_offset_stays_unknown():
    """A duplicate whose offset the broker no longer knows does not get an invented one."""
    batch = filled(2)
    batch.settle(Receipt(7, -1, "fsync", duplicate=True))

    assert (await BatchFuture(batch, 1)).offset == -1


async def test_future_gives_its_own_receipt_when_its_batch_was_split_twice():
    """After a route change split a batch twice, each future has the receipt of its own message."""
    batch = filled(4)
    futures = [BatchFuture(batch, index) for index in range(4)]
    even, odd, last = new_batch(), new_batch(), new_batch()
    for index in range(4):
        (even, odd)[index % 2].adopt(batch, index)
    last.adopt(odd, 1)
    first_of_odd = new_batch()
    first_of_odd.adopt(odd, 0)
    even.settle(Receipt(1, 10, "fsync"))
    assert [future.done() for future in futures] == [True, False, True, False]
    last.settle(Receipt(2, 20, "fsync"))
    first_of_odd.settle(GivenUpOutcome(StaleRouteError(Reason.NO_PARTITION), UnreportedMessages()))

    assert [(await futures[index]).offset for index in (0, 2, 3)] == [10, 11, 20]
    with raises(Reason.NO_PARTITION):
        await futures[1]


async def test_other_waiters_continue_when_one_is_cancelled():
    """A task that stops waiting does not cancel the batch."""
    batch = filled(2)

    async def wait(index: int) -> Receipt:
        return await BatchFuture(batch, index)

    waiters = [asyncio.create_task(wait(index)) for index in range(2)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    await asyncio.sleep(0)
    batch.settle(Receipt(7, 1, "fsync"))

    assert (await waiters[1]).offset == 2
    with pytest.raises(asyncio.CancelledError):
        await waiters[0]


async def test_future_wakes_when_its_own_message_is_settled():
    """The waiter of a message that was moved into another batch is woken by that message only."""
    batch = filled(3)

    async def wait(index: int) -> Receipt:
        return await BatchFuture(batch, index)

    waiters = [asyncio.create_task(wait(index)) for index in range(3)]
    await asyncio.sleep(0)
    parts = [new_batch() for _ in range(3)]
    for index, part in enumerate(parts):
        part.adopt(batch, index)
    for index in (1, 2, 0):
        parts[index].settle(Receipt(index, 10 + index, "fsync"))
        receipt = await asyncio.wait_for(waiters[index], 5)
        assert (receipt.partition_id, receipt.offset) == (index, 10 + index)
        for _ in range(3):
            await asyncio.sleep(0)
        assert [waiter.done() for waiter in waiters].count(True) == (1, 2, 0).index(index) + 1


async def test_doubtful_message_fails_as_unknown_when_it_left_its_partition():
    """After a try without an answer, a later refusal of another partition does not prove that the
    message is not stored.
    """
    origin, other = filled(2), filled(1)
    origin.doubtful = True
    origin.reset(refused=False)
    moved = new_batch()
    moved.adopt(origin, 0)
    moved.adopt(origin, 1)
    moved.adopt(other, 0)
    moved.settle(GivenUpOutcome(NotSentError("no broker there"), UnreportedMessages()))
    for batch, index, fate in (
        (origin, 0, Fate.UNKNOWN),
        (origin, 1, Fate.UNKNOWN),
        (other, 0, Fate.NOT_DONE),
    ):
        with pytest.raises(NotSentError) as caught:
            batch.receipt(index)
        assert caught.value.fate is fate


async def test_message_is_no_duplicate_when_its_partition_refused_it_for_good():
    """A message that the right broker refused is not stored there, even if an earlier try had no
    answer.
    """
    origin = filled(1)
    origin.doubtful = True
    origin.reset(refused=True)
    moved = new_batch()
    moved.adopt(origin, 0)
    moved.settle(Receipt(2, 5, "fsync"))
    assert origin.receipt(0) == Receipt(2, 5, "fsync", duplicate=False, reordered=False)


async def test_receipt_declares_its_own_message_when_a_batch_mixes_them():
    """`reordered` and `duplicate` are declared for the messages they are true of, also in a mixed
    batch.
    """
    doubtful, moved_only, home = filled(1), filled(1), filled(1)
    doubtful.doubtful = True
    doubtful.reset(refused=False)
    doubtful.mark_reordered()
    moved_only.mark_reordered()
    joined = new_batch()
    for batch in (doubtful, moved_only, home):
        joined.adopt(batch, 0)
    joined.settle(Receipt(9, 100, "fsync"))
    assert [batch.receipt(0) for batch in (doubtful, moved_only, home)] == [
        Receipt(9, 100, "fsync", duplicate="possible", reordered=True),
        Receipt(9, 101, "fsync", duplicate=False, reordered=True),
        Receipt(9, 102, "fsync", duplicate=False, reordered=False),
    ]


async def test_message_without_a_key_is_never_reordered():
    """A message without a key has no order to lose."""
    batch = new_batch()
    for key in (b"", b"k"):
        batch.add(key, b"v", b"", 0)
    batch.mark_reordered()
    batch.settle(Receipt(1, 0, "fsync"))
    assert [batch.receipt(index).reordered for index in range(2)] == [False, True]


async def test_future_of_a_batch_is_done_when_it_is_asked_for_after_the_outcome():
    """It is made only then; one that was asked for before is done with the outcome."""
    early, late = filled(1), filled(1)
    waited = early.future
    assert not waited.done()
    for batch in (early, late):
        assert batch.settle(Receipt(1, 0, "fsync")) == 1
    assert waited.done()
    assert late.future.done()
    assert late.future is late.future
