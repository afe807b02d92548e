"""Call-backs for partitions: together at a grant, before anything is pulled, with a limit, and
never in the way.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

import pytest

from keylane import Consumer, ConsumerSettings
from keylane.consumer.arguments import check_callbacks
from keylane.consumer.group.hand_overs import Callbacks
from keylane.errors import HandlerTypeError, Reason
from support.consumer_options import consumer_options
from support.raising import raises


class HeldGate:
    """The reasons for which nothing is pulled."""

    def __init__(self) -> None:
        self.reasons: set[str] = set()
        self.add = self.reasons.add
        self.remove = self.reasons.discard


class HeldClient:
    """What call-backs need of a shell."""

    def __init__(self, partition_id: int) -> None:
        self.partition_id = partition_id
        self.gate = HeldGate()


def callbacks_with(**settings: Any) -> Callbacks:
    return Callbacks("consumer", ConsumerSettings(**settings))


async def test_partitions_granted_together_are_told_together_and_pulled_afterwards():
    told: list[list[int]] = []
    gate = asyncio.Event()

    async def assigned(partition_ids: list[int]) -> None:
        told.append(partition_ids)
        await gate.wait()

    callbacks = callbacks_with(handover_ms=10_000, on_assigned=assigned)
    clients = [HeldClient(2), HeldClient(1)]
    for client in clients:
        callbacks.notify_assigned(client)
    await asyncio.sleep(0.01)
    assert told == [[1, 2]]
    assert all(client.gate.reasons for client in clients)
    ending = asyncio.create_task(callbacks.notify_ended(1, is_lost=False))
    await asyncio.sleep(0.01)
    assert not ending.done(), "the end is told after the grant"
    gate.set()
    await asyncio.wait_for(ending, 30)
    assert not any(client.gate.reasons for client in clients)


async def test_callback_that_fails_or_hangs_is_logged_and_over(caplog: pytest.LogCaptureFixture):
    async def hangs(_partition_ids: list[int]) -> None:
        await asyncio.Event().wait()

    def fails(_partition_ids: list[int]) -> None:
        raise ValueError("no")

    callbacks = callbacks_with(handover_ms=10, on_revoked=hangs, on_lost=fails)
    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        await asyncio.wait_for(callbacks.notify_ended(1, is_lost=False), 30)
        await asyncio.wait_for(callbacks.notify_ended(2, is_lost=True), 30)
    assert "on_revoked for partitions [1] took longer" in caplog.messages[0]
    assert "on_lost for partitions [2] failed" in caplog.messages[1]


async def test_consumer_without_callbacks_holds_nothing():
    callbacks = callbacks_with(handover_ms=10)
    client = HeldClient(1)
    callbacks.notify_assigned(client)
    assert not client.gate.reasons
    await callbacks.notify_ended(1, is_lost=True)


def test_callback_is_accepted_when_its_decorator_gives_another_argument():
    """What the decorator returns is called, with partition ids alone."""

    def note(partition_ids: list[int], book: list[int]) -> None: ...

    @functools.wraps(note)
    def wrapper(partition_ids: list[int]) -> None: ...

    check_callbacks(on_assigned=wrapper)


@pytest.mark.parametrize("name", ["on_assigned", "on_revoked", "on_lost"])
def test_callback_that_cannot_be_called_is_refused(name: str):
    """What it is, and how it is called: told when the consumer is made."""
    for call, why in ((7, "not 7"), (lambda: None, "cannot be called"), (list, "not <class")):
        with raises(Reason.CALLBACK_TYPE, match=rf"{name} .*{why}") as caught:
            Consumer("127.0.0.1:1", **consumer_options(subject="s", group="g", **{name: call}))
        assert isinstance(caught.value, HandlerTypeError)
        assert "partition ids" in caught.value.hint
    taken: list[int] = []
    Consumer("127.0.0.1:1", **consumer_options(subject="s", group="g", **{name: taken.extend}))


async def test_callback_that_cancels_its_own_task_is_logged_and_over(
    caplog: pytest.LogCaptureFixture,
):
    """The hand-over goes on, which called it."""

    async def cancels(_partition_ids: list[int]) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(60)

    callbacks = callbacks_with(handover_ms=10_000, on_revoked=cancels, on_lost=cancels)
    await asyncio.wait_for(callbacks.notify_ended(1, is_lost=False), 30)
    await asyncio.wait_for(callbacks.notify_ended(2, is_lost=True), 30)
    assert len([text for text in caplog.messages if "failed" in text]) == 2
