"""A message that waits for a retry occupies no worker and does not slow down the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from keylane.consumer.handed_out import shell_of
from keylane.consumer.session.events import LeaseGranted
from keylane.protocol.message import Message
from keylane.testing.machines import loop as loop_module
from support.cluster import eventually
from support.handling import Client, in_virtual_time, virtual_loop, workers_of

WORK_S = 0.01
MESSAGES = 4_000


def is_bad(message: Message) -> bool:
    return message.key.startswith(b"bad")


def time_of(
    monkeypatch: pytest.MonkeyPatch,
    *,
    concurrency: int,
    failing: int,
    fails_after_s: float = WORK_S,
    ordered: bool = True,
    count: int = MESSAGES,
) -> tuple[float, int]:
    """
    Run `count` messages of other keys beside `failing` keys, in the same partition and in another.

    Returns:
        The virtual seconds that the other messages take, and the attempts of failing messages in
        that time.
    """
    monkeypatch.setattr(loop_module, "STEPS_MAX", 10_000_000)
    loop, machine = virtual_loop()
    clients = [Client(1), Client(2)]
    failed = tries = 0

    async def handle(message: Message) -> None:
        nonlocal failed, tries
        if is_bad(message):
            await asyncio.sleep(fails_after_s)
            failed += message.attempt == 1
            tries += message.attempt > 1
            raise ValueError("never")
        await asyncio.sleep(WORK_S)

    async def story() -> tuple[float, int]:
        workers = workers_of(
            handle,
            concurrency=concurrency,
            clock=machine,
            first_ms=100,
            max_ms=30_000,
            ordered=ordered,
        )
        clients[0].give(workers, *[b"bad%d" % number for number in range(failing)])
        while failed < failing:  # the first tries are no different from those of good messages
            await asyncio.sleep(0.1)
        began, tries_before = loop.now, tries
        for client in clients:
            keys = [b"%d-%d" % (client.partition_id, number % 500) for number in range(count)]
            client.give(workers, *keys, start=1_000_000)
        while any(len(client.handled) < count for client in clients):
            await asyncio.sleep(0.1)
        took = loop.now - began
        for client in clients:
            client.lose()
            await client.hand_over()
            assert client.held == 0
        await workers.close()
        return took, tries - tries_before

    return in_virtual_time(story(), loop)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("concurrency", [1, 16])
@pytest.mark.parametrize("failing", [1, 16, 1_000])
def test_failing_keys_do_not_slow_other_keys(
    monkeypatch: pytest.MonkeyPatch, concurrency: int, failing: int, ordered: bool
):
    """With as many failing keys as workers, and with far more, the others keep 95 % of their rate;
    all retries run.
    """
    alone_s, _ = time_of(monkeypatch, concurrency=concurrency, failing=0, ordered=ordered)
    beside_s, tries = time_of(
        monkeypatch, concurrency=concurrency, failing=failing, ordered=ordered
    )
    assert alone_s / beside_s >= 0.95
    assert tries >= min(failing, 4), "nor are they starved"


@pytest.mark.parametrize("concurrency", [1, 16])
def test_slowly_failing_keys_do_not_slow_other_keys(
    monkeypatch: pytest.MonkeyPatch, concurrency: int
):
    """Each attempt of a hundred keys ends in a time-out that is a hundred times as long as the
    others' work.
    """
    count = 2_000 * concurrency
    alone_s, _ = time_of(monkeypatch, concurrency=concurrency, failing=0, count=count)
    beside_s, tries = time_of(
        monkeypatch, concurrency=concurrency, failing=100, fails_after_s=1.0, count=count
    )
    assert alone_s / beside_s >= 0.95
    assert tries >= 1


def test_failing_messages_are_tried_by_time_and_keep_the_order_of_their_keys():
    """With one worker, retries follow the backoff, and no newer message of a key runs before the
    failed one.
    """
    loop, machine = virtual_loop()
    client = Client()
    log: list[tuple[bytes, int, int]] = []
    at_s: dict[int, list[float]] = {}

    def handle(message: Message) -> None:
        at_s.setdefault(message.offset, []).append(loop.now)
        log.append((message.key, message.offset, message.attempt))
        if message.offset < 5 and message.attempt < 6:
            raise ValueError("not yet")

    async def story() -> None:
        workers = workers_of(handle, clock=machine, first_ms=1_000, max_ms=8_000)
        client.give(workers, b"a", b"b", b"c", b"d", b"e")
        for start in range(5, 100, 5):
            client.give(workers, b"a", b"b", b"c", b"d", b"e", start=start)
            await asyncio.sleep(0.5)
        while len(client.handled) < 100:
            await asyncio.sleep(1)
        await workers.close()

    in_virtual_time(story(), loop)
    for offset in range(5):
        waits = [
            after - before for before, after in zip(at_s[offset], at_s[offset][1:], strict=False)
        ]
        assert len(waits) == 5
        for wait_s, step_s in zip(waits, (1, 2, 4, 8, 8), strict=True):
            assert step_s / 2 - 0.01 <= wait_s <= step_s + 0.02
    for key in (b"a", b"b", b"c", b"d", b"e"):
        offsets = [offset for k, offset, _ in log if k == key]
        assert offsets == sorted(offsets), "a key's messages run one after the other"


def test_lost_partition_forgets_its_tries_at_once():
    """A hand-over does not wait for the next attempt; under a new token attempts are counted from
    1.
    """
    loop, machine = virtual_loop()
    client, again, other = Client(1), Client(1), Client(2)
    attempts: list[tuple[int, int]] = []

    def handle(message: Message) -> None:
        attempts.append((message.offset, message.attempt))
        if message.partition_id == 1 and shell_of(message) is client.shell:
            raise ValueError("never")

    async def story() -> None:
        workers = workers_of(handle, clock=machine, first_ms=60_000, max_ms=60_000)
        client.give(workers, *[b"%d" % number for number in range(50)], b"0", b"1")
        await asyncio.sleep(1)
        assert client.held == 52
        client.lose()
        began = loop.now
        await client.hand_over()
        assert loop.now - began < 0.1
        assert client.held == 0
        attempts.clear()
        again.give(workers, b"0", b"0", b"1")
        other.give(workers, b"1")
        await asyncio.sleep(1)
        assert again.handled == [0, 1, 2]
        assert other.handled == [0]
        assert {attempt for _, attempt in attempts} == {1}
        await workers.close()

    in_virtual_time(story(), loop)


def test_message_is_not_tried_again_after_its_lease():
    """The deadline is checked before each attempt; a dropped message blocks neither its lane nor
    the hand-over.
    """
    loop, machine = virtual_loop()
    client, other = Client(1), Client(2)
    tries = 0

    def handle(message: Message) -> None:
        nonlocal tries
        if shell_of(message) is client.shell:
            tries += 1
            raise ValueError("never")

    async def story() -> None:
        workers = workers_of(handle, clock=machine, first_ms=1_000, max_ms=1_000)
        client.give(workers, b"k")
        other_messages = other.give(workers, b"k")
        client.shell.feed(LeaseGranted(machine.boot_ms() + 3_500))
        await asyncio.sleep(10)
        assert tries in (4, 5, 6)
        assert client.held == 0
        assert other.handled == [other_messages[0].offset]
        await workers.close()

    in_virtual_time(story(), loop)


def test_handler_that_fails_during_its_hand_over_is_not_waited_for():
    """The hand-over does not wait for the pause before the next attempt."""
    loop, machine = virtual_loop()
    client = Client()

    async def handle(message: Message) -> None:
        await asyncio.sleep(1)
        raise ValueError("never")

    async def story() -> None:
        workers = workers_of(
            handle, clock=machine, first_ms=60_000, max_ms=60_000, handover_ms=5_000
        )
        client.give(workers, b"k")
        await asyncio.sleep(0.5)
        client.lose()
        began = loop.now
        await client.hand_over()
        assert loop.now - began < 1
        await workers.close()

    in_virtual_time(story(), loop)


def test_hanging_try_does_not_delay_other_tries():
    """Four of sixteen workers may retry; the retries of four keys never end, but the fifth key is
    still handled.
    """
    loop, machine = virtual_loop()
    client = Client()

    async def handle(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError("not yet")
        if message.key != b"good":
            await asyncio.sleep(100_000)

    async def story() -> None:
        workers = workers_of(handle, clock=machine, concurrency=16, first_ms=100, max_ms=100)
        client.give(workers, b"1", b"2", b"3", b"4")
        await asyncio.sleep(1)
        client.give(workers, b"good", start=4)
        await asyncio.sleep(20)
        assert client.handled == [4]
        client.lose()
        await client.hand_over()
        assert client.held == 0
        await workers.close()

    in_virtual_time(story(), loop)


@pytest.mark.parametrize("batched", [False, True])
async def test_message_is_not_tried_again_while_its_partition_is_paused(batched: bool):
    """Even if its retry is due. Other partitions' retries run, and this one runs after `resume`."""
    tries: dict[int, int] = {1: 0, 2: 0}
    blocked = asyncio.Event()
    blocked.set()

    async def fail(message: Message) -> None:
        tries[message.partition_id] += 1
        await blocked.wait()
        raise ValueError("no")

    async def fail_all(messages: list[Message]) -> None:
        for message in messages:
            await fail(message)

    handler: Any = fail_all if batched else fail
    workers = workers_of(handler, batched=batched, max_records=1)
    clients = [Client(1), Client(2)]
    for client in clients:
        client.give(workers, b"k%d" % client.partition_id)
    await eventually(lambda: min(tries.values()) > 2)
    blocked.clear()
    await asyncio.sleep(0.05)  # one of them runs, and the try of the other is due
    clients[0].shell.pause()
    blocked.set()
    await eventually(lambda: tries[2] > 5)
    paused, other = tries[1], tries[2]
    await eventually(lambda: tries[2] > other + 5)
    assert tries[1] == paused
    clients[0].shell.resume()
    await eventually(lambda: tries[1] > paused + 2)
    clients[1].shell.pause()
    for client in clients:
        client.lose()
        await client.hand_over()
        assert client.held == 0
    await workers.close()
