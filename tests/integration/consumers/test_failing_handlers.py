"""Handlers that fail, hang, block or end the program, with a real cluster."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol.backoff import Backoff
from support.cluster import Cluster, eventually

CONCURRENCY = 4


async def fill(cluster: Cluster, subject: str, *, failing: int, others: int) -> None:
    """Send `failing` keys of one message each, before and between others, to two partitions."""
    await cluster.create(subject, partitions=2)
    async with Producer(cluster.meta) as producer:
        for number in range(failing):
            producer.send(subject, b"bad", key=b"bad%d" % number)
        for number in range(others):
            producer.send(subject, b"%d" % number, key=b"k%d" % (number % 100))
        for number in range(failing):
            producer.send(subject, b"later", key=b"bad%d" % number)


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
@pytest.mark.parametrize("failing", [CONCURRENCY, 1_000])
async def test_failing_keys_do_not_stop_other_keys(
    shared_cluster: Cluster, strategy: str, failing: int
):
    """As many failing keys as workers, and far more than a shared group has in flight: all other
    keys are handled.
    """
    subject = f"failing-{strategy}-{failing}"
    await fill(shared_cluster, subject, failing=failing, others=2_000)
    mended = False
    handled: list[Message] = []

    async def handle(message: Message) -> None:
        await asyncio.sleep(0)
        if message.value == b"bad" and not mended:
            raise ValueError("never")
        handled.append(message)

    settings = ConsumerSettings(
        consume_strategy=strategy,
        concurrency=CONCURRENCY,
        in_flight_messages=50,
        handler_backoff=Backoff(first_ms=50, max_ms=500),
    )
    async with Consumer(
        shared_cluster.meta, subject=subject, group="g", handler=handle, settings=settings
    ):
        await eventually(lambda: sum(message.value.isdigit() for message in handled) >= 2_000)
        if strategy == "exclusive":
            assert all(message.value != b"later" for message in handled), (
                "they wait behind what fails"
            )
        mended = True
        await eventually(lambda: len(handled) >= 2_000 + 2 * failing)
    if strategy == "exclusive":
        assert len(handled) == 2_000 + 2 * failing
        for number in range(failing):
            values = [message.value for message in handled if message.key == b"bad%d" % number]
            assert values == [b"bad", b"later"]


async def test_coroutine_returned_by_a_lambda_is_awaited(shared_cluster: Cluster):
    """Messages that the coroutine has not handled are redelivered to the next consumer."""
    await fill(shared_cluster, "lambda", failing=0, others=200)
    handled: list[bytes] = []
    gate = asyncio.Event()

    async def handle(message: Message, database: list[bytes]) -> None:
        await gate.wait()
        database.append(message.value)

    settings = ConsumerSettings(handover_ms=10)
    for let_go in (False, True):
        async with Consumer(
            shared_cluster.meta,
            subject="lambda",
            group="g",
            handler=lambda message: handle(message, handled),
            settings=settings,
        ) as consumer:
            await eventually(lambda: sum(assigned.outstanding for assigned in consumer.assignment))
            assert handled == []
            if let_go:
                gate.set()
                await eventually(lambda: len(handled) == 200)


async def test_handler_that_blocks_the_loop_is_logged_as_the_reason_of_a_lost_lease(
    shared_cluster: Cluster, caplog: pytest.LogCaptureFixture
):
    """The line says how long the event loop was blocked, and the lease of which partition was
    lost.
    """
    await fill(shared_cluster, "blocked", failing=0, others=20)
    blocked = False

    def handle(message: Message) -> None:
        nonlocal blocked
        if not blocked:
            blocked = True
            time.sleep(2.5)

    with caplog.at_level(logging.INFO, "keylane.consumer"):
        async with Consumer(
            shared_cluster.meta,
            subject="blocked",
            group="g",
            handler=handle,
            settings=ConsumerSettings(ttl_ms=1_500),
        ):
            await eventually(lambda: any("lost the lease" in text for text in caplog.messages))
    (text, *_) = [text for text in caplog.messages if "lost the lease" in text]
    assert "consumer of blocked in group g lost the lease of partition" in text
    assert "a handler that blocks needs threads: settings=ConsumerSettings(threads=8)" in text
    assert sum("session is unknown" in line for line in caplog.messages) <= 1
    stall = re.search(r"the event loop did not run for ([\d.]+) s", text)
    assert stall, text
    # A stall counts from when the next look at the lease was due, up to a second after its
    # beginning.
    assert float(stall[1]) >= 1.5


PROGRAM = """
import asyncio, sys
from keylane import Consumer

async def handle(message):
    if message.value == b"7":
        sys.exit(3)

async def main():
    async with Consumer(sys.argv[1], subject=sys.argv[2], group="g", handler=handle) as consumer:
        await consumer.wait()

asyncio.run(main())
"""


@pytest.mark.crash
async def test_handler_that_exits_ends_its_program_after_the_hand_over(
    shared_cluster: Cluster, tmp_path: Path
):
    """The exit status is the handler's, and the next consumer does not wait for the ttl."""
    await fill(shared_cluster, "exits", failing=0, others=100)
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    program = await asyncio.create_subprocess_exec(
        sys.executable, str(script), shared_cluster.meta, "exits", stderr=subprocess.PIPE
    )
    _, said = await asyncio.wait_for(program.communicate(), 60)
    assert program.returncode == 3, said.decode()
    assert b"consumer of exits in group g ends: SystemExit(3)" in said
    handled: list[bytes] = []
    began = time.monotonic()
    async with Consumer(
        shared_cluster.meta,
        subject="exits",
        group="g",
        handler=lambda message: handled.append(message.value),
    ):
        await eventually(lambda: b"7" in handled)
    assert time.monotonic() - began < 15, "half of the ttl"
