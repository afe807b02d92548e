"""Tells brokers of the consumer groups of their partitions, so that retention waits for them.  Shell.

    a group is made ─▶ at once, before its first consumer's join is answered
    a broker was silent then ─▶ when it is back
    a broker says that it was never told ─▶ all that it asks for

What is opened later has heard of all groups before: see `operations/driver.py`.  One metaserver at a time looks, under a lease;
two at once would do the same twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ...protocol.errors import ForeignServerError, KeylaneError, NotSentError, OutcomeUnknownError
from ...protocol.progress import KnowGroups
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..catalogue.service import HOSTED_AT_ONCE_MAX, Catalogue
from ..cluster.heard import (
    Telling,
    begin_telling,
    note_heard,
    note_told,
    tellings,
    unheard_partitions,
    untold_groups,
)
from ..settings import MetaserverSettings
from ..sql.database import Database
from ..sql.duties import take_duty

log = logging.getLogger("keylane.metaserver")

DUTY = "announce"
CALL_TIMEOUT_MS = 2_000
PARTITIONS_MAX = 1_024
"""In one round; the next one goes on behind them, heard or not."""


class Announcer:
    """Makes groups known to brokers; `holder` names this process among the metaservers."""

    def __init__(
        self,
        database: Database,
        network: Network,
        settings: MetaserverSettings,
        *,
        catalogue: Catalogue,
        holder: str,
    ) -> None:
        self._database = database
        self._network = network
        self._catalogue = catalogue
        self._pause_s = settings.expire_ms / 1000
        self._lease_ms = 2 * settings.expire_ms
        self._holder = holder
        self._room = asyncio.Semaphore(HOSTED_AT_ONCE_MAX)
        self._next_look = 0.0
        """By the clock of the event loop: who refused is not asked again at once."""

    async def announce(self, group_id: int) -> None:
        """Make a new group known wherever a broker answers.  Raises StorageError."""
        found = await self._database.write(begin_telling, group_id, limit=PARTITIONS_MAX)
        while found:
            await self._tell_all(found)
            found = await self._database.read(
                unheard_partitions,
                limit=PARTITIONS_MAX,
                after=found[-1].partition_id,
                group_id=group_id,
            )

    async def look(self) -> int:
        """One look at all there are; how many partitions heard of their groups.  Raises StorageError."""
        told = 0
        for ids in self._catalogue.take_untold():
            told += await self._tell_all(await self._database.read(tellings, ids))
        now = asyncio.get_running_loop().time()
        if now < self._next_look or not await self._database.read(untold_groups):
            return told
        if not await self._database.write(
            take_duty, DUTY, holder=self._holder, lease_ms=self._lease_ms
        ):
            return told
        self._next_look = now + self._pause_s
        after = 0
        while found := await self._database.read(
            unheard_partitions, limit=PARTITIONS_MAX, after=after
        ):
            told += await self._tell_all(found)
            after = found[-1].partition_id
        await self._database.write(note_told)
        return told

    async def _tell_all(self, found: Sequence[Telling]) -> int:
        """Tell the brokers of these partitions, and note who has heard; of how many partitions."""
        gone: set[str] = set()
        answers = await asyncio.gather(*(self._tell(one, gone) for one in found))
        told = [one for one, known in zip(found, answers, strict=True) if known]
        if told:
            await self._database.write(note_heard, told)
        return len(told)

    async def _tell(self, one: Telling, gone: set[str]) -> bool:
        """Has the broker heard; `gone` are the addresses of those that do not answer in this round."""
        ask = KnowGroups(groups=tuple(name for _, name in one.groups), complete=True)
        async with self._room:
            if one.address in gone:
                return False
            broker = BrokerClient(self._network, one.address, timeout_ms=CALL_TIMEOUT_MS)
            try:
                await broker.know_groups(one.partition_id, ask)
            except (NotSentError, OutcomeUnknownError, ForeignServerError) as error:
                gone.add(one.address)
                log.info("partition %d: %s", one.partition_id, error.message)
                return False
            except KeylaneError as error:
                log.info("partition %d: %s", one.partition_id, error.message)
                return False
        return True
