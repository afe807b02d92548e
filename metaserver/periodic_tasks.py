"""Runs the periodic work of a metaserver: expired sessions, changes by other metaservers, repairs,
and expired data.

It polls every `poll_ms`, and earlier when a session is about to expire, so that a silent consumer
is replaced at its ttl even if no other consumer calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence

from ..protocol.errors import KeylaneError
from ..protocol.log_filter import LogFilter
from .catalogue.service import Catalogue
from .groups.service import GroupService
from .groups.views import due_work
from .operations.driver import OperationDriver
from .removals.service import RemovalService
from .settings import MetaserverSettings
from .sql.database import Database

log = logging.getLogger("keylane.metaserver")
SETTLE_S = 1.0
"""Longest time, in seconds, for which a round waits for one group. Another transaction may hold the
group's row for as long as a statement may take, and everything else in the round has to wait.
"""
LATE_S = 10.0
"""Time, in seconds, after which a group that rounds have skipped is logged. Settling may take long
where many consumers join at once.
"""


class PeriodicTasks:
    """
    Runs the periodic work. Any number of metaservers may run it at once: each step is a
    transaction.

    Args:
        duties: called every `expire_ms`.
        quick_duties: called after each poll that finds work for them in the database.
        beside: long-running jobs, started once and ended with the periodic work.
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
        beside: Sequence[Callable[[], Coroutine[object, object, None]]] = (),
    ) -> None:
        self._database = database
        self._groups = groups
        self._catalogue = catalogue
        self._settings = settings
        self._operations = operations
        self._duties = duties
        self._quick_duties = quick_duties
        self._beside = beside
        self._remove = removals.run_once
        self._removals_wanted = asyncio.Event()
        self._quick_wanted = [asyncio.Event() for _ in quick_duties]
        self._troubles = LogFilter()
        """Suppresses repeated log lines about failures of rounds and duties."""
        self._failing = False
        """True if a round has failed since the last good one."""
        self._creations = False
        """True if the last round saw an unfinished creation of a subject."""
        self._late: dict[int, float] = {}
        """Group id → time, in seconds of the event loop's clock, since when rounds have skipped it.
        """

    async def run(self) -> None:
        """Run until cancelled. A KeylaneError is logged and the work is repeated; any other error
        ends the run and is raised.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._poll_loop())
                group.create_task(self._repair_loop())
                for run in self._beside:
                    group.create_task(run())
                for duty in self._duties:
                    group.create_task(self._run_duty_loop(duty))
                for duty, wanted in zip(self._quick_duties, self._quick_wanted, strict=True):
                    group.create_task(self._run_quick_loop(duty, wanted))
                # Removals have a loop of their own, so that a hanging broker delays nothing else.
                group.create_task(self._run_quick_loop(self._remove, self._removals_wanted))
        except Exception:
            log.exception("the periodic work ended with an unexpected error")
            raise

    async def poll(self) -> int:
        """Do one round, and return the milliseconds until the next one is due."""
        poll_ms = self._settings.poll_ms
        good = True
        try:
            due = await self._database.read(due_work)
            self._creations = due.creations
            if due.quick or self._catalogue.has_unannounced:
                for wanted in self._quick_wanted:
                    wanted.set()
            self._late = {
                group_id: self._late[group_id] for group_id in due.groups if group_id in self._late
            }
            for group_id in due.groups:
                if self._groups.gathers(group_id):
                    continue
                good &= await self._settle(group_id)
            await self._groups.check_for_changes(due.versions)
            await self._catalogue.check_for_changes()
            if due.removals:
                self._removals_wanted.set()
            if due.operations:
                await self._operations.resume()
        except KeylaneError as error:
            self._failed(error.message)
            return poll_ms
        if good and self._failing:
            self._failing = False
            if failures := self._troubles.over(_now_ms()):
                log.warning("the periodic work succeeds again, after %s", failures)
        next_ms = poll_ms if due.next_expiry_ms is None else due.next_expiry_ms + 1
        return max(1, min(poll_ms, next_ms))

    async def _settle(self, group_id: int) -> bool:
        """Settle a group, or leave it to the next round; returns True if it was settled."""
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._groups.settle(group_id)
        except TimeoutError:
            now_s = asyncio.get_running_loop().time()
            if now_s - self._late.setdefault(group_id, now_s) >= LATE_S:
                self._failed(f"consumer group number {group_id} is not settled after {LATE_S:g} s")
        except KeylaneError as error:
            self._failed(error.message)
        else:
            self._late.pop(group_id, None)
            return True
        return False

    def _failed(self, why: str) -> None:
        """Log the failure of a round or of a part of it."""
        self._warn(why)
        self._failing = True

    async def _poll_loop(self) -> None:
        while True:
            pause_ms = await self.poll()
            await asyncio.sleep(pause_ms / 1000)

    async def _repair_loop(self) -> None:
        while True:
            await asyncio.sleep(self._settings.repair_ms / 1000)
            if not self._creations:
                continue
            try:
                await self._catalogue.repair()
            except KeylaneError as error:
                self._warn(error.message)

    async def _run_duty_loop(self, duty: Callable[[], Awaitable[object]]) -> None:
        while True:
            await asyncio.sleep(self._settings.expire_ms / 1000)
            await self._run(duty)

    async def _run_quick_loop(
        self, duty: Callable[[], Awaitable[object]], wanted: asyncio.Event
    ) -> None:
        while True:
            await wanted.wait()
            wanted.clear()
            await self._run(duty)

    async def _run(self, duty: Callable[[], Awaitable[object]]) -> None:
        try:
            await duty()
        except KeylaneError as error:
            self._warn(error.message)

    def _warn(self, why: str) -> None:
        """Log why work failed; lines that repeat within a while are suppressed, because there are
        many rounds a second.
        """
        if line := self._troubles.met(why, _now_ms()):
            log.warning("periodic work failed and will be retried: %s", line)


def _now_ms() -> int:
    return round(asyncio.get_running_loop().time() * 1000)
