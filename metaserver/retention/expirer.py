"""Takes sealed partitions out of the routes when retention has removed the last of their messages.  Shell around SQL.

    those whose parents are gone ─▶ their brokers: first offset = end? ─▶ EXPIRED, route + 1 ─▶ perhaps their children

One metaserver at a time looks, under a lease; two at once would do the same twice.
"""

from __future__ import annotations

import asyncio
import logging

from ...protocol.errors import KeylaneError
from ...protocol.routing import Partition, PartitionState
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..catalogue.service import Catalogue
from ..settings import MetaserverSettings
from ..sql.database import Database
from ..sql.duties import take_duty
from .expiry_rows import expiry_candidates, mark_expired

log = logging.getLogger("keylane.metaserver")

DUTY = "expiry"
CALL_TIMEOUT_MS = 2_000
ASKED_AT_ONCE_MAX = 8
ASKED_MAX = 256
"""Partitions in one look; the next one goes on behind them."""


class Expirer:
    """Looks for partitions without messages; `holder` names this process among the metaservers."""

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
        self._lease_ms = 2 * settings.expire_ms
        self._catalogue = catalogue
        self._holder = holder
        self._after = 0

    async def run_once(self) -> int:
        """One look; how many partitions have expired.  Raises StorageError."""
        mine = await self._database.write(
            take_duty, DUTY, holder=self._holder, lease_ms=self._lease_ms
        )
        if not mine:
            return 0
        expired = 0
        while True:
            found = await self._database.read(expiry_candidates, after=self._after, limit=ASKED_MAX)
            self._after = found[-1][0].partition_id if len(found) == ASKED_MAX else 0
            room = asyncio.Semaphore(ASKED_AT_ONCE_MAX)
            empty = await asyncio.gather(*(self._is_empty(one, end, room) for one, end in found))
            ends = {
                int(one.partition_id): end
                for (one, end), gone in zip(found, empty, strict=True)
                if gone
            }
            if not ends:
                return expired
            self._catalogue.wake(await self._database.write(mark_expired, ends))
            expired += len(ends)
            log.info("expired: partitions %s", ", ".join(map(str, sorted(ends))))

    async def _is_empty(self, one: Partition, end_offset: int, room: asyncio.Semaphore) -> bool:
        """Does its broker say that nothing of it is left."""
        if one.address is None:
            return False
        broker = BrokerClient(self._network, one.address, timeout_ms=CALL_TIMEOUT_MS)
        async with room:
            try:
                status = await broker.partition(one.partition_id)
            except KeylaneError as error:
                log.info("partition %d: %s", one.partition_id, error.message)
                return False
        sealed = status.state is PartitionState.SEALED
        return sealed and status.first_offset == status.next_offset == end_offset
