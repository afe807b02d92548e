"""Handlers whose messages are acked first: each is called at most once, and lost messages are
logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from keylane.consumer.handling.acked_first import LOG_MS, AckFirstHandler
from keylane.protocol.message import Message
from sim.machines.clock import ManualClock


class AckingClient:
    """Lets handlers start unless `refuses` is set."""

    refuses = False

    def __init__(self) -> None:
        self.client = self
        self.acked: list[int] = []

    async def ack_first(self, messages: Sequence[Message]) -> bool:
        self.acked += [message.offset for message in messages]
        return not self.refuses


def message(client: AckingClient, offset: int = 0) -> Message:
    return Message("s", b"k", b"v", offset, 1, 0, delivery=client)  # type: ignore[arg-type]


async def test_handler_is_called_after_the_ack_or_not_at_all():
    client, seen = AckingClient(), list[Any]()
    first = AckFirstHandler(seen.append, boot_ms=ManualClock().boot_ms)
    await first.handle(message(client, 1))
    await first.handle_all([message(client, 2), message(client, 3)])
    client.refuses = True
    await first.handle(message(client, 4))
    assert client.acked == [1, 2, 3, 4]
    assert [given.offset for given in (seen[0], *seen[1])] == [1, 2, 3]


async def test_lost_messages_are_counted_in_one_line_a_second(caplog: pytest.LogCaptureFixture):
    def fail(_message: Message) -> None:
        raise ValueError("bad")

    clock = ManualClock()
    first = AckFirstHandler(fail, boot_ms=clock.boot_ms)
    with caplog.at_level(logging.ERROR, "keylane.consumer"):
        for offset in range(5):
            await first.handle(message(AckingClient(), offset))
        clock.advance(LOG_MS)
        await first.handle(message(AckingClient(), 5))
    assert ["1 message is" in caplog.messages[0], "5 messages are" in caplog.messages[1]] == [
        True,
        True,
    ]
    assert len(caplog.messages) == 2


async def test_cancelled_handler_ends_its_task_only_if_that_was_asked_for():
    """A handler that cancels itself has failed; one that a hand-over cancels passes the
    request on.
    """

    async def cancels_itself(_message: Message) -> None:
        raise asyncio.CancelledError

    async def waits(_message: Message) -> None:
        await asyncio.Event().wait()

    clock = ManualClock()
    await AckFirstHandler(cancels_itself, boot_ms=clock.boot_ms).handle(message(AckingClient()))
    task = asyncio.create_task(
        AckFirstHandler(waits, boot_ms=clock.boot_ms).handle(message(AckingClient()))
    )
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
