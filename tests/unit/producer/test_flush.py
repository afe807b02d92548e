"""`flush` and `close` tell of every message that was given up, and `send_all` loses no message."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from keylane import (
    DeliveryTimeoutError,
    GivenUpError,
    MessageTooLargeError,
)
from keylane.producer import ProducerSettings
from keylane.protocol.errors import ClosedError, Fate, InvalidRequestError, Reason
from keylane.protocol.routing import OrderStrategy
from support.cluster import eventually
from support.raising import raises
from support.scripted_network import QUICK, ScriptedNetwork, producer_on, route_over


async def test_flush_tells_how_many_messages_failed_when_only_some_were_awaited():
    """Of 100 messages that a broker refused in one batch, one is awaited: flush tells of 99, close
    of none.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        network.refusal = InvalidRequestError("not that")
        futures = [producer.send("s", b"v", key=b"k") for _ in range(100)]
        with pytest.raises(InvalidRequestError, match="not that"):
            await futures[30]
        with pytest.raises(GivenUpError, match="99 messages were given up, 0 of them") as told:
            await producer.flush()
        assert isinstance(told.value.__cause__, InvalidRequestError)
        network.refusal = None
        await producer.send("s", b"1", key=b"k")
        await producer.flush()


async def test_close_tells_what_it_gave_up_and_what_may_be_stored():
    """After `close_timeout_ms` queued messages are given up; the error counts them, and those of
    unknown fate.
    """
    network = ScriptedNetwork()
    settings = ProducerSettings(backoff=QUICK.backoff, close_timeout_ms=50, in_flight_max=1)
    producer = producer_on(network, settings)
    await producer.__aenter__()
    await producer.send("s", b"0", key=b"k")
    network.mute.add(1)
    on_its_way = producer.send("s", b"1", key=b"k")
    await eventually(lambda: producer.stats.retries > 0)
    queued = [producer.send("s", b"2", key=b"k") for _ in range(2)]
    with pytest.raises(GivenUpError) as told:
        await producer.close()
    assert (told.value.details, told.value.fate) == ({"messages": 3, "unknown": 1}, Fate.UNKNOWN)
    fates = []
    for future in (on_its_way, *queued):
        with pytest.raises(ClosedError, match="closed") as caught:
            await future
        assert "unless its fate is unknown" in caught.value.hint
        fates.append(caught.value.fate)
    assert fates == [Fate.UNKNOWN, Fate.NOT_DONE, Fate.NOT_DONE]


@pytest.mark.parametrize("error", [ValueError("bad row"), asyncio.CancelledError("stop")])
async def test_block_stores_what_was_sent_when_it_raises(error):
    network = ScriptedNetwork()

    async def work() -> None:
        async with producer_on(network, ProducerSettings(linger_ms=500)) as producer:
            for number in range(3):
                producer.send("s", b"%d" % number, key=b"k")
            raise error

    with pytest.raises(type(error), match=str(error)):
        await work()
    assert [value for stored in network.stored.values() for value in stored] == [b"0", b"1", b"2"]


async def test_block_logs_what_it_waits_for_and_gives_up_when_it_raises(caplog, monkeypatch):
    """The block's own error is raised; the log says how many messages were given up, and how many
    of them may be stored.
    """
    monkeypatch.setattr("keylane.producer.client.QUIET_CLOSE_S", 0.01)
    network = ScriptedNetwork()
    settings = ProducerSettings(backoff=QUICK.backoff, close_timeout_ms=200, in_flight_max=1)

    async def work() -> None:
        async with producer_on(network, settings) as producer:
            await producer.send("s", b"0", key=b"k")
            network.mute.add(1)
            producer.send("s", b"1", key=b"k")
            await eventually(lambda: producer.stats.retries > 0)
            producer.send("s", b"2", key=b"k")
            raise ValueError("bad row")

    with pytest.raises(ValueError, match="bad row"):
        await work()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert lines[-2].startswith(
        "closing the producer waits up to 0.2 s for 2 messages to be stored; the oldest, of "
        "subject s: "
    )
    assert lines[-1].startswith("closed: 2 messages were given up, 1 of them may be stored; ")


async def test_block_ends_at_once_when_it_is_cancelled_again(caplog):
    network = ScriptedNetwork()

    async def work() -> None:
        async with producer_on(network) as producer:
            await producer.send("s", b"0", key=b"k")
            network.mute.add(1)
            producer.send("s", b"1", key=b"k")
            waiting.set()
            await asyncio.sleep(60)

    waiting = asyncio.Event()
    task = asyncio.create_task(work())
    await waiting.wait()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert "closed: 1 message was given up, " in caplog.text


async def test_close_stores_what_other_tasks_send_while_it_waits():
    """The task of the second message goes on in the turn in which `close` finds the first one
    stored.
    """
    network = ScriptedNetwork()
    settings = ProducerSettings(backoff=QUICK.backoff, linger_ms=500)
    async with producer_on(network, settings) as producer:
        await producer.send("s", b"0", key=b"k")
        first = producer.send("s", b"1", key=b"k")

        async def follow() -> None:
            await first
            producer.send("s", b"2", key=b"k")

        following = asyncio.create_task(follow())
        await asyncio.sleep(0)
    await following
    assert network.stored == {1: [b"0", b"1", b"2"]}


async def test_send_is_refused_when_its_task_begins_after_close():
    """Nothing is queued that a closing producer would only give up, as one that may be stored."""
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")

        async def send_late() -> None:
            producer.send("s", b"1", key=b"k")

        late = asyncio.create_task(send_late())  # its first step is behind the end of the block
    with pytest.raises(ClosedError, match="the producer is not open"):
        await late
    assert network.stored == {1: [b"0"]}


async def test_send_all_waits_for_room_before_each_message():
    """1,000 values of 100 KB through a queue of one MiB: all are stored, in order."""
    network = ScriptedNetwork()
    settings = ProducerSettings(backoff=QUICK.backoff, queue_bytes=1 << 20)
    values = [b"%6d" % number + bytes(100_000) for number in range(1_000)]
    async with producer_on(network, settings) as producer:
        sent = await asyncio.wait_for(
            producer.send_all("s", ((b"k", value) for value in values)), 60
        )

    assert sent == 1_000
    assert network.stored == {1: values}


async def test_send_all_tells_how_many_were_queued_when_a_message_is_refused():
    """The messages before it are queued, and the error has their number."""
    network = ScriptedNetwork()
    messages = [(b"k", b"0"), (b"k", b"1"), (b"k", bytes(2 << 20)), (b"k", b"3")]
    async with producer_on(network) as producer:
        with raises(Reason.PARTLY_QUEUED, match="2 messages were queued") as told:
            await producer.send_all("s", messages)
        assert told.value.details == {"queued": 2}
        assert isinstance(told.value.__cause__, MessageTooLargeError)
        await producer.flush()

    assert network.stored == {1: [b"0", b"1"]}


def test_producer_that_is_never_closed_says_how_many_messages_it_gives_up(caplog):
    """The event loop ends before the producer is closed: a WARNING counts the messages that are
    given up.
    """

    async def leave_open() -> None:
        network = ScriptedNetwork()
        producer = producer_on(network)
        await producer.__aenter__()
        await producer.send("s", b"0", key=b"k")
        network.mute.add(1)
        for _ in range(5):
            producer.send("s", b"1", key=b"k")

    asyncio.run(leave_open())
    assert "was never closed: 5 messages were not acked" in caplog.text


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, ValueError])
def test_producer_that_is_never_closed_says_so_when_the_program_ends_at_once(caplog, end):
    """The event loop ends before any task of the producer has made a step."""

    async def leave_open() -> None:
        network = ScriptedNetwork()
        producer = producer_on(network)
        await producer.__aenter__()
        for _ in range(5):
            producer.send("s", b"1", key=b"k")
        raise end

    with pytest.raises(end):
        asyncio.run(leave_open())
    assert "was never closed: 5 messages were not acked" in caplog.text


def test_producer_that_is_never_closed_tells_of_failed_messages(caplog):
    """Messages that were given up, and whose futures were never awaited, are counted when the
    producer is finalized.
    """

    async def leave_open() -> None:
        network = ScriptedNetwork()
        producer = producer_on(network)
        await producer.__aenter__()
        network.mute.add(1)
        for _ in range(3):
            producer.send("s", b"1", key=b"k", timeout_ms=10)
        while producer.stats.failed < 3:
            await asyncio.sleep(0.01)

    asyncio.run(leave_open())
    gc.collect()
    assert "never closed: 3 messages were given up" in caplog.text


@pytest.mark.parametrize("error", [None, 5, ValueError(), DeliveryTimeoutError])
async def test_resume_refuses_what_is_no_error_of_a_message(error):
    async with producer_on(ScriptedNetwork()) as producer:
        with pytest.raises(InvalidRequestError, match="resume takes the DeliveryTimeoutError"):
            producer.resume(error)


async def test_close_logs_messages_given_up_when_it_is_cancelled(caplog):
    """No error can tell of them: the cancellation is what `close` raises."""
    network = ScriptedNetwork()
    network.unreachable.add("broker-1")
    producer = producer_on(network)
    await producer.__aenter__()
    producer.send("s", b"v", key=b"k")
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(0.05)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(ClosedError, match="not open"):
        producer.send("s", b"v", key=b"k")
    await producer.close()
    (line,) = [record.getMessage() for record in caplog.records if "closed:" in record.getMessage()]
    assert "1 message" in line


@pytest.mark.parametrize("third", [(b"k", b"v", b"more"), None, b"k"])
async def test_send_all_tells_what_is_queued_when_an_element_is_no_pair(third):
    """The messages before it are sent; the caller learns how many, and can continue from there."""
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        with raises(Reason.PARTLY_QUEUED) as told:
            await producer.send_all("s", [(b"k", b"0"), (b"k", b"1"), third])
        assert told.value.queued == 2
        await producer.flush()
        assert network.stored[1] == [b"0", b"1"]


@pytest.mark.parametrize("await_every", [0, -1, 1.5, None])
async def test_send_all_queues_nothing_when_its_step_is_no_count(await_every):
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        with pytest.raises(InvalidRequestError, match="await_every"):
            await producer.send_all("s", [(b"k", b"0")], await_every=await_every)
        assert producer.stats.sent == 0


def four_partitions() -> ScriptedNetwork:
    network = ScriptedNetwork()
    ranges = {number + 1: (number * 256, number * 256 + 256) for number in range(4)}
    network.route = route_over(ranges, version=1, strategy=OrderStrategy.STRICT)
    return network


MESSAGES = [(b"key %d" % (number % 97), b"%d" % number) for number in range(5_000)]


@pytest.mark.parametrize("await_every", [1, 7, 1_000])
async def test_send_all_stores_the_messages_of_a_loop_of_send(await_every):
    network, other = four_partitions(), four_partitions()
    async with producer_on(network) as producer:
        assert await producer.send_all("s", MESSAGES, await_every=await_every) == len(MESSAGES)
        assert producer.stats.acked == len(MESSAGES)
    async with producer_on(other) as producer:
        for key, value in MESSAGES:
            producer.send("s", value, key=key)
    assert network.stored == other.stored
    assert len(network.stored) == 4


@pytest.mark.parametrize("batch_count", [2, 50])
async def test_no_batch_of_send_all_has_more_messages_than_the_setting(batch_count):
    network = four_partitions()
    settings = ProducerSettings(backoff=QUICK.backoff, batch_count=batch_count)
    async with producer_on(network, settings) as producer:
        await producer.send("s", b"first", key=b"key 1")
        counts: list[int] = []
        for executor in producer._senders["s"].executors:
            pack = executor._send_batch

            def call(channel, batch, pack=pack):
                counts.append(len(batch))
                return pack(channel, batch)

            executor._send_batch = call  # type: ignore[method-assign]
        await producer.send_all("s", MESSAGES)
    assert 0 < max(counts) <= batch_count
    assert sum(counts) == len(MESSAGES)


async def test_send_all_queues_what_came_before_when_its_messages_raise():
    """The messages that the iterable gave before its error are queued, also within a chunk."""

    def messages():
        yield from MESSAGES[:1_234]
        raise LookupError("no more")

    network = four_partitions()
    async with producer_on(network) as producer:
        await producer.send("s", b"first", key=b"key 1")
        with raises(Reason.PARTLY_QUEUED, match="no more") as told:
            await producer.send_all("s", messages())
        assert told.value.details["queued"] == 1_234
    assert sum(map(len, network.stored.values())) == 1_235


@pytest.mark.parametrize("bad", [(b"k", "text"), (b"k" * 2_000, b"v"), (b"k", 3), (b"k",), 7])
async def test_send_all_tells_how_many_are_queued_when_one_of_a_chunk_is_bad(bad):
    network = four_partitions()
    async with producer_on(network) as producer:
        await producer.send("s", b"first", key=b"key 1")
        with raises(Reason.PARTLY_QUEUED) as told:
            await producer.send_all("s", [*MESSAGES[:700], bad, *MESSAGES[700:]])
        assert told.value.details["queued"] == 700
    stored = {value for values in network.stored.values() for value in values}
    assert stored == {b"first", *(value for _, value in MESSAGES[:700])}


async def test_send_all_of_large_values_waits_for_room():
    """1,000 values of 100 KB are 100 MB, more than the queue holds: none is refused, and none is
    lost.
    """
    network = four_partitions()
    values = [b"%d " % number + bytes(100_000) for number in range(1_000)]
    async with producer_on(network) as producer:
        await producer.send_all("s", ((b"k", value) for value in values))
    assert [value for stored in network.stored.values() for value in stored] == values


@pytest.mark.parametrize("turns", range(6))
def test_close_gives_up_every_message_when_the_event_loop_ends_meanwhile(turns: int):
    """`asyncio.run` cancels the tasks of the close too: no future may stay without an outcome."""
    futures = []
    closed = []

    async def program() -> None:
        network = ScriptedNetwork()
        producer = producer_on(network, ProducerSettings(backoff=QUICK.backoff))
        await producer.__aenter__()
        await producer.send("s", b"0", key=b"k")
        network.mute.add(1)
        futures.extend(producer.send("s", b"%d" % number, key=b"k") for number in range(3))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(producer.close(flush=False))
        for _ in range(turns):
            await asyncio.sleep(0)
        assert not closing.done()
        closed.append(producer)

    asyncio.run(program())
    assert all(future.done() for future in futures)
    assert "closed" in repr(closed[0])
