"""Tells brokers of the groups that have yet to come to their partitions, so that retention waits for them.  Shell.

One metaserver at a time looks, under a lease; two at once would do the same twice.
"""

from __future__ import annotations

import asyncio
import logging

from ..protocol.errors import KeylaneError
from ..protocol.progress import KnowGroups
from ..rpc.client import BrokerClient
from ..rpc.network import Network
from .database import Database
from .settings import MetaserverSettings
from .store_announce import Unheard, note_heard, unheard_groups
from .store_duties import take_duty

log = logging.getLogger("keylane.metaserver")

DUTY = "announce"
CALL_TIMEOUT_MS = 2_000
ASKED_AT_ONCE_MAX = 8
PAIRS_MAX = 512
"""Of groups and partitions in one round; the next one goes on behind them, heard or not."""


class Announcer:
    """Looks for groups that a broker has not heard of; `holder` names this process among the metaservers."""

    def __init__(
        self, database: Database, network: Network, settings: MetaserverSettings, *, holder: str
    ) -> None:
        self._database = database
        self._network = network
        self._lease_ms = 2 * settings.expire_ms
        self._holder = holder

    async def look(self) -> int:
        """One look at all there are; how many partitions were told of a group.  Raises StorageError."""
        mine = await self._database.write(
            take_duty, DUTY, holder=self._holder, lease_ms=self._lease_ms
        )
        told, after = 0, (0, 0)
        while mine:
            found = await self._database.read(unheard_groups, limit=PAIRS_MAX, after=after)
            if not found:
                break
            room = asyncio.Semaphore(ASKED_AT_ONCE_MAX)
            answers = await asyncio.gather(*(self._tell(one, room) for one in found))
            heard = [one for one, known in zip(found, answers, strict=True) if known]
            if heard:
                await self._database.write(note_heard, heard)
            told += len(heard)
            after = found[-1].partition_id, found[-1].groups[-1][0]
        return told

    async def _tell(self, one: Unheard, room: asyncio.Semaphore) -> bool:
        broker = BrokerClient(self._network, one.address, timeout_ms=CALL_TIMEOUT_MS)
        ask = KnowGroups(groups=tuple(name for _, name in one.groups))
        async with room:
            try:
                await broker.know_groups(one.partition_id, ask)
            except KeylaneError as error:
                log.info("partition %d: %s", one.partition_id, error.message)
                return False
        return True
