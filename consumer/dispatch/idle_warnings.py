"""Warns about a program that takes no messages from its consumer, or acks none."""

from __future__ import annotations

import logging
from typing import Any

from ...protocol.message import Message
from ...protocol.text import counted
from ..log_names import message_name

log = logging.getLogger("keylane.consumer")

NOT_ITERATED_MS = 10_000
"""How long messages may wait for a consumer without a handler that was never iterated before a
warning is logged, in milliseconds.
"""
NOT_ITERATED_REPEAT_MS = 600_000
NOT_ACKED_MS = 10_000
"""How long the user may wait for messages that are blocked by unacked ones before a warning is
logged, in milliseconds.
"""


class IdleConsumerWarnings:
    """Warns about a program that takes no messages, or acks none, from a consumer without a
    handler.
    """

    def __init__(self) -> None:
        self._idle_since_ms: int | None = None
        """The boot time, in milliseconds, since which messages have been waiting while nobody
        iterates; None if none wait.
        """
        self._blocked_since_ms: int | None = None
        """The boot time, in milliseconds, since which the user has been waiting for messages that
        are blocked by unacked ones.
        """

    def warn_if_not_acked(
        self, blocking: Message[Any] | None, waiting: int, method: str, now_ms: int
    ) -> None:
        """
        Warn that the user is waiting in vain, in the method `method`, because unacked messages
        block others.

        Args:
            blocking: the one whose ack the largest number of others wait for; None: none waits, or
                the user does not.
            waiting: the number of messages that wait.
        """
        if blocking is None:
            self._blocked_since_ms = None
        elif self._blocked_since_ms is None:
            self._blocked_since_ms = now_ms
        elif now_ms - self._blocked_since_ms >= NOT_ACKED_MS:
            self._blocked_since_ms = now_ms + NOT_ITERATED_REPEAT_MS
            log.warning(
                "%s waits for acks: %s until earlier messages of their keys are acked or returned, "
                "such as %s; to get several messages of a key at once, use getmany()",
                method,
                counted(waiting, "message waits", "messages wait"),
                message_name(blocking),
            )

    def warn_if_not_iterated(self, name: str, waiting: int, now_ms: int) -> None:
        """Warn that messages are waiting for the consumer `name`, which was never iterated."""
        if self._idle_since_ms is None:
            self._idle_since_ms = now_ms
        elif now_ms - self._idle_since_ms >= NOT_ITERATED_MS:
            self._idle_since_ms = now_ms + NOT_ITERATED_REPEAT_MS
            log.warning(
                "%s has no handler and is not iterated: %s, and no other consumer gets its "
                "partitions; pass handler=, or use: async for message in consumer",
                name,
                counted(waiting, "message waits", "messages wait"),
            )
