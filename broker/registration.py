"""A broker reports itself to the metaserver, for as long as it lives.  Network, through `MetaClient`."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Protocol

from ..protocol.backoff import Backoff
from ..protocol.clock import Clock, SystemClock
from ..protocol.control import BrokerHeartbeat, BrokerWelcome
from ..protocol.errors import (
    BrokerGroupTakenError,
    KeylaneError,
    RefusedError,
    Retry,
    UnreachableError,
)

log = logging.getLogger("keylane.broker")

WAITS = Backoff(first_ms=50, max_ms=1_000)
START_MS = 5_000
"""So long a metaserver that does not answer yet is no reason to warn anybody."""


class Metaserver(Protocol):
    """What registration needs of a `MetaClient`."""

    async def broker_heartbeat(
        self, body: BrokerHeartbeat, *, within_ms: int | None = None
    ) -> BrokerWelcome:
        """Report a broker; each metaserver has its share of `within_ms`."""
        ...


class Registration:
    """The loop of heartbeats; `problem` says why the last one failed."""

    def __init__(
        self,
        meta: Metaserver,
        report: Callable[[], BrokerHeartbeat],
        *,
        dice: random.Random,
        clock: Clock | None = None,
    ) -> None:
        self._meta = meta
        self._report = report
        self._dice = dice
        self._boot_ms = (clock or SystemClock()).boot_ms
        self._began_ms = self._boot_ms()
        self._welcomed = False
        self._told = ("", logging.NOTSET)
        self.problem = "not reported yet"
        self.refusal = ""
        """Why the metaserver will not have this broker, so that no client comes; "" if it will, or is silent."""

    async def run(self) -> None:
        """Report at once and then for ever; cancel it to end it."""
        failures = 0
        within_ms = None
        while True:
            try:
                welcome = await self._meta.broker_heartbeat(self._report(), within_ms=within_ms)
            except KeylaneError as error:
                failures += 1
                self.problem = error.message
                refused = isinstance(error, RefusedError | BrokerGroupTakenError)
                if refused and error.retry is Retry.NEVER:
                    self.refusal = error.message
                self._tell(error)
                wait_ms = WAITS.wait_ms(failures, self._dice)
            else:
                if failures:
                    again = " again" if self._welcomed else ""
                    log.log(self._told[1], "registered%s after %d tries", again, failures)
                failures = 0
                self._welcomed = True
                self._told = ("", logging.NOTSET)
                self.problem = self.refusal = ""
                wait_ms = welcome.heartbeat_ms
                # Where all metaservers but one hang, that one hears this broker before its ttl is over.
                within_ms = max(welcome.ttl_ms - 2 * wait_ms, welcome.ttl_ms // 4)
            await asyncio.sleep(wait_ms / 1000)

    def _tell(self, error: KeylaneError) -> None:
        """Once for each problem; programs that start together wait for each other, which is none for a while."""
        starting = not self._welcomed and self._boot_ms() - self._began_ms < START_MS
        level = (
            logging.INFO if starting and isinstance(error, UnreachableError) else logging.WARNING
        )
        if (error.message, level) != self._told:
            log.log(level, "not registered: %s", error.message)
        self._told = (error.message, level)
