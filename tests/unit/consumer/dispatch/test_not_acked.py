"""Handlers that do not ack their message: `raise Retry`, `return NACK`."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import pickle
from typing import Any

import pytest

from keylane.consumer.dispatch.handlers import (
    NACK,
    SHORTEST_MS_MAX,
    Retry,
    limited_wait_ms,
    only_retry,
)
from keylane.protocol.errors import InvalidRequestError
from keylane.protocol.message import Message
from support.handling import Client, in_virtual_time, virtual_loop, workers_of


def run(handle: Any, *keys: bytes) -> tuple[list[tuple[int, int, float]], list[int]]:
    """Handle a message of each key; return (offset, attempt, second) of each attempt, and the
    offsets in the order of their acks.
    """
    loop, machine = virtual_loop()
    client = Client()
    tries: list[tuple[int, int, float]] = []

    def traced(message: Message) -> Any:
        tries.append((message.offset, message.attempt, round(loop.now, 1)))
        return handle(message)

    async def story() -> None:
        workers = workers_of(traced, clock=machine, concurrency=2, first_ms=1_000, max_ms=1_000)
        client.give(workers, *keys)
        while len(client.handled) < len(keys):
            await asyncio.sleep(0.1)
        await workers.close()

    in_virtual_time(story(), loop)
    return tries, client.handled


def test_message_is_tried_again_after_the_seconds_that_its_handler_asked_for():
    """It is retried before the later message of its key; another key proceeds in the meantime."""

    def handle(message: Message) -> None:
        if message.offset == 0 and message.attempt < 3:
            raise Retry(after_s=30)

    tries, acked = run(handle, b"a", b"a", b"b")
    assert [each[:2] for each in tries] == [(0, 1), (2, 1), (0, 2), (0, 3), (1, 1)]
    assert acked == [2, 0, 1]
    seconds = [at for offset, _, at in tries if offset == 0]
    assert [round(after - before) for before, after in itertools.pairwise(seconds)] == [30, 30]


@pytest.mark.parametrize("wrapped", ["plain", "coroutine", "future"])
def test_message_is_tried_again_when_its_handler_returns_nack(wrapped):
    """From a `def`, an `async def`, or a future; the pause is the same as after an error."""

    async def later(value: object) -> object:
        await asyncio.sleep(0)
        return value

    def handle(message: Message) -> Any:
        value = NACK if message.attempt == 1 else None
        if wrapped == "plain":
            return value
        return later(value) if wrapped == "coroutine" else asyncio.ensure_future(later(value))

    tries, acked = run(handle, b"a", b"a")
    assert [each[:2] for each in tries] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert acked == [0, 1]
    assert 0.4 <= tries[1][2] - tries[0][2] <= 1.2


@pytest.mark.parametrize("returned", [Retry, Retry(after_s=0.5)])
def test_message_is_tried_again_when_its_handler_returns_a_retry(returned):
    """It was meant to be raised, so the message must not count as handled."""
    tries, acked = run(lambda message: returned if message.attempt == 1 else None, b"a")
    assert [each[:2] for each in tries] == [(0, 1), (0, 2)]
    assert acked == [0]


def test_seconds_count_when_a_task_group_raises_them():
    """The longest wait in the group counts; a group with another error is an error."""

    async def ask(after_s: float) -> None:
        raise Retry(after_s=after_s)

    async def handle(message: Message) -> None:
        if message.attempt == 1:
            async with asyncio.TaskGroup() as group:
                group.create_task(ask(20))
                group.create_task(ask(40))

    tries, _ = run(handle, b"a")
    assert round(tries[1][2] - tries[0][2]) == 40
    assert only_retry(ExceptionGroup("", [Retry(), ValueError()])) is None


def test_message_that_asks_for_another_try_at_once_does_not_spin():
    """The second attempt is immediate; then pauses grow to at most a second."""

    def handle(message: Message) -> None:
        if message.attempt < 20:
            raise Retry(after_s=0)

    tries, acked = run(handle, b"a")
    assert acked == [0]
    seconds = [at for *_, at in tries]
    assert seconds[5] - seconds[0] < 0.2
    assert seconds[-1] - seconds[0] >= 1 + 8 * SHORTEST_MS_MAX / 1000
    assert max(after - before for before, after in itertools.pairwise(seconds)) <= 1.2


def test_shortest_pause_grows_with_the_tries_and_a_longer_one_counts():
    assert [limited_wait_ms(0, attempt) for attempt in (1, 2, 3, 4, 11, 12, 10**9)] == [
        *(0, 1, 2, 4, 512),
        *(SHORTEST_MS_MAX, SHORTEST_MS_MAX),
    ]
    assert limited_wait_ms(30_000, 40) == 30_000


def test_reason_is_logged_without_a_traceback(caplog):
    """It shows operators why the key waits."""

    def handle(message: Message) -> None:
        if message.attempt == 1:
            raise Retry("the warehouse is closed", after_s=5)

    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        run(handle, b"a")
    first = caplog.records[0]
    assert "handler asked for another try (the warehouse is closed) on s partition 1 offset 0" in (
        first.getMessage()
    )
    assert "tried again in 5" in first.getMessage()
    assert first.exc_info is None


@pytest.mark.parametrize("after_s", [-1, 86_401, 10**400, float("nan"), float("inf"), "5", True])
def test_seconds_are_refused_when_they_are_no_time(after_s):
    """A negative or infinite wait, or a string."""
    with pytest.raises(InvalidRequestError, match="after_s must be seconds from 0 to 86400"):
        Retry(after_s=after_s)


def test_nack_has_a_short_repr():
    """NACK is a singleton, known by its name."""
    assert repr(NACK) == "keylane.NACK"


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda word: pickle.loads(pickle.dumps(word))]
)
def test_nack_is_itself_when_it_is_copied_or_comes_from_another_process(copied):
    assert copied(NACK) is NACK


def test_message_is_tried_again_when_a_process_of_a_pool_has_returned_nack():
    def handle(message: Message) -> object:
        return pickle.loads(pickle.dumps(NACK)) if message.attempt == 1 else None

    tries, handled = run(handle, b"a")
    assert [attempt for _, attempt, _ in tries] == [1, 2]
    assert handled == [0]
