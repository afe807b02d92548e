"""Appends that find no room in the queue for the disk: each gets its turn, in order, and what waits
is bounded.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane.broker.store import group_commit as admission
from keylane.broker.store.group_commit import AdmissionQueue
from keylane.broker.store.store import Store
from keylane.protocol.errors import (
    BrokerReadOnlyError,
    FlushFailedError,
    OverloadedError,
    SequenceGapError,
)
from keylane.protocol.frames import Appended
from keylane.protocol.limits import BATCH_BYTES_MAX
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store

LARGE = b"x" * ((1 << 20) - 100)
SMALL = b"x" * 20_000


class SlowDisk:
    """A store of the smallest queue, each of whose commits waits to be let go."""

    def __init__(self) -> None:
        self.commits = asyncio.Semaphore(0)
        self.store: Store = open_store(
            SimDisk(), clock=ManualClock(), queued_bytes_max=BATCH_BYTES_MAX
        )
        self.desk = Desk(self.store, ManualClock())

    async def start(self) -> SlowDisk:
        await self.desk.host()
        self.store.commit._run_blocking = self._blocking  # type: ignore[method-assign]
        return self

    async def _blocking(self, function, /, *args):
        await self.commits.acquire()
        return function(*args)

    def append(self, data: bytes) -> asyncio.Task[Appended]:
        return asyncio.create_task(self.desk.append(data))


@pytest.fixture
async def disk() -> SlowDisk:
    return await SlowDisk().start()


async def test_large_append_gets_its_turn_beside_an_endless_stream_of_small_ones(disk: SlowDisk):
    """Before as many small ones are stored as the queue holds, though there are always more of
    them.
    """
    small = iter(range(10_000))
    stored: list[int] = []

    async def send() -> None:
        while True:
            number = next(small)
            await disk.desk.append(batch(producer_id=1_000 + number, count=1, value=SMALL))
            stored.append(number)

    senders = [asyncio.create_task(send()) for _ in range(30)]
    await asyncio.sleep(0.01)
    large = disk.append(batch(producer_id=7, count=1, value=LARGE))
    commits = 0
    while not large.done():
        disk.commits.release()
        commits += 1
        await asyncio.sleep(0.002)
        assert commits < 20
    assert (await large).base_offset >= 0
    for sender in senders:
        sender.cancel()
    ended = await asyncio.gather(*senders, return_exceptions=True)
    assert {type(outcome) for outcome in ended} <= {asyncio.CancelledError, OverloadedError}


async def test_waiting_appends_are_stored_in_the_order_of_arrival(disk: SlowDisk):
    """Batches of one producer that wait, large and small, are decided as they came."""
    disk.store.commit._admission._waiting_max = 64
    data = [
        batch(sequence=number, count=1, value=LARGE if number % 3 == 0 else SMALL)
        for number in range(12)
    ]
    tasks = [disk.append(record) for record in data]
    for _ in range(40):
        disk.commits.release()
    answers = await asyncio.gather(*tasks)
    assert [answer.base_offset for answer in answers] == list(range(12))


async def test_append_is_refused_when_too_many_wait(disk: SlowDisk):
    """What waits is bounded by number; the refused is told that nothing was done, and may come
    again.
    """
    first = disk.append(batch(count=1, value=LARGE))
    await asyncio.sleep(0)
    waits = [
        disk.append(batch(producer_id=100 + number, count=1, value=SMALL if number else LARGE))
        for number in range(disk.store.commit._admission._waiting_max)
    ]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="too many appends wait"):
        await disk.desk.append(batch(producer_id=1, count=1, value=SMALL))
    for _ in range(100):
        disk.commits.release()
    await asyncio.gather(first, *waits)
    assert (await disk.desk.append(batch(producer_id=1, count=1, value=SMALL))).base_offset >= 0


async def test_append_is_refused_when_its_turn_takes_too_long(disk: SlowDisk, monkeypatch):
    """A disk that stands still is told as NOT_DONE before the producer gives up; the line goes on
    after that.
    """
    monkeypatch.setattr(admission, "WAIT_MS", 50)
    first = disk.append(batch(count=1, value=LARGE))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="waited 50 ms for the disk"):
        await disk.desk.append(batch(producer_id=1, count=1, value=LARGE))
    disk.commits.release()
    await first
    assert not disk.store.commit._admission.waiting
    assert not disk.store.commit._admission.reserved_bytes


async def test_append_that_waits_hears_of_a_failed_disk(disk: SlowDisk):
    """After a failed write no append waits for room that never comes."""
    first = disk.append(batch(count=1, value=LARGE))
    await asyncio.sleep(0)
    waits = disk.append(batch(producer_id=1, count=1, value=LARGE))
    await asyncio.sleep(0)

    def fail(*_args: object) -> None:
        raise FlushFailedError("the disk is gone")

    disk.store.commit._log.write = fail  # type: ignore[method-assign]
    disk.commits.release()
    with pytest.raises(FlushFailedError):
        await first
    with pytest.raises(BrokerReadOnlyError):
        await waits


async def test_line_gives_the_room_of_a_caller_that_left_to_the_next():
    """A caller that is cancelled before its turn, or as it is let in, does not block the next
    one.
    """
    room = 0
    queue = AdmissionQueue(8, lambda length: length <= room)
    order: list[str] = []

    async def wait(name: str) -> None:
        async with queue.admission(1):
            order.append(name)

    tasks = [asyncio.create_task(wait(name)) for name in "abc"]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    room = 1
    queue.admit()
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["c"]
    assert (queue.waiting, queue.reserved_bytes) == (0, 0)


@pytest.mark.parametrize("refused", [True, False], ids=["refused", "repeat"])
async def test_line_goes_on_after_an_append_that_takes_no_room(disk: SlowDisk, refused: bool):
    """A refused append or a repeat that had its turn leaves its room to the next, though no commit
    is under way.
    """
    stored = batch(producer_id=7, count=1, value=LARGE)
    first = disk.append(stored)
    await asyncio.sleep(0)
    useless = batch(producer_id=7, sequence=9, count=1, value=LARGE) if refused else stored
    takes_none = disk.append(useless)
    behind = [disk.append(batch(producer_id=number, count=1, value=LARGE)) for number in (8, 9)]
    await asyncio.sleep(0)
    assert disk.store.commit._admission.waiting == 3
    for _ in range(3):
        disk.commits.release()
    async with asyncio.timeout(admission.WAIT_MS / 1000 / 2):
        await first
        if refused:
            with pytest.raises(SequenceGapError):
                await takes_none
        else:
            assert (await takes_none).duplicate
        assert [answer.base_offset for answer in await asyncio.gather(*behind)] == [1, 2]


async def test_line_lets_no_append_pass_one_that_came_before_it():
    """What arrives between a promise and its append is decided after it, also if both have room."""
    room = 0
    queue = AdmissionQueue(8, lambda length: length <= room)
    order: list[str] = []

    async def append(name: str) -> None:
        if not (queue.empty and room):
            async with queue.admission(1):
                order.append(name)
        else:
            order.append(name)

    older = asyncio.create_task(append("older"))
    await asyncio.sleep(0)
    room = 8
    newer = asyncio.create_task(append("newer"))  # it runs before the older one hears of its room
    queue.admit()
    await asyncio.gather(older, newer)
    assert order == ["older", "newer"]
    assert (queue.waiting, queue.reserved_bytes) == (0, 0)
    assert queue.empty
