"""A broker reports itself to the metaserver, for as long as it lives.  Network, through `MetaClient`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Protocol

from ..protocol.backoff import Backoff
from ..protocol.clock import Clock, SystemClock
from ..protocol.control import BrokerHeartbeat, BrokerWelcome
from ..protocol.errors import (
    BrokerGroupTakenError,
    FolderBehindError,
    KeylaneError,
    LossAcceptedError,
    RefusedError,
    Retry,
    UnreachableError,
)
from ..protocol.text import counted

log = logging.getLogger("keylane.broker")

WAITS = Backoff(first_ms=50, max_ms=1_000)
ASKED_MS_MAX = 2_000
"""So long clients wait at most until the first report of a broker has ended."""
START_MS = 5_000
"""So long a metaserver that does not answer yet is no reason to warn anybody."""
_FOR_PEOPLE = (FolderBehindError, LossAcceptedError)
"""Refusals that only an operator ends: the hint says how."""
_SET_ASIDE = (BrokerGroupTakenError, *_FOR_PEOPLE)
"""Refusals that say that another data folder stands for the broker group."""


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
        rng: random.Random,
        clock: Clock | None = None,
        on_welcome: Callable[[], Awaitable[object]] | None = None,
        on_missed: Callable[[], object] | None = None,
        on_fence: Callable[[int], Awaitable[object]] | None = None,
    ) -> None:
        """
        Args:
            on_welcome: called once, when a metaserver has taken the first report.
            on_missed: called when the metaserver says that this broker may not know of some consumer group.
            on_fence: called with the highest token from before this data folder was accepted, before anybody is served.
        """
        self._meta = meta
        self._report = report
        self._rng = rng
        self._boot_ms = (clock or SystemClock()).boot_ms
        self._on_welcome = on_welcome
        self._on_missed = on_missed
        self._on_fence = on_fence
        self._welcome = asyncio.Event()
        self._began_ms = self._boot_ms()
        self._welcomed = False
        self._told = ("", logging.NOTSET)
        self.problem = "not reported yet"
        self.refusal = ""
        """Why the metaserver will not have this broker, so that no client comes; "" if it will, or is silent."""
        self.set_aside = ""
        """Why the broker group is another data folder's, as the metaserver says; "" while it does not."""
        self._asked = asyncio.Event()

    @property
    def asked(self) -> bool:
        """Has a metaserver answered the first report, or failed to: from then on `set_aside` counts."""
        return self._asked.is_set()

    @property
    def welcome(self) -> bool:
        """Has a metaserver taken a report, and set this broker aside since never: it knows which groups it lacks."""
        return self._welcome.is_set()

    async def wait_welcome(self) -> None:
        """Wait until `welcome` is true."""
        await self._welcome.wait()

    async def wait_asked(self) -> None:
        """Wait for the end of the first report, but not for long: a broker serves without its metaserver."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASKED_MS_MAX / 1000):
                await self._asked.wait()
        self._asked.set()

    async def run(self) -> None:
        """Report at once and then for ever; cancel it to end it."""
        failures = 0
        within_ms = None
        while True:
            try:
                welcome = await self._meta.broker_heartbeat(self._report(), within_ms=within_ms)
                if welcome.fence and self._on_fence is not None:
                    await self._on_fence(welcome.fence)
            except KeylaneError as error:
                failures += 1
                self.problem = error.message
                if isinstance(error, _FOR_PEOPLE):
                    self.problem += f"; {error.hint}"
                refused = isinstance(error, RefusedError | BrokerGroupTakenError)
                if refused and error.retry is Retry.NEVER:
                    self.refusal = error.message
                self._tell(error)
                if isinstance(error, _SET_ASIDE):
                    self.set_aside = error.message
                    self._welcome.clear()
                self._asked.set()
                wait_ms = WAITS.wait_ms(failures, self._rng)
            else:
                if failures:
                    again = " again" if self._welcomed else ""
                    log.log(
                        self._told[1],
                        "registered%s after %s",
                        again,
                        counted(failures, "try", "tries"),
                    )
                failures = 0
                if welcome.groups_missed and self._on_missed is not None:
                    self._on_missed()
                self.set_aside = ""
                self._asked.set()
                self._welcome.set()
                if not self._welcomed and self._on_welcome is not None:
                    await self._on_welcome()
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
            hint = f"; {error.hint}" if isinstance(error, _FOR_PEOPLE) else ""
            log.log(level, "not registered: %s%s", error.message, hint)
        self._told = (error.message, level)
