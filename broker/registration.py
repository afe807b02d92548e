"""A broker reports itself to the metaserver, for as long as it lives.  Network, through `MetaClient`."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Protocol

from ..protocol.backoff import Backoff
from ..protocol.control import BrokerHeartbeat, BrokerWelcome
from ..protocol.errors import KeylaneError

log = logging.getLogger("keylane.broker")

WAITS = Backoff(first_ms=50, max_ms=1_000)


class Metaserver(Protocol):
    """What registration needs of a `MetaClient`."""

    async def broker_heartbeat(self, body: BrokerHeartbeat) -> BrokerWelcome:
        """Report a broker."""
        ...


class Registration:
    """The loop of heartbeats; `problem` says why the last one failed."""

    def __init__(
        self, meta: Metaserver, report: Callable[[], BrokerHeartbeat], *, dice: random.Random
    ) -> None:
        self._meta = meta
        self._report = report
        self._dice = dice
        self.problem = "not reported yet"

    async def run(self) -> None:
        """Report at once and then for ever; cancel it to end it."""
        failures = 0
        while True:
            try:
                welcome = await self._meta.broker_heartbeat(self._report())
            except KeylaneError as error:
                failures += 1
                if error.message != self.problem:
                    log.warning("not registered: %s", error.message)
                self.problem = error.message
                wait_ms = WAITS.wait_ms(failures, self._dice)
            else:
                if failures:
                    log.warning("registered again after %d tries", failures)
                failures = 0
                self.problem = ""
                wait_ms = welcome.heartbeat_ms
            await asyncio.sleep(wait_ms / 1000)
