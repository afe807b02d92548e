"""Announces consumer groups to the brokers of their partitions, so that retention waits for them.
Shell.

    a group is made ─▶ it is announced at once, before its first consumer's join is answered
    a broker was silent then ─▶ the group is announced when the broker returns
    a broker reports partitions whose groups it does not know ─▶ all their groups are announced

The groups of a partition that opens later are announced before it opens: see
`operations/driver.py`. The periodic run needs a lease, so that two metaservers do not do the same
work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from sqlalchemy.engine import Connection

from ...protocol import endpoints
from ...protocol.errors import (
    ForeignServerError,
    InvalidRequestError,
    KeylaneError,
    NotSentError,
    OutcomeUnknownError,
)
from ...protocol.progress import (
    PARTITIONS_TOLD_MAX,
    KnowGroups,
    TellGroups,
    TellPartition,
    ToldGroups,
)
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..catalogue.service import HOSTED_AT_ONCE_MAX, Catalogue
from ..cluster import heard
from ..cluster.heard import (
    Announcement,
    begin_announcement,
    mark_announced,
    note_heard,
    read_announcements,
    unannounced_groups,
    unheard_partitions,
)
from ..settings import MetaserverSettings
from ..sql.database import Database
from ..sql.duties import take_duty

T = TypeVar("T")
log = logging.getLogger("keylane.metaserver")

DUTY = "announce"
CALL_TIMEOUT_MS = 2_000
NAMES_AT_ONCE_MAX = 1_000
"""Number of group names after which a call gets no further partition; far below the limit of a
body.
"""


class Announcer:
    """Announces consumer groups to brokers; `holder` is an id that no other metaserver has."""

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
        self._next_run = 0.0
        """Earliest time of the next periodic run, in seconds of the event loop's clock: a broker
        that refused is not asked again at once.
        """

    async def announce(
        self,
        group_id: int,
        unheard: Sequence[Announcement] | None = None,
        finish: Callable[[Connection, bool], T] | None = None,
    ) -> T | None:
        """
        Announce a new group to every broker of its partitions.

        Args:
            unheard: the result of `unheard_partitions` in the durable transaction that made the
                group; None: it was not read.
            finish: called in the transaction that stores the last answers, to settle the group; its
                argument is True if the group may be granted more than before.

        Returns:
            The result of `finish`; None: it was not called, because no broker has answered.

        Raises:
            StorageError
        """
        if unheard is None:
            unheard = await self._database.write(begin_announcement, group_id)
        while len(unheard) >= heard.PARTITIONS_MAX:
            await self._announce_all(unheard)
            unheard = await self._database.read(
                unheard_partitions, after=unheard[-1].partition_id, group_id=group_id
            )
        answered = await self._announce_each(unheard)
        if not answered:
            return None
        return await self._database.write(_store_and_finish, answered, group_id, finish)

    async def run_once(self) -> int:
        """Announce what brokers do not know, and return the number of partitions whose brokers have
        answered. Raises StorageError.
        """
        count = 0
        for ids in self._catalogue.take_unannounced():
            count += await self._announce_all(await self._database.read(read_announcements, ids))
        now = asyncio.get_running_loop().time()
        if now < self._next_run or not await self._database.read(unannounced_groups):
            return count
        if not await self._database.write(
            take_duty, DUTY, holder=self._holder, lease_ms=self._lease_ms
        ):
            return count
        self._next_run = now + self._pause_s
        after = 0
        while unheard := await self._database.read(unheard_partitions, after=after):
            count += await self._announce_all(unheard)
            after = unheard[-1].partition_id
        await self._database.write(mark_announced)
        return count

    async def _announce_all(self, announcements: Sequence[Announcement]) -> int:
        """Announce groups, and store what brokers know; returns the number of partitions whose
        brokers have answered.
        """
        answered = await self._announce_each(announcements)
        if answered:
            await self._database.write(note_heard, answered)
        return len(answered)

    async def _announce_each(self, announcements: Sequence[Announcement]) -> list[Announcement]:
        """Announce groups; returns the announcements that have arrived."""
        silent: set[str] = set()
        calls = _calls(announcements)
        answers = await asyncio.gather(*(self._announce(call, silent) for call in calls))
        known = set[int]().union(*answers)
        return [each for each in announcements if each.partition_id in known]

    async def _announce(self, call: Sequence[Announcement], silent: set[str]) -> set[int]:
        """
        Announce the groups of one broker's partitions in one call; returns the ids of the
        partitions that know their groups.

        Args:
            silent: addresses that have not answered in this round.
        """
        partitions = tuple(
            TellPartition(partition_id=each.partition_id, know=_know(each)) for each in call
        )
        answers: list[ToldGroups] = []

        async def ask(broker: BrokerClient) -> None:
            answers.append(
                await broker.control(endpoints.TELL_GROUPS, TellGroups(partitions=partitions))
            )

        try:
            await self._ask(call[0], silent, ask)
        except InvalidRequestError as error:
            log.info("partition %d: %s", call[0].partition_id, error.message)
            return set()
        known = {each.partition_id for each in call} if answers else set()
        for answer in answers:
            for left in answer.not_told:
                known.discard(left.partition_id)
                log.info("partition %d: %s", left.partition_id, left.reason)
        return known

    async def _ask(
        self,
        announcement: Announcement,
        silent: set[str],
        ask: Callable[[BrokerClient], Awaitable[None]],
    ) -> bool:
        """Return whether the broker of a partition has answered without an error. Raises
        InvalidRequestError.
        """
        address = announcement.address
        async with self._slots:
            if address in silent:
                return False
            try:
                await ask(BrokerClient(self._network, address, timeout_ms=CALL_TIMEOUT_MS))
            except InvalidRequestError:
                raise
            except (NotSentError, OutcomeUnknownError, ForeignServerError) as error:
                silent.add(address)
                log.info("partition %d: %s", announcement.partition_id, error.message)
                return False
            except KeylaneError as error:
                log.info("partition %d: %s", announcement.partition_id, error.message)
                return False
        return True


def _know(announcement: Announcement) -> KnowGroups:
    return KnowGroups(
        groups=tuple(name for _, name in announcement.groups),
        complete=True,
        tokens_above=announcement.tokens_above,
    )


def _calls(announcements: Sequence[Announcement]) -> list[list[Announcement]]:
    """Divide announcements into calls: each for one broker, and not too large."""
    calls: list[list[Announcement]] = []
    open_calls: dict[str, list[Announcement]] = {}
    names: dict[str, int] = {}
    for each in announcements:
        call = open_calls.get(each.address)
        if (
            call is None
            or len(call) >= PARTITIONS_TOLD_MAX
            or names[each.address] >= NAMES_AT_ONCE_MAX
        ):
            call = open_calls[each.address] = []
            calls.append(call)
            names[each.address] = 0
        call.append(each)
        names[each.address] += len(each.groups)
    return calls


def _store_and_finish(
    connection: Connection,
    answered: Sequence[Announcement],
    group_id: int,
    finish: Callable[[Connection, bool], T] | None,
) -> T | None:
    if finish is None:
        note_heard(connection, answered)
        return None
    return finish(connection, note_heard(connection, answered, settling=group_id))
