"""Sets a group's progress on an operator's word: asks the brokers, plans, takes tokens, tells the brokers.  Shell.

    scope, statuses ─▶ cursors to be ─▶ SQL: group held, tokens, drained forgotten ─▶ brokers, children first
      ▲                                   │                                         ─▶ SQL: drained, group free
      └───── there are other partitions ──┘

Invariants
    Up to the tokens nothing is changed; from then on a failure says UNKNOWN, and the same call again finishes it.
    Nobody is granted a partition between the tokens and the cursors, as long as the reset ends within its lease; who is
    granted it later has a higher token, and what of the reset comes after him is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from ...protocol.control import PartitionStatus, TimeBound
from ...protocol.errors import (
    GroupBusyError,
    KeylaneError,
    NotSentError,
    OverloadedError,
    ResetUnfinishedError,
)
from ...protocol.progress import CursorView, GroupReset, ResetGroup, ResetTo, SetCursor
from ...protocol.routing import Partition
from ...protocol.text import counted
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..catalogue.service import HOSTED_AT_ONCE_MAX
from ..settings import MetaserverSettings
from ..sql.database import Database
from .cursors import Found, generations, new_cursors
from .rows import ResetScope, begin_reset, end_reset, reset_scope

log = logging.getLogger("keylane.metaserver")
CALL_TIMEOUT_MS = 2_000
PLANS_MAX = 5
"""Of one reset, whose partitions change again and again while it is planned."""
OVERLOADED_PAUSES_MS = (20, 50, 100, 200, 400, 800, 800, 800)
"""Between the tries at a broker that is full; a flush takes milliseconds."""


class Resetter:
    """
    Sets progress.

    Args:
        holder: names this process among the metaservers; never used by another.
        after_step: called after each of reset-begun, reset-generation (some brokers know), reset-told (all of them).
    """

    def __init__(
        self,
        database: Database,
        network: Network,
        settings: MetaserverSettings,
        *,
        holder: str,
        after_step: Callable[[str], None] = lambda _step: None,
    ) -> None:
        self._database = database
        self._network = network
        self._settings = settings
        self._holder = holder
        self._after_step = after_step
        self._resets = 0
        self._room = asyncio.Semaphore(HOSTED_AT_ONCE_MAX)

    async def reset(self, subject: str, group: str, ask: ResetGroup) -> GroupReset:
        """
        Set the progress of a group that has no live sessions.

        Raises:
            InvalidNameError, InvalidRequestError, SubjectUnknownError, GroupUnknownError, QueueUnknownError,
            PartitionUnknownError, SubjectNotStaticError, OffsetOutOfRangeError, GroupBusyError,
            NotSentError: a broker does not answer; nothing was changed.
            ResetUnfinishedError: some brokers know, others may not.
        """
        self._resets += 1
        holder = (
            f"{self._holder}.{self._resets}"  # two resets of one process keep each other off, too
        )
        scope, cursors, tokens = await self._begin(subject, group, ask, holder)
        self._after_step("reset-begun")
        done: dict[int, int] = {}
        try:
            for ids in generations(scope.partitions):
                await self._tell(group, scope, ids, tokens, cursors, done)
                self._after_step("reset-generation")
        except ResetUnfinishedError:
            await self._database.write(end_reset, scope.group_id, tokens, {}, holder=holder)
            raise
        self._after_step("reset-told")
        await self._database.write(end_reset, scope.group_id, tokens, done, holder=holder)
        log.info("group %s of %s was set to %s", group, subject, ask.to)
        return replace(
            _answer(subject, group, scope.partitions, done, tokens),
            left_out=tuple(one.partition_id for one in scope.left_out),
        )

    async def _begin(
        self, subject: str, group: str, ask: ResetGroup, holder: str
    ) -> tuple[ResetScope, dict[int, int], dict[int, int]]:
        """What is set, to which cursors, under which tokens.  Raises what `reset` raises while nothing is changed."""
        for _ in range(PLANS_MAX):
            scope = await self._database.read(reset_scope, subject, group, ask)
            found = await asyncio.gather(*(self._find(one, group, ask) for one in scope.partitions))
            cursors = new_cursors(ask, found, static=scope.static)
            tokens = await self._database.write(
                begin_reset,
                scope,
                holder=holder,
                lease_ms=self._settings.operation_lease_ms,
                fence=max((one.fence for one in found), default=0),
            )
            if tokens is not None:
                return scope, cursors, tokens
        raise GroupBusyError("the partitions of its subject change again and again; reset it later")

    async def _find(self, one: Partition, group: str, ask: ResetGroup) -> Found:
        """The partition as its broker has it.  Raises NotSentError: it does not say."""
        try:
            broker = self._broker(one)
            status = await broker.partition(one.partition_id)
            at_time = None
            if ask.to is ResetTo.TIME:
                assert ask.at_ms is not None
                at_time = (
                    await broker.offset_at(one.partition_id, ask.at_ms, TimeBound.LOWER)
                ).offset
        except KeylaneError as error:
            raise NotSentError(
                f"partition {one.partition_id} on {one.broker_group!r} cannot be asked, "
                f"and nothing was changed: {error.message}",
                partition_id=one.partition_id,
            ) from error
        return Found(
            partition=one,
            first_offset=status.first_offset,
            next_offset=status.next_offset,
            at_time=at_time,
            fence=max((seen.token for seen in status.groups if seen.group == group), default=0),
        )

    async def _tell(
        self,
        group: str,
        scope: ResetScope,
        ids: Sequence[int],
        tokens: Mapping[int, int],
        cursors: Mapping[int, int],
        done: dict[int, int],
    ) -> None:
        """Set some partitions' cursors at their brokers.  Raises ResetUnfinishedError."""
        places = {int(one.partition_id): one for one in scope.partitions}

        async def tell(partition_id: int) -> str:
            one = places[partition_id]
            ask = SetCursor(
                group=group,
                token=tokens[partition_id],
                cursor=cursors[partition_id],
                strategy=scope.strategy,
            )
            async with self._room:
                try:
                    status = await self._set_cursor(one, ask)
                except KeylaneError as error:
                    return f"partition {partition_id} on {one.broker_group!r}: {error.message}"
            done[partition_id] = status.groups[0].cursor
            return ""

        problems = [one for one in await asyncio.gather(*map(tell, ids)) if one]
        if problems:
            raise ResetUnfinishedError(
                f"of {counted(len(places), 'partition')} {len(done)} are set; {problems[0]}",
                partitions=len(places),
                partitions_set=len(done),
            )

    async def _set_cursor(self, one: Partition, ask: SetCursor) -> PartitionStatus:
        """Again if the broker has more to write than it takes, perhaps because of this very reset; not for ever."""
        for pause_ms in OVERLOADED_PAUSES_MS:
            try:
                return await self._broker(one).set_cursor(one.partition_id, ask)
            except OverloadedError as error:
                log.info("partition %d: %s", one.partition_id, error.message)
                await asyncio.sleep(pause_ms / 1000)
        return await self._broker(one).set_cursor(one.partition_id, ask)

    def _broker(self, one: Partition) -> BrokerClient:
        if one.address is None:
            raise NotSentError(f"broker group {one.broker_group!r} is silent")
        return BrokerClient(self._network, one.address, timeout_ms=CALL_TIMEOUT_MS)


def _answer(
    subject: str,
    group: str,
    partitions: Sequence[Partition],
    cursors: Mapping[int, int],
    tokens: Mapping[int, int],
) -> GroupReset:
    ordered = sorted(partitions, key=lambda one: (one.queue, one.partition_id))
    return GroupReset(
        subject=subject,
        group=group,
        cursors=[
            CursorView(
                partition_id=one.partition_id,
                queue=one.queue,
                cursor=cursors[one.partition_id],
                logic_cursor=one.logic_start + cursors[one.partition_id],
                token=tokens[one.partition_id],
            )
            for one in ordered
        ],
    )
