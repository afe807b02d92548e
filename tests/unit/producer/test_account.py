"""Room in a producer's queue, and what was given up without a word."""

import asyncio

import pytest

from keylane.producer.account import Account
from keylane.producer.parcel import Parcel
from keylane.producer.ticket import Ticket
from keylane.protocol.errors import Fate, NotSentError
from keylane.protocol.message import Receipt

RECEIPT = Receipt(1, 0, "fsync")


def parcel_of(size: int) -> Parcel:
    parcel = Parcel(asyncio.get_running_loop().create_future())
    parcel.add(b"", b"v" * (size - 20), b"", 0)
    return parcel


def entered(account: Account, count: int) -> Parcel:
    parcel = Parcel(asyncio.get_running_loop().create_future())
    for index in range(count):
        parcel.add(b"k", b"%d" % index, b"", 0)
    account.enter(count, parcel.size)
    return parcel


async def test_room_comes_back_at_half():
    """A full queue lets senders on when half of it is answered, not at every answer."""
    account = Account(1_000)
    parcels = [parcel_of(250) for _ in range(4)]
    for parcel in parcels:
        account.enter(1, parcel.size)
    waiter = asyncio.create_task(account.room())
    await asyncio.sleep(0)
    assert not waiter.done()
    for parcel in parcels[:2]:
        account.stored(parcel, RECEIPT)
    await asyncio.sleep(0)
    assert not waiter.done()
    account.stored(parcels[2], RECEIPT)
    await waiter


async def test_drained_waits_until_every_message_is_answered():
    """Nothing queued means all answered; messages that were given up are counted."""
    account = Account(1_000)
    first, second = entered(account, 1), entered(account, 1)
    waiter = asyncio.create_task(account.drained())
    await asyncio.sleep(0)
    account.give_up(first, NotSentError())
    await asyncio.sleep(0)
    assert not waiter.done()
    account.stored(second, RECEIPT)
    await waiter
    assert (account.acked, account.failed) == (1, 1)


async def test_flush_counts_messages_when_a_whole_parcel_is_given_up():
    """Of 100 messages that failed together, one awaited ticket leaves 99 to tell; what was told is told once."""
    account = Account(1 << 20)
    parcel = entered(account, 100)
    cause = NotSentError("nobody there")
    account.give_up(parcel, cause)
    for _ in range(2):
        with pytest.raises(NotSentError):
            await Ticket(parcel, 7)
    told = account.untold()
    assert told is not None
    assert (told.details, told.fate) == ({"messages": 99, "unknown": 0}, Fate.NOT_DONE)
    assert told.__cause__ is cause
    assert account.untold() is None
    with pytest.raises(NotSentError):
        await Ticket(parcel, 8)
    assert account.untold() is None


async def test_flush_counts_every_parcel_when_hundreds_are_given_up():
    """No failure is forgotten because there were many before it."""
    account = Account(1 << 20)
    parcels = [entered(account, 1) for _ in range(500)]
    for parcel in parcels:
        account.give_up(parcel, NotSentError())
    for parcel in parcels[:400]:
        with pytest.raises(NotSentError):
            await Ticket(parcel, 0)
    told = account.untold()
    assert told is not None
    assert told.details["messages"] == 100


async def test_an_error_is_new_for_each_ticket_when_a_parcel_is_given_up():
    """Callers share no error object, so none sees another's traceback; each error says its own message's fate."""
    account = Account(1 << 20)
    doubtful, certain = entered(account, 2), entered(account, 1)
    doubtful.doubtful = True
    cause = NotSentError("nobody there")
    account.give_up(doubtful, cause)
    account.give_up(certain, cause)
    seen = []
    for parcel, index in ((doubtful, 0), (doubtful, 1), (doubtful, 1), (certain, 0)):
        with pytest.raises(NotSentError, match="nobody there") as caught:
            await Ticket(parcel, index)
        seen.append(caught.value)
    assert len({id(error) for error in seen}) == 4
    assert [error.fate for error in seen] == [Fate.UNKNOWN] * 3 + [Fate.NOT_DONE]
    assert cause.__traceback__ is None
