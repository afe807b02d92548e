"""`producer.waiting()`: which keys wait, how many messages, since when, why, and what helps; and
when that is logged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import pairwise
from typing import Any

import pytest

from keylane.producer import ProducerSettings, WaitingKey, executor, outgoing_batch
from keylane.producer.held import HeldMessages
from keylane.producer.outgoing_batch import OutgoingBatch
from keylane.producer.send_budget import SendBudget
from keylane.producer.sender import SubjectSender
from keylane.producer.waiting import (
    METASERVER_ADVICE,
    NO_ANSWER,
    PartitionWaits,
    WaitReport,
    broker_cause,
    route_cause,
)
from keylane.protocol.errors import (
    BrokerReadOnlyError,
    DeliveryTimeoutError,
    DiskFullError,
    ForeignServerError,
    InvalidRequestError,
    KeylaneError,
    NotSentError,
    OutcomeUnknownError,
    PartitionUnknownError,
    Reason,
    StaleRouteError,
    SubjectDeletedError,
    WrongBrokerError,
)
from keylane.protocol.log_filter import LogFilter
from keylane.protocol.routing import OrderStrategy, Route, logical_partition
from support.cluster import eventually
from support.raising import raises
from support.scripted_network import (
    QUICK,
    ScriptedChannel,
    ScriptedNetwork,
    producer_on,
    route_over,
)

NO_THREAD = "can't start new thread"
SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000


def _key_in(start: int, end: int) -> bytes:
    """An order key whose logical partition is in `[start, end)`."""
    keys = (b"k%d" % number for number in range(10_000))
    return next(key for key in keys if start <= logical_partition(key) < end)


async def test_keys_are_listed_with_counts_and_advice_when_a_broker_is_away():
    """Each key has one entry, the longest wait first; keys of the broker that answers are not in
    it.
    """
    network = ScriptedNetwork()
    network.route = route_over(
        {1: (0, 512), 2: (512, 1024)}, version=1, strategy=OrderStrategy.STRICT
    )
    network.unreachable.add("broker-1")
    away, answering = _key_in(0, 512), _key_in(512, 1024)
    before_ns = time.time_ns()
    async with producer_on(network) as producer:
        first = producer.send("s", b"older", key=away, properties={"a": "b"})
        await producer.send("s", b"stored", key=answering)
        second = producer.send("s", b"newer", key=away)
        await eventually(lambda: producer.stats.waiting)
        waiting = producer.waiting()
        (entry,) = waiting.keys
        assert isinstance(entry, WaitingKey)
        assert (entry.subject, entry.key, entry.messages) == ("s", away, 2)
        assert entry.size_bytes > len(b"oldernewer") + 2 * len(away)
        assert before_ns <= entry.sent_at_ns <= time.time_ns()
        assert (entry.partition, entry.broker_group) == ("p1", "g1")
        assert entry.reason == producer.stats.waiting["p1"]
        assert "restart broker group g1" in entry.advice
        assert "keylane broker evacuate g1 --accept-loss" in entry.advice
        assert (waiting.messages, waiting.size_bytes) == (2, entry.size_bytes)
        assert waiting.more_keys == 0
        network.unreachable.clear()
        await asyncio.gather(first, second)
        assert (producer.waiting().messages, producer.waiting().keys) == (0, ())


async def test_messages_for_a_later_delivery_are_listed_until_a_broker_keeps_them():
    network = ScriptedNetwork()
    network.unreachable.add("broker-1")
    async with producer_on(network) as producer:
        at_ms = time.time_ns() // 1_000_000 + 60_000
        scheduled = [producer.send("s", b"later", deliver_at=at_ms) for _ in range(2)]
        producer.send("s", b"now", key=b"k")
        await eventually(lambda: all(each.advice for each in producer.waiting().keys))
        waiting = producer.waiting()
        assert (waiting.messages, waiting.more_keys) == (3, 0)
        assert {(each.key, each.messages, each.partition) for each in waiting.keys} == {
            (b"", 2, None),
            (b"k", 1, "p1"),
        }
        assert producer.waiting(limit=1).more_keys == 1
        await producer.close(flush=False)
    assert all(future.done() for future in scheduled)


async def test_list_of_keys_is_bounded_when_many_wait():
    """The oldest keys are listed; the others are counted."""
    network = ScriptedNetwork()
    network.unreachable.add("broker-1")
    async with producer_on(network) as producer:
        futures = [producer.send("s", b"v", key=b"k%03d" % number) for number in range(300)]
        await eventually(lambda: producer.stats.waiting)
        waiting = producer.waiting(limit=7)
        assert [entry.key for entry in waiting.keys] == [b"k%03d" % number for number in range(7)]
        assert (waiting.messages, waiting.more_keys) == (300, 293)
        assert len(producer.waiting().keys) == 100
        network.unreachable.clear()
        await asyncio.gather(*futures)


async def test_counts_are_those_of_the_stats_when_some_messages_are_settled():
    """Messages that timed out are given up, and wait no longer."""
    network = ScriptedNetwork()
    network.lost.add(1)
    async with producer_on(network) as producer:
        late = producer.send("s", b"v", key=b"timed", timeout_ms=50)
        others = [producer.send("s", b"v", key=b"k%d" % number) for number in range(5)]
        await eventually(late.done)
        stats, waiting = producer.stats, producer.waiting()
        assert waiting.messages == stats.sent - stats.acked - stats.failed == 5
        assert b"timed" not in {entry.key for entry in waiting.keys}
        network.lost.clear()
        await asyncio.gather(*others)
        with pytest.raises(Exception, match="was not acked in"):
            await late


async def test_messages_are_listed_without_advice_when_no_try_has_failed():
    """An answer that takes its time is no failure."""
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        network.late = asyncio.Event()
        network.sealed.add(1)
        future = producer.send("s", b"1", key=b"k")
        await eventually(lambda: network.asked)
        (entry,) = producer.waiting().keys
        assert (entry.partition, entry.reason, entry.advice) == ("p1", NO_ANSWER, "")
        assert producer.stats.waiting == {}
        network.sealed.clear()
        network.route = network.route_to(2, version=2)
        network.late.set()
        await future


async def test_held_messages_name_the_partition_that_they_wait_for():
    """A newer message of a range waits for what is under way to its left partition."""
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        network.late = asyncio.Event()
        network.sealed.add(1)
        older = producer.send("s", b"1", key=b"k")
        await eventually(lambda: network.asked)
        network.route = network.route_to(2, version=2, group="another")
        sender = producer._senders["s"]
        await eventually(lambda: sender.table[0] is None)
        newer = producer.send("s", b"2", key=b"another")
        entries = {entry.key: entry for entry in producer.waiting().keys}
        assert (entries[b"another"].partition, entries[b"another"].reason) == ("p1", NO_ANSWER)
        network.late.set()
        await asyncio.gather(older, newer)
    assert network.stored[2] == [b"1", b"2"]


async def test_cause_of_a_broker_stands_while_the_route_names_its_partition():
    """
    An empty data folder at the address of a lost broker: it has no such partition, each time that
    it is asked.

    Whether its messages are on their way there or held, the reason is the broker's, and the advice
    names the way out.
    """
    network = ScriptedNetwork()
    network.unknown.add(1)
    async with producer_on(network) as producer:
        futures = [producer.send("s", b"0", key=b"k"), producer.send("s", b"1")]
        await eventually(lambda: network.asked > 2)
        held = 0
        for _ in range(300):
            held += len(producer._senders["s"].held_messages)
            reasons = set(producer.stats.waiting.values())
            entries = producer.waiting().keys
            assert reasons == {entry.reason for entry in entries}
            assert all("does not hold this partition" in reason for reason in reasons)
            for entry in entries:
                assert "keylane broker evacuate g --accept-loss" in entry.advice
                assert "keylane subject operations" not in entry.advice
            await asyncio.sleep(0.001)
        assert held
        late = producer.send("s", b"2", key=b"k2", timeout_ms=30)
        with pytest.raises(DeliveryTimeoutError, match="does not hold this partition"):
            await late
        network.unknown.clear()
        await asyncio.gather(*futures)


async def test_messages_wait_for_the_metaserver_when_there_is_no_route_yet():
    """There is no partition; the advice is about the metaserver."""
    network = ScriptedNetwork()
    network.unreachable.add("meta:1")
    settings = ProducerSettings(backoff=QUICK.backoff)
    async with producer_on(network, settings) as producer:
        future = producer.send("s", b"v")
        await eventually(lambda: "cannot reach" in producer.stats.waiting.get("s", ""))
        (entry,) = producer.waiting().keys
        assert (entry.key, entry.partition, entry.broker_group) == (b"", None, None)
        assert "cannot reach" in entry.reason
        assert entry.advice == METASERVER_ADVICE
        network.unreachable.clear()
        await future


def test_advice_names_the_remedy_of_a_failure():
    """A silent server is started again, a full disk needs space, a newer route comes by itself."""
    assert "restart broker group g" in broker_cause(OutcomeUnknownError(), "g").advice
    assert broker_cause(DiskFullError(), "g").advice == (f"at broker group g: {DiskFullError.hint}")
    read_only = broker_cause(BrokerReadOnlyError(), "g").advice
    assert "broker group g:" in read_only
    assert "keylane broker health" in read_only
    for gone in (PartitionUnknownError(), WrongBrokerError()):
        assert "keylane broker evacuate g --accept-loss" in broker_cause(gone, "g").advice
    assert "automatically" in broker_cause(StaleRouteError(), "g").advice
    assert ForeignServerError.hint in broker_cause(ForeignServerError(), "g").advice
    assert route_cause(OutcomeUnknownError()).advice == METASERVER_ADVICE
    assert route_cause(ForeignServerError()).advice == ForeignServerError.hint


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "10", None])
async def test_limit_is_refused_when_it_is_no_positive_number(limit):
    """A limit is how many keys are listed."""
    async with producer_on(ScriptedNetwork()) as producer:
        with pytest.raises(InvalidRequestError, match="limit is 1 or more"):
            producer.waiting(limit=limit)


async def test_waiting_is_refused_in_another_thread():
    """The batches are those of the event loop; a closed producer has none."""
    producer = producer_on(ScriptedNetwork())
    async with producer:
        with raises(Reason.OTHER_LOOP):
            await asyncio.to_thread(producer.waiting)
    assert producer.waiting().messages == 0


def test_wait_is_reported_at_growing_intervals():
    """After 5 s, 1 min, 2 min, 4 min …, then once an hour."""
    report = WaitReport()
    told = [second for second in range(10 * 3_600) if report.record_wait(second * SECOND, 0)]
    assert told[:8] == [5, 60, 120, 240, 480, 960, 1_920, 3_840]
    assert {scheduled - earlier for earlier, scheduled in pairwise(told[8:])} == {3_600}


def test_end_of_a_wait_is_reported_when_the_wait_was():
    """A short wait is not reported, neither its start nor its end; each wait is timed anew."""
    report = WaitReport()
    assert not report.record_wait(0, 0)
    assert report.end(4_999) is None
    assert not report.record_wait(10_000, 0)
    assert report.record_wait(15_000, 5_000)
    assert report.end(17_000) == 7_000
    assert report.end(18_000) is None


def test_wait_report_is_due_once_when_polls_are_rare():
    """Reports that were due between two polls are not repeated."""
    report = WaitReport()
    report.record_wait(0, 0)
    assert report.record_wait(10 * HOUR, 0)
    assert not report.record_wait(10 * HOUR + MINUTE, 0)


class SetClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_ms = 100_000

    def boot_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + self.now_ms


async def test_end_of_a_wait_is_not_shorter_than_its_report_when_the_first_try_took_long(caplog):
    """Both count from the moment at which the oldest message was sent, not from the try that failed
    4 s later.
    """
    clock = SetClock()
    waits = PartitionWaits("p1", "g1", clock)
    batch = OutgoingBatch(asyncio.get_running_loop())
    batch.add(b"k", b"v", b"", clock.wall_ms() * 1_000_000)
    with caplog.at_level(logging.WARNING, logger="keylane.producer"):
        for after_ms in (4_000, 6_000):
            clock.now_ms += after_ms
            waits.begin(NotSentError("away"), clock.boot_ms(), [batch], "broker:1")
        clock.now_ms += 1_000
        waits.end()
    reported, ended = caplog.messages
    assert "the oldest for 10 s: away" in reported
    assert ended == "p1: sending resumed after 11 s"


# ── errors that nothing foresaw ───────────────────────────────────────────────────────────────────
class FaultyNetwork(ScriptedNetwork):
    """As a process that has no thread for the name of a host, or no memory for a batch."""

    def __init__(self, *, routes: int = 0, channels: int = 0, batches: int = 0) -> None:
        super().__init__()
        self.routes, self.channels, self.batches = routes, channels, batches
        """How many calls of each kind fail, after the first `whole` batches."""
        self.whole = 0
        self.refused: KeylaneError | None = None
        """What the metaserver answers to each call for the route, in place of one."""

    async def control(self, method, address, path, answer, **more):
        if answer is Route and self.refused is not None:
            raise self.refused
        if answer is Route and self.routes:
            self.routes -= 1
            raise RuntimeError(NO_THREAD)
        return await super().control(method, address, path, answer, **more)

    async def open_channel(self, address, *, timeout_ms):
        if self.channels:
            self.channels -= 1
            raise RuntimeError(NO_THREAD)
        await super().open_channel(address, timeout_ms=timeout_ms)
        return FaultyChannel(self, address)


class FaultyChannel(ScriptedChannel):
    def begin(self, request, payload=b"", **more):
        if self.network.whole:
            self.network.whole -= 1
        elif self.network.batches:
            self.network.batches -= 1
            raise MemoryError
        return super().begin(request, payload, **more)


@pytest.mark.parametrize("faults", [{"routes": 3}, {"channels": 3}, {"batches": 3}])
async def test_messages_are_stored_once_in_order_when_a_fault_passes(faults, caplog):
    network = FaultyNetwork(**faults)
    async with producer_on(network) as producer, asyncio.timeout(10):
        for number in range(5):
            producer.send("s", b"%d" % number, key=b"k")
        await producer.flush()
    assert network.stored == {1: [b"0", b"1", b"2", b"3", b"4"]}
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 1, "one line for the same fault again and again"
    assert told[0].exc_info


async def test_messages_are_stored_once_in_order_when_the_fault_comes_between_batches(caplog):
    network = FaultyNetwork(batches=2)
    network.whole = 3
    async with producer_on(network) as producer, asyncio.timeout(10):
        values = [b"%d" % number for number in range(50)]
        for value in values:
            producer.send("s", value, key=b"k")
            await asyncio.sleep(0)
        await producer.flush()
    assert network.stored == {1: values}
    assert "MemoryError" in caplog.text


@pytest.mark.parametrize("faults", [{"routes": 10**6}, {"channels": 10**6}])
async def test_message_that_times_out_names_the_fault_that_does_not_pass(faults):
    network = FaultyNetwork(**faults)
    async with producer_on(network) as producer, asyncio.timeout(10):
        with pytest.raises(DeliveryTimeoutError, match=NO_THREAD):
            await producer.send("s", b"1", key=b"k", timeout_ms=200)
        waits = producer.send("s", b"2")
        await eventually(lambda: NO_THREAD in producer.waiting().keys[0].reason)
        assert "traceback" in producer.waiting().keys[0].advice
        await producer.close(flush=False)
        assert waits.done()


class FaultyStep:
    """A step of sending that fails, as for want of memory: a function of `where`, from its next
    call on.
    """

    def __init__(self, where: Any, name: str) -> None:
        self.where, self.name = where, name

    def fail(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        """Have the next `times` calls raise, and later ones do what they do."""
        step, left = getattr(self.where, self.name), [times]

        def faulty(*values, **more):
            if left[0]:
                left[0] -= 1
                raise MemoryError(self.name)
            return step(*values, **more)

        monkeypatch.setattr(self.where, self.name, faulty)


STEPS = [
    FaultyStep(outgoing_batch, "encode_columns"),
    FaultyStep(ScriptedChannel, "begin"),
    FaultyStep(executor, "first_receipt"),
    FaultyStep(executor, "partial"),
    FaultyStep(SendBudget, "reserve"),
    FaultyStep(SendBudget, "settle_stored"),
    FaultyStep(OutgoingBatch, "pack"),
    FaultyStep(OutgoingBatch, "settle"),
]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("behind", [0, 40])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
async def test_order_stays_and_flush_ends_when_a_step_of_sending_fails(
    step, behind, times, monkeypatch, caplog
):
    """In steady state, with no message behind it as with many."""
    network = ScriptedNetwork()
    values = [b"%d" % number for number in range(4 + behind)]
    async with producer_on(network) as producer:
        for value in values[:3]:
            await producer.send("s", value, key=b"k")
        step.fail(monkeypatch, times)
        async with asyncio.timeout(5):
            futures = []
            for value in values[3:]:
                futures.append(producer.send("s", value, key=b"k"))
                await asyncio.sleep(0)
            if step.name == "reserve":  # a flush closes batches: this fault is its own, too
                await asyncio.gather(*futures)
            await producer.flush()
        assert network.stored == {1: values}
        assert (producer.stats.acked, producer.stats.failed) == (len(values), 0)
        assert not producer.waiting().keys
    assert "MemoryError" in caplog.text


@pytest.mark.parametrize(
    "step",
    [
        FaultyStep(SubjectSender, "on_availability_changed"),
        FaultyStep(executor, "decide_wait_stage"),
        FaultyStep(PartitionWaits, "begin"),
        FaultyStep(LogFilter, "count_failure"),
    ],
    ids=lambda step: step.name,
)
async def test_messages_are_stored_in_order_when_the_handling_of_a_failure_fails(step, monkeypatch):
    """The task goes on, and tries again."""
    network = FaultyNetwork(channels=4)
    async with producer_on(network) as producer, asyncio.timeout(5):
        step.fail(monkeypatch, 1)
        for value in (b"0", b"1", b"2"):
            producer.send("s", value, key=b"k")
        await producer.flush()
    assert network.stored == {1: [b"0", b"1", b"2"]}


@pytest.mark.parametrize(
    "step",
    [FaultyStep(HeldMessages, "report"), FaultyStep(LogFilter, "count_failure")],
    ids=lambda step: step.name,
)
async def test_routes_are_followed_when_the_handling_of_a_failure_fails(step, monkeypatch):
    network = ScriptedNetwork()
    network.unreachable.add("meta:1")
    step.fail(monkeypatch, 1)
    async with producer_on(network) as producer, asyncio.timeout(5):
        future = producer.send("s", b"0", key=b"k")
        await eventually(lambda: network.route_asks > 3)
        network.unreachable.clear()
        await future
    assert network.stored == {1: [b"0"]}


@pytest.mark.parametrize(
    "step",
    [
        FaultyStep(HeldMessages, "give_up"),
        FaultyStep(SendBudget, "give_up"),
    ],
    ids=lambda step: step.name,
)
async def test_refused_messages_are_given_up_when_that_fails_at_first(step, monkeypatch):
    """Those that are held, and those that wait at a broker, each with the refusal."""
    network = FaultyNetwork()
    async with producer_on(network) as producer, asyncio.timeout(5):
        await producer.send("s", b"0", key=b"k")
        network.unreachable.add("broker-1")
        futures = [producer.send("s", b"%d" % number, key=b"k") for number in range(1, 4)]
        await eventually(lambda: producer.stats.waiting)
        step.fail(monkeypatch, 1)
        network.refused = SubjectDeletedError()
        for future in futures:
            with pytest.raises(SubjectDeletedError):
                await future
        assert producer.stats.failed == 3


async def test_fault_is_logged_once_with_its_end_when_it_comes_between_messages(caplog):
    caplog.set_level(logging.INFO, "keylane.producer")
    network = FaultyNetwork()
    async with producer_on(network) as producer, asyncio.timeout(5):
        for value in (b"0", b"1"):
            network.batches = 3
            await producer.send("s", value, key=b"k")
    told = [record for record in caplog.records if "MemoryError" in record.message]
    ends = [line for line in caplog.messages if "sending works again, after 3 failures" in line]
    assert (len(told), len(ends)) == (1, 1)


async def test_route_fault_is_logged_with_its_end_when_a_route_is_followed_again(caplog):
    caplog.set_level(logging.INFO, "keylane.producer")
    network = FaultyNetwork(routes=3)
    async with producer_on(network) as producer, asyncio.timeout(5):
        await producer.send("s", b"0", key=b"k")
    told = [line for line in caplog.messages if "route of s" in line]
    assert NO_THREAD in told[0]
    assert told[1].startswith("route of s is updated again, after 3 failures in ")
    assert len(told) == 2
