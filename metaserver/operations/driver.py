"""Drives operations on partitions to their end: hosts children, seals parents, changes the route.  Shell around SQL.

    begin ─▶ journal ─▶ claim ─▶ ask the brokers what the state asks for ─▶ finish the round: next states, perhaps the route
                          ▲                                                            │
                          └────────────────────────────────────────────────────────────┘

Invariants
    Two metaservers may do every step, even at once: brokers and SQL accept a repetition and change nothing.
    The lease in SQL only keeps two drivers from doing the same work.
    No broker is asked to seal before every child is hosted and every parent's broker says that it can seal:
    writes stop for one seal and one transaction.
    The broker of a child has every consumer group of the subject on its disk before the child opens.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
from collections.abc import Callable

from msgspec.structs import replace

from ...protocol.backoff import Backoff
from ...protocol.control import HostPartition
from ...protocol.errors import (
    InvalidRequestError,
    KeylaneError,
    PartitionInUseError,
    PartitionUnknownError,
    StorageError,
)
from ...protocol.operations import (
    OperationKind,
    OperationList,
    OperationState,
    OperationView,
    Reshape,
    SubjectHistory,
)
from ...protocol.routing import Partition, PartitionState
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..catalogue.service import HOSTED_AT_ONCE_MAX, Catalogue
from ..groups.service import GroupService
from ..settings import MetaserverSettings
from ..sql.database import Database
from .begin import begin_operations, plan_operations
from .journal import (
    Operation,
    cancel_operation,
    claim_operation,
    finish_round,
    groups_of,
    idle_operations,
    read_operation,
    release_operation,
)
from .states import RULES, Outlook, outlook, parents_silent, silence, unsealable, waiting_reason
from .views import operation_views, subject_history, subject_operations

log = logging.getLogger("keylane.metaserver")
CALL_TIMEOUT_MS = 2_000
DRIVEN_AT_ONCE_MAX = 64
IDS_MAX = 1_024
WAITS = Backoff(first_ms=20, max_ms=500)
ATTEMPTS_MAX = 10
"""Rounds in a row that change nothing; then the operation is released and tried again after a pause."""
PAUSE_MS = 2_000
_ENTERED = {
    OperationState.SEAL: "hosted",
    OperationState.OPEN: "sealed",
    OperationState.FENCE: "opened",
    OperationState.DONE: "opened",
    OperationState.CANCELED: "canceled",
}


class _Round(enum.Enum):
    """How a round of a driver ended."""

    ADVANCED = enum.auto()
    """The operation has entered another state."""
    RETRY = enum.auto()
    """It has not, and another round soon may help."""
    STOP = enum.auto()
    """There is nothing to do for this driver now."""


def _ignore_step(_step: str) -> None:
    """Ignore a step."""


class OperationDriver:
    """
    Begins operations and drives them.

    `begin(Reshape(...))` journals an operation and starts a task in this event loop that drives it to its end.
    `resume()`, called periodically by the attendant of any metaserver, starts tasks for the operations that have no
    driver, as after a crash.
    An operation that waits for a silent broker has no task until the broker is back.  An operation whose brokers keep
    refusing has no task for PAUSE_MS, so that it delays no other.

    Args:
        driver: names this process among the metaservers; never used by another.
        after_step: called after each of planned, hosted, sealing (a broker has sealed, SQL does not know it), sealed
            (the operation waits in OPEN), telling (a broker has stored groups made since, SQL does not know it), opened.
    """

    def __init__(
        self,
        database: Database,
        network: Network,
        settings: MetaserverSettings,
        *,
        catalogue: Catalogue,
        members: GroupService,
        driver: str,
        rng: random.Random,
        after_step: Callable[[str], None] = _ignore_step,
    ) -> None:
        self._database = database
        self._network = network
        self._settings = settings
        self._catalogue = catalogue
        self._members = members
        self._driver = driver
        self._rng = rng
        self._after_step = after_step
        self._driving: dict[int, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(HOSTED_AT_ONCE_MAX)

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────────
    async def begin(self, ask: Reshape) -> OperationList:
        """
        Journal an operation and drive it; answers before it is done.  A dry run only plans.

        Raises:
            InvalidNameError, InvalidRequestError, SubjectUnknownError, PartitionUnknownError,
            BrokerGroupUnknownError, NotEnoughBrokersError, OperationRunningError: nothing was changed.
        """
        if len(ask.partition_ids) > IDS_MAX:
            raise InvalidRequestError(f"at most {IDS_MAX} partitions at once")
        if ask.dry_run:
            return await self._planned(ask)
        begun = await self._database.write(
            begin_operations,
            ask,
            driver=self._driver,
            lease_ms=self._settings.operation_lease_ms,
        )
        ids = [operation_id for operation_id, _ in begun if operation_id]
        if ids:
            self._after_step("planned")
        for operation_id in ids[:DRIVEN_AT_ONCE_MAX]:
            self._drive_soon(operation_id)
        # The others are resumed, by any metaserver, when the lease of this call has expired.
        idle = [one.view(ask) for operation_id, one in begun if not (operation_id or one.busy)]
        return OperationList(
            operations=[*await self._database.read(operation_views, ids), *idle],
            busy=[one.busy for _, one in begun if one.busy],
            cordoned=ask.broker_group if ask.kind is OperationKind.EVACUATE else "",
        )

    async def _planned(self, ask: Reshape) -> OperationList:
        """The answer that `begin` would give."""
        plans = await self._database.read(plan_operations, ask)
        losses = {one.freed: one.losses for one in plans}
        freed = await self._database.read(operation_views, [one.freed for one in plans])
        shown = [one for one in plans if not one.freed and (one.plan.sealed or not one.busy)]
        return OperationList(
            operations=[
                *(
                    replace(one, without_source=True, losses=losses[one.operation_id])
                    for one in freed
                ),
                *(one.view(ask) for one in shown),
            ],
            busy=[one.busy for one in plans if one.busy],
        )

    async def cancel(self, operation_id: int) -> OperationView:
        """
        Cancel an operation that is in PLAN; a repetition changes nothing.

        Raises:
            OperationUnknownError, OperationForwardError
        """
        await self._database.write(cancel_operation, operation_id)
        self._drive_soon(operation_id)
        (view,) = await self._database.read(operation_views, [operation_id])
        return view

    async def operations(self, subject: str) -> OperationList:
        """The latest operations of a subject, the newest first.  Raises SubjectUnknownError."""
        views = await self._database.read(subject_operations, subject)
        return OperationList(operations=[await self._explained(one) for one in views])

    async def _explained(self, view: OperationView) -> OperationView:
        """Add the reason for waiting where no driver has noted one: it may have died before it asked a broker."""
        if view.problem or all(one.done for one in view.steps):
            return view
        operation = await self._database.read(read_operation, view.operation_id)
        if operation.state is not view.state:
            return view
        return replace(view, problem=waiting_reason(operation.state, operation.pending))

    async def history(self, subject: str) -> SubjectHistory:
        """Every partition a subject ever had.  Raises SubjectUnknownError."""
        return await self._database.read(subject_history, subject)

    # ── driving ───────────────────────────────────────────────────────────────────────────────────────
    async def resume(self) -> None:
        """Drive the operations that have no driver and can continue.  Raises StorageError."""
        for operation_id in await self._database.read(idle_operations):
            if len(self._driving) >= DRIVEN_AT_ONCE_MAX:
                return
            self._drive_soon(operation_id)

    def _drive_soon(self, operation_id: int) -> None:
        if operation_id not in self._driving:
            task = asyncio.create_task(self._drive(operation_id), name=f"operation {operation_id}")
            self._driving[operation_id] = task

    async def _drive(self, operation_id: int) -> None:
        pauses = WAITS.pauses(self._rng)
        try:
            while True:
                try:
                    end = await self._step(operation_id)
                except StorageError as error:
                    log.warning("operation %d: %s", operation_id, error.message)
                    end = _Round.RETRY
                if end is _Round.STOP:
                    return
                if end is _Round.ADVANCED:
                    pauses.reset()
                elif pauses.failures + 1 < ATTEMPTS_MAX:
                    await asyncio.sleep(pauses.next_ms() / 1000)
                else:
                    await self._pause(operation_id)
                    return
        except Exception:
            log.exception("operation %d met a fault of ours", operation_id)
            raise
        finally:
            del self._driving[operation_id]

    async def _pause(self, operation_id: int) -> None:
        """Release an operation for PAUSE_MS; operations that have waited longer are resumed first."""
        try:
            await self._database.write(
                release_operation, operation_id, driver=self._driver, pause_ms=PAUSE_MS
            )
        except StorageError as error:
            # It is resumed when its lease has expired.
            log.warning("operation %d: %s", operation_id, error.message)

    async def _step(self, operation_id: int) -> _Round:
        """Drive an operation for one round: claim it, ask its brokers, note their answers."""
        operation = await self._database.write(
            claim_operation,
            operation_id,
            driver=self._driver,
            lease_ms=self._settings.operation_lease_ms,
        )
        if operation is None:
            return _Round.STOP
        done, problem = await self._ask_brokers(operation)
        sealable = () if problem else tuple(one.partition_id for one in operation.sources)
        heard = [group_id for group_id, _ in operation.groups]
        state = await self._database.write(
            finish_round, operation_id, done, problem, heard=heard, sealable=sealable
        )
        if state is not operation.state:
            self._after_step(_ENTERED[state])
            if RULES[operation.state].runs and RULES[state].children is PartitionState.OPEN:
                await self._tell(operation)
            return _Round.STOP if RULES[state].asks is None else _Round.ADVANCED
        if RULES[state].after is None and not problem:
            return _Round.STOP
        if outlook(operation.state, operation.pending) is not Outlook.WAIT:
            return _Round.RETRY  # a broker has refused, or a consumer group was made meanwhile
        log.info("operation %d waits: %s", operation_id, problem)
        pause_ms = PAUSE_MS if operation.state is OperationState.OPEN else 0
        await self._database.write(
            release_operation, operation_id, driver=self._driver, pause_ms=pause_ms
        )
        return _Round.STOP

    async def _ask_brokers(self, operation: Operation) -> tuple[dict[int, int | None], str]:
        """
        Ask the brokers for what the operation's state needs.

        Returns:
            What they have done, partition id → end offset of a sealed one or None; and the first problem, "" if there
            is none.
        """
        asked = await asyncio.gather(*(self._ask(operation, one) for one in operation.todo))
        done = dict(one for one in asked if not isinstance(one, str))
        problems = [one for one in asked if isinstance(one, str)]
        if done and operation.state is not OperationState.PLAN:
            self._after_step("telling" if operation.state is OperationState.OPEN else "sealing")
        if not problems:
            problems = [parents_silent(operation.state, operation.pending)]
        if not any(problems):
            problems = await asyncio.gather(*(self._refusal(one) for one in operation.sources))
        return done, next(filter(None, problems), "")

    async def _ask(self, operation: Operation, one: Partition) -> tuple[int, int | None] | str:
        """Have a broker host or seal a partition: the id and the end offset, or the problem."""
        if one.address is None:
            return silence(operation.state, one.broker_group)
        broker = BrokerClient(self._network, one.address, timeout_ms=CALL_TIMEOUT_MS)
        async with self._room:
            try:
                if operation.state not in {OperationState.PLAN, OperationState.OPEN}:
                    canceled = operation.state is OperationState.CANCELED
                    status = await broker.seal(one.partition_id, empty=canceled)
                    return one.partition_id, status.next_offset
                facts = replace(one, state=PartitionState.OPEN)
                await broker.host_partition(
                    HostPartition(
                        subject=operation.subject,
                        partition=facts,
                        order_strategy=operation.order_strategy,
                        partitions_wanted=operation.partitions_wanted,
                        retention=operation.retention,
                        static=operation.static,
                        groups=tuple(name for _, name in operation.groups),
                    )
                )
            except KeylaneError as error:
                absent = isinstance(error, PartitionUnknownError | PartitionInUseError)
                if operation.state is OperationState.CANCELED and absent:
                    return (
                        one.partition_id,
                        0,
                    )  # never hosted: what has its number is not of this operation
                if isinstance(error, PartitionUnknownError):
                    return f"partition {one.partition_id} is not known to {one.broker_group!r}"
                return f"partition {one.partition_id} on {one.broker_group!r}: {error.message}"
        return one.partition_id, None

    async def _refusal(self, one: Partition) -> str:
        """The reason for which the broker of a parent cannot seal it, "" if it can; changes nothing there."""
        assert one.address is not None
        broker = BrokerClient(self._network, one.address, timeout_ms=CALL_TIMEOUT_MS)
        async with self._room:
            try:
                why = (await broker.partition(one.partition_id)).unsealable
            except KeylaneError as error:
                why = error.message
        return unsealable(one.partition_id, one.broker_group, why) if why else ""

    async def _tell(self, operation: Operation) -> None:
        """Announce a new route: wake the calls that wait for it, and settle the subject's groups."""
        self._catalogue.wake([operation.subject])
        for group_id in await self._database.read(groups_of, operation.subject_id):
            await self._members.settle(group_id)

    async def stop(self) -> None:
        """Stop driving; unfinished operations are resumed by another metaserver, or after a restart."""
        tasks = list(self._driving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
