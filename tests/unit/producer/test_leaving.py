"""Messages that leave a partition which does not answer, and what their receipts declare."""

from __future__ import annotations

import asyncio
import logging

import pytest

from keylane.producer import ProducerSettings
from keylane.protocol.errors import NotSentError, OutcomeUnknownError
from keylane.protocol.routing import OrderStrategy, logical_partition
from support.cluster import eventually
from support.scripted_network import (
    QUICK,
    ScriptedChannel,
    ScriptedNetwork,
    producer_on,
    route_over,
)

BEST_TRIED, STRICT = OrderStrategy.BEST_TRIED, OrderStrategy.STRICT
HALVES = {1: (0, 512), 2: (512, 1024)}


def key_in(start: int, end: int) -> bytes:
    keys = (b"k%d" % number for number in range(10_000))
    return next(key for key in keys if start <= logical_partition(key) < end)


CLOSED, RIGHT = key_in(0, 512), key_in(512, 1024)


def network_of(strategy: OrderStrategy, **more) -> ScriptedNetwork:
    """Two partitions, each of a broker of its own."""
    network = ScriptedNetwork()
    network.route = route_over(HALVES, version=1, strategy=strategy, **more)
    return network


def leaving_after(milliseconds: int, **more) -> ProducerSettings:
    return ProducerSettings(backoff=QUICK.backoff, leave_after_ms=milliseconds, **more)


async def test_restart_of_a_broker_reorders_nothing():
    """BEST_TRIED: a partition that fails for less than `leave_after_ms` keeps its messages, the
    newer ones too.
    """
    network = network_of(BEST_TRIED)
    async with producer_on(network, leaving_after(600_000)) as producer:
        await producer.send("s", b"0", key=CLOSED)
        network.unreachable.add("broker-1")
        futures = [producer.send("s", b"1", key=CLOSED)]
        await eventually(lambda: producer.stats.retries > 5)
        futures += [producer.send("s", b"%d" % number, key=CLOSED) for number in (2, 3)]
        at_home = producer.send("s", b"0", key=RIGHT)
        await asyncio.wait_for(at_home, 30)
        network.unreachable.clear()
        receipts = [await asyncio.wait_for(future, 30) for future in futures]

    assert network.stored == {1: [b"0", b"1", b"2", b"3"], 2: [b"0"]}
    assert not any(receipt.reordered or receipt.duplicate for receipt in receipts)


async def test_newer_messages_wait_for_the_decision_about_older_ones():
    """BEST_TRIED: after `leave_after_ms` all messages leave together, in order and declared; later
    ones follow them.
    """
    network = network_of(BEST_TRIED)
    async with producer_on(network, leaving_after(60)) as producer:
        await producer.send("s", b"0", key=CLOSED)
        network.unreachable.add("broker-1")
        futures = [producer.send("s", b"1", key=CLOSED)]
        await eventually(lambda: producer.stats.retries > 0)
        futures += [producer.send("s", b"%d" % number, key=CLOSED) for number in (2, 3)]
        assert 2 not in network.stored
        receipts = [await asyncio.wait_for(future, 30) for future in futures]
        later = await asyncio.wait_for(producer.send("s", b"4", key=CLOSED), 30)
        network.unreachable.clear()
        await eventually(lambda: not producer._senders["s"].careful)
        home = await producer.send("s", b"5", key=CLOSED)

    assert network.stored == {1: [b"0", b"5"], 2: [b"1", b"2", b"3", b"4"]}
    assert all(receipt.reordered and not receipt.duplicate for receipt in (*receipts, later))
    assert not home.reordered


async def test_receipt_is_reordered_only_for_messages_that_left_when_a_batch_mixes_them():
    """Messages in their own partition are not declared reordered when they share a batch with
    others.
    """
    network = network_of(BEST_TRIED)
    async with producer_on(network, leaving_after(20)) as producer:
        for key in (CLOSED, RIGHT):
            await producer.send("s", b"0", key=key)
        network.unreachable.add("broker-1")
        assert (await asyncio.wait_for(producer.send("s", b"1", key=CLOSED), 30)).reordered
        keys = [CLOSED, RIGHT, b"", CLOSED, RIGHT]
        futures = [producer.send("s", b"2", key=key) for key in keys]
        batches = {future._batch for future in futures}
        receipts = [await asyncio.wait_for(future, 30) for future in futures]

    assert len(batches) == 1
    assert [receipt.reordered for receipt in receipts] == [True, False, False, True, False]


async def test_message_may_be_stored_twice_when_its_first_home_had_it():
    """A receipt declares a possible duplicate if the message was sent without an answer before it
    left, and only then.
    """
    network = network_of(BEST_TRIED)
    settings = leaving_after(60, in_flight_max=1)
    async with producer_on(network, settings) as producer:
        await producer.send("s", b"0", key=CLOSED)
        network.mute.add(1)  # stores what it is sent and answers nothing
        futures = [producer.send("s", b"1", key=CLOSED)]
        await eventually(lambda: producer.stats.retries > 0)
        futures.append(producer.send("s", b"2", key=CLOSED))
        receipts = [await asyncio.wait_for(future, 30) for future in futures]

    assert network.stored == {1: [b"0", b"1"], 2: [b"1", b"2"]}
    assert [receipt.duplicate for receipt in receipts] == ["possible", False]
    assert all(receipt.reordered for receipt in receipts)


async def test_best_tried_gives_up_after_its_time_and_says_why():
    """With no broker left a message is given up after `give_up_after_ms` and `tries_min` tries, and
    is not stored.
    """
    network = network_of(BEST_TRIED)
    settings = leaving_after(5, give_up_after_ms=100, tries_min=3)
    async with producer_on(network, settings) as producer:
        await producer.send("s", b"0", key=CLOSED)
        network.unreachable |= {"broker-1", "broker-2"}
        with pytest.raises(NotSentError):
            await asyncio.wait_for(producer.send("s", b"1", key=CLOSED), 30)


class HalfDeafChannel(ScriptedChannel):
    """The answers to what is stored at the first two offsets are lost, however often it is sent."""

    def _answer(self, request, base: int, *, duplicate: bool):
        if base < 2:
            raise OutcomeUnknownError
        return super()._answer(request, base, duplicate=duplicate)


async def test_order_is_kept_when_a_batch_is_given_up_before_one_that_is_stored():
    """BEST_TRIED: a batch that was answered is sent again with those before it whose answers are
    lost, in their order.
    """
    network = network_of(BEST_TRIED)

    async def open_channel(address: str, *, timeout_ms: int) -> HalfDeafChannel:
        return HalfDeafChannel(network, address)

    network.open_channel = open_channel
    network.route = route_over({1: (0, 1024)}, version=1, strategy=BEST_TRIED)
    settings = leaving_after(5, give_up_after_ms=100, tries_min=3, batch_count=1, in_flight_max=3)
    async with producer_on(network, settings) as producer:
        first, *others = [producer.send("s", b"%d" % number, key=CLOSED) for number in range(3)]
        with pytest.raises(OutcomeUnknownError):
            await asyncio.wait_for(first, 30)
        receipts = [await asyncio.wait_for(future, 30) for future in others]

    assert network.stored == {1: [b"0", b"1", b"2", b"1", b"2"]}
    assert [receipt.offset for receipt in receipts] == [3, 4]
    assert [receipt.duplicate for receipt in receipts] == ["possible", "possible"]
    assert not any(receipt.reordered for receipt in receipts)


@pytest.mark.parametrize("strategy", [STRICT, BEST_TRIED])
@pytest.mark.parametrize("static", [False, True])
async def test_messages_without_a_key_pass_over_a_partition_that_does_not_answer(strategy, static):
    """Under both strategies, unsent messages without a key go elsewhere at once, and are never
    declared reordered.
    """
    network = network_of(strategy, static=static)
    async with producer_on(network, leaving_after(600_000)) as producer:
        for key in (CLOSED, RIGHT):
            await producer.send("s", b"0", key=key)
        network.unreachable.add("broker-1")
        keyed = producer.send("s", b"keyed", key=CLOSED)
        futures = [producer.send("s", b"%d" % number) for number in range(20)]
        receipts = [await asyncio.wait_for(future, 30) for future in futures]
        assert not keyed.done()
        receipts += [await asyncio.wait_for(producer.send("s", b"later"), 30) for _ in range(20)]
        network.unreachable.clear()
        assert (await asyncio.wait_for(keyed, 30)).partition_id == 1

    assert {receipt.partition_id for receipt in receipts} == {2}
    assert not any(receipt.reordered or receipt.duplicate for receipt in receipts)
    assert network.stored[1] == [b"0", b"keyed"]


async def test_message_without_a_key_stays_when_it_may_be_stored():
    """STRICT: a message that was sent without an answer waits for its broker, so that it is stored
    once.
    """
    network = network_of(STRICT)
    settings = leaving_after(0)
    async with producer_on(network, settings) as producer:
        await producer.send("s", b"0", key=CLOSED)
        network.mute |= {1, 2}
        future = producer.send("s", b"1")
        await eventually(lambda: producer.stats.retries > 2)
        network.mute.clear()
        receipt = await asyncio.wait_for(future, 30)

    assert receipt.duplicate is True
    assert sum(values.count(b"1") for values in network.stored.values()) == 1


async def test_static_subject_keeps_keyed_messages_in_their_queue():
    """Also under BEST_TRIED, and however long it takes."""
    network = network_of(BEST_TRIED, static=True)
    async with producer_on(network, leaving_after(0)) as producer:
        for key in (CLOSED, RIGHT):
            await producer.send("s", b"0", key=key)
        network.unreachable.add("broker-1")
        future = producer.send("s", b"1", key=CLOSED)
        await eventually(lambda: producer.stats.retries > 5)
        network.unreachable.clear()
        receipt = await asyncio.wait_for(future, 30)

    assert (receipt.partition_id, receipt.reordered) == (1, False)


async def test_messages_leave_a_silent_broker_when_the_producer_started_meanwhile():
    """BEST_TRIED: a partition whose broker the metaserver does not know is left like one that does
    not answer.
    """
    network = network_of(BEST_TRIED, silent=(1,))
    async with producer_on(network, leaving_after(30)) as producer:
        keyless = await asyncio.wait_for(producer.send("s", b"any"), 30)
        receipt = await asyncio.wait_for(producer.send("s", b"1", key=CLOSED), 30)

    assert (keyless.partition_id, keyless.reordered) == (2, False)
    assert (receipt.partition_id, receipt.reordered, receipt.duplicate) == (2, True, False)


async def test_messages_for_a_silent_broker_are_shown_when_the_producer_started_meanwhile():
    """STRICT: `stats.waiting` names the partition, and its messages are sent as soon as the broker
    is known.
    """
    network = network_of(STRICT, silent=(1,))
    async with producer_on(network) as producer:
        future = producer.send("s", b"1", key=CLOSED)
        assert "s" in producer.stats.waiting
        await eventually(lambda: "p1" in producer.stats.waiting)
        assert "knows no broker" in producer.stats.waiting["p1"]
        assert (await asyncio.wait_for(producer.send("s", b"1", key=RIGHT), 30)).partition_id == 2
        network.route = route_over(HALVES, version=2, strategy=STRICT)
        assert (await asyncio.wait_for(future, 30)).partition_id == 1
        assert producer.stats.waiting == {}


async def test_receipts_of_healthy_partitions_come_when_another_is_silent_from_the_start():
    """Messages sent before the first route share a batch, and each future waits for its own message
    only.
    """
    network = network_of(STRICT)
    network.unreachable.add("broker-1")
    async with producer_on(network) as producer:
        futures = {key: producer.send("s", b"1", key=key) for key in (CLOSED, RIGHT)}
        assert futures[CLOSED]._batch is futures[RIGHT]._batch
        assert (await asyncio.wait_for(futures[RIGHT], 30)).partition_id == 2
        assert (futures[RIGHT].done(), futures[CLOSED].done()) == (True, False)
        network.unreachable.clear()
        assert (await asyncio.wait_for(futures[CLOSED], 30)).partition_id == 1


async def test_sealed_partition_is_not_waited_for_when_it_refused_for_good():
    """STRICT: a refused message is not doubtful, so it does not wait for the silent broker of the
    next partition.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        network.lost.add(1)
        future = producer.send("s", b"1", key=b"k")
        await eventually(lambda: producer.stats.retries > 1)
        network.sealed.add(1)
        network.lost.clear()
        network.unreachable.add("broker-2")
        network.route = network.route_to(2, version=2, group="second")
        await eventually(lambda: "p2" in producer.stats.waiting)
        network.route = network.route_to(
            3, version=3, group="third"
        )  # the second is gone, and never had it
        receipt = await asyncio.wait_for(future, 30)

    assert network.stored == {1: [b"0"], 3: [b"1"]}
    assert (receipt.partition_id, receipt.duplicate) == (3, False)


async def test_wait_is_logged_after_seconds_and_once_when_it_is_over(caplog, monkeypatch):
    """A WARNING says where, why and how many strict messages wait; short waits are not logged."""
    monkeypatch.setattr("keylane.producer.waiting.FIRST_MS", 50)
    network = network_of(STRICT)
    with caplog.at_level(logging.WARNING, logger="keylane.producer"):
        async with producer_on(network) as producer:
            await producer.send("s", b"0", key=CLOSED)
            network.unreachable.add("broker-1")
            futures = [producer.send("s", b"%d" % number, key=CLOSED) for number in range(3)]
            await eventually(lambda: bool(caplog.messages))
            await asyncio.sleep(0.1)
            network.unreachable.clear()
            for future in futures:
                await asyncio.wait_for(future, 30)

    waiting, over = caplog.messages
    assert waiting.startswith("p1 at broker-1: 3 messages wait, the oldest for 0 s: cannot reach")
    assert over.startswith("p1: sending resumed")
