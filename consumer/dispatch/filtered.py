"""Skips messages that the filter rejects: they count as handled, and the handler is not called."""

from __future__ import annotations

from typing import Any

from ...protocol.message import Message
from ..filter import MessageFilter
from .handlers import Handler, is_async


def filtered(handler: Handler[Any], message_filter: MessageFilter) -> Handler[Any]:
    """Return a handler that is called only for accepted messages. An error in the filter counts as
    an error in the handler.
    """
    matches = message_filter.matches

    async def handle_async(message: Message) -> Any:
        return await handler(message) if matches(message) else None

    def handle(message: Message) -> Any:
        return handler(message) if matches(message) else None

    return handle_async if is_async(handler) else handle


def filtered_batches(handler: Any, message_filter: MessageFilter) -> Any:
    """Return a batch handler that gets only the accepted messages, and is not called if there are
    none.
    """

    def handle(messages: list[Message]) -> Any:
        accepted = [message for message in messages if message_filter.matches(message)]
        return handler(accepted) if accepted else None

    return handle
