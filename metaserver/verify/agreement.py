"""Notices that the database lacks what brokers have, after a fail-over that lost commits or a
restore of an older copy. Shell around `checks.py`.

    a start, a new connection to the database,
    a broker that returns, or has a higher id
      ─▶ read the database ─▶ ask the brokers ─▶ read the database: it lacks something (`lacking`)
      ─▶ the same once more: the fact BEHIND is stored, so that calls create nothing, and readiness
         and a metric show it
      ─▶ agreement again: the fact is deleted

A database that lacks nothing of what brokers have is not found behind, whatever else it has lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from ...protocol.errors import KeylaneError
from ...protocol.text import counted
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..cluster.lost_database import behind_error, note_behind, read_behind
from ..sql.database import Database
from .checks import BrokerAnswer, BrokerRow, Index, Lacking, Views, lacking
from .service import read_sql_view

log = logging.getLogger("keylane.metaserver")
LOOK_S = 5.0
"""Interval, in seconds, at which the fact is read, and at which the brokers are asked while it is
stored.
"""
CONFIRM_S = 1.0
"""Pause, in seconds, between the two comparisons that have to agree."""
REST_SHARE = 4
"""Factor by which the pause after a round is longer than the round: reasons come in groups, for
example when all brokers were late.
"""
ASK_TIMEOUT_MS = 3_000
ASKED_AT_ONCE_MAX = 16
PATIENCE_S = 4.0
"""Longest time, in seconds, for which a call that changes partitions waits for a comparison: the
first one of a metaserver, or one after a new connection.
"""


class AgreementWatch:
    """Compares the database with brokers when there is a reason, and stores whether the database
    lacks something.
    """

    def __init__(self, database: Database, network: Network) -> None:
        self._database = database
        self._network = network
        self._doubted: set[str] | None = None
        """Broker groups to ask; None: all."""
        self._doubt = asyncio.Event()
        self._doubt.set()  # the first comparison is the one at the start
        self._settled = asyncio.Event()
        self._evidence: frozenset[str] = frozenset()
        """Broker groups that had more than the database when they were last asked."""
        self._logged = False
        """True if the present state was logged."""

    def doubt(self, broker_group: str | None = None) -> None:
        """Request a comparison with a broker group; None: with all, and calls that create something
        wait for it.
        """
        if broker_group is None:
            self._doubted = None
            self._settled.clear()
        elif self._doubted is not None:
            self._doubted.add(broker_group)
        self._doubt.set()

    async def settled(self) -> None:
        """Return when the comparison for which creations have to wait is done, or after
        `PATIENCE_S`.
        """
        if not self._settled.is_set():
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._settled.wait()
            except TimeoutError:
                pass  # a broker or the database does not answer, which the call itself will notice

    async def run(self) -> None:
        """Compare when there is a reason, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._doubt.wait()
            except TimeoutError:
                pass
            clock = asyncio.get_running_loop().time
            began_s = clock()
            try:
                await self.look()
            except KeylaneError as error:
                log.debug("cannot compare the database with the brokers: %s", error.message)
                self._doubt.set()
                await asyncio.sleep(CONFIRM_S)
            await asyncio.sleep(min(LOOK_S, REST_SHARE * (clock() - began_s)))

    async def look(self) -> None:
        """Do one round: read the fact, ask the brokers if there is a reason, and write the fact.
        Raises StorageError.
        """
        known = await self._database.read(read_behind)
        if not known and not self._doubt.is_set():
            self._log_change(known)
            return
        self._doubt.clear()
        doubted, self._doubted = self._doubted, set()
        wanted = None if known or doubted is None else doubted
        try:
            found = await self._compare(wanted)
            if found and not known:
                await asyncio.sleep(CONFIRM_S)
                found &= await self._compare(wanted)
        except KeylaneError:
            self._doubted = None if doubted is None else doubted | (self._doubted or set())
            raise
        if found and not known:
            known = _sentence(found)
            await self._database.write(note_behind, known)
        elif known and not found and not self._evidence:
            known = ""
            await self._database.write(note_behind, known)
        self._log_change(known)
        if not self._doubt.is_set() or self._doubted is not None:
            self._settled.set()

    async def _compare(self, wanted: Collection[str] | None) -> set[Lacking]:
        """Return what the database lacks in comparison with these broker groups; None: all
        groups.
        """
        before = await self._database.read(read_sql_view)
        limit = asyncio.Semaphore(ASKED_AT_ONCE_MAX)
        chosen = [row for row in before.brokers if wanted is None or row.broker_group in wanted]
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._ask(row, limit)) for row in chosen]
        answers = [answer for task in asked if (answer := task.result()) is not None]
        after = await self._database.read(read_sql_view)
        found = set(lacking(Index(Views(before=before, answers=answers, after=after))))
        # A group that does not answer now may still disagree, unless the database has no row for it
        # any more.
        answered = {answer.broker_group for answer in answers}
        unheard = (self._evidence - answered) & {row.broker_group for row in after.brokers}
        self._evidence = unheard | {each.broker_group for each in found}
        return found

    async def _ask(self, broker: BrokerRow, limit: asyncio.Semaphore) -> BrokerAnswer | None:
        """Return the partitions of a broker group; None: its broker does not answer, or another one
        is at its address.
        """
        async with limit:
            client = BrokerClient(self._network, broker.address, timeout_ms=ASK_TIMEOUT_MS)
            try:
                hosted = await client.partitions()
            except KeylaneError:
                return None  # the broker is compared when it reports itself
        if hosted.broker_group != broker.broker_group:
            return None
        if broker.broker_id and hosted.broker_id not in {"", broker.broker_id}:
            return None
        return BrokerAnswer(broker_group=broker.broker_group, address=broker.address, hosted=hosted)

    def _log_change(self, lacks: str) -> None:
        """Log a change of the state, whichever metaserver has found it."""
        if bool(lacks) == self._logged:
            return
        self._logged = bool(lacks)
        if lacks:
            error = behind_error(lacks)
            log.error("%s; nothing is created meanwhile.  %s", error.message, error.hint)
        else:
            log.warning("the database again has everything that brokers have")


def _sentence(found: Collection[Lacking]) -> str:
    """Return one sentence with the first difference and the number of further ones."""
    first, *more = sorted(found)
    rest = f", and {counted(len(more), 'difference')} more" if more else ""
    return f"{first.text}{rest}"
