"""`send` while the queue is full: it waits when it is awaited, and raises when it is not."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from keylane import Producer, ProducerSettings
from keylane.producer.send_budget import UNAWAITED_MAX
from keylane.protocol.errors import (
    AccessDeniedError,
    DeliveryTimeoutError,
    Fate,
    InvalidRequestError,
    KeyHaltedError,
    QueueFullError,
    QuotaExceededError,
)
from support.cluster import eventually
from support.scripted_network import QUICK, ScriptedNetwork, producer_on

LIMIT = 1 << 20
VALUE_BYTES = 100_000
SETTINGS = ProducerSettings(queue_bytes=LIMIT, batch_bytes=VALUE_BYTES, backoff=QUICK.backoff)


def value_of(text: str) -> bytes:
    return text.encode().ljust(VALUE_BYTES, b".")


def texts(network: ScriptedNetwork) -> list[str]:
    return [value.rstrip(b".").decode() for value in network.stored[1]]


@asynccontextmanager
async def producer_of_slow_broker():
    """A producer whose broker answers nothing until it is removed from `network.lost`."""
    network = ScriptedNetwork()
    async with producer_on(network, SETTINGS) as producer:
        await producer.send("s", b"first", key=b"k")
        network.lost.add(1)
        yield network, producer
        network.lost.clear()
        await producer.flush()


def fill(producer: Producer) -> list[str]:
    """Send without awaiting until that raises; returns what was queued."""
    queued: list[str] = []
    while len(queued) < 1_000:
        text = f"bare {len(queued)}"
        try:
            producer.send("s", value_of(text), key=b"k")
        except QueueFullError:
            return queued
        queued.append(text)
    raise AssertionError("the queue is never full")


async def test_bare_sends_raise_when_the_queue_is_full_and_lose_nothing_queued():
    """One message over the limit is queued, because `send` cannot know that it is not awaited; the
    next is refused.
    """
    async with producer_of_slow_broker() as (network, producer):
        queued = fill(producer)
        assert LIMIT // VALUE_BYTES < len(queued) <= LIMIT // VALUE_BYTES + 3
        for _ in range(5):
            with pytest.raises(QueueFullError):
                producer.send("s", value_of("refused"), key=b"k")
        network.lost.clear()
        await asyncio.wait_for(producer.drain(), 30)
        producer.send("s", value_of("after"), key=b"k")
        await producer.flush()
    assert texts(network) == ["first", *queued, "after"]


async def test_awaited_sends_never_raise_when_the_queue_is_full():
    """Ten tasks await their sends beside one that filled the queue; each waits, and their order
    stays.
    """
    async with producer_of_slow_broker() as (network, producer):
        queued = fill(producer)

        async def send_and_wait(task: int) -> None:
            for number in range(5):
                await producer.send("s", value_of(f"{task} {number}"), key=b"k")

        tasks = [asyncio.create_task(send_and_wait(task)) for task in range(10)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in tasks)
        with pytest.raises(QueueFullError):  # this task awaited nothing
            producer.send("s", value_of("refused"), key=b"k")
        network.lost.clear()
        await asyncio.wait_for(asyncio.gather(*tasks), 30)
    stored = texts(network)
    assert stored[: len(queued) + 1] == ["first", *queued]
    assert len(stored) == len(queued) + 1 + 50
    for task in range(10):
        assert [text for text in stored if text.startswith(f"{task} ")] == [
            f"{task} {number}" for number in range(5)
        ]


async def test_task_whose_wait_was_cancelled_is_refused_when_the_queue_is_full():
    """Waits with a time-out over and over add one message to the queue, not one for each
    time-out.
    """
    async with producer_of_slow_broker() as (network, producer):
        queued = fill(producer)

        async def send_impatiently() -> int:
            given_up = 0
            for number in range(10):
                try:
                    async with asyncio.timeout(0.01):
                        await producer.send("s", value_of(f"impatient {number}"), key=b"k")
                except TimeoutError:
                    given_up += 1
                except QueueFullError:
                    pass
            return given_up

        assert await asyncio.create_task(send_impatiently()) == 1
        network.lost.clear()
        await producer.flush()
    assert texts(network) == ["first", *queued, "impatient 0"]


async def test_sends_of_many_tasks_raise_when_too_many_of_them_await_nothing():
    """A task for each message, none of which waits, cannot fill the memory."""
    async with producer_of_slow_broker() as (_network, producer):
        fill(producer)

        async def send_once() -> None:
            producer.send("s", b"", key=b"k")

        tasks = [asyncio.create_task(send_once()) for _ in range(UNAWAITED_MAX + 10)]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [error for error in outcomes if isinstance(error, QueueFullError)]
        assert len(refused) == 11  # one of the 64 is the test itself
        assert all(error is None for error in outcomes if error not in refused)


async def test_send_that_raises_over_the_limit_counts_for_nothing():
    """After a malformed message, or one of a halted key, the task may still queue its one message
    over the limit.
    """
    async with producer_of_slow_broker() as (network, producer):
        fill(producer)

        async def send_three() -> None:
            with pytest.raises(InvalidRequestError):
                producer.send("s", "text", key=b"k")  # type: ignore[arg-type]
            with pytest.raises(DeliveryTimeoutError):
                await producer.send("s", b"late", key=b"halted", timeout_ms=20)
            with pytest.raises(KeyHaltedError):
                producer.send("s", b"newer", key=b"halted")
            producer.send("s", b"taken", key=b"k")
            with pytest.raises(QueueFullError):
                producer.send("s", b"refused", key=b"k")

        await asyncio.create_task(send_three())
        network.lost.clear()
        await producer.flush()
    assert texts(network)[-1] == "taken"


async def test_strict_keeps_order_when_a_quota_refuses_a_batch_and_not_the_next_one():
    """A refusal that ends by itself gives nothing up: the batch is sent again, before newer
    ones.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        network.refusal = QuotaExceededError(principal="p", retry_after_ms=6_000)
        older = producer.send("s", b"1", key=b"k")
        await eventually(lambda: producer.stats.retries > 2)
        newer = producer.send("s", b"2", key=b"k")
        network.refusal = None
        for future in (older, newer):
            await asyncio.wait_for(future, 30)
    assert network.stored == {1: [b"0", b"1", b"2"]}


async def test_strict_tells_each_message_that_no_later_try_would_store_and_keeps_the_others_in_order():
    """
    The rights are taken away, and are back a moment later.

    The refused message is not stored, and its future says so: it is never stored behind newer ones
    by itself.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        network.refusal = AccessDeniedError(principal="p", right="produce", subject="s")
        refused = producer.send("s", b"1", key=b"k")
        with pytest.raises(AccessDeniedError) as caught:
            await asyncio.wait_for(refused, 30)
        network.refusal = None
        for value in (b"2", b"3"):
            await asyncio.wait_for(producer.send("s", value, key=b"k"), 30)
    assert caught.value.fate is Fate.NOT_DONE
    assert network.stored == {1: [b"0", b"2", b"3"]}
