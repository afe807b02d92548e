"""Log lines of workers about failing and hanging messages, during and after the problem."""

from __future__ import annotations

import asyncio
import logging

import pytest

from keylane.protocol.message import Message
from support.cluster import eventually
from support.handling import Client, in_virtual_time, virtual_loop, workers_of


async def test_handler_that_always_fails_does_not_fill_the_log(caplog: pytest.LogCaptureFixture):
    """Of a thousand messages that fail once, some get a line, one of them with a traceback; the
    rest are counted.
    """
    crashed: list[BaseException] = []
    client = Client()

    async def handle(message: Message) -> None:
        await asyncio.sleep(0)
        if message.attempt == 1:
            raise ValueError("no")

    workers = workers_of(handle, crashed=crashed, concurrency=50)
    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        client.give(workers, *[b"%d" % number for number in range(1_000)])
        await eventually(lambda: len(client.handled) == 1_000)
        await workers.close()
    assert not crashed
    told = caplog.messages
    assert sum(record.exc_info is not None for record in caplog.records) <= 2
    assert len(told) < 50
    assert "handler failed with ValueError on s partition 1 offset" in told[0]
    assert "were handled since" in told[-1]


async def watch(workers) -> None:
    while True:
        await asyncio.sleep(1)
        workers.check_long_running()


def test_hanging_handler_is_logged_while_it_runs(caplog: pytest.LogCaptureFixture):
    """At 10, 20 and 40 s, and when it ends, which is no warning; a quick handler beside it is never
    logged.
    """
    loop, machine = virtual_loop()
    client = Client()

    async def handle(message: Message) -> None:
        await asyncio.sleep(50 if message.key == b"slow" else 1)

    async def story() -> None:
        workers = workers_of(handle, concurrency=2, clock=machine)
        watching = asyncio.create_task(watch(workers))
        client.give(workers, b"slow", *[b"quick"] * 60)
        while len(client.handled) < 61:
            await asyncio.sleep(1)
        await asyncio.sleep(2)
        watching.cancel()
        await workers.close()

    with caplog.at_level(logging.INFO, "keylane.consumer"):
        in_virtual_time(story(), loop)
    assert len(caplog.messages) == 4
    for text, seconds in zip(caplog.messages, (10, 20, 40), strict=False):
        assert (
            f"running for {seconds} s on s partition 1 offset 0 in group billing (key digest"
            in text
        )
    assert "partition 1 offset 0" in caplog.messages[-1]
    assert "is handled after 1 attempt and" in caplog.messages[-1]
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING, logging.WARNING, logging.WARNING, logging.INFO]


def test_failing_message_is_logged_until_it_is_handled(caplog: pytest.LogCaptureFixture):
    """The lines have the number of attempts and the time since the first one."""
    loop, machine = virtual_loop()
    client = Client()
    tries: list[float] = []

    def handle(message: Message) -> None:
        tries.append(loop.now)
        if len(tries) < 20:
            raise OSError("down")

    async def story() -> None:
        workers = workers_of(handle, clock=machine, first_ms=100, max_ms=30_000)
        client.give(workers, b"k")
        while not client.handled:
            await asyncio.sleep(1)
        await workers.close()

    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        in_virtual_time(story(), loop)
    took_s = tries[-1] - tries[0]
    assert took_s > 200
    told = caplog.messages
    assert 4 < len(told) < 9
    assert (
        "handler failed with OSError on s partition 1 offset 0 in group billing (key digest"
        in told[0]
    )
    assert told[-1].endswith(f"is handled after 20 attempts and {int(took_s)} s")


def test_message_waiting_for_its_next_try_is_logged_as_given_up_at_the_hand_over(
    caplog: pytest.LogCaptureFixture,
):
    """The last line says that the next owner tries the message again."""
    loop, machine = virtual_loop()
    client = Client()

    def handle(message: Message) -> None:
        raise OSError("down")

    async def story() -> None:
        workers = workers_of(handle, clock=machine, first_ms=10_000, max_ms=10_000)
        client.give(workers, b"k")
        await asyncio.sleep(1)
        client.lose()
        await client.hand_over()
        await workers.close()

    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        in_virtual_time(story(), loop)
    assert "is given up here" in caplog.messages[-1]
    assert caplog.messages[-1].endswith("the next owner tries it again")
