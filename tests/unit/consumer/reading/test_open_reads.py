"""The long polls of a reader: which are due, what they return, and when they end."""

from __future__ import annotations

import asyncio

import pytest

from keylane.consumer.reading.reads import POLL_MS, OpenReads
from keylane.protocol.errors import ClosedError, NotSentError
from keylane.protocol.frames import Batches, Read
from keylane.protocol.limits import READ_WAIT_MS
from sim.machines.clock import ManualClock


class WaitingBroker:
    """A broker whose reads wait until the test lets them return."""

    address = "b:1"

    def __init__(self) -> None:
        self.asked: dict[int, asyncio.Future[bytes]] = {}

    async def call(self, request: Read, *, wait_ms: int = 0):
        assert request.wait_ms == wait_ms
        assert wait_ms in {0, READ_WAIT_MS}
        word = self.asked[request.partition_id] = asyncio.get_running_loop().create_future()
        payload = await word
        end = request.offset + len(payload)
        return Batches(0, end, end, False), memoryview(payload)


@pytest.fixture
async def broker() -> WaitingBroker:
    return WaitingBroker()


@pytest.fixture
async def waits(broker: WaitingBroker) -> OpenReads:
    waits = OpenReads(ManualClock())
    for partition_id in (1, 2):
        waits.begin(broker, partition_id, 5, bytes_max=100)
    await asyncio.sleep(0)
    return waits


async def test_wait_is_due_once_when_it_is_answered(waits, broker):
    assert waits.find_due([1, 2, 3]) == [3]
    news = asyncio.create_task(waits.wait(None))
    broker.asked[2].set_result(b"xx")
    await asyncio.wait_for(news, 1)
    assert waits.find_due([1, 2, 3]) == [2, 3]
    assert [waits.pending(each) for each in (1, 2, 3)] == [True, False, False]
    assert (await waits.read(broker, 2, 5, bytes_max=100))[0].upto == 7
    assert waits.find_due([2]) == [2]
    await waits.end()


async def test_wait_is_begun_once_when_it_is_asked_for_again(waits, broker):
    word = broker.asked[1]
    waits.begin(broker, 1, 5, bytes_max=100)
    await asyncio.sleep(0)
    assert broker.asked[1] is word
    await waits.end()


async def test_wait_ends_when_the_address_is_another_or_the_partition_is_not_read(waits, broker):
    waits.retain({1: "b:1", 2: "b:2"})
    assert waits.find_due([1, 2]) == [2]
    waits.retain({})
    assert len(waits) == 0
    await waits.end()
    await asyncio.sleep(0)
    assert all(word.cancelled() for word in broker.asked.values())


async def test_answer_that_has_come_is_kept_when_the_address_is_another(waits, broker):
    broker.asked[1].set_result(b"x")
    await asyncio.sleep(0.01)
    waits.retain({1: "b:2"})
    assert (await waits.read(broker, 1, 5, bytes_max=100))[0].upto == 6


async def test_failure_is_told_to_who_takes_it(waits, broker):
    broker.asked[1].set_exception(NotSentError("gone"))
    await asyncio.wait_for(waits.wait(None), 1)
    with pytest.raises(NotSentError):
        await waits.read(broker, 1, 5, bytes_max=100)
    await waits.end()


async def test_read_stays_open_when_its_caller_gives_up(waits, broker):
    """A broker that never replies is noticed although every caller is more impatient."""
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await waits.read(broker, 3, 0, bytes_max=100)
        word = broker.asked[3]
    assert waits.find_due([3]) == []
    assert broker.asked[3] is word
    word.set_exception(NotSentError("no answer"))
    await asyncio.wait_for(waits.wait(None), 1)
    assert waits.find_due([3]) == [3]
    with pytest.raises(NotSentError):
        await waits.read(broker, 3, 0, bytes_max=100)
    await waits.end()


async def test_read_is_told_when_the_reader_is_closed(waits, broker):
    reading = asyncio.create_task(waits.read(broker, 3, 0, bytes_max=100))
    await asyncio.sleep(0.01)
    await waits.end()
    with pytest.raises(ClosedError):
        await reading


async def test_next_read_is_not_due_before_a_pause_when_a_broker_does_not_wait(waits, broker):
    """A broker that is stopping replies at once, without messages."""
    began = asyncio.get_running_loop().time()
    broker.asked[1].set_result(b"")
    await waits.wait(None)
    assert asyncio.get_running_loop().time() - began >= POLL_MS / 1000 - 0.01
    assert (await waits.read(broker, 1, 5, bytes_max=100))[0].upto == 5
    await waits.end()


async def test_news_are_waited_for_no_longer_when_all_ends(waits):
    waits.find_due([])
    news = asyncio.create_task(waits.wait(None))
    await asyncio.sleep(0)
    await waits.end()
    await asyncio.wait_for(news, 1)
    assert len(waits) == 0


async def test_news_are_waited_for_at_most_so_long(waits):
    waits.find_due([])
    await waits.wait(1)
    assert len(waits) == 2
    await waits.end()
