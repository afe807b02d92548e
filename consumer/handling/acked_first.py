"""Calls a handler only once its messages are acked; it is never called again for them, whatever it
raises.

    taken ─▶ acked, durably ─▶ handler ─▶ returned
                                   ╰─ raised, or cancelled: the messages are lost, which is logged

The workers see a handler that always returns, so they try nothing again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

from ...protocol.errors import HandlerTimeoutError
from ...protocol.message import Message
from ...protocol.text import counted
from ..log_names import message_name
from ..pulling.acked_first import AckedFirstClient
from ..pulling.pull_client import client_of
from .handlers import await_result

log = logging.getLogger("keylane.consumer")
LOG_MS = 1_000
"""Milliseconds between two lines about lost messages; messages lost between them are counted."""


class AckedFirst:
    """
    A handler whose messages are acked before it is called.

    Args:
        handler: the user's handler, for one message or for several.
        boot_ms: the boot clock.
    """

    def __init__(self, handler: Callable[[Any], Any], *, boot_ms: Callable[[], int]) -> None:
        self._handler = handler
        self._boot_ms = boot_ms
        self.timed_out: Callable[[], HandlerTimeoutError | None] = lambda: None
        """A callable that gives, once, the error of the handler in the running task if it was
        cancelled because it took too long.
        """
        self._lost = 0
        """The number of messages lost since the last line."""
        self._silent_until_ms = 0

    async def handle(self, message: Message) -> None:
        """Handle one message."""
        await self._handle(message, [message])

    async def handle_all(self, messages: list[Message]) -> None:
        """Handle several messages of one partition."""
        await self._handle(messages, messages)

    async def _handle(self, given: Any, messages: list[Message]) -> None:
        client = cast(AckedFirstClient, client_of(messages[0]))
        if not await client.ack_first(messages):
            return
        error: BaseException | None = None
        try:
            result = self._handler(given)
            if result is not None:
                await await_result(result)
        except (Exception, asyncio.CancelledError) as raised:  # noqa: BLE001 - no try follows
            error = raised
        timeout = self.timed_out()
        if timeout is not None or error is not None:
            self._note_lost(messages, timeout or error)
        if timeout is None and isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise error

    def _note_lost(self, messages: list[Message], error: BaseException | None) -> None:
        self._lost += len(messages)
        now_ms = self._boot_ms()
        if now_ms < self._silent_until_ms:
            return
        log.error(
            "handler failed with %s on %s, which was acked before and is not tried again; %s lost",
            type(error).__qualname__,
            message_name(messages[0]),
            counted(self._lost, "message is", "messages are"),
            exc_info=error,
        )
        self._lost = 0
        self._silent_until_ms = now_ms + LOG_MS
