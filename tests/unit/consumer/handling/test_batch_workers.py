"""Batch handlers that fail, request a retry, hang or end the program."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest

from keylane import NACK, Message, Retry
from keylane.consumer.handling.batch_workers import BatchWorkers
from keylane.consumer.handling.failing import FailureRules
from keylane.consumer.settings import FailurePolicy
from keylane.protocol.backoff import Backoff
from keylane.protocol.clock import SystemClock
from keylane.protocol.text import key_digest
from support.cluster import eventually
from support.handling import Client, Crash
from support.running.eager_tasks import eager_tasks


def workers_of(
    handler: Callable[[list[Message]], Any],
    *,
    crashed: list[BaseException] | None = None,
    concurrency: int = 4,
    max_records: int = 8,
    max_wait_ms: int = 0,
    failure_rules: FailureRules | None = None,
    ordered: bool = True,
) -> BatchWorkers:
    return BatchWorkers(
        handler,
        max_records=max_records,
        max_wait_ms=max_wait_ms,
        concurrency=concurrency,
        handover_ms=0,
        backoff=Backoff(first_ms=1, max_ms=1),
        clock=SystemClock(),
        rng=random.Random(1),
        on_crash=(crashed if crashed is not None else []).append,
        failure_rules=failure_rules,
        ordered=ordered,
    )


async def handled_by(
    handler: Callable[[list[Message]], Any], keys: list[bytes], **settings: Any
) -> Client:
    """Return the client when every message is handled."""
    client = Client()
    workers = workers_of(handler, **settings)
    client.give(workers, *keys)
    await eventually(lambda: len(client.handled) == len(keys))
    assert client.in_flight.count == 0
    await workers.close()
    return client


async def test_batch_is_handled_whole_and_acked_when_its_handler_returns():
    batches: list[list[int]] = []

    async def handle(messages: list[Message]) -> None:
        batches.append([message.offset for message in messages])
        messages.clear()  # it is the handler's list
        await asyncio.sleep(0)

    client = await handled_by(handle, [b"k%d" % number for number in range(20)])
    assert sorted(map(len, batches)) == [4, 8, 8]
    assert sorted(client.handled) == list(range(20))


async def test_batches_of_other_keys_run_together_and_of_one_key_one_after_another():
    running: set[bytes] = set()
    most = 0

    async def handle(messages: list[Message]) -> None:
        nonlocal most
        keys = {message.key for message in messages}
        assert not keys & running
        running.update(keys)
        most = max(most, len(running))
        await asyncio.sleep(0.001)
        running.difference_update(keys)

    keys = [b"a"] * 20 + [b"b"] * 20 + [b"c"] * 20
    client = await handled_by(handle, keys, max_records=5)
    assert most >= 2
    for start in (0, 20, 40):
        own = [offset for offset in client.handled if start <= offset < start + 20]
        assert own == list(range(start, start + 20))


async def test_failed_batch_is_tried_whole_once_and_then_in_halves():
    """Until only the bad message and later messages of its key are left; other messages do not wait
    for it.
    """
    tries: list[list[int]] = []
    healed = asyncio.Event()

    def handle(messages: list[Message]) -> None:
        offsets = [message.offset for message in messages]
        tries.append(offsets)
        if 3 in offsets and not healed.is_set():
            raise ValueError("3 is bad")

    client = Client()
    workers = workers_of(handle)
    client.give(workers, b"a", b"b", b"c", b"bad", b"e", b"f", b"g", b"bad")
    await eventually(lambda: sorted(client.handled) == [0, 1, 2, 4, 5, 6])
    assert tries[:2] == [list(range(8))] * 2
    await eventually(lambda: [3] in tries)
    healed.set()
    await eventually(lambda: len(client.handled) == 8)
    assert client.handled[-2:] == [3, 7]
    await workers.close()


@pytest.mark.parametrize("loose", [False, True])
async def test_failed_batch_is_logged_as_a_message_is(
    loose: bool, caplog: pytest.LogCaptureFixture
):
    """The line names the group and what waits: nothing if the batch consists of redriven dead
    letters.
    """

    def handle(messages: list[Message]) -> None:
        if messages[0].attempt == 1:
            raise ValueError("no")

    client = Client()
    client.group = "billing"
    client.is_loose = loose
    workers = workers_of(handle)
    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        client.give(workers, b"a", b"b")
        await eventually(lambda: len(client.handled) == 2)
        await workers.close()
    where = f"s partition 1 offset 0 in group billing ({key_digest(b'a')})"
    failed, handled = caplog.messages
    assert failed.startswith(f"handler of batches failed with ValueError on {where}: attempt 1, ")
    assert ("later messages of its key wait" in failed) is not loose
    assert handled.startswith(f"{where} is handled after ")


@pytest.mark.parametrize("ask", ["raise", "return"])
async def test_batch_is_tried_again_whole_when_its_handler_asks_for_it(ask: str):
    tries: list[tuple[int, int]] = []

    def handle(messages: list[Message]) -> Any:
        tries.append((len(messages), messages[-1].attempt))
        if len(tries) == 4:
            return None
        if ask == "raise":
            raise Retry("not yet", after_s=0)
        return NACK

    await handled_by(handle, [b"a", b"b", b"c"])
    assert tries == [(3, 1), (3, 2), (3, 3), (3, 4)]


async def test_small_batch_waits_for_more_messages():
    sizes: list[int] = []
    client = Client()
    workers = workers_of(lambda messages: sizes.append(len(messages)), max_wait_ms=40)
    client.give(workers, b"a", b"b")
    await asyncio.sleep(0.005)
    assert sizes == []
    client.give(workers, b"c", start=2)
    await eventually(lambda: sizes)
    assert sizes == [3]
    await workers.close()


async def test_hanging_batch_is_cancelled_and_forgotten_at_a_hand_over():
    """Its messages and the waiting ones are left to the next owner."""
    client = Client()
    begun = asyncio.Event()

    async def handle(_messages: list[Message]) -> None:
        begun.set()
        await asyncio.Event().wait()

    workers = workers_of(handle, max_records=2)
    client.give(workers, b"a", b"a", b"a", b"a", b"a")
    await begun.wait()
    client.lose()
    await asyncio.wait_for(workers.quiesce(client), 30)
    assert client.in_flight.count == 0
    assert client.handled == []
    other = Client(2)
    other.give(workers, b"z")
    await workers.close()


async def test_failed_batches_are_forgotten_at_a_hand_over():
    client = Client()
    tries = 0

    def handle(_messages: list[Message]) -> None:
        nonlocal tries
        tries += 1
        raise ValueError

    workers = workers_of(handle)
    client.give(workers, *(b"k%d" % number for number in range(16)))
    await eventually(lambda: tries > 8)
    client.lose()
    await asyncio.wait_for(workers.quiesce(client), 30)
    assert client.in_flight.count == 0
    await workers.close()


async def test_crash_in_a_batch_handler_ends_the_consumer():
    crashed: list[BaseException] = []

    def handle(_messages: list[Message]) -> None:
        raise Crash

    workers = workers_of(handle, crashed=crashed, concurrency=1)
    client = Client()
    client.give(workers, b"a", b"b")
    await eventually(lambda: crashed)
    assert isinstance(crashed[0], Crash)
    assert client.in_flight.count == 0
    assert client.handled == []
    await workers.close()


# ── messages that fail too often ──────────────────────────────────────────────────────────────────
def refuse(*values: int) -> Callable[[list[Message]], None]:
    """Return a handler that fails for these offsets."""

    def handle(messages: list[Message]) -> None:
        if any(message.offset in values for message in messages):
            raise ValueError("no")

    return handle


@pytest.mark.parametrize("tries_max", [1, 4])
async def test_message_that_fails_alone_is_parked_with_those_behind_it(tries_max: int):
    """The other messages of its batch and earlier ones of its key are handled; later ones of its
    key are not.
    """
    client = Client()
    failure_rules = FailureRules(policy=FailurePolicy.PARK, tries_max=tries_max, client="c")
    workers = workers_of(refuse(3), failure_rules=failure_rules)
    keys = [b"a", b"b", b"bad", b"bad", b"bad", b"c", b"d", b"e", b"bad", b"f"]
    client.give(workers, *keys)
    await eventually(lambda: client.set_aside and len(client.handled) == 7)
    ((how, offset, behind, failure),) = client.set_aside
    assert (how, offset, behind) == ("parked", 3, [4, 8])
    assert (failure.kind, failure.client) == ("ValueError", "c")
    assert failure.attempts >= tries_max
    assert sorted(client.handled) == [0, 1, 2, 5, 6, 7, 9]
    client.give(workers, b"bad", start=10)
    await eventually(lambda: 10 in client.handled)
    assert client.in_flight.count == 0
    await workers.close()


@pytest.mark.parametrize(
    ("policy", "ordered"), [(FailurePolicy.DEAD, True), (FailurePolicy.PARK, False)]
)
async def test_message_that_fails_alone_is_buried(policy: FailurePolicy, ordered: bool):
    """As a dead letter, or in a shared group: later messages of its key are handled."""
    client = Client()
    failure_rules = FailureRules(policy=policy, tries_max=3)
    workers = workers_of(refuse(1), failure_rules=failure_rules, ordered=ordered)
    client.give(workers, b"a", b"a", b"a", b"b")
    await eventually(lambda: client.set_aside and len(client.handled) == 3)
    assert [each[:3] for each in client.set_aside] == [("buried", 1, [])]
    assert sorted(client.handled) == [0, 2, 3]
    assert client.in_flight.count == 0
    await workers.close()


async def test_batch_that_asks_for_another_try_is_never_set_aside():
    client, calls = Client(), 0

    def handle(_messages: list[Message]) -> object:
        nonlocal calls
        calls += 1
        return NACK if calls < 20 else None

    workers = workers_of(handle, failure_rules=FailureRules(policy=FailurePolicy.PARK, tries_max=1))
    client.give(workers, b"a")
    await eventually(lambda: client.handled)
    assert client.set_aside == []
    await workers.close()


async def test_messages_of_another_delivery_are_a_batch_of_their_own():
    """Redriven messages, also of other partitions, are acked and forgotten through their own
    delivery.
    """
    client, window, batches = Client(), Window(), []

    async def handle(messages: list[Message]) -> None:
        batches.append({message.delivery for message in messages})
        await asyncio.sleep(0)

    workers = workers_of(handle, max_wait_ms=20)
    window.client = client
    client.in_flight.count += 4
    for start in (0, 2):
        workers.put([Message("s", b"w", b"", start + n, 9, 0, delivery=window) for n in (0, 1)])
    client.give(workers, b"a", b"b")
    await eventually(lambda: len(window.handled) == 4 and len(client.handled) == 2)
    assert all(len(deliveries) == 1 for deliveries in batches)
    assert window.handled == [0, 1, 2, 3]
    assert len(workers._batch_lanes._queues) <= 2
    workers.put([Message("s", b"w", b"", 4, 9, 0, delivery=window)])
    await eventually(lambda: 4 in window.handled)
    await workers.close()


class Window(Client):
    """A delivery other than its client."""

    is_apart = True

    def mark_handled(self, offset: int) -> None:
        self.handled.append(offset)


@pytest.mark.parametrize("how", ["Retry", "NACK"])
async def test_batch_that_asks_for_another_try_is_set_aside_for_it_under_retry(how: str):
    """Each message is set aside by itself after one attempt; others of its key proceed."""
    tried: list[list[int]] = []

    async def handle(messages: list[Message]) -> object:
        tried.append([message.offset for message in messages])
        if messages[0].offset:
            return None
        if how == "Retry":
            raise Retry("not yet", after_s=0)
        return NACK

    client = Client()
    failure_rules = FailureRules(policy=FailurePolicy.RETRY)
    workers = workers_of(handle, failure_rules=failure_rules, max_records=2, concurrency=1)
    client.give(workers, b"a", b"b", b"a", b"b")
    await eventually(lambda: len(tried) == 2 and client.in_flight.count == 0)
    await workers.close()
    assert tried == [[0, 1], [2, 3]]
    assert [(what, offset) for what, offset, *_ in client.set_aside] == [
        ("retried", 0),
        ("retried", 1),
    ]
    assert client.handled == [2, 3]


async def test_message_that_asks_too_often_is_buried_alone_of_a_batch():
    async def handle(_messages: list[Message]) -> object:
        return NACK

    client = Client()
    failure_rules = FailureRules(policy=FailurePolicy.RETRY, retry_tries_max=3)
    workers = workers_of(handle, failure_rules=failure_rules, max_records=2, concurrency=1)
    messages = client.messages(b"a", b"b")
    messages[0].attempt = 3
    client.in_flight.count += 2
    workers.put(messages)
    await eventually(lambda: client.in_flight.count == 0)
    await workers.close()
    assert [(what, offset) for what, offset, *_ in client.set_aside] == [
        ("buried", 0),
        ("retried", 1),
    ]


async def test_batches_are_handled_when_the_event_loop_takes_first_steps_at_once():
    batches: list[int] = []

    async def handle(messages: list[Message]) -> None:
        batches.append(len(messages))
        await asyncio.sleep(0)

    asyncio.get_running_loop().set_task_factory(eager_tasks)
    client = await handled_by(handle, [b"k%d" % number for number in range(20)])
    assert sum(batches) == 20
    assert sorted(client.handled) == list(range(20))
