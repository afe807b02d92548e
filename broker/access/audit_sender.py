"""Sends the broker's audit log to a metaserver, which stores it. Does network I/O through
`send`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from ...protocol.errors import KeylaneError, UnreachableError
from ...protocol.http.access import AuditEvent
from ...rpc.access.audit_events import AuditBuffer

log = logging.getLogger("keylane.broker")

SEND_S = 1.0
"""The interval between two attempts to send, and the timeout of the last attempt, in seconds."""


class AuditSender:
    """
    Sends audit events to a metaserver. Up to `audit_events.WAITING_MAX` events are buffered while
    no metaserver replies.

    Args:
        send: stores events at a metaserver.
    """

    def __init__(self, server: str, send: Callable[[list[AuditEvent]], Awaitable[object]]) -> None:
        self.buffer = AuditBuffer(server)
        self._send = send
        self._problem = ""

    async def run(self) -> None:
        """Send buffered events until cancelled, then try once more."""
        try:
            while True:
                await asyncio.sleep(SEND_S)
                await self.send()
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SEND_S):
                    await self.send()

    async def send(self) -> None:
        """Send the buffered events. If the outcome of a call is unknown, its events are sent again
        and may therefore be stored twice.
        """
        while events := self.buffer.pop_oldest():
            try:
                await self._send(events)
            except KeylaneError as error:
                self.buffer.requeue(events)
                if error.message != self._problem and not isinstance(error, UnreachableError):
                    log.warning("cannot send audit events: %s", error.message)
                self._problem = error.message
                return
            self._problem = ""
