"""
Calls a handler only after its messages are acked, so that it is never called for them again,
even if it raises.

    taken ─▶ acked, durably ─▶ handler ─▶ returned
                                   ╰─ raised, or cancelled: the messages are lost, which is logged

The workers see a handler that always succeeds, so they never retry.
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
from ..pulling.acked_first import AckFirstClient
from ..pulling.pull_client import client_of
from .handlers import await_result

log = logging.getLogger("keylane.consumer")
LOG_MS = 1_000
"""The minimum interval between log lines about lost messages, in milliseconds; messages lost in
between are counted.
"""


class AckFirstHandler:
    """
    A handler whose messages are acked before it is called.

    Args:
        handler: the user's handler, for one message or for several.
        boot_ms: the boot clock.
    """

    def __init__(self, handler: Callable[[Any], Any], *, boot_ms: Callable[[], int]) -> None:
        self._handler = handler
        self._boot_ms = boot_ms
        self.take_timeout_error: Callable[[], HandlerTimeoutError | None] = lambda: None
        """Returns, once, the error of the current task's handler if the handler was cancelled
        because it timed out.
        """
        self._lost_count = 0
        """The number of messages lost since the last log line."""
        self._next_log_ms = 0

    async def handle(self, message: Message) -> None:
        """Handle one message."""
        await self._handle(message, [message])

    async def handle_all(self, messages: list[Message]) -> None:
        """Handle several messages of one partition."""
        await self._handle(messages, messages)

    async def _handle(self, argument: Any, messages: list[Message]) -> None:
        client = cast(AckFirstClient, client_of(messages[0]))
        if not await client.ack_first(messages):
            return
        error: BaseException | None = None
        try:
            result = self._handler(argument)
            if result is not None:
                await await_result(result)
        except (Exception, asyncio.CancelledError) as raised:  # noqa: BLE001 - there is no retry
            error = raised
        timeout = self.take_timeout_error()
        if timeout is not None or error is not None:
            self._log_lost(messages, timeout or error)
        if timeout is None and isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise error

    def _log_lost(self, messages: list[Message], error: BaseException | None) -> None:
        self._lost_count += len(messages)
        now_ms = self._boot_ms()
        if now_ms < self._next_log_ms:
            return
        log.error(
            "handler failed with %s on %s, which is already acked, so it is not retried; %s lost",
            type(error).__qualname__,
            message_name(messages[0]),
            counted(self._lost_count, "message is", "messages are"),
            exc_info=error,
        )
        self._lost_count = 0
        self._next_log_ms = now_ms + LOG_MS
