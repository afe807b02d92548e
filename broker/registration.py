"""Reports a broker to the metaserver at regular intervals. Does network I/O through `MetaClient`.

report changed, or a quarter of the ttl has passed ─▶ send it at the next interval
report unchanged ─▶ skip this interval
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
    OverloadedError,
    Reason,
    RefusedError,
    RetryRule,
    UnreachableError,
)
from ..protocol.log_filter import LogFilter
from .copies.commitment import WAITS_FOR_COPIES

log = logging.getLogger("keylane.broker")

WAITS = Backoff(first_ms=50, max_ms=1_000)
FIRST_REPORT_MS_MAX = 2_000
"""The maximum time that a client's call waits for the broker's first report, in milliseconds."""
COPIED_MS_MAX = 5_000
"""The maximum time that a client's call waits for copies after the start, in milliseconds."""
START_MS = 5_000
"""For how long after the start an unreachable metaserver is logged at INFO instead of WARNING, in
milliseconds.
"""


class Metaserver(Protocol):
    """The methods of `MetaClient` that registration needs."""

    async def broker_heartbeat(
        self, body: BrokerHeartbeat, *, within_ms: int | None = None
    ) -> BrokerWelcome:
        """Report a broker. `within_ms` is a timeout that is shared by all metaservers that are
        tried.
        """
        ...


class Registration:
    """The heartbeat loop. `problem` is the reason why the last heartbeat failed."""

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
        awaits_copies: bool = False,
    ) -> None:
        """
        Args:
            awaits_copies: True if no client is served before `note_copied` is called.
            on_accepted: called once, when a metaserver accepts a report for the first time.
            on_missed: called when the metaserver says that this broker may have missed the creation
                of a consumer group.
            on_fence: called with the highest token that was granted before an operator accepted
                this data folder. No client is served until it returns.
            on_access: called with the access news in each answer.
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
        self._started_ms = self._boot_ms()
        self._was_accepted = False
        self._failure_log = LogFilter()
        self._level = logging.INFO
        """The level of the last failure that was logged. The recovery is logged at the same
        level.
        """
        self.problem = "not reported yet"
        self.refusal = ""
        """The reason why the metaserver refuses this broker and sends no clients to it; "" if it
        does not refuse it or does not answer.
        """
        self.set_aside = ""
        """The reason why the broker group belongs to another data folder; "" unless the metaserver
        says so.
        """
        self.cluster_version = ""
        """The lowest version of all members, according to the last answer; "" if unknown."""
        self.history = 0
        """The highest number of changes of copies that a metaserver has named; it may know fewer
        after its database fell back.
        """
        self.has_reported = False
        """True once the first report has been answered or has failed, and copies have what the log
        had at the start. Until then `set_aside` is unknown.
        """
        self.awaits_copies = awaits_copies
        """True until the copies that acks wait for have what the log had when the broker was
        started: until then it is not known what was durable.
        """
        self.answered = asyncio.Event()
        """Set once a metaserver has accepted a report."""
        self.is_behind = asyncio.Event()
        """Set once a metaserver has said that this folder is an older one than its group's."""
        self._replaced = ""
        self._copied = asyncio.Event()
        self._first_report_ended = asyncio.Event()
        """Set together with `has_reported`."""

    @property
    def accepted(self) -> bool:
        """True if a metaserver has accepted a report and has not set this broker aside since then,
        and `awaits_copies` is false.
        """
        return self._accepted.is_set()

    async def wait_accepted(self) -> None:
        """Wait until `accepted` is true."""
        await self._accepted.wait()

    async def wait_reported(self) -> None:
        """Wait until the first report has ended, for at most FIRST_REPORT_MS_MAX. After that, the
        broker serves even without a metaserver.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_REPORT_MS_MAX / 1000):
                await self._first_report_ended.wait()
        self._set_reported()
        if self.awaits_copies:
            await self.wait_copied()

    async def wait_copied(self) -> None:
        """Wait until `awaits_copies` is false. Raises OverloadedError if that takes too long."""
        try:
            async with asyncio.timeout(COPIED_MS_MAX / 1000):
                await self._copied.wait()
        except TimeoutError:
            raise OverloadedError(WAITS_FOR_COPIES, retry_after_ms=100) from None

    @property
    def is_current(self) -> bool:
        """True if a metaserver has accepted a report of this opening, and has not set this broker
        aside since then, whether it awaits copies or not.
        """
        return self._was_accepted and not self.set_aside

    def note_copied(self) -> None:
        """Note that the copies have what the log had when the broker was started."""
        self.awaits_copies = False
        self.has_reported = self._first_report_ended.is_set()
        self._copied.set()
        if not self.problem:
            self._accepted.set()

    def note_replaced(self, reason: str) -> None:
        """Note that a copy has the place of this broker, which reports itself no more."""
        self._replaced = self.set_aside = self.problem = reason
        self._accepted.clear()
        self.is_behind.set()

    def _was_replaced(self) -> bool:
        return bool(self._replaced)

    def _note_failure(self, error: KeylaneError) -> None:
        self.problem = error.message
        if isinstance(error, FolderRefusedError):
            self.problem += f"; {_hint_of(error)}"
        if isinstance(error, RefusedError) and error.retry is RetryRule.NEVER:
            self.refusal = self.problem
        self._log_failure(error)
        if isinstance(error, FolderRefusedError):
            self._note_refused(error)
        self._set_reported()

    def _note_refused(self, error: FolderRefusedError) -> None:
        self.set_aside = error.message
        self._accepted.clear()
        if error.reason in {Reason.FOLDER_BEHIND, Reason.FOLDER_IN_USE}:
            self.is_behind.set()

    def _set_reported(self) -> None:
        self.has_reported = not self.awaits_copies
        self._first_report_ended.set()

    async def run(self) -> None:
        """Send reports until cancelled or replaced: one immediately, then one at each of the
        metaserver's intervals, skipping unchanged reports.
        """
        pauses = WAITS.pauses(self._rng)
        within_ms = None
        report = self._report()
        while not self._was_replaced():
            ttl_ms = quiet_ms = 0
            try:
                welcome = await self._meta.broker_heartbeat(report, within_ms=within_ms)
                if self._was_replaced():
                    return
                if welcome.access is not None:
                    self._on_access(welcome.access)
                if welcome.fence and self._on_fence is not None:
                    await self._on_fence(welcome.fence)
            except KeylaneError as error:
                if self._was_replaced():
                    return
                self._note_failure(error)
                wait_ms = pauses.next_pause_ms()
            else:
                pauses.reset()
                self.answered.set()
                self._log_recovery()
                if welcome.groups_missed and self._on_missed is not None:
                    self._on_missed()
                self.set_aside = ""
                self.cluster_version = welcome.cluster_version
                self.history = max(self.history, welcome.history)
                self._set_reported()
                if not self.awaits_copies:
                    self._accepted.set()
                if not self._was_accepted and self._on_accepted is not None:
                    await self._on_accepted()
                self._was_accepted = True
                self.problem = self.refusal = ""
                wait_ms, ttl_ms = welcome.heartbeat_ms, welcome.ttl_ms
                if welcome.access is None:  # otherwise, any answer may revoke a right
                    quiet_ms = quiet_limit_ms(ttl_ms)
            report = await self._next_report(report, wait_ms, quiet_ms=quiet_ms)
            if ttl_ms:
                # If all metaservers but one hang, the remaining one must still receive the report
                # before the broker's ttl ends.
                remaining_ms = ttl_ms - max(wait_ms, quiet_ms) - wait_ms
                within_ms = max(remaining_ms, ttl_ms // 4)

    async def _next_report(
        self, last_report: BrokerHeartbeat, wait_ms: int, *, quiet_ms: int
    ) -> BrokerHeartbeat:
        """
        Wait for `wait_ms`, and return the next report. Reports that are equal to `last_report` are
        skipped until `quiet_ms` have passed.

        Reports that contain earlier openings, or partitions that lack groups, are never skipped,
        because the metaserver acts on them.
        """
        began_ms = self._boot_ms()
        await asyncio.sleep(wait_ms / 1000)
        report = self._report()
        needs_reply = bool(report.opened_after or report.untold)
        for _ in range(quiet_ms // max(1, wait_ms) - 1):
            is_overdue = self._boot_ms() - began_ms >= quiet_ms  # for example after a suspend
            if needs_reply or is_overdue or report != last_report:
                break
            await asyncio.sleep(wait_ms / 1000)
            report = self._report()
        return report

    def _log_failure(self, error: KeylaneError) -> None:
        """Log each problem once. A broker may start before its metaserver, so an unreachable
        metaserver is logged at INFO at first.
        """
        is_starting = not self._was_accepted and self._boot_ms() - self._started_ms < START_MS
        level = self._level = (
            logging.INFO if is_starting and isinstance(error, UnreachableError) else logging.WARNING
        )
        if text := self._failure_log.count_failure(error.message, self._boot_ms(), level):
            hint = f"; {_hint_of(error)}" if isinstance(error, FolderRefusedError) else ""
            log.log(level, "cannot register with the metaserver: %s%s", text, hint)

    def _log_recovery(self) -> None:
        again = " again" if self._was_accepted else ""
        if failures := self._failure_log.end_failures(
            self._boot_ms(), logging.INFO, logging.WARNING
        ):
            log.log(self._level, "registered%s after %s", again, failures)
        elif not self._was_accepted:
            log.info("registered with the metaserver")


def _hint_of(error: KeylaneError) -> str:
    """Return the hint for a refusal, with the name of the broker group filled in."""
    return error.hint.replace("GROUP", str(error.details.get("broker_group", "GROUP")))
