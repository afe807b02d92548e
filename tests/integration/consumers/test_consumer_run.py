"""`Consumer.run`: at SIGTERM or SIGINT a consumer hands everything over, and the next owner
continues at once.
"""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.protocol.errors import Reason
from support.cluster import Cluster, eventually
from support.raising import raises
from support.server_process import ServerProcess, running_script
from support.written_lines import written_lines

TTL_MS = 30_000
"""The default: the delay after a consumer that does not hand over."""
NEXT_OWNER_MS_MAX = 3_000
"""About a second here, with a margin for a busy machine."""


def runner(
    cluster: Cluster, how: str, subject: str, path: Path, *, sleep_s: float, ttl_ms: int = TTL_MS
) -> AbstractContextManager[ServerProcess]:
    arguments = (how, cluster.meta, subject, "g", str(ttl_ms), str(path), str(sleep_s))
    return running_script(Path(__file__).with_name("runner.py"), *arguments)


def records(path: Path) -> list[tuple[tuple[int, int], int]]:
    """((partition, offset), boot time in ms) of each handled message."""
    rows = [tuple(map(int, line.split())) for line in written_lines(path)]
    return [((row[0], row[1]), row[2]) for row in rows]


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("alone", signal.SIGTERM),
        ("opened", signal.SIGINT),
        ("iterating", signal.SIGTERM),
    ],
)
async def test_signal_hands_over_under_load(
    shared_cluster: Cluster, tmp_path: Path, how: str, number: signal.Signals
) -> None:
    """The next owner starts long before the ttl is over, and no message is handled twice or left
    out.
    """
    subject = f"run-{how}"
    await shared_cluster.create(subject, partitions=1)
    first, second = tmp_path / "first", tmp_path / "second"
    sent = 0
    async with Producer(shared_cluster.meta) as producer:

        async def load() -> None:
            nonlocal sent
            while True:
                producer.send(subject, b"v", key=b"k%d" % (sent % 40))
                sent += 1
                await asyncio.sleep(0.002)

        loading = asyncio.create_task(load())
        with runner(shared_cluster, how, subject, first, sleep_s=0.02) as leaving:
            await eventually(lambda: len(records(first)) > 20)
            with runner(shared_cluster, "alone", subject, second, sleep_s=0) as staying:
                await asyncio.sleep(1)
                assert not records(second), "it waits for the only partition"
                leaving.send_signal(number)
                assert await asyncio.to_thread(leaving.wait, 20) == 0
                assert leaving.stdout.read() == "done\n"
                loading.cancel()
                await producer.flush()
                await eventually(lambda: len(records(first)) + len(records(second)) >= sent)
                staying.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(staying.wait, 20) == 0
    before, after = records(first), records(second)
    handled = [place for place, _ in before + after]
    assert len(handled) == len(set(handled)) == sent
    pause_ms = min(at for _, at in after) - max(at for _, at in before)
    assert pause_ms < NEXT_OWNER_MS_MAX


async def test_second_signal_does_not_wait_for_handlers(
    shared_cluster: Cluster, tmp_path: Path
) -> None:
    """A slow handler is waited for after the first signal, not after the second."""
    await shared_cluster.create("run-twice", partitions=1)
    async with Producer(shared_cluster.meta) as producer:
        await producer.send("run-twice", b"v", key=b"k")
    with runner(shared_cluster, "alone", "run-twice", tmp_path / "file", sleep_s=4) as process:
        await asyncio.sleep(1.5)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert await asyncio.to_thread(process.wait, 60) == -signal.SIGTERM
        assert time.monotonic() - began < 1


async def test_hangup_ends_the_process_without_a_hand_over(
    shared_cluster: Cluster, tmp_path: Path
) -> None:
    """As SIGKILL does: the partition is its owner's until the ttl is over, and the next one gets
    its messages.
    """
    subject, ttl_ms = "run-hangup", 6_000
    await shared_cluster.create(subject, partitions=1)
    first, second = tmp_path / "first", tmp_path / "second"
    async with Producer(shared_cluster.meta) as producer, Admin(shared_cluster.meta) as admin:
        await producer.send(subject, b"v", key=b"k")
        await admin.create_group(subject, "g")

        async def owner() -> str | None:
            (partition,) = (await admin.describe_group(subject, "g")).partitions
            return partition.owner

        with runner(shared_cluster, "alone", subject, first, sleep_s=600, ttl_ms=ttl_ms) as leaving:
            while (name := await owner()) is None:
                await asyncio.sleep(0.05)
            leaving.send_signal(signal.SIGHUP)
            assert await asyncio.to_thread(leaving.wait, 20) == -signal.SIGHUP
            assert leaving.stdout.read() == "", "it has not ended by itself"
        assert await owner() == name, "nothing was handed over"
        with runner(shared_cluster, "alone", subject, second, sleep_s=0):
            await eventually(lambda: records(second))
    assert not records(first)


@pytest.mark.parametrize("how", ["async", "threads", "iterating"])
async def test_signal_during_a_long_handler_logs_what_the_consumer_waits_for(
    shared_cluster: Cluster, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    subject = f"run-waits-{how}"
    await shared_cluster.create(subject, partitions=1)
    async with Producer(shared_cluster.meta) as producer:
        await producer.send(subject, b"v", key=b"k")
    started = asyncio.Event()

    async def handle(_message: Message) -> None:
        started.set()
        await asyncio.sleep(2)

    def handle_in_thread(_message: Message) -> None:
        loop.call_soon_threadsafe(started.set)
        time.sleep(2)

    async def iterate() -> None:
        async with consumer:
            running = asyncio.create_task(consumer.run())
            async for message in consumer:
                await handle(message)
                await message.ack()
            await running

    loop = asyncio.get_running_loop()
    handlers = {"async": handle, "threads": handle_in_thread, "iterating": None}
    settings = ConsumerSettings(threads=1 if how == "threads" else 0)
    consumer = Consumer(
        shared_cluster.meta, subject=subject, group="g", handler=handlers[how], settings=settings
    )
    running = asyncio.create_task(iterate() if how == "iterating" else consumer.run())
    await asyncio.wait_for(started.wait(), 60)
    signal.raise_signal(signal.SIGTERM)
    await asyncio.wait_for(running, 60)
    lines = [text for text in caplog.messages if " to end: " in text]
    assert len(lines) == 1, caplog.text
    runner_name = "loop body" if how == "iterating" else "handler"
    limit = {
        "async": "it cancels them 5.0 s after the close began",
        "threads": "handlers in threads cannot be cancelled",
        "iterating": "it waits 5.0 s at most",
    }[how]
    assert re.fullmatch(
        rf"consumer of {subject} in group g waits for 1 {runner_name} to end: {subject} partition "
        rf"\d+ offset 0, running for \d\.\d s; {limit}; a second signal ends the process at once, "
        "and these messages are handled again",
        lines[0],
    )


async def test_run_in_a_thread_ends_with_its_cancellation(shared_cluster: Cluster) -> None:
    """No signal handler is installed there; a cancelled `run` hands over, and the next owner
    continues.
    """
    await shared_cluster.create("run-thread", partitions=1)
    handled: list[Message] = []
    ready = threading.Event()
    cancel: list[object] = []
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    def thread() -> None:
        async def main() -> None:
            consumer = Consumer(
                shared_cluster.meta, subject="run-thread", group="g", handler=handled.append
            )
            running = asyncio.create_task(consumer.run())
            cancel[:] = [asyncio.get_running_loop(), running]
            ready.set()
            with pytest.raises(asyncio.CancelledError):
                await running

        asyncio.run(main())

    worker = threading.Thread(target=thread)
    worker.start()
    assert await asyncio.to_thread(ready.wait, 60)
    async with Producer(shared_cluster.meta) as producer:
        await producer.send("run-thread", b"0", key=b"k")
        await eventually(lambda: len(handled) == 1)
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
        loop, running = cancel
        loop.call_soon_threadsafe(running.cancel)
        await asyncio.to_thread(worker.join, 60)
        assert not worker.is_alive()
        async with Consumer(
            shared_cluster.meta, subject="run-thread", group="g", handler=handled.append
        ):
            await producer.send("run-thread", b"1", key=b"k")
            await eventually(lambda: len(handled) == 2, seconds=60)


async def test_run_ends_with_close_and_raises_the_error_that_ended_the_consumer(
    shared_cluster: Cluster,
) -> None:
    """`close` from elsewhere ends `run`; an error of the metaserver is raised, and signal handlers
    are restored.
    """
    await shared_cluster.create("run-close", partitions=1)
    before = signal.getsignal(signal.SIGTERM)
    consumer = Consumer(shared_cluster.meta, subject="run-close", group="g", handler=print)
    async with consumer:
        running = asyncio.create_task(consumer.run())
        await asyncio.sleep(0.1)
        assert signal.getsignal(signal.SIGTERM) is not before
        await consumer.close()
        await asyncio.wait_for(running, 60)
    other = Consumer(
        shared_cluster.meta,
        subject="run-close",
        group="g",
        handler=print,
        settings=ConsumerSettings(consume_strategy="shared"),
    )
    with raises(Reason.GROUP_STRATEGY):
        await other.run()
    assert signal.getsignal(signal.SIGTERM) is before


async def test_signal_handler_of_the_user_may_close_the_consumer(shared_cluster: Cluster) -> None:
    """A signal that ends `run` and also makes the user close the consumer hands over once, and ends
    both.
    """
    await shared_cluster.create("run-close-twice", partitions=1)
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        await asyncio.sleep(0.5)
        handled.append(message.value)

    loop = asyncio.get_running_loop()
    consumer = Consumer(shared_cluster.meta, subject="run-close-twice", group="g", handler=handle)
    closing: list[asyncio.Task[None]] = []
    loop.add_signal_handler(
        signal.SIGTERM, lambda: closing.append(asyncio.create_task(consumer.close()))
    )
    try:
        async with Producer(shared_cluster.meta) as producer, consumer:
            await producer.send("run-close-twice", b"v", key=b"k")
            running = asyncio.create_task(consumer.run())
            await eventually(lambda: any(assigned.outstanding for assigned in consumer.assignment))
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(running, 60)
            await asyncio.wait_for(closing[0], 60)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
    assert handled == [b"v"]


@pytest.mark.parametrize("ends", ["close", "suspend"])
async def test_handler_may_end_its_own_consumer(shared_cluster: Cluster, ends: str) -> None:
    """`close` and `suspend` in a handler return at once; its message is acked, and the hand-over
    waits for no time-out.
    """
    subject = f"own-{ends}"
    await shared_cluster.create(subject, partitions=1)
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        await getattr(consumer, ends)()
        await asyncio.sleep(0.1)
        handled.append(message.value)

    settings = ConsumerSettings(handover_ms=20_000, ttl_ms=60_000)
    consumer = Consumer(
        shared_cluster.meta, subject=subject, group="g", handler=handle, settings=settings
    )
    async with Producer(shared_cluster.meta) as producer, consumer:
        await producer.send(subject, b"1", key=b"k")
        await eventually(lambda: handled, seconds=10)
        await eventually(lambda: not consumer.assignment, seconds=5)
        await asyncio.wait_for(consumer.close(), 5)
        async with Consumer(
            shared_cluster.meta,
            subject=subject,
            group="g",
            handler=lambda m: handled.append(m.value),
        ):
            await producer.send(subject, b"2", key=b"k")
            await eventually(lambda: b"2" in handled, seconds=10)
    assert handled == [b"1", b"2"]
