"""Reports a broker to the metaserver, at regular intervals. Network, through `MetaClient`.

news, or a quarter of the ttl since the last report ─▶ reported at the next interval
no news ─▶ that report is left out
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Protocol

from ..protocol.access.capability import AccessNews
from ..protocol.backoff import Backoff
from ..protocol.clock import Clock, SystemClock
from ..protocol.control import BrokerHeartbeat, BrokerWelcome, quiet_limit_ms
from ..protocol.errors import (
    FolderRefusedError,
    KeylaneError,
    RefusedError,
    RetryRule,
    UnreachableError,
)
from ..protocol.log_filter import LogFilter

log = logging.getLogger("keylane.broker")

WAITS = Backoff(first_ms=50, max_ms=1_000)
FIRST_REPORT_MS_MAX = 2_000
"""The longest time that a client's call waits for the broker's first report."""
START_MS = 5_000
"""The time after the start, in milliseconds, during which a metaserver that does not answer is
logged at INFO, not WARNING.
"""


class Metaserver(Protocol):
    """The part of a `MetaClient` that registration needs."""

    async def broker_heartbeat(
        self, body: BrokerHeartbeat, *, within_ms: int | None = None
    ) -> BrokerWelcome:
        """Report a broker. Each metaserver gets its share of `within_ms`."""
        ...


class Registration:
    """The loop of heartbeats; `problem` says why the last heartbeat failed."""

    def __init__(
        self,
        meta: Metaserver,
        report: Callable[[], BrokerHeartbeat],
        *,
        rng: random.Random,
        clock: Clock | None = None,
        on_accepted: Callable[[], Awaitable[object]] | None = None,
        on_missed: Callable[[], object] | None = None,
        on_fence: Callable[[int], Awaitable[object]] | None = None,
        on_access: Callable[[AccessNews], None] = lambda _news: None,
    ) -> None:
        """
        Args:
            on_accepted: called once, when a metaserver has accepted the first report.
            on_missed: called when the metaserver says that this broker may lack a consumer group.
            on_fence: called with the highest token that was granted before an operator accepted
                this data folder; clients are served after the call.
            on_access: called with what every answer says about access control.
        """
        self._meta = meta
        self._report = report
        self._rng = rng
        self._boot_ms = (clock or SystemClock()).boot_ms
        self._on_accepted = on_accepted
        self._on_missed = on_missed
        self._on_fence = on_fence
        self._on_access = on_access
        self._accepted = asyncio.Event()
        self._began_ms = self._boot_ms()
        self._reported = False
        self._troubles = LogFilter()
        self._level = logging.INFO
        """The level of the last log line about a failure; the line about its end has the same
        level.
        """
        self.problem = "not reported yet"
        self.refusal = ""
        """Why the metaserver refuses this broker and sends no client to it; "" if it does not
        refuse it, or does not answer.
        """
        self.set_aside = ""
        """Why the broker group belongs to another data folder; "" unless the metaserver says so."""
        self.cluster_version = ""
        """The lowest version of all members, by the last answer; "" if it is not known."""
        self.asked = False
        """True once the first report was answered or has failed; before that `set_aside` is not
        known.
        """
        self._heard = asyncio.Event()
        """An event that is set together with `asked`, for callers that wait."""

    @property
    def accepted(self) -> bool:
        """True if a metaserver has accepted a report, and has not set this broker aside since."""
        return self._accepted.is_set()

    async def wait_accepted(self) -> None:
        """Wait until `accepted` is true."""
        await self._accepted.wait()

    async def wait_asked(self) -> None:
        """Wait for the end of the first report, but at most FIRST_REPORT_MS_MAX; then serve without
        a metaserver.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_REPORT_MS_MAX / 1000):
                await self._heard.wait()
        self._note_asked()

    def _note_asked(self) -> None:
        self.asked = True
        self._heard.set()

    async def run(self) -> None:
        """Report at once, and then, while there is news, at the interval that the metaserver gives,
        until cancelled.
        """
        pauses = WAITS.pauses(self._rng)
        within_ms = None
        report = self._report()
        while True:
            ttl_ms = quiet_ms = 0
            try:
                welcome = await self._meta.broker_heartbeat(report, within_ms=within_ms)
                if welcome.access is not None:
                    self._on_access(welcome.access)
                if welcome.fence and self._on_fence is not None:
                    await self._on_fence(welcome.fence)
            except KeylaneError as error:
                self.problem = error.message
                if isinstance(error, FolderRefusedError):
                    self.problem += f"; {_way_out(error)}"
                if isinstance(error, RefusedError) and error.retry is RetryRule.NEVER:
                    self.refusal = self.problem
                self._tell(error)
                if isinstance(error, FolderRefusedError):
                    self.set_aside = error.message
                    self._accepted.clear()
                self._note_asked()
                wait_ms = pauses.next_ms()
            else:
                pauses.reset()
                self._note_registered()
                if welcome.groups_missed and self._on_missed is not None:
                    self._on_missed()
                self.set_aside = ""
                self.cluster_version = welcome.cluster_version
                self._note_asked()
                self._accepted.set()
                if not self._reported and self._on_accepted is not None:
                    await self._on_accepted()
                self._reported = True
                self.problem = self.refusal = ""
                wait_ms, ttl_ms = welcome.heartbeat_ms, welcome.ttl_ms
                if welcome.access is None:  # else any answer may take a right back
                    quiet_ms = quiet_limit_ms(ttl_ms)
            report = await self._next_report(report, wait_ms, quiet_ms=quiet_ms)
            if ttl_ms:
                # If all metaservers but one hang, that one must receive the report before the
                # broker's ttl ends.
                left_ms = ttl_ms - max(wait_ms, quiet_ms) - wait_ms
                within_ms = max(left_ms, ttl_ms // 4)

    async def _next_report(
        self, said: BrokerHeartbeat, wait_ms: int, *, quiet_ms: int
    ) -> BrokerHeartbeat:
        """
        Return the next report after `wait_ms`. A report that equals `said` is left out until
        `quiet_ms` have passed.

        A report with earlier openings, or with partitions that lack groups, is never left out,
        because a metaserver acts on it.
        """
        began_ms = self._boot_ms()
        await asyncio.sleep(wait_ms / 1000)
        report = self._report()
        asks = bool(report.opened_after or report.untold)
        for _ in range(quiet_ms // max(1, wait_ms) - 1):
            late = self._boot_ms() - began_ms >= quiet_ms  # as after a suspend
            if asks or late or report != said:
                break
            await asyncio.sleep(wait_ms / 1000)
            report = self._report()
        return report

    def _tell(self, error: KeylaneError) -> None:
        """Log each problem once. A broker may start before its metaserver, so at first a missing
        answer is logged at INFO.
        """
        starting = not self._reported and self._boot_ms() - self._began_ms < START_MS
        level = self._level = (
            logging.INFO if starting and isinstance(error, UnreachableError) else logging.WARNING
        )
        if line := self._troubles.met(error.message, self._boot_ms(), level):
            hint = f"; {_way_out(error)}" if isinstance(error, FolderRefusedError) else ""
            log.log(level, "cannot register with the metaserver: %s%s", line, hint)

    def _note_registered(self) -> None:
        again = " again" if self._reported else ""
        if failures := self._troubles.over(self._boot_ms(), logging.INFO, logging.WARNING):
            log.log(self._level, "registered%s after %s", again, failures)


def _way_out(error: KeylaneError) -> str:
    """Return the hint of a refusal, with the name of the broker group that it concerns."""
    return error.hint.replace("GROUP", str(error.details.get("broker_group", "GROUP")))
