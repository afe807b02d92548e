"""Detects that the database lacks partitions or changes that brokers have, after a failover that
lost commits or the restore of an older copy. Does network I/O and runs SQL.

    a start, a new connection to the database,
    a broker that returns, or has a higher id
      ─▶ read the database ─▶ ask the brokers ─▶ read the database: something is missing
         (`find_differences`)
      ─▶ the same result again: the fact BEHIND is stored, so that calls create nothing, and
         readiness and a metric show it
      ─▶ nothing is missing any more: the fact is deleted

Losses that do not affect any broker are not detected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import replace

from ...protocol.errors import KeylaneError
from ...protocol.text import counted
from ...rpc.network import Network
from ..cluster.lost_database import database_behind_error, read_missing_data, store_missing_data
from ..sql.database import Database
from .checks import BrokerAnswer, BrokerRow, Difference, Index, find_differences
from .service import read_views

log = logging.getLogger("keylane.metaserver")
CHECK_INTERVAL_S = 5.0
"""Interval, in seconds, at which the fact is read and, while it is stored, the brokers are
asked.
"""
CONFIRM_S = 1.0
"""Pause, in seconds, between the two comparisons, which must have the same result."""
PAUSE_FACTOR = 4
"""Ratio of the pause after a check to the duration of the check. Requests come in bursts, for
example when all brokers were late.
"""
CALL_TIMEOUT_MS = 3_000
SETTLE_TIMEOUT_S = 4.0
"""How long, in seconds, a call that changes partitions waits for the comparison after a start or a
new connection.
"""


class AgreementWatch:
    """Compares the database with brokers on request, and records whether the database lacks
    anything.
    """

    def __init__(self, database: Database, network: Network) -> None:
        self._database = database
        self._network = network
        self._pending_groups: set[str] | None = None
        """Broker groups to ask in the next comparison; None means all of them."""
        self._requested = asyncio.Event()
        self._requested.set()  # for the comparison at the start
        self._settled = asyncio.Event()
        self._ahead_groups: frozenset[str] = frozenset()
        """Broker groups that, according to their last reply, had more than the database."""
        self._logged_behind = False
        """True if the log last reported that the database lacks something."""

    def request_comparison(self, broker_group: str | None = None) -> None:
        """Request a comparison with a broker group. None requests one with all groups, which calls
        that create something wait for.
        """
        if broker_group is None:
            self._pending_groups = None
            self._settled.clear()
        elif self._pending_groups is not None:
            self._pending_groups.add(broker_group)
        self._requested.set()

    async def wait_until_settled(self) -> None:
        """Wait until the comparison that creations wait for is done, for at most
        `SETTLE_TIMEOUT_S`.
        """
        if not self._settled.is_set():
            try:
                async with asyncio.timeout(SETTLE_TIMEOUT_S):
                    await self._settled.wait()
            except TimeoutError:
                pass  # a broker or the database does not respond, as the call itself will find out

    async def run(self) -> None:
        """Compare on request, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await self._requested.wait()
            except TimeoutError:
                pass
            clock = asyncio.get_running_loop().time
            started_s = clock()
            try:
                await self.check()
            except KeylaneError as error:
                log.debug("cannot compare the database with the brokers: %s", error.message)
                self._requested.set()
                await asyncio.sleep(CONFIRM_S)
            await asyncio.sleep(min(CHECK_INTERVAL_S, PAUSE_FACTOR * (clock() - started_s)))

    async def check(self) -> None:
        """Read the fact, ask the brokers if the fact is stored or a comparison has been requested,
        and store or delete the fact. Raises StorageError.
        """
        missing_data = await self._database.read(read_missing_data)
        if not missing_data and not self._requested.is_set():
            self._log_change(missing_data)
            return
        self._requested.clear()
        pending_groups, self._pending_groups = self._pending_groups, set()
        groups = None if missing_data or pending_groups is None else pending_groups
        try:
            differences = await self._compare(groups)
            if differences and not missing_data:
                await asyncio.sleep(CONFIRM_S)
                differences &= await self._compare(groups)
        except KeylaneError:
            self._pending_groups = (
                None if pending_groups is None else pending_groups | (self._pending_groups or set())
            )
            raise
        if differences and not missing_data:
            missing_data = _describe(differences)
            await self._database.write(store_missing_data, missing_data)
        elif missing_data and not differences and not self._ahead_groups:
            missing_data = ""
            await self._database.write(store_missing_data, missing_data)
        self._log_change(missing_data)
        if not self._requested.is_set() or self._pending_groups is not None:
            self._settled.set()

    async def _compare(self, groups: Collection[str] | None) -> set[Difference]:
        """Return everything that these broker groups have and the database lacks. None means all
        groups.
        """
        views = await read_views(
            self._database, self._network, broker_groups=groups, timeout_ms=CALL_TIMEOUT_MS
        )
        rows = {row.broker_group: row for row in views.before.brokers}
        # A broker that does not respond will be compared when it sends its next report.
        answers = [each for each in views.answers if _is_from(rows[each.broker_group], each)]
        differences = set(find_differences(Index(replace(views, answers=answers))))
        # A group that does not respond now may still be ahead, unless its row was deleted.
        answered_groups = {answer.broker_group for answer in answers}
        silent_groups = (self._ahead_groups - answered_groups) & {
            row.broker_group for row in views.after.brokers
        }
        self._ahead_groups = silent_groups | {each.broker_group for each in differences}
        return differences

    def _log_change(self, missing_data: str) -> None:
        """Log that the fact was stored or deleted by this or another metaserver."""
        if bool(missing_data) == self._logged_behind:
            return
        self._logged_behind = bool(missing_data)
        if missing_data:
            error = database_behind_error(missing_data)
            log.error("%s; nothing is created meanwhile.  %s", error.message, error.hint)
        else:
            log.warning("the database again has everything that brokers have")


def _is_from(broker: BrokerRow, answer: BrokerAnswer) -> bool:
    """Return True if the answer is from the broker in this row, and not from another one at its
    address.
    """
    hosted = answer.hosted
    return (
        hosted is not None
        and hosted.broker_group == broker.broker_group
        and (not broker.broker_id or hosted.broker_id in {"", broker.broker_id})
    )


def _describe(differences: Collection[Difference]) -> str:
    """Return a sentence with the first difference and the number of others."""
    first, *others = sorted(differences)
    suffix = f", and {counted(len(others), 'difference')} more" if others else ""
    return f"{first.text}{suffix}"
