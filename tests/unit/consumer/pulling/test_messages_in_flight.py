"""The counter of messages that are with handlers: capacity, hysteresis, and waiting for zero."""

from __future__ import annotations

import asyncio

from keylane.consumer.pulling.messages_in_flight import MessagesInFlight


async def test_retrying_messages_are_exempt_up_to_their_maximum():
    """Messages that wait for their next try do not count against the limit; the count itself stays
    true.
    """
    in_flight = MessagesInFlight(retrying_max=3)
    in_flight.count = 4
    assert not in_flight.has_capacity(4)
    waiting = asyncio.create_task(in_flight.wait_for_capacity(4))
    await asyncio.sleep(0)
    in_flight.add_retrying(2)
    await asyncio.wait_for(waiting, 5)
    assert in_flight.capacity(4) == 2
    in_flight.count += 2
    assert not in_flight.has_capacity(4)
    in_flight.add_retrying(4)
    assert in_flight.capacity(4) == 1, "three of six are exempt"
    in_flight.add_retrying(-6)
    assert in_flight.capacity(4) == -2
    in_flight.remove(6)
    assert in_flight.capacity(4) == 4


async def test_full_counter_has_capacity_again_at_half_its_limit():
    """Pulling resumes for many messages at once, not for each."""
    in_flight = MessagesInFlight()
    in_flight.count = 8
    waiting = asyncio.create_task(in_flight.wait_for_capacity(8))
    await asyncio.sleep(0)
    in_flight.remove(3)
    await asyncio.sleep(0)
    assert not waiting.done(), "five of eight are still in flight"
    in_flight.remove(1)
    await asyncio.wait_for(waiting, 5)


async def test_blocked_counter_has_no_capacity_until_it_is_unblocked():
    """An empty counter is as full as any while it is blocked."""
    in_flight = MessagesInFlight()
    in_flight.block()
    assert not in_flight.has_capacity(10)
    waiting = asyncio.create_task(in_flight.wait_for_capacity(10))
    await asyncio.sleep(0)
    in_flight.unblock()
    await asyncio.wait_for(waiting, 5)
    assert in_flight.has_capacity(10)


async def test_wait_until_empty_returns_with_the_last_message():
    """A hand-over waits for the last handler, and not at all if there is none."""
    in_flight = MessagesInFlight()
    await asyncio.wait_for(in_flight.wait_until_empty(), 5)
    in_flight.count = 2
    waiting = asyncio.create_task(in_flight.wait_until_empty())
    await asyncio.sleep(0)
    in_flight.remove(1)
    await asyncio.sleep(0)
    assert not waiting.done()
    in_flight.remove(1)
    await asyncio.wait_for(waiting, 5)
