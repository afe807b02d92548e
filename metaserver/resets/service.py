"""Sets a group's cursors for an operator: asks the brokers, makes a plan, takes tokens, and sets
the cursors. Does network I/O and runs SQL.

    scope, statuses ─▶ new cursors ─▶ SQL: group locked, tokens taken, rows of `drained` deleted
      ▲                                  │                     ─▶ brokers, children first
      └───── the partitions changed ─────┘                     ─▶ SQL: drained, group unlocked

Invariants
    Nothing is changed before the tokens are taken. Later failures have the fate UNKNOWN, and
    repeating the call finishes the reset.
    While the lease of the reset lasts, no session is granted a partition before the cursors are
    set. A session that is granted one after the lease has expired has a higher token, so its broker
    refuses the rest of the reset.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from ...protocol import endpoints
from ...protocol.control import PartitionStatus
from ...protocol.errors import BusyError, KeylaneError, OverloadedError, Reason, UnfinishedError
from ...protocol.progress import CursorView, GroupReset, GroupStatus, ResetGroup, SetCursor
from ...protocol.routing import Partition
from ...protocol.text import counted
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..catalogue.service import HOSTED_AT_ONCE_MAX
from ..settings import MetaserverSettings
from ..sql.database import Database
from .broker_offsets import broker_at, read_offsets
from .cursors import PartitionOffsets, compute_cursors, order_generations
from .rows import ResetScope, begin_reset, end_reset, read_reset_scope

log = logging.getLogger("keylane.metaserver")
PLANS_MAX = 5
"""Maximum number of attempts to plan a reset while its partitions keep changing."""
OVERLOADED_PAUSES_MS = (20, 50, 100, 200, 400, 800, 800, 800)
"""Delays, in milliseconds, before retrying an overloaded broker; a flush takes a few
milliseconds.
"""


class ResetService:
    """
    Sets the cursors of consumer groups.

    Args:
        holder: this metaserver's unique id.
        after_step: called with the name of each finished step: reset-begun, reset-generation (all
            partitions of one depth are set), reset-told (all partitions are set).
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
        self._reset_count = 0
        self._slots = asyncio.Semaphore(HOSTED_AT_ONCE_MAX)

    async def reset(self, subject: str, group: str, request: ResetGroup) -> GroupReset:
        """
        Set the cursors of a group without live sessions.

        Raises:
            InvalidRequestError, SubjectUnknownError, GroupUnknownError, NotFoundError,
            PartitionUnknownError, ConflictError, OffsetOutOfRangeError, BusyError
            NotSentError: a broker does not respond; nothing was changed.
            UnfinishedError: some cursors are set, but others may not be; repeat the call.
        """
        if request.dry_run:
            plan, _ = await self.plan(subject, group, request)
            return plan
        return await self.run(subject, group, request)

    async def run(
        self,
        subject: str,
        group: str,
        request: ResetGroup,
        *,
        reset_id: int = 0,
        begun: bool = False,
    ) -> GroupReset:
        """
        Carry out a reset.

        Args:
            reset_id: id of a live reset (see `live.py`), for which live sessions without leases are
                allowed and whose row gets the answer; 0 if this is not a live reset.
            begun: True if some cursors may already have been set. In that case, the reset continues
                even if retention has removed messages since.
        """
        self._reset_count += 1
        # Each reset has a different holder, so that two resets in one process exclude each other.
        holder = f"{self._holder}.{self._reset_count}"
        scope, cursors, tokens = await self._plan_and_take_tokens(
            subject, group, request, holder, reset_id, begun
        )
        self._after_step("reset-begun")
        statuses: dict[int, GroupStatus] = {}
        try:
            for ids in order_generations(scope.partitions):
                await self._set_cursors(group, scope, ids, tokens, cursors, statuses)
                self._after_step("reset-generation")
        except UnfinishedError:
            await self._database.write(end_reset, scope.group_id, tokens, {}, holder=holder)
            raise
        self._after_step("reset-told")
        cursors_set = {partition_id: status.cursor for partition_id, status in statuses.items()}
        result = _build_result(subject, group, scope.partitions, cursors_set, tokens)
        result = replace(
            result,
            cursors=[
                replace(view, parked=statuses[view.partition_id].parked) for view in result.cursors
            ],
            static=scope.static,
            left_out=tuple(partition.partition_id for partition in scope.left_out),
        )
        await self._database.write(
            end_reset,
            scope.group_id,
            tokens,
            cursors_set,
            holder=holder,
            recorded_answer=(reset_id, msgspec.json.encode(result).decode()),
            parked_ids=[
                partition_id for partition_id, status in statuses.items() if status.left_to_children
            ],
        )
        log.info("the cursors of group %s of %s were reset to %s", group, subject, request.to)
        return result

    async def plan(self, subject: str, group: str, request: ResetGroup) -> tuple[GroupReset, int]:
        """Return the cursors that the same call without `dry_run` would set now, and the id of the
        group.
        """
        scope = await self._database.read(read_reset_scope, subject, group, request)
        all_offsets = await self._read_offsets(scope, group, request)
        cursors = compute_cursors(request, all_offsets, static=scope.static)
        current_offsets = {
            int(offsets.partition.partition_id): offsets.current_offset for offsets in all_offsets
        }
        tokens = dict.fromkeys(cursors, 0)
        plan = _build_result(subject, group, scope.partitions, cursors, tokens)
        plan = replace(
            plan,
            cursors=[
                replace(view, before=current_offsets[view.partition_id]) for view in plan.cursors
            ],
            static=scope.static,
            left_out=tuple(partition.partition_id for partition in scope.left_out),
            dry_run=True,
        )
        return plan, scope.group_id

    async def _read_offsets(
        self, scope: ResetScope, group: str, request: ResetGroup
    ) -> list[PartitionOffsets]:
        """Read the offsets of all partitions in the scope from their brokers."""
        return await asyncio.gather(
            *(
                read_offsets(self._network, partition, group, at_ms=request.at_ms)
                for partition in scope.partitions
            )
        )

    async def _plan_and_take_tokens(
        self, subject: str, group: str, request: ResetGroup, holder: str, reset_id: int, begun: bool
    ) -> tuple[ResetScope, dict[int, int], dict[int, int]]:
        """Make a plan and take the tokens. Return the scope, cursors and tokens. Raises those
        errors of `reset` after which nothing was changed.
        """
        for _ in range(PLANS_MAX):
            scope = await self._database.read(
                read_reset_scope, subject, group, request, begun=begun
            )
            all_offsets = await self._read_offsets(scope, group, request)
            cursors = compute_cursors(request, all_offsets, static=scope.static, begun=begun)
            tokens = await self._database.write(
                begin_reset,
                scope,
                holder=holder,
                lease_ms=self._settings.operation_lease_ms,
                fence=max((offsets.fence for offsets in all_offsets), default=0),
                reset_id=reset_id,
            )
            if tokens is not None:
                return scope, cursors, tokens
        raise BusyError(
            Reason.GROUP_BUSY, "the partitions of its subject keep changing; reset the group later"
        )

    async def _set_cursors(
        self,
        group: str,
        scope: ResetScope,
        ids: Sequence[int],
        tokens: Mapping[int, int],
        cursors: Mapping[int, int],
        statuses: dict[int, GroupStatus],
    ) -> None:
        """
        Set the cursors of some partitions at their brokers.

        Args:
            ids: the partitions to set.
            statuses: the status of the group on each partition that was set is added here under the
                partition id.

        Raises:
            UnfinishedError: a broker has not set its cursor.
        """
        partitions = {int(partition.partition_id): partition for partition in scope.partitions}

        async def set_one(partition_id: int) -> str:
            partition = partitions[partition_id]
            request = SetCursor(
                group=group,
                token=tokens[partition_id],
                cursor=cursors[partition_id],
                strategy=scope.strategy,
                kept_parents=scope.kept_parents(partition),
                kept_children=scope.kept_children(partition),
            )
            async with self._slots:
                try:
                    status = await self._set_cursor(partition, request)
                except KeylaneError as error:
                    return (
                        f"partition {partition_id} on {partition.broker_group!r}: {error.message}"
                    )
            (statuses[partition_id],) = status.groups
            return ""

        problems = [problem for problem in await asyncio.gather(*map(set_one, ids)) if problem]
        if problems:
            raise UnfinishedError(
                Reason.RESET_UNFINISHED,
                f"{len(statuses)} of {counted(len(partitions), 'partition')} are set; "
                f"{problems[0]}",
                partitions=len(partitions),
                partitions_set=len(statuses),
            )

    async def _set_cursor(self, partition: Partition, request: SetCursor) -> PartitionStatus:
        """Set a cursor, retrying a few times if the broker is overloaded."""
        for pause_ms in OVERLOADED_PAUSES_MS:
            try:
                return await self._broker_client(partition).control(
                    endpoints.SET_CURSOR, request, id=partition.partition_id
                )
            except OverloadedError as error:
                log.debug("partition %d: %s", partition.partition_id, error.message)
                await asyncio.sleep(pause_ms / 1000)
        return await self._broker_client(partition).control(
            endpoints.SET_CURSOR, request, id=partition.partition_id
        )

    def _broker_client(self, partition: Partition) -> BrokerClient:
        return broker_at(self._network, partition.address, partition.broker_group)


def _build_result(
    subject: str,
    group: str,
    partitions: Sequence[Partition],
    cursors: Mapping[int, int],
    tokens: Mapping[int, int],
) -> GroupReset:
    ordered = sorted(partitions, key=lambda partition: (partition.queue, partition.partition_id))
    return GroupReset(
        subject=subject,
        group=group,
        cursors=[
            CursorView(
                partition_id=partition.partition_id,
                queue=partition.queue,
                cursor=cursors[partition.partition_id],
                logic_cursor=partition.logic_start + cursors[partition.partition_id],
                token=tokens[partition.partition_id],
            )
            for partition in ordered
        ],
    )
