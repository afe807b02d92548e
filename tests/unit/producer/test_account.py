"""Room in a producer's queue."""

import asyncio

from keylane.producer.account import Account
from keylane.producer.parcel import Parcel
from keylane.protocol.errors import NotSentError


def parcel_of(size: int) -> Parcel:
    parcel = Parcel(asyncio.get_running_loop().create_future())
    parcel.add(b"", b"v" * (size - 20), b"", 0)
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
        account.settled(parcel, None)
    await asyncio.sleep(0)
    assert not waiter.done()
    account.settled(parcels[2], None)
    await waiter


async def test_drained_waits_for_every_message_and_keeps_the_first_error():
    """Nothing queued means all answered; what was given up is counted and remembered."""
    account = Account(1_000)
    one, two = parcel_of(100), parcel_of(100)
    account.enter(1, one.size)
    account.enter(1, two.size)
    waiter = asyncio.create_task(account.drained())
    await asyncio.sleep(0)
    error = NotSentError()
    account.settled(one, error)
    account.settled(two, None)
    await waiter

    assert (account.acked, account.failed) == (1, 1)
    assert account.untold() is error
    assert account.untold() is None
