"""Sends a broker's audit log to a metaserver, which stores it. Network, through `send`."""

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


class AuditSending:
    """
    Sends audit events to a metaserver. While none answers, up to `audit_buffer.WAITING_MAX` events
    wait.

    Args:
        send: stores events at a metaserver.
    """

    def __init__(self, server: str, send: Callable[[list[AuditEvent]], Awaitable[object]]) -> None:
        self.buffer = AuditBuffer(server)
        self._send = send
        self._problem = ""

    async def run(self) -> None:
        """Send the waiting events until cancelled; then try one last time."""
        try:
            while True:
                await asyncio.sleep(SEND_S)
                await self.send()
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SEND_S):
                    await self.send()

    async def send(self) -> None:
        """Send the waiting events. An event whose outcome is unknown may be stored twice; none is
        lost for that reason.
        """
        while events := self.buffer.take():
            try:
                await self._send(events)
            except KeylaneError as error:
                self.buffer.put_back(events)
                if error.message != self._problem and not isinstance(error, UnreachableError):
                    log.warning("cannot send audit events: %s", error.message)
                self._problem = error.message
                return
            self._problem = ""
