"""Batch handlers that fail, request a retry, hang or end the program."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest

from keylane import NACK, Message, Retry
from keylane.consumer.dispatch import workers as workers_module
from keylane.consumer.dispatch.handlers import filtered_batches
from keylane.consumer.dispatch.threads import HandlerThreads
from keylane.consumer.filter import MessageFilter
from keylane.protocol.text import key_digest
from support.cluster import eventually
from support.dispatching import GROUP, WorkerStory
from support.handling import Crash, in_virtual_time, virtual_loop
from support.running.eager_tasks import eager_tasks


def offsets_of(messages: list[Message]) -> list[int]:
    return [message.offset for message in messages]


async def handled_by(
    handler: Callable[[list[Message]], Any], keys: list[bytes], **settings: Any
) -> WorkerStory:
    """Return the story when every message is handled and acked."""
    story = WorkerStory(handler, **settings)
    shell = story.shell
    shell.give(*keys)
    await eventually(lambda: shell.acked.cursor == len(keys))
    assert sorted(shell.ended) == list(range(len(keys)))
    assert shell.held == 0
    await story.pool.close()
    return story


async def test_batch_is_handled_whole_and_acked_when_its_handler_returns():
    batches: list[list[int]] = []

    async def handle(messages: list[Message]) -> None:
        batches.append(offsets_of(messages))
        messages.clear()  # it is the handler's list
        await asyncio.sleep(0)

    await handled_by(handle, [b"k%d" % number for number in range(20)])
    assert sorted(map(len, batches)) == [4, 8, 8]


async def test_batch_is_not_acked_while_its_handler_runs():
    gate = asyncio.Event()

    async def handle(_messages: list[Message]) -> None:
        await gate.wait()

    story = WorkerStory(handle, ack="each")
    story.shell.give(b"a", b"b")
    await asyncio.sleep(0.02)
    assert story.shell.acked.cursor == 0
    gate.set()
    await eventually(lambda: story.shell.acked.cursor == 2)
    await story.pool.close()


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
    story = await handled_by(handle, keys, max_records=5)
    assert most >= 2
    for start in (0, 20, 40):
        own = [offset for offset in story.shell.ended if start <= offset < start + 20]
        assert own == list(range(start, start + 20))


async def test_workers_take_batches_of_partitions_in_turn():
    begun: list[int] = []

    async def handle(messages: list[Message]) -> None:
        begun.append(messages[0].partition_id)
        await asyncio.sleep(0)

    story = WorkerStory(handle, concurrency=1, max_records=2)
    other = story.other_partition()
    await asyncio.sleep(0)
    story.shell.give(*[b""] * 8)
    other.give(*[b""] * 8)
    await eventually(lambda: len(begun) == 8)
    assert begun in ([1, 2] * 4, [2, 1] * 4)
    await story.pool.close()


async def test_failed_batch_is_tried_whole_once_and_then_in_halves():
    """Until only the bad message and later messages of its key are left; other messages do not wait
    for it.
    """
    tries: list[list[int]] = []
    healed = asyncio.Event()

    def handle(messages: list[Message]) -> None:
        tries.append(offsets_of(messages))
        if 3 in tries[-1] and not healed.is_set():
            raise ValueError("3 is bad")

    story = WorkerStory(handle)
    shell = story.shell
    shell.give(b"a", b"b", b"c", b"bad", b"e", b"f", b"g", b"bad")
    await eventually(lambda: sorted(shell.ended) == [0, 1, 2, 4, 5, 6])
    assert tries[:2] == [list(range(8))] * 2
    await eventually(lambda: [3] in tries)
    healed.set()
    await eventually(lambda: len(shell.ended) == 8)
    assert shell.ended[-2:] == [3, 7]
    await story.pool.close()


async def test_failed_batch_is_logged_as_a_message_is(caplog: pytest.LogCaptureFixture):
    """The line names the group and what waits."""

    def handle(messages: list[Message]) -> None:
        if messages[0].attempt == 1:
            raise ValueError("no")

    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        await handled_by(handle, [b"a", b"b"])
    where = f"s partition 1 offset 0 in group {GROUP} ({key_digest(b'a')})"
    failed, handled = caplog.messages
    assert failed.startswith(f"handler of batches failed with ValueError on {where}: attempt 1, ")
    assert "later messages of its key wait" in failed
    assert handled.startswith(f"{where} is handled after ")


async def test_failed_batch_of_redriven_dead_letters_is_logged_without_what_waits(
    caplog: pytest.LogCaptureFixture,
):
    def handle(messages: list[Message]) -> None:
        if messages[0].attempt == 1:
            raise ValueError("no")

    story = WorkerStory(handle)
    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        story.shell.redrive(b"a", 3, 4, partition_id=9, is_loose=True)
        await eventually(lambda: story.shell.ended == [3, 4])
        await story.pool.close()
    failed, _ = caplog.messages
    assert f"s partition 9 offset 3 in group {GROUP}" in failed
    assert "later messages of its key wait" not in failed


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


async def test_pause_that_a_handler_asks_for_is_kept():
    loop = asyncio.get_running_loop()
    times: list[float] = []

    def handle(_messages: list[Message]) -> None:
        times.append(loop.time())
        if len(times) == 1:
            raise Retry(after_s=0.2)

    await handled_by(handle, [b"a", b"b"])
    assert times[1] - times[0] >= 0.19


async def test_small_batch_waits_for_more_messages():
    sizes: list[int] = []
    story = WorkerStory(lambda messages: sizes.append(len(messages)), max_wait_ms=40)
    story.shell.give(b"a", b"b")
    await asyncio.sleep(0.005)
    assert sizes == []
    story.shell.give(b"c")
    await eventually(lambda: sizes)
    assert sizes == [3]
    await story.pool.close()


# ── hand-overs, and the end ───────────────────────────────────────────────────────────────────────
async def test_hanging_batch_is_cancelled_and_forgotten_at_a_hand_over():
    """Its messages and the waiting ones are left to the next owner."""
    begun = asyncio.Event()

    async def handle(messages: list[Message]) -> None:
        begun.set()
        if messages[0].partition_id == 1:
            await asyncio.Event().wait()

    story = WorkerStory(handle, max_records=2)
    shell = story.shell
    shell.give(b"a", b"a", b"a", b"a", b"a")
    await begun.wait()
    await asyncio.wait_for(shell.hand_over(), 30)
    assert (shell.held, shell.ended, shell.acked.cursor) == (0, [], 0)
    other = story.other_partition()
    other.give(b"z")
    await eventually(lambda: other.ended == [0])
    await story.pool.close()


async def test_running_batch_may_end_within_a_hand_over():
    begun = asyncio.Event()

    async def handle(_messages: list[Message]) -> None:
        begun.set()
        await asyncio.sleep(0.02)

    story = WorkerStory(handle, max_records=2, concurrency=1)
    shell = story.shell
    shell.give(b"a", b"b", b"c")
    await begun.wait()
    await asyncio.wait_for(shell.hand_over(grace_ms=10_000), 30)
    await eventually(lambda: shell.acked.cursor == 2)
    assert shell.ended == [0, 1]
    await story.pool.close()


async def test_failed_batches_are_forgotten_at_a_hand_over(caplog: pytest.LogCaptureFixture):
    tries = 0

    def handle(_messages: list[Message]) -> None:
        nonlocal tries
        tries += 1
        raise ValueError

    story = WorkerStory(handle)
    shell = story.shell
    shell.give(*(b"k%d" % number for number in range(16)))
    await eventually(lambda: tries > 8)
    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        await asyncio.wait_for(shell.hand_over(), 30)
    assert shell.held == 0
    assert any("is given up here" in line for line in caplog.messages)
    tried = tries
    await asyncio.sleep(0.02)
    assert tries == tried
    await story.pool.close()


async def test_batch_that_ignores_its_cancellation_delays_the_hand_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The hand-over logs that once and waits for the handler."""
    monkeypatch.setattr(workers_module, "CANCEL_WARN_MS", 10)
    gate, begun = asyncio.Event(), asyncio.Event()

    async def handle(_messages: list[Message]) -> None:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await gate.wait()
        await gate.wait()

    story = WorkerStory(handle)
    shell = story.shell
    shell.give(b"k", b"l")
    await begun.wait()
    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        handing_over = asyncio.create_task(shell.hand_over())
        await eventually(lambda: caplog.messages)
        await asyncio.sleep(0.05)
        assert not handing_over.done()
    (line,) = caplog.messages
    assert "s partition 1 offset 0" in line
    assert "is still running; the hand-over waits for it" in line
    gate.set()
    await asyncio.wait_for(handing_over, 30)
    await eventually(lambda: shell.acked.cursor == 2)
    await story.pool.close()


async def test_crash_in_a_batch_handler_ends_the_consumer():
    def handle(_messages: list[Message]) -> None:
        raise Crash

    story = WorkerStory(handle, concurrency=1)
    story.shell.give(b"a", b"b")
    await eventually(lambda: story.crashed)
    assert isinstance(story.crashed[0], Crash)
    await asyncio.wait_for(story.shell.hand_over(), 30)
    assert (story.shell.held, story.shell.ended) == (0, [])
    await story.pool.close()


async def test_batch_whose_handler_closes_the_pool_is_returned():
    begun = asyncio.Event()

    async def handle(_messages: list[Message]) -> None:
        begun.set()
        await asyncio.sleep(60)

    story = WorkerStory(handle)
    story.shell.give(b"a", b"b")
    await begun.wait()
    await story.pool.close()
    assert story.shell.state.lanes.is_idle
    assert story.shell.ended == []


async def test_cancel_that_a_batch_handler_swallowed_reaches_no_later_one():
    """Task groups and timeouts of later handlers would break."""
    attempts: list[tuple[bytes, int]] = []

    async def fail() -> None:
        raise ValueError("no such customer")

    async def handle(messages: list[Message]) -> None:
        (message,) = messages
        attempts.append((message.key, message.attempt))
        if message.key == b"slow":
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_later(0.002, task.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        elif message.attempt == 1:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                group.create_task(asyncio.sleep(60))

    story = await handled_by(handle, [b"slow", b"group"], concurrency=1, max_records=1)
    assert attempts == [(b"slow", 1), (b"group", 1), (b"group", 2)]
    assert not story.crashed


async def test_batches_are_handled_when_the_event_loop_takes_first_steps_at_once():
    batches: list[int] = []

    async def handle(messages: list[Message]) -> None:
        batches.append(len(messages))
        await asyncio.sleep(0)

    asyncio.get_running_loop().set_task_factory(eager_tasks)
    await handled_by(handle, [b"k%d" % number for number in range(20)])
    assert sum(batches) == 20


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
    story = WorkerStory(refuse(3), on_failure="park", tries_max=tries_max)
    shell = story.shell
    shell.give(b"a", b"b", b"bad", b"bad", b"bad", b"c", b"d", b"e", b"bad", b"f")
    await eventually(lambda: shell.set_aside and len(shell.ended) == 7)
    ((how, offset, behind, failure),) = shell.set_aside
    assert (how, offset, behind) == ("parked", 3, [4, 8])
    assert (failure.kind, failure.client) == ("ValueError", "c")
    assert failure.attempts >= tries_max
    assert sorted(shell.ended) == [0, 1, 2, 5, 6, 7, 9]
    assert shell.held == 0
    await story.pool.close()


@pytest.mark.parametrize(("policy", "strategy"), [("dead", "exclusive"), ("park", "shared")])
async def test_message_that_fails_alone_is_buried(policy: str, strategy: str):
    """As a dead letter, or in a shared group: later messages of its key are handled."""
    story = WorkerStory(refuse(1), on_failure=policy, tries_max=3, consume_strategy=strategy)
    shell = story.shell
    shell.give(b"a", b"a", b"a", b"b")
    await eventually(lambda: shell.set_aside and len(shell.ended) == 3)
    assert [each[:3] for each in shell.set_aside] == [("buried", 1, [])]
    assert sorted(shell.ended) == [0, 2, 3]
    assert shell.held == 0
    await story.pool.close()


async def test_batch_that_asks_for_another_try_is_never_set_aside():
    calls = 0

    def handle(_messages: list[Message]) -> object:
        nonlocal calls
        calls += 1
        return NACK if calls < 20 else None

    story = await handled_by(handle, [b"a"], on_failure="park", tries_max=1)
    assert story.shell.set_aside == []


@pytest.mark.parametrize("how", ["Retry", "NACK"])
async def test_batch_that_asks_for_another_try_is_set_aside_for_it_under_retry(
    how: str, caplog: pytest.LogCaptureFixture
):
    """Each message is set aside by itself after one attempt, with a line of its own; others of its
    key proceed.
    """
    tried: list[list[int]] = []

    async def handle(messages: list[Message]) -> object:
        tried.append(offsets_of(messages))
        if messages[0].offset:
            return None
        if how == "Retry":
            raise Retry("not yet", after_s=0)
        return NACK

    story = WorkerStory(handle, on_failure="retry", max_records=2, concurrency=1)
    shell = story.shell
    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        shell.give(b"a", b"b", b"a", b"b")
        await eventually(lambda: len(tried) == 2 and shell.held == 0 and len(shell.set_aside) == 2)
        await story.pool.close()
    assert tried == [[0, 1], [2, 3]]
    assert [each[:2] for each in shell.set_aside] == [("retried", 0), ("retried", 1)]
    assert shell.ended == [2, 3]
    lines = [line for line in caplog.messages if "is set aside alone, and tried again" in line]
    assert [line.split(" in group")[0] for line in lines] == [
        "s partition 1 offset 0",
        "s partition 1 offset 1",
    ]


async def test_message_that_asks_too_often_is_buried_alone_of_a_batch():
    async def handle(_messages: list[Message]) -> object:
        return NACK

    story = WorkerStory(
        handle,
        on_failure="retry",
        retry_tries_max=3,
        max_records=2,
        concurrency=1,
        attempts=((0, 2),),
    )
    shell = story.shell
    await asyncio.sleep(0)  # it is acquired
    shell.give(b"a", b"b")
    await eventually(lambda: shell.held == 0 and len(shell.set_aside) == 2)
    assert [each[:2] for each in shell.set_aside] == [("buried", 0), ("retried", 1)]
    await story.pool.close()


async def test_messages_of_another_delivery_are_a_batch_of_their_own():
    """Redriven messages, also of other partitions, are in no batch with others."""
    batches = []

    async def handle(messages: list[Message]) -> None:
        batches.append({message.partition_id for message in messages})
        await asyncio.sleep(0)

    story = WorkerStory(handle, max_wait_ms=20)
    shell = story.shell
    shell.redrive(b"w", 0, 1, 2, 3, partition_id=9)
    shell.give(b"a", b"b")
    await eventually(lambda: shell.acked.cursor == 2 and shell.held == 0)
    assert all(len(partitions) == 1 for partitions in batches)
    assert [offset for offset in shell.ended if offset >= 2] == [2, 3]
    shell.redrive(b"w", 4, partition_id=9)
    await eventually(lambda: 4 in shell.ended)
    await story.pool.close()


# ── handlers that take too long ───────────────────────────────────────────────────────────────────
async def watch(story: WorkerStory) -> None:
    """Look for hanging handlers once a second, as a consumer does."""
    while True:
        story.pool.check_long_running()
        await asyncio.sleep(1)


def test_batch_that_hangs_is_told_by_its_first_message():
    loop, machine = virtual_loop()

    async def handle(_messages: list[Message]) -> None:
        await asyncio.sleep(12)

    async def play() -> WorkerStory:
        story = WorkerStory(handle, clock=machine, concurrency=1)
        watching = asyncio.create_task(watch(story))
        await asyncio.sleep(0)
        story.shell.give(b"a", b"b", b"c")
        while not story.shell.ended:
            await asyncio.sleep(1)
        watching.cancel()
        await story.pool.close()
        return story

    story = in_virtual_time(play(), loop)
    assert {told[:3] for told in story.shell.hanging} == {
        (0, "the handler of its batch of 3 messages has not returned", 0)
    }


def test_batch_that_times_out_is_cancelled_and_tried_again():
    loop, machine = virtual_loop()
    tries: list[int] = []

    async def handle(messages: list[Message]) -> None:
        tries.append(messages[0].attempt)
        if len(tries) == 1:
            await asyncio.sleep(60)

    async def play() -> tuple[WorkerStory, float]:
        story = WorkerStory(handle, clock=machine, handler_timeout_ms=1_000, tries_max=5)
        started_s = asyncio.get_running_loop().time()
        story.shell.give(b"a", b"b")
        while not story.shell.ended:
            await asyncio.sleep(0.01)
        took_s = asyncio.get_running_loop().time() - started_s
        await story.pool.close()
        return story, took_s

    story, took_s = in_virtual_time(play(), loop)
    assert tries == [1, 2]
    assert 1 <= took_s < 1.3
    assert story.shell.ended == [0, 1]


def test_batch_that_times_out_in_a_thread_is_told_and_not_cancelled(
    caplog: pytest.LogCaptureFixture,
):
    loop, machine = virtual_loop()

    async def handle(_messages: list[Message]) -> None:
        await asyncio.sleep(5)  # in place of a thread, which cannot be cancelled

    async def play() -> WorkerStory:
        story = WorkerStory(handle, clock=machine, handler_timeout_ms=1_000, cancels=False)
        story.shell.give(b"a", b"b")
        while not story.shell.ended:
            await asyncio.sleep(0.1)
        await story.pool.close()
        return story

    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        story = in_virtual_time(play(), loop)
    assert [told[0] for told in story.shell.hanging] == [0]
    assert story.shell.failed == {0: 1, 1: 1}
    assert "s partition 1 offset 0" in caplog.messages[0]
    assert "has been in a thread for longer than handler_timeout_ms (1000 ms)" in caplog.messages[0]
    assert story.shell.ended == [0, 1]


# ── acks, filters, threads, pauses ────────────────────────────────────────────────────────────────
async def test_batch_is_acked_before_its_handler_is_called():
    begun: list[list[int]] = []

    def handle(messages: list[Message]) -> None:
        begun.append(offsets_of(messages))

    story = WorkerStory(handle, ack="before", answers_acks=False)
    shell = story.shell
    shell.give(b"a", b"b")
    await asyncio.sleep(0.02)
    assert begun == []
    shell.answer_acks()
    await eventually(lambda: begun == [[0, 1]])
    assert shell.acked.cursor == 2
    await story.pool.close()


async def test_batch_that_fails_after_its_ack_is_lost_and_logged(
    caplog: pytest.LogCaptureFixture,
):
    tries: list[list[int]] = []

    def handle(messages: list[Message]) -> None:
        tries.append(offsets_of(messages))
        raise ValueError("no")

    story = WorkerStory(handle, ack="before")
    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        story.shell.give(b"a", b"b", b"c")
        await eventually(lambda: tries and story.shell.held == 0)
        await story.pool.close()
    assert tries == [[0, 1, 2]]
    (line,) = caplog.messages
    assert line.startswith("handler failed with ValueError on s partition 1 offset 0")
    assert line.endswith("which is already acked, so it is not retried; 3 messages are lost")


async def test_no_more_batches_are_acked_first_than_workers_are_free():
    gate = asyncio.Event()
    begun = 0

    async def handle(_messages: list[Message]) -> None:
        nonlocal begun
        begun += 1
        await gate.wait()

    story = WorkerStory(handle, ack="before", concurrency=2, max_records=1)
    shell = story.shell
    shell.give(*[b""] * 10)
    await eventually(lambda: begun == 2)
    await asyncio.sleep(0.02)
    assert shell.acked.cursor == 2
    gate.set()
    await eventually(lambda: shell.acked.cursor == 10)
    await eventually(lambda: begun == 10)
    await story.pool.close()


async def test_later_messages_of_a_key_wait_for_each_ack():
    begun: list[int] = []
    story = WorkerStory(
        lambda messages: begun.extend(offsets_of(messages)),
        ack="each",
        answers_acks=False,
        max_records=1,
    )
    story.shell.give(b"a", b"b", b"a")
    await asyncio.sleep(0.02)
    assert sorted(begun) == [0, 1]
    story.shell.answer_acks()
    await eventually(lambda: 2 in begun)
    await story.pool.close()


async def test_filtered_messages_are_acked_and_not_handled():
    batches: list[list[int]] = []
    wanted = MessageFilter(wanted=lambda message: message.offset % 2 == 0)

    def handle(messages: list[Message]) -> None:
        batches.append(offsets_of(messages))

    await handled_by(filtered_batches(handle, wanted), [b"a", b"b", b"c", b"d"])
    assert batches == [[0, 2]]


async def test_batch_handler_runs_in_a_thread():
    batches: list[list[int]] = []

    def handle(messages: list[Message]) -> None:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        batches.append(offsets_of(messages))

    threads = HandlerThreads(handle, 2, forked=lambda: False)
    threads.start()
    await handled_by(threads.run, [b"a", b"b", b"c"], cancels=False, concurrency=2)
    threads.stop()
    assert batches == [[0, 1, 2]]


async def test_batch_is_not_tried_again_while_its_partition_is_paused():
    tries: list[int] = []

    def handle(messages: list[Message]) -> None:
        tries.append(messages[0].attempt)
        if messages[0].attempt == 1:
            story.shell.pause()
            raise ValueError("no")

    story = WorkerStory(handle)
    shell = story.shell
    shell.give(b"a", b"b")
    await eventually(lambda: tries)
    await asyncio.sleep(0.05)
    assert tries == [1]
    shell.resume()
    await eventually(lambda: shell.acked.cursor == 2)
    assert tries == [1, 2]
    await story.pool.close()


async def test_retries_leave_workers_to_first_attempts():
    """A worker at most has batches that have failed, while others wait."""
    running = most = 0
    handled: list[int] = []

    async def handle(messages: list[Message]) -> None:
        nonlocal running, most
        if messages[0].key != b"bad":
            handled.extend(offsets_of(messages))
            await asyncio.sleep(0.001)
            return
        if messages[0].attempt > 1:
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1
        raise ValueError("no")

    story = WorkerStory(handle, max_records=1, concurrency=4)
    others = [story.other_partition(number) for number in (2, 3, 4)]
    await asyncio.sleep(0)
    for other in others:
        other.give(b"bad")
    story.shell.give(*[b""] * 200)
    await eventually(lambda: len(handled) == 200)
    assert most == 1
    await story.pool.close()
