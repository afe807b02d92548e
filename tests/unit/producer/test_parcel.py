"""A parcel from its first message to the receipts."""

import asyncio

import pytest

from keylane.producer.parcel import Parcel
from keylane.producer.ticket import Ticket
from keylane.protocol.batch import check_batch, columns
from keylane.protocol.errors import Fate, NoPartitionError, NotSentError
from keylane.protocol.message import Receipt, pack_properties


def new_parcel() -> Parcel:
    return Parcel(asyncio.get_running_loop().create_future())


def filled(count: int) -> Parcel:
    parcel = new_parcel()
    for index in range(count):
        parcel.add(b"k%d" % index, b"v%d" % index, b"", index)
    return parcel


async def test_a_packed_parcel_keeps_its_bytes():
    """Whatever sequence a later call names, a repeat is the same batch."""
    parcel = filled(3)
    first = parcel.pack(partition_id=7, producer_id=1, producer_epoch=0, sequence=5)
    again = parcel.pack(partition_id=7, producer_id=1, producer_epoch=9, sequence=99)

    assert again is first
    header = check_batch(first)
    assert (header.sequence, header.producer_epoch, header.count) == (5, 0, 3)


async def test_properties_that_begin_late_stay_with_their_message():
    """Messages before the first one with properties have none."""
    parcel = filled(2)
    packed = pack_properties({"a": "b"})
    parcel.add(b"", b"last", packed, 2)
    data = parcel.pack(partition_id=7, producer_id=1, producer_epoch=0, sequence=0)
    cut = columns(data, check_batch(data))

    found = [
        cut.blob[start:end]
        for start, end in zip(cut.property_edges, cut.property_edges[1:], strict=False)
    ]
    assert found == [b"", b"", packed]


async def test_receipts_follow_from_the_first():
    """One answer of the broker gives each message its own offset."""
    parcel = filled(3)
    tickets = [Ticket(parcel, index) for index in range(3)]
    parcel.settle(Receipt(7, 100, "fsync"))

    assert [(await ticket).offset for ticket in tickets] == [100, 101, 102]


async def test_an_unknown_offset_stays_unknown():
    """A duplicate whose offset the broker no longer knows does not get an invented one."""
    parcel = filled(2)
    parcel.settle(Receipt(7, -1, "fsync", duplicate=True))

    assert (await Ticket(parcel, 1)).offset == -1


async def test_messages_that_moved_tell_their_first_tickets():
    """After a route change split a parcel, twice, each ticket learns where its own message went."""
    parcel = filled(4)
    tickets = [Ticket(parcel, index) for index in range(4)]
    even, odd, last = new_parcel(), new_parcel(), new_parcel()
    for index in range(4):
        (even, odd)[index % 2].adopt(parcel, index)
    last.adopt(odd, 1)
    first_of_odd = new_parcel()
    first_of_odd.adopt(odd, 0)
    even.settle(Receipt(1, 10, "fsync"))
    assert not tickets[0].done
    last.settle(Receipt(2, 20, "fsync"))
    first_of_odd.settle(NoPartitionError())

    assert [(await tickets[index]).offset for index in (0, 2, 3)] == [10, 11, 20]
    with pytest.raises(NoPartitionError):
        await tickets[1]


async def test_a_cancelled_waiter_leaves_the_others():
    """One task that stops waiting does not cancel the batch of the others."""
    parcel = filled(2)

    async def wait(index: int) -> Receipt:
        return await Ticket(parcel, index)

    waiters = [asyncio.create_task(wait(index)) for index in range(2)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    await asyncio.sleep(0)
    parcel.settle(Receipt(7, 1, "fsync"))

    assert (await waiters[1]).offset == 2
    with pytest.raises(asyncio.CancelledError):
        await waiters[0]


async def test_a_doubtful_parcel_is_given_up_as_unknown():
    """After a try without an answer no later refusal proves that nothing was stored."""
    origin = filled(2)
    origin.doubtful = True
    moved = new_parcel()
    moved.adopt(origin, 0)
    moved.adopt(origin, 1)
    moved.give_up(NotSentError("nobody there"))
    for index in range(2):
        with pytest.raises(NotSentError) as caught:
            origin.receipt(index)
        assert caught.value.fate is Fate.UNKNOWN


async def test_a_declared_parcel_stays_declared_in_others():
    """A message that left its partition is told as reordered, however often it is packed anew."""
    origin = filled(1)
    origin.reordered = True
    moved = new_parcel()
    moved.adopt(origin, 0)
    assert moved.reordered
