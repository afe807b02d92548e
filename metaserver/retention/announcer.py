"""Announces consumer groups to the brokers of their partitions, so that retention waits for them.
Does network I/O and runs SQL.

    a group is created ─▶ it is announced before the reply to its first consumer's join
    a broker was silent then ─▶ the group is announced when the broker returns
    a broker reports partitions whose groups it does not know ─▶ all their groups are announced

Groups of a partition that opens later are announced before it opens: see `operations/driver.py`.
The periodic run takes a lease, so that two metaservers do not repeat each other's work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from sqlalchemy.engine import Connection

from ...protocol import endpoints
from ...protocol.errors import (
    ForeignServerError,
    KeylaneError,
    NotSentError,
    OutcomeUnknownError,
)
from ...protocol.progress import (
    BATCH_PARTITIONS_MAX,
    PartitionGroups,
    RegisterGroups,
    RegisterGroupsBatch,
)
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..catalogue.service import HOSTED_AT_ONCE_MAX, Catalogue
from ..cluster import announcements
from ..cluster.announcements import (
    Announcement,
    begin_announcement,
    mark_announced,
    pending_announcements,
    read_announcements,
    record_announced,
    unannounced_groups,
)
from ..settings import MetaserverSettings
from ..sql.database import Database
from ..sql.duties import take_duty

T = TypeVar("T")
log = logging.getLogger("keylane.metaserver")

DUTY = "announce"
CALL_TIMEOUT_MS = 2_000
NAMES_AT_ONCE_MAX = 1_000
"""Number of group names after which no further partition is added to a call; far below the limit on
the body size.
"""


class Announcer:
    """
    Announces consumer groups to brokers.

    Args:
        holder: this metaserver's unique id.
    """

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
        self._slots = asyncio.Semaphore(HOSTED_AT_ONCE_MAX)
        self._next_run_s = 0.0
        """Earliest time of the next periodic run, in seconds on the event loop's clock. It gives a
        broker that refused a request a pause.
        """

    async def announce(
        self,
        group_id: int,
        pending: Sequence[Announcement] | None = None,
        finish: Callable[[Connection, bool], T] | None = None,
    ) -> T | None:
        """
        Announce a new group to every broker of its partitions.

        Args:
            pending: the result of `pending_announcements` in the durable transaction that created
                the group; None if it was not read.
            finish: called in the transaction that stores the last replies, in order to settle the
                group. Its second argument is True if the group may be granted more than before.

        Returns:
            The result of `finish`; None if it was not called because no broker has replied.

        Raises:
            StorageError
        """
        if pending is None:
            pending = await self._database.write(begin_announcement, group_id)
        while len(pending) >= announcements.PARTITIONS_MAX:
            await self._announce_all(pending)
            pending = await self._database.read(
                pending_announcements, after=pending[-1].partition_id, group_id=group_id
            )
        delivered_announcements = await self._send_all(pending)
        if not delivered_announcements:
            return None
        return await self._database.write(
            _store_and_finish, delivered_announcements, group_id, finish
        )

    async def run_once(self) -> int:
        """Announce groups to the brokers that lack them. Return the number of partitions whose
        brokers have replied. Raises StorageError.
        """
        count = 0
        for ids in self._catalogue.pop_unannounced():
            count += await self._announce_all(await self._database.read(read_announcements, ids))
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_run_s or not await self._database.read(unannounced_groups):
            return count
        if not await self._database.write(
            take_duty, DUTY, holder=self._holder, lease_ms=self._lease_ms
        ):
            return count
        self._next_run_s = now_s + self._pause_s
        last_id = 0
        while pending := await self._database.read(pending_announcements, after=last_id):
            count += await self._announce_all(pending)
            last_id = pending[-1].partition_id
        await self._database.write(mark_announced)
        return count

    async def _announce_all(self, announcements: Sequence[Announcement]) -> int:
        """Announce groups and record which brokers know them. Return the number of partitions whose
        brokers have replied.
        """
        delivered_announcements = await self._send_all(announcements)
        if delivered_announcements:
            await self._database.write(record_announced, delivered_announcements)
        return len(delivered_announcements)

    async def _send_all(self, announcements: Sequence[Announcement]) -> list[Announcement]:
        """Send announcements to brokers. Return those that were delivered."""
        silent_addresses: set[str] = set()
        batches = _split_into_batches(announcements)
        delivered_ids = await asyncio.gather(
            *(self._send_batch(batch, silent_addresses) for batch in batches)
        )
        ids = set[int]().union(*delivered_ids)
        return [each for each in announcements if each.partition_id in ids]

    async def _send_batch(
        self, batch: Sequence[Announcement], silent_addresses: set[str]
    ) -> set[int]:
        """
        Announce the groups of one broker's partitions with one call. Return the ids of the
        partitions whose groups are now known to the broker.

        Args:
            silent_addresses: addresses of brokers that did not reply in this run.
        """
        first_announcement = batch[0]
        request = RegisterGroupsBatch(
            partitions=tuple(
                PartitionGroups(
                    partition_id=each.partition_id, registration=_build_registration(each)
                )
                for each in batch
            )
        )
        async with self._slots:
            if first_announcement.address in silent_addresses:
                return set()
            broker = BrokerClient(
                self._network, first_announcement.address, timeout_ms=CALL_TIMEOUT_MS
            )
            try:
                reply = await broker.control(endpoints.REGISTER_GROUPS_BATCH, request)
            except KeylaneError as error:
                if isinstance(error, NotSentError | OutcomeUnknownError | ForeignServerError):
                    silent_addresses.add(first_announcement.address)
                log.debug("partition %d: %s", first_announcement.partition_id, error.message)
                return set()
        announced_ids = {each.partition_id for each in batch}
        for failure in reply.refused_partitions:
            announced_ids.discard(failure.partition_id)
            log.debug("partition %d: %s", failure.partition_id, failure.reason)
        return announced_ids


def _build_registration(announcement: Announcement) -> RegisterGroups:
    return RegisterGroups(
        groups=tuple(name for _, name in announcement.groups),
        complete=True,
        tokens_above=announcement.tokens_above,
    )


def _split_into_batches(announcements: Sequence[Announcement]) -> list[list[Announcement]]:
    """Divide announcements into batches of limited size, each for one broker."""
    batches: list[list[Announcement]] = []
    open_batches: dict[str, list[Announcement]] = {}
    name_counts: dict[str, int] = {}
    for each in announcements:
        batch = open_batches.get(each.address)
        if (
            batch is None
            or len(batch) >= BATCH_PARTITIONS_MAX
            or name_counts[each.address] >= NAMES_AT_ONCE_MAX
        ):
            batch = open_batches[each.address] = []
            batches.append(batch)
            name_counts[each.address] = 0
        batch.append(each)
        name_counts[each.address] += len(each.groups)
    return batches


def _store_and_finish(
    connection: Connection,
    delivered_announcements: Sequence[Announcement],
    group_id: int,
    finish: Callable[[Connection, bool], T] | None,
) -> T | None:
    if finish is None:
        record_announced(connection, delivered_announcements)
        return None
    return finish(
        connection, record_announced(connection, delivered_announcements, settling_id=group_id)
    )
