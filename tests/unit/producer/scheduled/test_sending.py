"""Messages for a later delivery, with scripted brokers: which is asked, when again, and what the
sender is told.
"""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections import Counter
from typing import Any

import msgspec
import pytest

from keylane.producer import ProducerSettings
from keylane.producer.given_up import CAUSES_KEPT
from keylane.producer.scheduled import sending as sending_module
from keylane.producer.scheduled.sending import CALLS_MAX, ScheduledSender
from keylane.producer.waiting import METASERVER_ADVICE, NO_ANSWER
from keylane.protocol.backoff import Backoff
from keylane.protocol.clock import SystemClock
from keylane.protocol.control import Health
from keylane.protocol.errors import (
    BrokerReadOnlyError,
    ClosedError,
    DeliveryTimeoutError,
    Fate,
    InvalidRequestError,
    KeylaneError,
    NotSentError,
    OutcomeUnknownError,
    OverloadedError,
    QueueFullError,
    Reason,
    StorageError,
)
from keylane.protocol.frames import CancelScheduled, Schedule, Scheduled, ScheduledCanceled
from keylane.protocol.routing import OrderStrategy, Partition, PartitionState, Route
from keylane.protocol.scheduled.receipt import CancelOutcome, ScheduledReceipt
from support.raising import raises

CLOCK = SystemClock()
GROUPS = ("g1", "g2")


class ScriptedBrokers:
    """A metaserver and two brokers; a broker answers with the next entry of `script`, then keeps
    everything.
    """

    def __init__(self, *script: KeylaneError) -> None:
        self.script = list(script)
        self.route_task: list[tuple[str, Any]] = []
        """Address and request of each call."""
        self.routes = 0
        self.available = True
        self.answers = asyncio.Event()
        """Unset while the metaserver does not say where brokers are."""
        self.answers.set()

    async def route_to_send(self, subject: str, *, order_strategy: object = None) -> Route:
        self.routes += 1
        return Route(
            subject=subject,
            version=1,
            order_strategy=OrderStrategy.STRICT,
            partitions=tuple(
                Partition(
                    partition_id=number,
                    name=f"s.p{number}",
                    queue=number,
                    range_start=number * 512,
                    range_end=number * 512 + 512,
                    broker_group=group,
                    state=PartitionState.OPEN,
                    address=f"{group}:1" if self.available else None,
                )
                for number, group in enumerate(GROUPS)
            ),
        )

    async def health(self) -> Health:
        await self.answers.wait()
        brokers = [
            {"broker_group": group, "address": f"{group}:1", "available": self.available}
            for group in GROUPS
        ]
        return Health(program="metaserver", ready=True, details={"brokers": brokers})

    def broker_at(self, address: str) -> SchedulingBroker:
        return SchedulingBroker(self, address)

    def sending(self, **settings: Any) -> ScheduledSender:
        return ScheduledSender(
            self,
            encode=lambda _subject, value: value,
            broker_at=self.broker_at,
            draw=random.Random(7).getrandbits,
            order_strategy=None,
            settings=ProducerSettings(backoff=Backoff(first_ms=1, max_ms=5), **settings),
            clock=CLOCK,
            rng=random.Random(7),
        )


class SchedulingBroker:
    def __init__(self, brokers: ScriptedBrokers, address: str) -> None:
        self._brokers: Any = brokers
        self._broker_address = address

    async def call(self, request: Any, payload: bytes = b"") -> tuple[Any, bytes]:
        self._brokers.route_task.append((self._broker_address, request))
        await asyncio.sleep(0)
        if self._brokers.script:
            raise self._brokers.script.pop(0)
        if isinstance(request, CancelScheduled):
            return ScheduledCanceled("delivered"), b""
        assert isinstance(request, Schedule)
        assert payload
        return Scheduled(self._broker_address.partition(":")[0], "fsync"), b""


def send(sending: ScheduledSender, value: bytes = b"v", **changed: Any) -> Any:
    given: dict[str, Any] = {"deliver_at": CLOCK.wall_ms() + 60_000} | changed
    return sending.send("s", value, **given)


async def test_receipt_names_the_message_and_its_broker_group():
    brokers = ScriptedBrokers()
    future = send(brokers.sending())
    assert not future.done()
    with pytest.raises(asyncio.InvalidStateError):
        future.result()
    receipt = await future
    ((address, request),) = brokers.route_task
    assert receipt.scheduled_id == request.scheduled_id.hex()
    assert (receipt.subject, receipt.broker_group + ":1") == ("s", address)
    assert receipt.deliver_at_ms == request.deliver_at_ms
    assert future.result() is receipt


async def test_wait_of_asyncio_takes_futures_of_scheduled_messages():
    """As it takes tasks; what it added is removed."""
    sending = ScriptedBrokers(OverloadedError(Reason.SCHEDULE_FULL, "full")).sending()
    futures = {send(sending) for _ in range(5)}
    done, _ = await asyncio.wait(futures)
    assert done == futures
    assert sum(future.exception() is not None for future in futures) == 1
    assert not any(future.cancelled() for future in futures)
    called: list[object] = []
    last = send(sending)
    last.add_done_callback(called.append)
    assert last.remove_done_callback(called.append) == 1
    await last
    await asyncio.sleep(0)
    assert not called


async def test_route_serves_many_messages():
    brokers = ScriptedBrokers()
    sending = brokers.sending()
    await send(sending)
    receipts = [await send(sending) for _ in range(20)]
    assert brokers.routes == 1
    assert {receipt.broker_group for receipt in receipts} == set(GROUPS)
    assert len({receipt.scheduled_id for receipt in receipts}) == 20


async def test_message_without_an_answer_goes_to_the_same_broker_under_the_same_id():
    """Other brokers would keep it a second time."""
    silent = [OutcomeUnknownError(), NotSentError(), BrokerReadOnlyError(), OutcomeUnknownError()]
    brokers = ScriptedBrokers(*silent)
    await send(brokers.sending())
    assert len(brokers.route_task) == 5
    assert len({address for address, _ in brokers.route_task}) == 1
    assert len({request.scheduled_id for _, request in brokers.route_task}) == 1


async def test_message_that_was_surely_not_kept_may_go_to_another_broker():
    brokers = ScriptedBrokers(*(NotSentError() for _ in range(10)))
    await send(brokers.sending())
    assert {address for address, _ in brokers.route_task} == {"g1:1", "g2:1"}
    assert brokers.routes > 1


@pytest.mark.parametrize(
    "refusal",
    [InvalidRequestError(Reason.DELIVER_AT, "late"), OverloadedError(Reason.SCHEDULE_FULL, "full")],
)
async def test_refusal_is_reported_with_its_fate(refusal):
    with pytest.raises(type(refusal)) as error:
        await send(ScriptedBrokers(refusal).sending())
    assert error.value.fate is Fate.NOT_DONE
    with pytest.raises(type(refusal)) as error:
        await send(ScriptedBrokers(OutcomeUnknownError(), refusal).sending())
    assert error.value.fate is Fate.UNKNOWN, "the first try may have been kept, and delivered"


async def test_message_waits_when_the_disk_of_the_metaserver_fails(
    monkeypatch: pytest.MonkeyPatch,
):
    """As one without a time does; no broker was asked yet."""
    brokers = ScriptedBrokers()
    answer, failures = brokers.route_to_send, [StorageError("disk I/O error")] * 2

    async def fails_twice(subject: str, *, order_strategy: object = None) -> Route:
        if failures:
            raise failures.pop()
        return await answer(subject)

    monkeypatch.setattr(brokers, "route_to_send", fails_twice)
    sending = brokers.sending()
    assert (await send(sending)).broker_group in GROUPS
    assert not failures


async def test_message_is_given_up_after_its_time_out():
    brokers = ScriptedBrokers()
    brokers.available = False
    future = send(brokers.sending(), timeout_ms=30)
    with pytest.raises(DeliveryTimeoutError, match="no broker of subject 's'") as error:
        await future
    assert error.value.fate is Fate.NOT_DONE


async def test_bad_arguments_are_refused_at_once():
    sending = ScriptedBrokers().sending()
    with raises(Reason.DELIVER_AT_KEY):
        send(sending, key=b"k")
    with raises(Reason.DELIVER_AT):
        send(sending, deliver_at=1)
    with pytest.raises(InvalidRequestError, match="no logic queue"):
        send(sending, queue=0)
    with pytest.raises(InvalidRequestError, match="a property"):
        send(sending, properties={"n": 1})
    await sending.wait_until_settled()


async def test_messages_over_the_limit_are_refused():
    brokers = ScriptedBrokers()
    sending = brokers.sending(queue_bytes=1 << 20)
    futures = [send(sending, bytes(1 << 19)) for _ in range(2)]
    with pytest.raises(QueueFullError):
        send(sending)
    await asyncio.gather(*futures)
    await send(sending)


async def test_message_that_was_given_up_and_not_awaited_is_reported_once():
    refused = [
        OverloadedError(Reason.SCHEDULE_FULL, "full"),
        OverloadedError(Reason.SCHEDULE_FULL, "full"),
    ]
    sending = ScriptedBrokers(*refused).sending()
    send(sending)
    await sending.wait_until_settled()
    error = sending.take_unreported_error()
    assert error is not None
    assert (error.messages, error.unknown) == (1, 0)
    assert sending.take_unreported_error() is None
    with raises(Reason.SCHEDULE_FULL):
        await send(sending)
    assert sending.take_unreported_error() is None


async def test_messages_that_were_given_up_and_awaited_leave_nothing():
    """A program that awaits each message need never call `flush`."""
    brokers = ScriptedBrokers(*[OverloadedError(Reason.SCHEDULE_FULL, "full") for _ in range(50)])
    sending = brokers.sending()
    given_up = []
    for number in range(50):
        future = send(sending)
        given_up.append(weakref.ref(future._task))
        if number % 2:
            await sending.wait_until_settled()
        with raises(Reason.SCHEDULE_FULL):
            await future
        del future
    await asyncio.sleep(0)
    gc.collect()
    assert not any(task() is not None for task in given_up)
    assert sending.take_unreported_error() is None


async def test_messages_that_were_given_up_and_not_awaited_are_counted_not_kept():
    brokers = ScriptedBrokers(*[OverloadedError(Reason.SCHEDULE_FULL, "full") for _ in range(50)])
    sending = brokers.sending()
    futures = [send(sending) for _ in range(50)]
    await sending.wait_until_settled()
    with raises(Reason.SCHEDULE_FULL):
        futures[40].result()
    assert futures[0].exception().reason is Reason.SCHEDULE_FULL
    given_up = [weakref.ref(future._task) for future in futures]
    del futures
    await asyncio.sleep(0)
    gc.collect()
    assert sum(task() is not None for task in given_up) <= CAUSES_KEPT
    error = sending.take_unreported_error()
    assert error is not None
    assert (error.messages, error.unknown) == (48, 0)
    assert error.__cause__.reason is Reason.SCHEDULE_FULL


async def test_routes_of_subjects_that_come_and_go_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sending_module, "ROUTES_MAX", 10)
    brokers = ScriptedBrokers()
    sending = brokers.sending()
    for number in range(100):
        await sending.send(f"s{number}", b"v", deliver_at=CLOCK.wall_ms() + 60_000)
    assert len(sending._routes) <= 12
    route_task = brokers.routes
    await sending.send("s99", b"v", deliver_at=CLOCK.wall_ms() + 60_000)
    assert brokers.routes == route_task
    together = [
        sending.send(f"t{number}", b"v", deliver_at=CLOCK.wall_ms() + 60_000)
        for number in range(100)
    ]
    await asyncio.gather(*together)
    assert brokers.routes == route_task + 100


async def test_messages_that_no_broker_keeps_are_given_up_at_close():
    brokers = ScriptedBrokers()
    brokers.available = False
    sending = brokers.sending()
    future = send(sending)
    await asyncio.sleep(0.01)
    await sending.close()
    assert future.done()
    with pytest.raises(ClosedError):
        await future
    error = sending.take_unreported_error()
    assert error is None, "the future told it"


async def test_waiting_messages_are_counted_with_what_helps():
    """An entry for each subject, and one for those that a broker may keep already, whose answer was
    lost.
    """
    brokers = ScriptedBrokers(OutcomeUnknownError("the answer was lost"))
    sending = brokers.sending()
    begun_ns = CLOCK.wall_ns()
    first = send(sending, b"one", properties={"a": "b"})
    assert [(each.messages, each.reason, each.advice) for each in sending.list_waiting()] == [
        (1, NO_ANSWER, "")
    ]
    while not brokers.route_task:
        await asyncio.sleep(0)
    brokers.available = False
    others = [send(sending, value) for value in (b"two", b"three")]
    while not all(each.advice for each in sending.list_waiting()):
        await asyncio.sleep(0.001)
    by_group = {each.broker_group: each for each in sending.list_waiting()}
    doubtful, unsent = by_group.pop(brokers.route_task[0][0].removesuffix(":1")), by_group.pop(None)
    assert not by_group
    assert {(each.subject, each.key) for each in (doubtful, unsent)} == {("s", b"")}
    assert (doubtful.messages, unsent.messages, unsent.size_bytes) == (1, 2, len(b"twothree"))
    assert doubtful.size_bytes > len(b"one")
    assert begun_ns <= doubtful.sent_at_ns <= unsent.sent_at_ns
    assert f"restart broker group {doubtful.broker_group}" in doubtful.advice
    assert "no broker of subject 's' is available" in unsent.reason
    assert "restart broker group g1" in unsent.advice
    brokers.available = True
    await asyncio.gather(first, *others)
    await sending.wait_until_settled()
    assert sending.list_waiting() == []


async def test_waiting_messages_are_told_of_a_silent_metaserver(monkeypatch: pytest.MonkeyPatch):
    async def silent(*_: object, **__: object) -> Route:
        raise NotSentError("no metaserver answers")

    brokers = ScriptedBrokers()
    monkeypatch.setattr(brokers, "route_to_send", silent)
    sending = brokers.sending()
    send(sending)
    while not sending.list_waiting()[0].advice:
        await asyncio.sleep(0.001)
    (entry,) = sending.list_waiting()
    assert (entry.reason, entry.advice) == ("no metaserver answers", METASERVER_ADVICE)
    await sending.close()


async def test_cancel_goes_to_the_broker_of_the_receipt():
    brokers = ScriptedBrokers()
    sending = brokers.sending()
    receipt = await send(sending)
    assert await sending.cancel(receipt) is CancelOutcome.DELIVERED
    (_, kept), (address, request) = brokers.route_task
    assert address == f"{receipt.broker_group}:1"
    assert request == CancelScheduled(kept.scheduled_id)
    brokers.available = False
    with pytest.raises(NotSentError, match="not available"):
        await sending.cancel(receipt)


async def test_cancel_raises_closed_error_when_the_producer_is_closed_meanwhile():
    """The task that cancels was not cancelled itself: a CancelledError would end it without a
    word.
    """
    brokers = ScriptedBrokers()
    sending = brokers.sending()
    receipt = await send(sending)
    brokers.answers.clear()
    cancels = [asyncio.create_task(sending.cancel(receipt)) for _ in range(2)]
    await asyncio.sleep(0.01)
    await sending.close()
    await asyncio.wait(cancels)
    for cancel in cancels:
        assert not cancel.cancelled()
        with pytest.raises(ClosedError, match="closed before a metaserver"):
            cancel.result()


@pytest.mark.parametrize("receipt", ["0a", None, b"id"])
async def test_cancel_takes_receipts_only(receipt):
    with pytest.raises(InvalidRequestError, match="ScheduledReceipt"):
        await ScriptedBrokers().sending().cancel(receipt)


async def test_cancel_at_an_unknown_broker_group_is_refused():
    receipt = ScheduledReceipt(
        scheduled_id="0a", subject="s", broker_group="g9", deliver_at_ms=1, durable="fsync"
    )
    with raises(Reason.BROKER_GROUP_UNKNOWN):
        await ScriptedBrokers().sending().cancel(receipt)


async def test_burst_is_sent_once_when_brokers_take_it_slowly():
    """All calls were made at once: most timed out while brokers took the others, and came again
    without an end.
    """

    class SlowBrokers(ScriptedBrokers):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.waiting: Counter[str] = Counter()

        def broker_at(self, address: str) -> SchedulingBroker:
            return SlowBroker(self, address)

    class SlowBroker(SchedulingBroker):
        async def call(self, request: Any, payload: bytes = b"") -> tuple[Any, bytes]:
            brokers.waiting[self._broker_address] += 1
            brokers.calls += 1
            try:
                if brokers.waiting[self._broker_address] > CALLS_MAX:
                    raise OutcomeUnknownError(address=self._broker_address)
                await asyncio.sleep(0.001)
                return await super().call(request, payload)
            finally:
                brokers.waiting[self._broker_address] -= 1

    brokers = SlowBrokers()
    sending = brokers.sending()
    at_ms = CLOCK.wall_ms() + 3_600_000
    futures = [sending.send("reminders", b"renew", deliver_at=at_ms) for _ in range(6 * CALLS_MAX)]
    receipts = [await future for future in futures]
    route_task = [request.scheduled_id.hex() for _, request in brokers.route_task]
    assert sorted(route_task) == sorted(receipt.scheduled_id for receipt in receipts)
    assert len(set(route_task)) == brokers.calls == 6 * CALLS_MAX


class HangingBrokers(ScriptedBrokers):
    """The broker of the first group takes every request and answers none, until it is `freed`."""

    def __init__(self) -> None:
        super().__init__()
        self.freed = asyncio.Event()
        self.groups = set(GROUPS)
        """Those that routes of most subjects name."""
        self.healths = 0
        self.held_messages = 0

    async def until_full(self) -> None:
        while self.held_messages < CALLS_MAX:
            await asyncio.sleep(0.001)

    async def route_to_send(self, subject: str, *, order_strategy: object = None) -> Route:
        route = await super().route_to_send(subject)
        groups = {"hanging": {"g1"}, "healthy": {"g2"}}.get(subject, self.groups)
        partitions = [each for each in route.partitions if each.broker_group in groups]
        return msgspec.structs.replace(route, partitions=tuple(partitions))

    async def health(self) -> Health:
        await self.answers.wait()
        self.healths += 1
        await asyncio.sleep(0.01)
        return await super().health()

    def broker_at(self, address: str) -> SchedulingBroker:
        return HangingBroker(self, address)


class HangingBroker(SchedulingBroker):
    async def call(self, request: Any, payload: bytes = b"") -> tuple[Any, bytes]:
        if self._broker_address == "g1:1" and not self._brokers.freed.is_set():
            self._brokers.held_messages += 1
            await self._brokers.freed.wait()
            raise OutcomeUnknownError(address=self._broker_address)
        return await super().call(request, payload)


async def test_message_is_sent_at_once_when_only_the_broker_of_others_hangs():
    """All brokers had 1,000 turns together: behind 20,000 messages for one that hangs, it waited
    for 100 s.
    """
    brokers = HangingBrokers()
    sending = brokers.sending()
    at_ms = CLOCK.wall_ms() + 3_600_000
    held = [sending.send("hanging", b"v", deliver_at=at_ms) for _ in range(2 * CALLS_MAX)]
    await brokers.until_full()
    async with asyncio.timeout(10):
        receipt = await sending.send("healthy", b"v", deliver_at=at_ms)
    assert receipt.broker_group == "g2"
    assert not any(future.done() for future in held)
    brokers.freed.set()
    async with asyncio.timeout(60):
        await sending.wait_until_settled()
    assert {future.result().broker_group for future in held} == {"g1"}
    assert brokers.healths < CALLS_MAX, "they ask for its address together"


async def test_message_goes_to_another_broker_when_its_own_left_while_it_waited():
    brokers = HangingBrokers()
    brokers.groups = {"g1"}
    sending = brokers.sending()
    at_ms = CLOCK.wall_ms() + 3_600_000
    futures = [sending.send("s", b"v", deliver_at=at_ms) for _ in range(2 * CALLS_MAX)]
    await brokers.until_full()
    brokers.groups = {"g2"}
    brokers.freed.set()
    async with asyncio.timeout(60):
        await sending.wait_until_settled()
    assert Counter(future.result().broker_group for future in futures) == {
        "g1": CALLS_MAX,  # which may keep them already
        "g2": CALLS_MAX,
    }
