"""A producer over a scripted network: what is sent where, and in which order."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
import pyarrow as pa
import pytest

from keylane.producer import ProducerSettings
from keylane.producer.executor_state import ExecutorEvent
from keylane.producer.flight import BUSY_PARTITIONS_MAX, WAIT_S, BrokerLoad, SendScheduler
from keylane.producer.outgoing_batch import OutgoingBatch
from keylane.protocol.backoff import Backoff
from keylane.protocol.errors import ClosedError, Fate, GivenUpError, OutcomeUnknownError
from keylane.protocol.routing import OrderStrategy, logical_partition
from support.cluster import eventually
from support.scripted_network import (
    QUICK,
    ScriptedChannel,
    ScriptedNetwork,
    producer_on,
    route_over,
)


async def test_older_messages_are_sent_first_when_the_route_changes():
    """Messages that a sealed partition refused are sent to its child before newer ones, also if the
    broker flaps meanwhile.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        network.sealed.add(1)
        producer.send("s", b"1", key=b"k")
        sender = producer._senders["s"]
        await eventually(lambda: sender.table[0] is None)
        (executor,) = sender.executors
        executor._record_result(ExecutorEvent.FAILED)
        executor._record_result(ExecutorEvent.ANSWERED)
        producer.send("s", b"2", key=b"k")
        network.route = network.route_to(2, version=2)
        producer.send("s", b"3", key=b"k")
        receipt = await producer.send("s", b"4", key=b"k")

    assert network.stored == {1: [b"0"], 2: [b"1", b"2", b"3", b"4"]}
    assert (receipt.partition_id, receipt.offset, receipt.reordered) == (2, 3, False)


async def test_newer_messages_wait_for_the_refusal_when_a_new_route_comes_first():
    """While a sealed partition has not answered every batch, newer messages of its range are
    held.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        sender = producer._senders["s"]
        network.late = asyncio.Event()
        network.sealed.add(1)
        producer.send("s", b"1", key=b"k")
        await eventually(lambda: network.asked)
        network.route = network.route_to(2, version=2)
        await eventually(lambda: len(sender.executors) == 2)
        producer.send("s", b"2", key=b"k")
        await asyncio.sleep(0.02)
        assert 2 not in network.stored
        network.late.set()
        await producer.send("s", b"3", key=b"k")
        await eventually(lambda: len(sender.executors) == 1)

    assert network.stored == {1: [b"0"], 2: [b"1", b"2", b"3"]}


async def test_batch_without_an_answer_is_settled_before_newer_ones():
    """A broker remembers the latest batches only: an older batch sent again behind them would be
    stored twice.
    """
    network = ScriptedNetwork()
    network.mute_offset = 0
    settings = ProducerSettings(backoff=QUICK.backoff, batch_count=1, in_flight_max=2)
    values = [b"%d" % number for number in range(30)]
    async with producer_on(network, settings) as producer:
        for value in values:
            producer.send("s", value, key=b"k")
        await asyncio.sleep(0.1)
        assert len(network.stored[1]) <= 2
        network.mute_offset = None
    assert network.stored[1] == values


class ForgetfulChannel(ScriptedChannel):
    """The answer to the batch stored at offset 1 is lost once; then the broker does not know the
    producer any more.
    """

    forgets = True

    def _answer(self, request, base: int, *, duplicate: bool):
        if base == 1 and self.forgets:
            raise OutcomeUnknownError
        if base == 2 and self.forgets:
            type(self).forgets = False
            self.network.producers.clear()
        return super()._answer(request, base, duplicate=duplicate)


async def test_order_is_kept_when_a_broker_forgets_a_batch_before_one_that_is_stored(
    monkeypatch: pytest.MonkeyPatch,
):
    """Both are sent again under a new epoch: the older one alone would be stored behind the newer
    one.
    """
    monkeypatch.setattr(ForgetfulChannel, "forgets", True)
    network = ScriptedNetwork()

    async def open_channel(address: str, *, timeout_ms: int) -> ForgetfulChannel:
        return ForgetfulChannel(network, address)

    network.open_channel = open_channel
    settings = ProducerSettings(backoff=QUICK.backoff, batch_count=1, in_flight_max=2)
    async with producer_on(network, settings) as producer:
        await producer.send("s", b"0", key=b"k")
        futures = [producer.send("s", value, key=b"k") for value in (b"1", b"2")]
        receipts = [await asyncio.wait_for(future, 30) for future in futures]

    assert network.stored == {1: [b"0", b"1", b"2", b"1", b"2"]}
    assert [receipt.offset for receipt in receipts] == [3, 4]
    assert [receipt.duplicate for receipt in receipts] == ["possible", "possible"]


async def test_sealed_partition_is_asked_once():
    """Messages that a sealed partition refused are held until there is a newer route, and not sent
    there again.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        network.sealed.add(1)
        futures = [producer.send("s", b"%d" % number, key=b"k") for number in (1, 2)]
        await eventually(lambda: network.asked)
        await asyncio.sleep(0.05)
        assert network.asked <= 2
        network.route = network.route_to(2, version=2)
        for future in futures:
            await future

    assert network.stored == {1: [b"0"], 2: [b"1", b"2"]}


async def test_left_partition_is_asked_at_the_new_address_of_its_broker():
    """A partition that was sealed while its broker moved still answers its batches; newer messages
    follow.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        network.lost.add(1)
        producer.send("s", b"1", key=b"k")
        await eventually(lambda: producer.stats.retries > 0)
        network.lost.clear()
        network.unreachable.add("broker-1")
        network.sealed.add(1)
        network.route = network.route_to(2, version=2)
        receipt = await asyncio.wait_for(producer.send("s", b"2", key=b"k"), 30)

    assert network.asked > 0
    assert network.stored == {1: [b"0"], 2: [b"1", b"2"]}
    assert (receipt.partition_id, receipt.offset) == (2, 1)


async def test_unsent_messages_follow_the_new_route_when_their_broker_is_gone():
    """The broker of a sealed partition was removed: unsent messages take the newer route, the older
    first.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        (executor,) = producer._senders["s"].executors
        network.unreachable.add("broker-1")
        older = producer.send("s", b"1", key=b"k")
        await eventually(lambda: not executor.state.available)
        network.route = network.route_to(2, version=2, group="another")
        newer = producer.send("s", b"2", key=b"k")
        receipts = [await asyncio.wait_for(future, 30) for future in (older, newer)]
        await eventually(executor._task.done)

    assert [receipt.partition_id for receipt in receipts] == [2, 2]
    assert network.stored == {1: [b"0"], 2: [b"1", b"2"]}


async def test_pauses_do_not_grow_while_batches_are_stored():
    """A broker that takes one batch at a time and refuses the rest of the window is slow, and does
    not fail.
    """
    network = ScriptedNetwork()
    network.narrow = True
    pauses = Backoff(first_ms=1, max_ms=600_000, factor=100.0)
    settings = ProducerSettings(backoff=pauses, batch_count=1)
    async with producer_on(network, settings) as producer:
        futures = [producer.send("s", b"%d" % number, key=b"k") for number in range(20)]
        await asyncio.wait_for(asyncio.gather(*futures), 30)
        assert producer.stats.retries > 3

    assert network.stored == {1: [b"%d" % number for number in range(20)]}


async def test_retries_are_kept_when_their_partition_leaves_the_route():
    """`stats.retries` counts since the producer was opened, over all partitions that it ever sent
    to.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        network.unreachable.add("broker-1")
        future = producer.send("s", b"1", key=b"k")
        await eventually(lambda: producer.stats.retries > 2)
        network.unreachable.clear()
        await future
        retries = producer.stats.retries
        sender = producer._senders["s"]
        network.route = network.route_to(2, version=2)
        await eventually(lambda: [*sender._executors] == [2])
        assert producer.stats.retries >= retries
    assert producer.stats.retries >= retries


async def test_route_is_ignored_when_it_is_older():
    """A lower version, from a metaserver that lags, changes nothing."""
    network = ScriptedNetwork()
    network.route = network.route_to(2, version=2)
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        sender = producer._senders["s"]
        sender._apply_route(network.route_to(1, version=1))
        await producer.send("s", b"1", key=b"k")

    assert network.stored == {2: [b"0", b"1"]}


async def test_metaserver_with_older_routes_is_asked_with_pauses(caplog):
    """A metaserver with a restored database has only older routes: a WARNING says so once; a newer
    route is followed.
    """
    network = ScriptedNetwork()
    network.route = network.route_to(2, version=9)
    pauses = Backoff(first_ms=20, max_ms=20)
    with caplog.at_level(logging.WARNING, "keylane.producer"):
        async with producer_on(network, ProducerSettings(backoff=pauses)) as producer:
            await producer.send("s", b"0", key=b"k")
            network.route = network.route_to(1, version=5)  # told at once, as it differs
            producer._senders["s"]._refresh_requested.set()
            asked, began = network.route_asks, time.monotonic()
            await eventually(lambda: network.route_asks >= asked + 10)
            assert time.monotonic() - began > 0.08  # nine pauses, each of 10 ms at least
            await producer.send("s", b"1", key=b"k")
            network.route = network.route_to(3, version=10)
            await eventually(
                lambda: (
                    3
                    in [
                        executor.partition.partition_id
                        for executor in producer._senders["s"].executors
                    ]
                )
            )
            await producer.send("s", b"2", key=b"k")

    assert network.stored == {2: [b"0", b"1"], 3: [b"2"]}
    assert sum("older than 9" in message for message in caplog.messages) == 1


async def test_partition_that_was_left_knows_new_messages_from_old():
    """After a restored route leads back to a sealed partition, its refusal counts: no new message
    is stored there.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        for number in range(3):
            await producer.send("s", b"%d" % number, key=b"k")
        sender = producer._senders["s"]
        network.sealed.add(1)
        network.route = network.route_to(2, version=5)
        await eventually(lambda: list(sender._executors) == [2])
        network.route = network.route_to(1, version=6)
        await eventually(lambda: list(sender._executors) == [1])
        future = producer.send("s", b"3", key=b"k")
        await eventually(lambda: network.asked)
        network.route = network.route_to(2, version=7)
        receipt = await asyncio.wait_for(future, 30)

    assert network.stored == {1: [b"0", b"1", b"2"], 2: [b"3"]}
    assert (receipt.partition_id, receipt.offset, receipt.duplicate) == (2, 0, False)


async def test_doubtful_batch_keeps_its_sequence_when_another_broker_answers():
    """A broker at the address of another does not have the partition; the repeated batch is stored
    once, in order.
    """
    network = ScriptedNetwork()
    settings = ProducerSettings(backoff=QUICK.backoff, batch_count=1)
    async with producer_on(network, settings) as producer:
        await producer.send("s", b"0", key=b"k")
        network.mute.add(1)
        futures = [producer.send("s", b"%d" % number, key=b"k") for number in (1, 2)]
        await eventually(lambda: len(network.stored[1]) == 3)
        network.unknown.add(1)
        network.mute.clear()
        await eventually(lambda: network.asked >= 2)
        asks = network.route_asks
        await eventually(lambda: network.route_asks > asks)
        network.unknown.clear()
        futures.append(producer.send("s", b"3", key=b"k"))
        receipts = [await asyncio.wait_for(future, 30) for future in futures]
        assert producer.stats.retries

    assert network.stored == {1: [b"0", b"1", b"2", b"3"]}
    assert [receipt.offset for receipt in receipts] == [1, 2, 3]
    assert not any(receipt.reordered for receipt in receipts)


async def test_metaserver_is_asked_rarely_when_a_partition_fails_often():
    """However often a partition fails and recovers, the next call for the route waits for the
    answer of the last.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        (executor,) = producer._senders["s"].executors
        for _ in range(100):
            executor._record_result(ExecutorEvent.FAILED)
            await asyncio.sleep(0.001)
            executor._record_result(ExecutorEvent.ANSWERED)
            await asyncio.sleep(0.001)

    assert network.route_asks < 10


async def test_moved_broker_is_found_when_the_route_does_not_list_it():
    """Only that broker knows whether its batch is stored; the message is sent elsewhere if not, and
    newer ones behind it.
    """
    network = ScriptedNetwork()
    settings = ProducerSettings(backoff=QUICK.backoff, call_timeout_ms=50)
    async with producer_on(network, settings) as producer:
        await producer.send("s", b"0", key=b"k")
        network.lost.add(1)
        older = producer.send("s", b"1", key=b"k")
        await eventually(lambda: producer.stats.retries > 0)
        network.lost.clear()
        network.unreachable.add("broker-1")
        newer = producer.send("s", b"2", key=b"k")
        (left,) = network.route.partitions
        network.past.append(msgspec.structs.replace(left, address="elsewhere"))
        network.sealed.add(1)
        network.route = network.route_to(2, version=2, group="another")
        receipts = [await asyncio.wait_for(future, 30) for future in (older, newer)]

    assert [receipt.partition_id for receipt in receipts] == [2, 2]
    assert network.stored == {1: [b"0"], 2: [b"1", b"2"]}


class HangingChannel(ScriptedChannel):
    """The broker at the first address stores what it gets, and answers nothing."""

    async def call(self, request, payload=b"", *, timeout_ms):
        answer = await super().call(request, payload, timeout_ms=timeout_ms)
        if self.address == "broker-1":
            await asyncio.Event().wait()
        return answer


async def test_batches_are_stored_once_and_in_order_when_their_broker_hangs_and_moves():
    """Their calls end when the route says where the broker is now, and not with their timeout."""
    network = ScriptedNetwork()

    async def open_channel(address: str, *, timeout_ms: int) -> HangingChannel:
        return HangingChannel(network, address)

    network.open_channel = open_channel
    settings = ProducerSettings(
        backoff=QUICK.backoff, batch_count=1, in_flight_max=2, call_timeout_ms=60_000
    )
    values = [b"%d" % number for number in range(4)]
    async with producer_on(network, settings) as producer:
        futures = [producer.send("s", value, key=b"k") for value in values]
        await eventually(lambda: len(network.stored.get(1, ())) == 2)
        (partition,) = network.route.partitions
        moved = msgspec.structs.replace(partition, address="elsewhere")
        network.route = msgspec.structs.replace(network.route, version=2, partitions=(moved,))
        receipts = [await asyncio.wait_for(future, 30) for future in futures]

    assert network.stored == {1: values}
    assert [receipt.duplicate for receipt in receipts] == [True, True, False, False]


async def test_messages_keep_their_order_when_they_are_sent_before_the_first_route():
    """Messages that were sent before the first route are stored first, in their order."""
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        futures = [producer.send("s", b"%d" % number, key=b"k") for number in range(10)]
        offsets = [(await future).offset for future in futures]

    assert offsets == list(range(10))
    assert network.stored == {1: [b"%d" % number for number in range(10)]}


async def test_close_gives_up_messages_when_their_broker_is_away():
    """A producer that is closed while its broker is away raises the number of messages that were
    not acked.
    """
    network = ScriptedNetwork()
    network.unreachable.add("broker-1")
    settings = ProducerSettings(backoff=QUICK.backoff, close_timeout_ms=50)
    producer = producer_on(network, settings)
    await producer.__aenter__()
    future = producer.send("s", b"0", key=b"k")
    await eventually(lambda: producer.stats.retries > 2)
    assert "cannot reach" in producer.stats.waiting["p1"]
    with pytest.raises(
        GivenUpError, match=r"^1 message was given up, it is not stored; .*closed"
    ) as told:
        await producer.close()
    assert (told.value.details, told.value.fate) == ({"messages": 1, "unknown": 0}, Fate.NOT_DONE)
    with pytest.raises(ClosedError, match="closed"):
        await future


class LateChannel(ScriptedChannel):
    """Stores all; the answer to its second batch is lost once the third one is stored, whose answer
    never comes.
    """

    def __init__(self, network: ScriptedNetwork, address: str) -> None:
        super().__init__(network, address)
        self.calls = 0
        self.stored = asyncio.Event()

    async def call(self, request, payload=b"", *, timeout_ms):
        self.calls += 1
        number = self.calls
        answer = await super().call(request, payload, timeout_ms=timeout_ms)
        if number == 2:
            await self.stored.wait()
            raise OutcomeUnknownError
        if number == 3:
            self.stored.set()
            await asyncio.Event().wait()
        return answer


async def test_message_may_be_stored_when_the_producer_is_closed_before_its_answer():
    """The batch before it has failed, so the executor waits for the answers under way when it is
    closed.
    """
    network = ScriptedNetwork()
    channel = LateChannel(network, "broker-1")

    async def open_channel(address: str, *, timeout_ms: int) -> LateChannel:
        return channel

    network.open_channel = open_channel
    producer = producer_on(network)
    await producer.__aenter__()
    await producer.send("s", b"0", key=b"k")
    sender = producer._senders["s"]
    first = producer.send("s", b"1", key=b"k")
    sender.queue_open_batches()
    second = producer.send("s", b"2", key=b"k")
    sender.queue_open_batches()
    await channel.stored.wait()
    await eventually(lambda: not sender.executors[0]._calls)
    await producer.close(flush=False)
    assert network.stored == {1: [b"0", b"1", b"2"]}
    for future in (first, second):
        assert future.exception().fate is Fate.UNKNOWN


async def test_table_is_given_up_when_its_producer_is_closed_before_the_first_route():
    """It had waited for ever for a route that is asked for no more."""

    async def never(*_args: object, **_fields: object) -> None:
        await asyncio.Event().wait()

    network = ScriptedNetwork()
    producer = producer_on(network)
    await producer.__aenter__()
    network.control = never  # type: ignore[method-assign]
    sending = asyncio.create_task(
        producer.send_arrow("s", pa.table({"value": [b"0"]}), value="value")
    )
    await eventually(lambda: bool(producer._senders))
    await producer.close()
    async with asyncio.timeout(5):
        with pytest.raises(ClosedError, match="closed"):
            await sending
    assert not network.stored


class PushRecorder:
    def __init__(self, flight: BrokerLoad | None = None, *, send_count: bool = True) -> None:
        self.open = OutgoingBatch(asyncio.get_running_loop())
        self.wait_is_over = False
        self.gathering = None
        self.pushes = 0
        self._broker_load = flight
        self._sends = send_count

    def push(self) -> None:
        self.pushes += 1
        if self._broker_load is not None and self._sends:
            self._broker_load.busy_partitions += 1


async def test_turn_pushes_each_executor_once_when_the_turn_ends():
    ended: list[int] = []
    turn = SendScheduler(asyncio.get_running_loop(), lambda: ended.append(1))
    first, second = PushRecorder(), PushRecorder()
    for _ in range(3):
        turn.begin_turn()
        turn.schedule(first)
        turn.schedule(second)
    assert (first.pushes, second.pushes, ended) == (0, 0, [])
    await asyncio.sleep(0)
    assert (first.pushes, second.pushes, ended) == (1, 1, [1])
    turn.schedule(second)
    await asyncio.sleep(0)
    assert (first.pushes, second.pushes, len(ended)) == (1, 2, 2)


class FaultyPush(PushRecorder):
    def push(self) -> None:
        super().push()
        raise ZeroDivisionError


async def test_turn_pushes_all_others_when_the_push_of_one_fails():
    """The faults go to the event loop, each once."""
    loop, told = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _loop, context: told.append(type(context["exception"])))
    turn = SendScheduler(loop, lambda: None)
    executors = [FaultyPush(), PushRecorder(), FaultyPush(), PushRecorder()]
    for executor in executors:
        turn.schedule(executor)
    await asyncio.sleep(0)
    assert [executor.pushes for executor in executors] == [1, 1, 1, 1]
    assert told == [ZeroDivisionError, ZeroDivisionError]


async def test_flight_pushes_all_others_when_the_push_of_one_fails():
    """After an answer, and after a while without one."""
    loop, told = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _loop, context: told.append(type(context["exception"])))
    flight = BrokerLoad(loop)
    executors = [FaultyPush(), PushRecorder(flight, send_count=False), FaultyPush(), PushRecorder()]
    for executor in executors[:2]:
        flight.enqueue(executor)
    flight.busy_partitions = 1
    flight.release_partition()
    flight.busy_partitions = BUSY_PARTITIONS_MAX
    for executor in executors[2:]:
        flight.enqueue(executor)
    await asyncio.sleep(WAIT_S * 4)
    assert [executor.pushes for executor in executors] == [1, 1, 1, 1]
    assert told == [ZeroDivisionError, ZeroDivisionError]


async def test_channel_writes_once_when_executors_of_a_turn_have_sent():
    told: list[str] = []

    class Channel:
        def gather(self) -> None:
            told.append("gather")

        def flush(self) -> None:
            told.append("flush")

    turn, channel = SendScheduler(asyncio.get_running_loop(), lambda: None), Channel()
    for _ in range(2):
        executor = PushRecorder()
        executor.gathering = channel
        executor.push = lambda: told.append("push")
        turn.schedule(executor)
    await asyncio.sleep(0)
    assert told == ["gather", "push", "push", "flush"]


async def test_flight_pushes_the_one_that_waits_longest_when_another_is_answered():
    flight = BrokerLoad(asyncio.get_running_loop())
    flight.busy_partitions = BUSY_PARTITIONS_MAX
    waiting = [PushRecorder(flight) for _ in range(3)]
    for executor in waiting:
        flight.enqueue(executor)
    flight.release_partition()
    assert [executor.pushes for executor in waiting] == [1, 0, 0]
    flight.remove(waiting[1])
    flight.release_partition()
    assert [executor.pushes for executor in waiting] == [1, 0, 1]


async def test_flight_pushes_the_next_when_the_first_has_nothing_to_send():
    flight = BrokerLoad(asyncio.get_running_loop())
    flight.busy_partitions = BUSY_PARTITIONS_MAX
    idle, busy = PushRecorder(flight, send_count=False), PushRecorder(flight)
    flight.enqueue(idle)
    flight.enqueue(busy)
    flight.release_partition()
    assert (idle.pushes, busy.pushes) == (1, 1)


async def test_flight_pushes_all_that_wait_when_nothing_is_answered():
    flight = BrokerLoad(asyncio.get_running_loop())
    flight.busy_partitions = BUSY_PARTITIONS_MAX
    executor = PushRecorder(flight)
    flight.enqueue(executor)
    await asyncio.sleep(WAIT_S * 4)
    assert (executor.pushes, executor.wait_is_over) == (1, True)


async def test_message_is_stored_when_all_other_partitions_of_its_broker_are_silent():
    """More partitions than make a crowd do not answer; those that do are delayed, and not
    stopped.
    """
    network = ScriptedNetwork()
    step = 1024 // 32
    ranges = {number + 1: (number * step, number * step + step) for number in range(32)}
    network.route = route_over(ranges, version=1, strategy=OrderStrategy.STRICT, group="g")
    silent = asyncio.Event()
    async with producer_on(network) as producer:
        await producer.send("s", b"first", key=b"0")
        executors = producer._senders["s"].executors
        flight = executors[0]._broker_load
        for executor in executors:
            executor._broker_load = flight
        network.sealed.update(range(2, 33))
        network.late = silent
        for number in range(500):
            producer.send("s", b"v", key=b"%d" % number)
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            key = next(
                b"%d" % number
                for number in range(10_000)
                if executors[0] is producer._senders["s"].table[logical_partition(b"%d" % number)]
            )
            receipt = await producer.send("s", b"last", key=key)
        assert flight.busy_partitions >= BUSY_PARTITIONS_MAX
        assert receipt.partition_id == 1
        silent.set()
        children = {partition_id + 100: span for partition_id, span in ranges.items()}
        network.route = route_over(children, version=2, strategy=OrderStrategy.STRICT, group="g")
    assert sum(map(len, network.stored.values())) == 502
