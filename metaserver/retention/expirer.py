"""Removes sealed partitions from the routes when retention has removed the last of their messages.
Shell around SQL.

    SEALED, its parents EXPIRED ─▶ its broker: first offset = end? ─▶ EXPIRED, route + 1
                                                                   ─▶ its children may be next

The run needs a lease, so that two metaservers do not do the same work.
"""

from __future__ import annotations

import asyncio
import logging

from ...protocol import endpoints
from ...protocol.errors import KeylaneError
from ...protocol.routing import Partition, PartitionState
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..catalogue.service import Catalogue
from ..settings import MetaserverSettings
from ..sql.database import Database
from ..sql.duties import take_duty
from .expiry_rows import (
    expiry_candidates,
    forget_progress,
    mark_expired,
    subjects_with_gone_progress,
)

log = logging.getLogger("keylane.metaserver")

DUTY = "expiry"
CALL_TIMEOUT_MS = 2_000
ASKED_AT_ONCE_MAX = 8
ASKED_MAX = 256
"""Most partitions in one round; the next round continues after them."""
SUBJECTS_AT_ONCE = 100
"""Number of subjects whose rows one statement deletes."""


class Expirer:
    """Expires partitions without messages; `holder` is an id that no other metaserver has."""

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
        """Expire the partitions that can expire, and return their number. Raises StorageError."""
        mine = await self._database.renew(
            take_duty, DUTY, holder=self._holder, lease_ms=self._lease_ms
        )
        if not mine:
            return 0
        expired = await self._expire()
        await self._forget()
        return expired

    async def _expire(self) -> int:
        expired = 0
        while True:
            candidates = await self._database.read(
                expiry_candidates, after=self._after, limit=ASKED_MAX
            )
            full = len(candidates) == ASKED_MAX
            self._after = candidates[-1][0].partition_id if full else 0
            slots = asyncio.Semaphore(ASKED_AT_ONCE_MAX)
            answers = await asyncio.gather(
                *(self._is_empty(partition, end, slots) for partition, end in candidates)
            )
            ends = {
                int(partition.partition_id): end
                for (partition, end), empty in zip(candidates, answers, strict=True)
                if empty
            }
            if not ends:
                return expired
            changed = await self._database.write(mark_expired, ends)
            self._catalogue.wake(changed)
            expired += len(ends)
            log.info("expired: partitions %s", ", ".join(map(str, sorted(ends))))

    async def _forget(self) -> None:
        """Delete the progress of groups on gone partitions, including those of an earlier round
        that ended after it had marked them.
        """
        after, full = "", True
        while full:
            names = await self._database.read(
                subjects_with_gone_progress, after=after, limit=SUBJECTS_AT_ONCE
            )
            full = len(names) == SUBJECTS_AT_ONCE
            more = bool(names)
            while more:
                more = await self._database.write(forget_progress, names)
            after = names[-1] if full else ""

    async def _is_empty(
        self, partition: Partition, end_offset: int, slots: asyncio.Semaphore
    ) -> bool:
        """Return whether its broker answers that no message of a sealed partition is left."""
        if partition.address is None:
            return False
        broker = BrokerClient(self._network, partition.address, timeout_ms=CALL_TIMEOUT_MS)
        async with slots:
            try:
                status = await broker.control(endpoints.PARTITION, id=partition.partition_id)
            except KeylaneError as error:
                log.info("partition %d: %s", partition.partition_id, error.message)
                return False
        sealed = status.state is PartitionState.SEALED
        return sealed and status.first_offset == status.next_offset == end_offset
