"""Skips messages that a consumer does not want: they count as handled, and its handler is not
called.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from ...protocol.backoff import Backoff
from ...protocol.message import Message
from ..delivery.filter import MessageFilter
from .handlers import Handler, is_async


@dataclass(frozen=True, slots=True)
class Filtering:
    """The filter of a loop, and the pauses between tries of a filter that fails."""

    wanted: MessageFilter
    backoff: Backoff
    rng: random.Random


def filtered(handler: Handler[Any], wanted: MessageFilter) -> Handler[Any]:
    """Return a handler that gets only the wanted messages; a failure of the filter is an error of
    the handler.
    """
    matches = wanted.matches

    async def handle_async(message: Message) -> Any:
        return await handler(message) if matches(message) else None

    def handle(message: Message) -> Any:
        return handler(message) if matches(message) else None

    return handle_async if is_async(handler) else handle


def filtered_batches(handler: Any, wanted: MessageFilter) -> Any:
    """Return a batch handler that gets only the wanted messages; it is not called if none is
    wanted.
    """

    def handle(messages: list[Message]) -> Any:
        kept = [message for message in messages if wanted.matches(message)]
        return handler(kept) if kept else None

    return handle
