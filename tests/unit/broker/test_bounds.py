"""Ranges that begin or end at a time, beside appends: each message is in one of two that follow
each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from keylane.broker.control import bounds_of
from keylane.broker.store.store import Store
from keylane.protocol.control import TimeBound
from keylane.protocol.reading.bounds import BoundsOf, PartitionBounds
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, facts, settings_of


class BoundsBroker:
    """A broker whose writes wait for `gate`, and that calls `before_read` before each look into the
    index.
    """

    def __init__(self) -> None:
        self.clock, self.gate = ManualClock(), asyncio.Event()
        self.gate.set()
        self.before_read: Callable[[], Awaitable[Any]] | None = None
        self.store = Store.open(
            SimDisk(),
            settings_of(cache_bytes=0),
            clock=self.clock,
            run_commit=self._write,
            run_read=self._read,
        )
        self.desk = Desk(self.store, self.clock)

    async def _write(self, function: Callable[..., Any], /, *args: Any) -> Any:
        await self.gate.wait()
        return function(*args)

    async def _read(self, function: Callable[..., Any], /, *args: Any) -> Any:
        if self.before_read is not None:
            await self.before_read()
        return function(*args)

    async def host(self) -> None:
        _, durable = self.store.host(facts(1))
        await durable

    async def append(self, sequence: int) -> None:
        await self.desk.append(batch(partition_id=1, sequence=sequence), 1)

    async def bounds(self, at_ms: int) -> PartitionBounds:
        partition = self.store.state.partition(1)
        asked = BoundsOf(partition_id=1, at_ms=(at_ms,), groups=())
        return await bounds_of(self.store, partition, asked, lambda _stored_ms: None)


async def test_time_is_looked_up_behind_messages_that_are_being_written():
    """One that is stored a moment later, with an earlier time, would be in no range: neither before
    the time nor from it on.
    """
    broker = BoundsBroker()
    await broker.host()
    broker.gate.clear()
    writing = asyncio.create_task(broker.append(0))
    await asyncio.sleep(0)
    at_ms = broker.clock.wall_ms() + 1
    broker.clock.advance(1)
    partition = broker.store.state.partition(1)
    looking = asyncio.create_task(
        broker.store.find_offset_at(partition, at_ms - 1, TimeBound.LOWER)
    )
    planning = asyncio.create_task(broker.bounds(at_ms))
    for _ in range(10):
        await asyncio.sleep(0)
    broker.gate.set()
    await writing
    assert await looking == 0
    bounds = await planning
    assert (bounds.next_offset, bounds.offsets_at) == (partition.next_offset, (None,))
    await broker.store.close()


async def test_time_without_a_message_is_the_end_of_then_when_messages_come_meanwhile():
    """None would mean the end of now: a start there passes them over, and an end there has them a
    second time.
    """
    broker = BoundsBroker()
    await broker.host()
    await broker.append(0)
    partition = broker.store.state.partition(1)
    end, looks = partition.next_offset, 0

    async def before_read() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:  # the look for the first message, behind that for the time
            broker.clock.advance(10)
            await broker.append(2)

    broker.before_read = before_read
    bounds = await broker.bounds(broker.clock.wall_ms() + 5)
    assert bounds.next_offset > end
    assert bounds.offsets_at == (end,)
    await broker.store.close()
