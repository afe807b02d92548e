"""A producer's id: from the operating system, new for each opening, and replaced where a broker
knows it already.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from dataclasses import replace

import pytest

from keylane import Producer
from keylane.producer.send_future import SendFuture
from keylane.protocol.errors import ClosedError, Fate, Reason
from keylane.rpc.environment import Environment
from support.forked import Child, error_of
from support.raising import raises
from support.scripted_network import QUICK, ScriptedNetwork, producer_on

SINGLE = replace(QUICK, batch_count=1)
"""Each message is a batch of its own, and several are in flight at once."""


def ids_at(network: ScriptedNetwork) -> set[int]:
    return {producer_id for _, producer_id in network.producers}


async def send_some(producer: Producer, *values: bytes) -> None:
    for future in [producer.send("s", value, key=b"k") for value in values]:
        assert not (await future).duplicate


async def test_producer_id_does_not_repeat_when_the_users_random_generator_does():
    """Two producers with equal generators store what each of them sends."""
    network = ScriptedNetwork()
    for value in (b"0", b"1"):
        rng = random.Random(7)
        async with Producer(
            "meta:1", settings=QUICK, _environment=Environment(network=network, rng=rng)
        ) as producer:
            await send_some(producer, value)
    assert network.stored == {1: [b"0", b"1"]}
    assert len(ids_at(network)) == 2
    assert random.Random(7).getrandbits(63) | 1 not in ids_at(network)


async def test_second_opening_begins_anew(caplog):
    """The second opening has its own id, counts and queue; messages given up by the first are not
    counted in it.
    """
    network = ScriptedNetwork()
    producer = producer_on(network)
    for values in ((b"0", b"1"), (b"2",)):
        async with producer:
            await send_some(producer, *values)
            assert producer.stats.sent == producer.stats.acked == len(values)
            network.lost.add(1)
            producer.send("s", b"lost", key=b"k")
            await producer.close(flush=False)
            network.lost.clear()
        with pytest.raises(ClosedError):
            producer.send("s", b"", key=b"k")
    assert network.stored == {1: [b"0", b"1", b"2"]}
    assert len(ids_at(network)) == 2
    assert "used by another producer" not in caplog.text


async def test_open_producer_is_not_opened_again():
    """It is refused while the producer is open or closing; the first opening still works."""
    producer = producer_on(ScriptedNetwork())
    async with producer:
        with raises(Reason.ALREADY_OPEN):
            await producer.__aenter__()
        await send_some(producer, b"0")
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(0)
        with raises(Reason.ALREADY_OPEN):
            await producer.__aenter__()
        await closing


def opened_in(loop: asyncio.AbstractEventLoop, network: ScriptedNetwork) -> Producer:
    producer = producer_on(network)
    loop.run_until_complete(producer.__aenter__())
    loop.run_until_complete(send_some(producer, b"0"))
    return producer


async def flush(producer: Producer) -> None:
    await producer.flush()


async def ask_room(producer: Producer) -> None:
    await producer.drain()


async def close(producer: Producer) -> None:
    await producer.close()


async def send_one(producer: Producer) -> None:
    producer.send("s", b"elsewhere", key=b"k")


def refusals(producer: Producer) -> list[str]:
    """The errors of each call in a new event loop, and of `send` without a loop."""
    errors = [
        error_of(lambda call=call: asyncio.run(call(producer)))
        for call in (send_one, flush, ask_room)
    ]
    return [*errors, error_of(lambda: producer.send("s", b"elsewhere", key=b"k"))]


def test_forked_producer_is_refused():
    """In the child no message is sent and `close` does nothing; the parent sends its queued
    messages.
    """
    network = ScriptedNetwork()
    loop = asyncio.new_event_loop()
    producer = opened_in(loop, network)

    async def queue() -> None:
        producer.send("s", b"1", key=b"k")

    loop.run_until_complete(queue())  # the batch that gathers is in both processes

    def child() -> list[str]:
        errors = refusals(producer)
        asyncio.run(close(producer))
        return [*errors, error_of(lambda: asyncio.run(producer.__aenter__()))]

    assert Child(child).result() == ["FORKED"] * 5
    loop.run_until_complete(send_some(producer, b"2"))
    loop.run_until_complete(producer.close())
    loop.close()
    assert network.stored == {1: [b"0", b"1", b"2"]}


def test_another_loop_or_thread_is_refused():
    """A `send`, or the wait of a future, raises at once when its event loop is not the
    producer's.
    """
    network = ScriptedNetwork()
    loop = asyncio.new_event_loop()
    producer = opened_in(loop, network)
    errors = [*refusals(producer), error_of(lambda: asyncio.run(close(producer)))]
    thread = threading.Thread(target=lambda: errors.extend(refusals(producer)))
    thread.start()
    thread.join()
    assert errors == ["OTHER_LOOP"] * 9

    network.lost.add(1)

    async def queue() -> None:
        futures.append(producer.send("s", b"1", key=b"k"))

    async def wait() -> None:
        await futures[0]

    futures = []
    loop.run_until_complete(queue())
    with raises(Reason.OTHER_LOOP):
        asyncio.run(wait())
    network.lost.clear()
    loop.run_until_complete(producer.close())
    loop.close()
    assert network.stored == {1: [b"0", b"1"]}


def twins(network: ScriptedNetwork) -> list[Producer]:
    """Two producers whose first id is the same, as after a copy of a whole machine."""
    first = random.Random(5).getrandbits(63)
    producers = []
    for number in (1, 2):
        draws = iter((first, 100 + number))
        identity = lambda _bits, draws=draws: next(draws)  # noqa: E731
        producers.append(
            Producer(
                "meta:1",
                settings=SINGLE,
                _environment=Environment(network=network, draw_identity=identity),
            )
        )
    return producers


async def test_producers_of_one_id_store_everything_in_order(caplog):
    """A broker refuses the second one's batches; it logs that, takes another id, and each message
    is stored once.
    """
    network = ScriptedNetwork()
    first, other = twins(network)
    async with first, other:
        await send_some(first, b"a0", b"a1", b"a2")
        with caplog.at_level(logging.WARNING, logger="keylane.producer"):
            futures = []
            for number in range(6):
                futures.append(other.send("s", b"b%d" % number, key=b"k"))
                await asyncio.sleep(0)
            receipts = [await future for future in futures]
        await send_some(first, b"a3")
        assert other.stats.failed == first.stats.failed == 0
    assert not any(receipt.duplicate for receipt in receipts)
    stored = network.stored[1]
    assert sorted(stored) == [b"a0", b"a1", b"a2", b"a3", *(b"b%d" % n for n in range(6))]
    for name in (b"a", b"b"):
        own = [value for value in stored if value.startswith(name)]
        assert own == sorted(own)
    assert any("used by another producer" in record.getMessage() for record in caplog.records)


async def test_batches_behind_a_refused_batch_are_not_stored_when_an_id_is_shared():
    """A batch with the next sequence is not stored when an older batch of the same producer was
    refused.
    """
    network = ScriptedNetwork()
    first, other = twins(network)
    async with first, other:
        await send_some(first, b"a0")
        futures = [other.send("s", b"b%d" % number, key=b"k") for number in range(3)]
        for future in futures:
            await future
    assert network.stored == {1: [b"a0", b"b0", b"b1", b"b2"]}


def test_send_in_another_thread_is_refused_while_a_batch_gathers():
    """Two threads that fill a batch could give a message the key of another: every send of the
    second thread raises.
    """
    network = ScriptedNetwork()
    loop = asyncio.new_event_loop()
    producer = opened_in(loop, network)

    def send_elsewhere(errors: list[str]) -> None:
        errors.append(error_of(lambda: producer.send("s", b"elsewhere", key=b"k")))
        errors.append(error_of(lambda: producer.send("s", b"elsewhere")))

    async def send_beside_a_thread() -> list[str]:
        errors: list[str] = []
        future = producer.send("s", b"1", key=b"k")
        thread = threading.Thread(target=send_elsewhere, args=(errors,))
        thread.start()
        thread.join()
        await future
        return errors

    assert loop.run_until_complete(send_beside_a_thread()) == ["OTHER_LOOP"] * 2
    loop.run_until_complete(producer.close())
    loop.close()
    assert network.stored == {1: [b"0", b"1"]}


def test_future_awaited_in_another_loop_tells_an_unknown_fate():
    """The message is in flight: a caller that reads "not stored" would send it twice."""
    network = ScriptedNetwork()
    loop = asyncio.new_event_loop()
    producer = opened_in(loop, network)

    async def queue() -> SendFuture:
        return producer.send("s", b"1", key=b"k")

    async def wait(future: SendFuture) -> None:
        await future

    future = loop.run_until_complete(queue())
    with raises(Reason.OTHER_LOOP) as refused:
        asyncio.run(wait(future))
    assert refused.value.fate is Fate.UNKNOWN
    loop.run_until_complete(producer.close())
    loop.close()
    assert network.stored == {1: [b"0", b"1"]}
