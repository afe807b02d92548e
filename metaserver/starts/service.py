"""Creates consumer groups and has brokers store where they start. Does network I/O and runs SQL.

    ends of the partitions ─▶ SQL: group, cursors fixed ─▶ brokers: fence and cursor ─▶ SQL: ready,
                                    │                                 partition by partition
                                    └─ after a crash, or while a broker is silent, any metaserver
                                       continues with the same cursors

Invariants
    Nothing is stored before every broker has replied with its offsets; a group that starts at the
    earliest message needs no reply. After the transaction, repeated calls and other members do not
    change any cursor.
    Messages from the cursors on are retained for the group: before `create` returns, the brokers
    store the cursors, and those that may get messages know the group. From then on retention waits
    for the group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from ...protocol import endpoints
from ...protocol.errors import (
    BusyError,
    ConflictError,
    KeylaneError,
    OffsetOutOfRangeError,
    Reason,
    UnfinishedError,
)
from ...protocol.groups import CreateGroup, GroupSettings, StartAt
from ...protocol.operations import PartitionHistory
from ...protocol.progress import SetCursor
from ...protocol.routing import Partition
from ...protocol.text import listed
from ...rpc.network import Network
from ..catalogue.service import HOSTED_AT_ONCE_MAX
from ..cluster.announcements import pending_announcements
from ..operations.views import subject_history
from ..resets.broker_offsets import broker_at, read_offsets
from ..resets.cursors import PartitionOffsets
from ..sql.database import Database
from .plan import check_start, compute_start_cursors
from .rows import (
    PendingStart,
    StartScope,
    begin_group,
    complete_starts,
    pending_starts,
    read_pending_starts,
    read_start_scope,
)

log = logging.getLogger("keylane.metaserver")
PLANS_MAX = 5
"""Maximum number of attempts to plan a creation while its partitions keep changing."""
STORE_PAUSES_MS = (20, 50, 100, 200, 400, 800)
"""Delays, in milliseconds, before `create` asks brokers again to store a group and its start; a
flush takes a few milliseconds.
"""
LAST_ROUND_MS = 5_000
"""How long, in milliseconds, after its beginning `create` still asks brokers again. A broker that
hangs delays a round by several seconds, and the call has to return within `WORK_MS`.
"""
PENDING_MAX = 1_024
"""Maximum number of partitions in one batch of `resume`."""


class StartService:
    """
    Creates consumer groups with a given start.

    Args:
        announce: announces a new group, given its id, to its subject's brokers.
        after_step: called with the name of each finished step: start-fixed (the group is created),
            start-told (its brokers have replied).
    """

    def __init__(
        self,
        database: Database,
        network: Network,
        *,
        announce: Callable[[int], Awaitable[None]],
        after_step: Callable[[str], None] = lambda _step: None,
    ) -> None:
        self._database = database
        self._network = network
        self._announce = announce
        self._after_step = after_step
        self._slots = asyncio.Semaphore(HOSTED_AT_ONCE_MAX)

    async def create(self, subject: str, group: str, request: CreateGroup) -> GroupSettings:
        """
        Create a group. Repeating the call has no effect. The group will get every message that is
        sent after this call has returned.

        Raises:
            InvalidRequestError, SubjectUnknownError, OverloadedError, GroupDeletedError
            ConflictError: the group exists with another start or strategy.
            BusyError: the partitions keep changing; nothing was changed.
            NotSentError: a broker does not respond; nothing was changed.
            UnfinishedError: the group is created, but a broker does not know it or has not stored
                its start; until then, that broker removes messages without regard to the group.
        """
        loop = asyncio.get_running_loop()
        last_round_s = loop.time() + LAST_ROUND_MS / 1000
        await self.begin(subject, group, request)
        stored_settings = await self._read_settings(subject, group)
        for pause_ms in STORE_PAUSES_MS:
            if not stored_settings.unstarted or loop.time() > last_round_s:
                break
            await asyncio.sleep(pause_ms / 1000)
            await self._tell_brokers(subject, group)
            stored_settings = await self._read_settings(subject, group)
        if (
            stored_settings.start != request.start.stored
            or stored_settings.strategy != request.strategy
        ):
            raise ConflictError(
                Reason.GROUP_EXISTS,
                f"consumer group {group!r} of {subject!r} is {stored_settings.strategy} and began "
                f"at {stored_settings.start}",
                stored=f"{stored_settings.strategy}, {stored_settings.start}",
                asked=f"{request.strategy}, {request.start}",
            )
        if stored_settings.unstarted:
            raise UnfinishedError(
                Reason.GROUP_START_UNFINISHED,
                f"consumer group {group!r} was created, but not every broker knows it and has "
                f"stored its start yet (partition ids: {listed(stored_settings.unstarted)})",
                partitions=len(stored_settings.unstarted),
            )
        return stored_settings

    async def begin(self, subject: str, group: str, request: CreateGroup) -> None:
        """
        Create a group, if it does not exist, and ask the brokers to store its start.

        Raises:
            KeylaneError: any error of `create` after which nothing was changed.
            StorageError
        """
        check_start(request.start)
        for _ in range(PLANS_MAX):
            scope = await self._database.read(read_start_scope, subject, group)
            if scope.group_id is not None:
                if scope.settings is not None and scope.settings.unstarted:
                    await self._store_starts(
                        await self._database.read(read_pending_starts, scope.group_id)
                    )
                return
            all_offsets = await self._read_offsets(scope, group, request)
            history: Sequence[PartitionHistory] = ()
            if request.start.at is StartAt.CURSORS:
                history = (await self._database.read(subject_history, subject)).partitions
            cursors = compute_start_cursors(
                request.start,
                all_offsets,
                static=scope.subject.static,
                expired_ends=scope.expired_ends,
                history=history,
            )
            fence = max((offsets.fence for offsets in all_offsets), default=0)
            if fence:
                log.warning(
                    "brokers hold progress of group %s of %s that the database lacks; the group "
                    "continues there",
                    group,
                    subject,
                )
            is_created = await self._database.write(
                begin_group, scope, group, request, cursors=cursors, fence=fence
            )
            if is_created:
                log.info("group %s of %s begins at %s", group, subject, request.start)
                self._after_step("start-fixed")
                await self._tell_brokers(subject, group, is_new=True)
                self._after_step("start-told")
                return
        raise BusyError(
            Reason.GROUP_BUSY, "the partitions of its subject keep changing; create the group later"
        )

    async def _tell_brokers(self, subject: str, group: str, *, is_new: bool = False) -> None:
        """
        Announce a group to the live brokers that do not know it, and have brokers store where it
        starts.

        Args:
            is_new: True if no broker knows the group yet.
        """
        scope = await self._database.read(read_start_scope, subject, group)
        if scope.group_id is None:
            return
        if is_new or bool(
            await self._database.read(pending_announcements, group_id=scope.group_id)
        ):
            await self._announce(scope.group_id)
        await self._store_starts(await self._database.read(read_pending_starts, scope.group_id))

    async def resume(self) -> None:
        """Ask brokers to store the pending starts of all groups. Raises StorageError."""
        last_key = (0, 0)
        while pending_batch := await self._database.read(
            pending_starts, limit=PENDING_MAX, after=last_key
        ):
            await self._store_starts(pending_batch)
            last_key = pending_batch[-1].group_id, pending_batch[-1].partition_id

    async def _read_settings(self, subject: str, group: str) -> GroupSettings:
        scope = await self._database.read(read_start_scope, subject, group)
        if scope.settings is None:
            raise BusyError(Reason.GROUP_BUSY, f"consumer group {group!r} was deleted meanwhile")
        return scope.settings

    # ── brokers ───────────────────────────────────────────────────────────────────────────────────
    async def _read_offsets(
        self, scope: StartScope, group: str, request: CreateGroup
    ) -> list[PartitionOffsets]:
        """Read the offsets of all partitions, unless the group starts at the earliest message."""
        if request.start.at is StartAt.EARLIEST:
            return []

        async def read(partition: Partition) -> PartitionOffsets:
            async with self._slots:
                return await read_offsets(
                    self._network, partition, group, at_ms=request.start.at_ms
                )

        return await asyncio.gather(*map(read, scope.partitions))

    async def _store_starts(self, pending_batch: Sequence[PendingStart]) -> None:
        """Ask brokers to store cursors and record which ones have been stored."""
        results = await asyncio.gather(*map(self._store_start, pending_batch))
        starts_by_group: dict[int, list[PendingStart]] = {}
        for start, is_stored in zip(pending_batch, results, strict=True):
            if is_stored:
                starts_by_group.setdefault(start.group_id, []).append(start)
        for group_id, starts in starts_by_group.items():
            await self._database.write(complete_starts, group_id, starts)

    async def _store_start(self, start: PendingStart) -> bool:
        """Ask a broker to store a cursor. Return True if it has been stored or need not be."""
        if start.expired:
            return True
        request = SetCursor(
            group=start.group, token=start.token, cursor=start.cursor, strategy=start.strategy
        )
        async with self._slots:
            try:
                broker = broker_at(self._network, start.address, start.broker_group)
                try:
                    await broker.control(endpoints.SET_CURSOR, request, id=start.partition_id)
                except OffsetOutOfRangeError as error:
                    # The broker is running on an older copy of its folder, which ends before the
                    # cursor.
                    log.warning("partition %d: %s", start.partition_id, error.message)
                    request_at_end = replace(request, cursor=error.next_offset or 0)
                    await broker.control(
                        endpoints.SET_CURSOR, request_at_end, id=start.partition_id
                    )
            except KeylaneError as error:
                log.debug(
                    "start of group %s on partition %d: %s",
                    start.group,
                    start.partition_id,
                    error.message,
                )
                return False
        return True
