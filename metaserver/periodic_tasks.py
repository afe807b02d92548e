"""Runs a metaserver's periodic work: it expires sessions, notices changes by other metaservers,
repairs interrupted creations, and removes expired data.

It polls every `poll_ms`, or earlier when a session is about to expire, so a silent consumer is
replaced when its ttl ends, even if no other consumer makes a call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence

from ..protocol.errors import KeylaneError
from ..protocol.log_filter import LogFilter
from .catalogue.service import Catalogue
from .groups.service import GroupService
from .groups.views import read_due_work
from .operations.driver import OperationDriver
from .removals.service import RemovalService
from .settings import MetaserverSettings
from .sql.database import Database

log = logging.getLogger("keylane.metaserver")
SETTLE_S = 1.0
"""Timeout, in seconds, for settling one group per round. Another transaction may lock the group's
row for as long as a statement may take, and the rest of the round would have to wait.
"""
UNSETTLED_LOG_S = 10.0
"""Time, in seconds, after which a group that has still not been settled is logged. Settling is slow
while many consumers join at once.
"""


class PeriodicTasks:
    """
    Runs the periodic work. Several metaservers may do so at the same time, because each step is a
    transaction.

    Args:
        duties: called every `expire_ms`.
        quick_duties: called after each poll that finds work for them in the database.
        background: long-running jobs, started once and cancelled with the periodic work.
    """

    def __init__(
        self,
        database: Database,
        groups: GroupService,
        catalogue: Catalogue,
        settings: MetaserverSettings,
        operations: OperationDriver,
        duties: Sequence[Callable[[], Awaitable[object]]] = (),
        *,
        removals: RemovalService,
        quick_duties: Sequence[Callable[[], Awaitable[object]]] = (),
        background: Sequence[Callable[[], Coroutine[object, object, None]]] = (),
    ) -> None:
        self._database = database
        self._groups = groups
        self._catalogue = catalogue
        self._settings = settings
        self._operations = operations
        self._duties = duties
        self._quick_duties = quick_duties
        self._background = background
        self._run_removals = removals.run_once
        self._removals_requested = asyncio.Event()
        self._quick_requested = [asyncio.Event() for _ in quick_duties]
        self._failures = LogFilter()
        """Suppresses repeated log messages about failing rounds and duties."""
        self._failing = False
        """True if a round has failed since the last successful one."""
        self._has_creations = False
        """True if the last round found an unfinished creation of a subject."""
        self._unsettled_since_s: dict[int, float] = {}
        """Maps each group id to the event loop time, in seconds, of the first of its consecutive
        timeouts.
        """

    async def run(self) -> None:
        """Run until cancelled. KeylaneErrors are logged and the work is retried; any other error
        ends the run and is raised.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._poll_loop())
                group.create_task(self._run_creation_loop())
                for run in self._background:
                    group.create_task(run())
                for duty in self._duties:
                    group.create_task(self._run_duty_loop(duty))
                for duty, event in zip(self._quick_duties, self._quick_requested, strict=True):
                    group.create_task(self._run_quick_loop(duty, event))
                # Removals have a loop of their own, so a hanging broker delays nothing else.
                group.create_task(
                    self._run_quick_loop(self._run_removals, self._removals_requested)
                )
        except Exception:
            log.exception("the periodic work ended with an unexpected error")
            raise

    async def poll(self) -> int:
        """Run one round. Return the number of milliseconds until the next one is due."""
        poll_ms = self._settings.poll_ms
        is_success = True
        try:
            work = await self._database.read(read_due_work)
            self._has_creations = work.creations
            if work.quick or self._catalogue.has_unannounced_groups:
                for event in self._quick_requested:
                    event.set()
            self._unsettled_since_s = {
                group_id: since_s
                for group_id, since_s in self._unsettled_since_s.items()
                if group_id in work.groups
            }
            for group_id in work.groups:
                if self._groups.is_gathering_joins(group_id):
                    continue
                is_success &= await self._settle(group_id)
            await self._groups.check_for_changes(work.versions)
            await self._catalogue.check_for_changes()
            if work.removals:
                self._removals_requested.set()
            if work.operations:
                await self._operations.resume()
        except KeylaneError as error:
            self._log_failed_round(error.message)
            return poll_ms
        if is_success and self._failing:
            self._failing = False
            if failures := self._failures.end_failures(_now_ms()):
                log.warning("the periodic work succeeds again, after %s", failures)
        wait_ms = poll_ms if work.next_expiry_ms is None else work.next_expiry_ms + 1
        return max(1, min(poll_ms, wait_ms))

    async def _settle(self, group_id: int) -> bool:
        """Settle a group and return True. On a timeout or an error, return False and leave the
        group for the next round.
        """
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._groups.settle(group_id)
        except TimeoutError:
            now_s = asyncio.get_running_loop().time()
            if now_s - self._unsettled_since_s.setdefault(group_id, now_s) >= UNSETTLED_LOG_S:
                self._log_failed_round(
                    f"consumer group {group_id} is not settled after {UNSETTLED_LOG_S:g} s"
                )
        except KeylaneError as error:
            self._log_failed_round(error.message)
        else:
            self._unsettled_since_s.pop(group_id, None)
            return True
        return False

    def _log_failed_round(self, why: str) -> None:
        """Log that a round, or part of it, has failed."""
        self._warn(why)
        self._failing = True

    async def _poll_loop(self) -> None:
        while True:
            pause_ms = await self.poll()
            await asyncio.sleep(pause_ms / 1000)

    async def _run_creation_loop(self) -> None:
        """Continue interrupted creations every `repair_ms`."""
        while True:
            await asyncio.sleep(self._settings.repair_ms / 1000)
            if not self._has_creations:
                continue
            try:
                await self._catalogue.continue_creations()
            except KeylaneError as error:
                self._warn(error.message)

    async def _run_duty_loop(self, duty: Callable[[], Awaitable[object]]) -> None:
        """Run a duty every `expire_ms`."""
        while True:
            await asyncio.sleep(self._settings.expire_ms / 1000)
            await self._run(duty)

    async def _run_quick_loop(
        self, duty: Callable[[], Awaitable[object]], event: asyncio.Event
    ) -> None:
        """Run a duty whenever `event` is set."""
        while True:
            await event.wait()
            event.clear()
            await self._run(duty)

    async def _run(self, duty: Callable[[], Awaitable[object]]) -> None:
        """Run a duty and log its error if it fails."""
        try:
            await duty()
        except KeylaneError as error:
            self._warn(error.message)

    def _warn(self, why: str) -> None:
        """Log the reason why work failed. Repeated messages are suppressed, because there are
        several rounds per second.
        """
        if line := self._failures.count_failure(why, _now_ms()):
            log.warning("periodic work failed and will be retried: %s", line)


def _now_ms() -> int:
    return round(asyncio.get_running_loop().time() * 1000)
