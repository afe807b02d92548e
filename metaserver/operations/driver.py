"""Drives operations until they are done: hosts children, seals parents, changes the route. Does
network I/O and runs SQL.

    begin ─▶ journal ─▶ claim ─▶ send the state's requests to brokers ─▶ finish the round:
                          ▲                                   next states, perhaps a new route
                          └──────────────────────────────────────────────────┘

Invariants
    Every step is idempotent, both at brokers and in SQL, even if two metaservers perform it
    concurrently.
    Correctness does not depend on the driver's lease, which only prevents two drivers from doing
    the same work.
    No parent is sealed before every child is hosted and every parent's broker has confirmed that it
    can seal. So writes only pause for one seal, one call to the brokers of the children, and one
    transaction.
    A child opens only after its broker has stored every consumer group of the subject.

Between the seals and the new route, the driver sends start times to the brokers of the children.
These are the times at which the parents were sealed; they ensure that no message of a child has an
earlier time.

    SEAL: each parent's broker seals, and reports the time
      ─▶ the brokers of its children on other broker groups get the time
      ─▶ the round is finished: the seal is stored, and perhaps the route changes

Correctness does not depend on start times, so no operation waits longer than SEND_MS for them; see
docs/decisions/0102. A seal that has not been stored in the database yet is requested again, and its
time is sent again.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from ...protocol import endpoints
from ...protocol.backoff import Backoff, Pauses
from ...protocol.control import HostPartition, hosted_limit
from ...protocol.errors import (
    InvalidRequestError,
    KeylaneError,
    OverloadedError,
    PartitionUnknownError,
    Reason,
    StorageError,
    UnreachableError,
)
from ...protocol.operations import (
    OperationKind,
    OperationList,
    OperationState,
    OperationView,
    Reshape,
    SetSubject,
)
from ...protocol.progress import RegisterGroups
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
from .states import (
    RULES,
    BrokerAction,
    NextAction,
    describe_silent_broker,
    describe_silent_parents,
    describe_unsealable,
    next_action,
    waiting_reason,
)
from .views import operation_views, subject_operations, waiting_operations

log = logging.getLogger("keylane.metaserver")

WAITS_LOGGED_MAX = 1_000
"""The maximum number of operations whose logged waits are remembered."""
SEND_MS = 5_000
"""Maximum time, in milliseconds, to spend on sending a start time to the broker of a child."""

Send = Callable[[Partition, int], Awaitable[object]]
"""A function that sends a child's start time, in milliseconds since 1970, to its broker."""


def find_start_times(
    children: Sequence[Partition], parents: Collection[Partition], end_times_ms: Mapping[int, int]
) -> list[tuple[Partition, int]]:
    """
    Return the children whose brokers need a start time, each with the latest time at which a parent
    on another broker group was sealed.

    A broker knows when the parents that it hosts itself were sealed.

    Args:
        children: the children to be opened.
        parents: the parents sealed in this round.
        end_times_ms: maps a parent id to the time at which the parent was sealed, in milliseconds
            since 1970, if its broker has reported it.
    """
    group_of_parent = {int(parent.partition_id): parent.broker_group for parent in parents}
    result = []
    for child in children:
        from_ms = max(
            (
                end_times_ms.get(parent, 0)
                for parent in map(int, child.parents)
                if group_of_parent.get(parent, child.broker_group) != child.broker_group
            ),
            default=0,
        )
        if from_ms:
            result.append((child, from_ms))
    return result


async def send_start_times(
    times: Sequence[tuple[Partition, int]], send: Send, pauses: Callable[[], Pauses]
) -> bool:
    """Send all start times concurrently, spending at most SEND_MS on each. Return False if any
    could not be sent, which is logged.
    """
    sends = (_send_with_retries(child, from_ms, send, pauses()) for child, from_ms in times)
    return all(await asyncio.gather(*sends))


async def _send_with_retries(child: Partition, from_ms: int, send: Send, pauses: Pauses) -> bool:
    """Send a start time, with retries for up to SEND_MS. If it fails, log a warning and return
    False.
    """
    reason = "it is silent"
    try:
        async with asyncio.timeout(SEND_MS / 1000):
            while child.address is not None:
                try:
                    await send(child, from_ms)
                    return True
                except InvalidRequestError as error:
                    if error.reason is not Reason.PARTITION_IN_USE:
                        raise
                    # Either the child is open, so another driver has sent the time, or it was
                    # dropped or sealed and accepts no messages.
                    return True
                except (UnreachableError, OverloadedError) as error:
                    reason = error.message
                await asyncio.sleep(pauses.next_pause_ms() / 1000)
    except TimeoutError:
        pass
    except KeylaneError as error:
        reason = error.message
    log.warning(
        "partition %d starts with the clock of broker group %r, which could not be sent the "
        "times of its parents: %s",
        child.partition_id,
        child.broker_group,
        reason,
    )
    return False


CALL_TIMEOUT_MS = 2_000
CONCURRENT_OPERATIONS_MAX = 64
IDS_MAX = 1_024
BACKOFF = Backoff(first_ms=20, max_ms=500)
ATTEMPTS_MAX = 10
"""Number of consecutive rounds without progress after which an operation is released for a
pause.
"""
PAUSE_MS = 2_000
_STEP_OF_STATE = {
    OperationState.SEAL: "hosted",
    OperationState.OPEN: "sealed",
    OperationState.FENCE: "opened",
    OperationState.DONE: "opened",
    OperationState.CANCELED: "canceled",
}
_STEP_OF_ACTION = {BrokerAction.SEAL: "sealing", BrokerAction.ANNOUNCE: "telling"}
"""Name of the step that is passed to `after_step` when a broker has replied; hosting a child has
none.
"""


class _RoundResult(enum.Enum):
    """The result of one round of driving an operation."""

    ADVANCED = enum.auto()
    """The operation has entered a new state."""
    RETRY = enum.auto()
    """The state has not changed, but another round may change it soon."""
    STOP = enum.auto()
    """There is nothing to do for now."""


def _ignore_step(_run_round: str) -> None:
    """Do nothing. This is the default of `after_step`."""


class _StepReply(NamedTuple):
    """The reply of a broker that has performed a step."""

    partition_id: int
    end_offset: int | None = None
    """End offset of a sealed partition; None for a hosted one."""
    ended_ms: int = 0
    """Time at which the partition was sealed, in milliseconds since 1970. It is 0 if the partition
    was hosted, or if the broker does not report the time.
    """


class OperationDriver:
    """
    Begins operations and drives them.

    `begin(Reshape(...))` journals an operation and starts a task in this event loop that drives it
    until it is done. The periodic tasks of every metaserver call `resume()`, which starts tasks for
    operations whose driver has crashed or has released them. An operation that is waiting for a
    silent broker has no task until the broker sends a report again. An operation whose brokers keep
    refusing has no task for PAUSE_MS, so that other operations get a turn.

    Args:
        driver: id of this process, which no other metaserver must ever use.
        after_step: called with the name of each finished step: planned, hosted, sealing (a broker
            has sealed, but SQL does not know it yet), untold (a start time could not be sent),
            sealed (the operation is in OPEN), telling (a broker has stored new groups, but SQL does
            not know it yet), opened.
    """

    def __init__(
        self,
        database: Database,
        network: Network,
        settings: MetaserverSettings,
        *,
        catalogue: Catalogue,
        groups: GroupService,
        driver: str,
        rng: random.Random,
        after_step: Callable[[str], None] = _ignore_step,
    ) -> None:
        self._database = database
        self._network = network
        self._settings = settings
        self._catalogue = catalogue
        self._groups = groups
        self.driver_id = driver
        """The id with which this process claims operations."""
        self._rng = rng
        self._after_step = after_step
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._logged_waits: dict[int, str] = {}
        """Maps each operation that waits to the reason that was logged last."""
        self._brokers_limit = asyncio.Semaphore(HOSTED_AT_ONCE_MAX)

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────
    async def begin(self, request: Reshape) -> OperationList:
        """
        Journal operations, start driving them, and return without waiting until they are done. A
        dry run only plans them.

        Raises:
            InvalidRequestError, SubjectUnknownError, PartitionUnknownError,
            NotFoundError, UnavailableError, BusyError: nothing was changed.
        """
        if max(len(request.partition_ids), len(request.queues)) > IDS_MAX:
            raise InvalidRequestError(f"at most {IDS_MAX} partitions or queues at once")
        if request.dry_run:
            return await self._dry_run(request)
        begun_operations = await self._database.write(
            begin_operations,
            request,
            driver=self.driver_id,
            lease_ms=self._settings.operation_lease_ms,
        )
        ids = [operation_id for operation_id, _ in begun_operations if operation_id]
        if ids:
            self._after_step("planned")
        for operation_id in ids[:CONCURRENT_OPERATIONS_MAX]:
            self._start_driving(operation_id)
        # Operations beyond the limit are resumed by any metaserver once their lease has expired.
        unchanged_operations = [
            planned.view(request)
            for operation_id, planned in begun_operations
            if not (operation_id or planned.busy_subject)
        ]
        views = await self._database.read(operation_views, ids)
        for view in views:
            log.info("operation %d begins: %s of %s", view.operation_id, view.kind, view.subject)
        return OperationList(
            operations=[*views, *unchanged_operations],
            busy=[planned.busy_subject for _, planned in begun_operations if planned.busy_subject],
            cordoned=request.broker_group if request.kind is OperationKind.EVACUATE else "",
        )

    async def set_subject(self, subject: str, request: SetSubject) -> OperationList:
        """Journal a change of a subject's settings and start to drive it. Raises the same errors as
        `begin`.
        """
        return await self.begin(replace(request, kind=OperationKind.SET, subject=subject))

    async def _dry_run(self, request: Reshape) -> OperationList:
        """Return the plans of a dry run in the same form in which `begin` returns operations."""
        plans = await self._database.read(plan_operations, request)
        losses = {plan.continued_id: plan.losses for plan in plans}
        continued_operations = await self._database.read(
            operation_views, [plan.continued_id for plan in plans]
        )
        new_plans = [
            plan
            for plan in plans
            if not plan.continued_id and (plan.plan.sealed or not plan.busy_subject)
        ]
        return OperationList(
            operations=[
                *(
                    replace(view, without_source=True, losses=losses[view.operation_id])
                    for view in continued_operations
                ),
                *(plan.view(request) for plan in new_plans),
            ],
            busy=[plan.busy_subject for plan in plans if plan.busy_subject],
        )

    async def cancel(self, operation_id: int) -> OperationView:
        """
        Cancel an operation that is in PLAN. Idempotent.

        Raises:
            NotFoundError, ConflictError
        """
        await self._database.write(cancel_operation, operation_id)
        self._start_driving(operation_id)
        (view,) = await self._database.read(operation_views, [operation_id])
        return view

    async def list_operations(self, subject: str) -> OperationList:
        """Return the latest operations of a subject, newest first. Raises SubjectUnknownError."""
        views = await self._database.read(subject_operations, subject)
        return OperationList(operations=[await self._add_waiting_reason(view) for view in views])

    async def list_waiting(self) -> OperationList:
        """Return the latest operations of all subjects that wait, newest first."""
        return OperationList(operations=await self._database.read(waiting_operations))

    async def _add_waiting_reason(self, view: OperationView) -> OperationView:
        """Add the reason why the operation is waiting if no driver has stored one, for example
        because it crashed before its first request.
        """
        if view.problem or all(step.done for step in view.steps):
            return view
        operation = await self._database.read(read_operation, view.operation_id)
        if operation.state is not view.state:
            return view
        return replace(view, problem=waiting_reason(operation.state, operation.pending))

    async def drive(self, operation_id: int) -> OperationView | None:
        """Start driving a journaled operation unless it is done. Return its view, or None if it was
        deleted with its subject.
        """
        views = await self._database.read(operation_views, [operation_id])
        if views and views[0].state is OperationState.PLAN:
            self._after_step("planned")
        if views and RULES[views[0].state].successor is not None:
            self._start_driving(operation_id)
        return await self._add_waiting_reason(views[0]) if views else None

    # ── driving ───────────────────────────────────────────────────────────────────────────────────
    async def resume(self) -> None:
        """Start driving the operations that have no driver and can continue. Raises
        StorageError.
        """
        for operation_id in await self._database.read(idle_operations):
            if len(self._tasks) >= CONCURRENT_OPERATIONS_MAX:
                return
            self._start_driving(operation_id)

    def _start_driving(self, operation_id: int) -> None:
        if operation_id not in self._tasks:
            task = asyncio.create_task(
                self._drive_to_end(operation_id), name=f"operation {operation_id}"
            )
            self._tasks[operation_id] = task

    async def _drive_to_end(self, operation_id: int) -> None:
        """Drive an operation until it is done, must wait, or makes no progress."""
        pauses = BACKOFF.pauses(self._rng)
        try:
            while True:
                try:
                    result = await self._run_round(operation_id)
                except StorageError as error:
                    log.warning("operation %d: %s", operation_id, error.message)
                    result = _RoundResult.RETRY
                if result is _RoundResult.STOP:
                    return
                if result is _RoundResult.ADVANCED:
                    pauses.reset()
                elif pauses.failures + 1 < ATTEMPTS_MAX:
                    await asyncio.sleep(pauses.next_pause_ms() / 1000)
                else:
                    await self._release_for_pause(operation_id)
                    return
        except Exception:
            log.exception("operation %d stopped with an unexpected error", operation_id)
            raise
        finally:
            del self._tasks[operation_id]

    async def _release_for_pause(self, operation_id: int) -> None:
        """Release an operation so that no driver claims it for PAUSE_MS. `resume` starts with the
        operations that have waited longest.
        """
        try:
            await self._database.write(
                release_operation, operation_id, driver=self.driver_id, pause_ms=PAUSE_MS
            )
        except StorageError as error:
            # The operation is resumed after its lease has expired.
            log.warning("operation %d: %s", operation_id, error.message)

    async def _run_round(self, operation_id: int) -> _RoundResult:
        """Drive an operation for one round: claim it, send requests to brokers, and store the
        results.
        """
        operation = await self._database.write(
            claim_operation,
            operation_id,
            driver=self.driver_id,
            lease_ms=self._settings.operation_lease_ms,
        )
        if operation is None:
            return _RoundResult.STOP
        end_offsets, problem = await self._request_steps(operation)
        sealable_ids = () if problem else tuple(parent.partition_id for parent in operation.sources)
        group_ids = [group_id for group_id, _ in operation.groups]
        state = await self._database.write(
            finish_round,
            operation_id,
            end_offsets,
            problem,
            group_ids=group_ids,
            sealable_ids=sealable_ids,
            openings=operation.openings,
        )
        if state is not operation.state:
            self._after_step(_STEP_OF_STATE[state])
            if RULES[state].successor is None:
                self._logged_waits.pop(operation_id, None)
                log.info("operation %d on %s is %s", operation_id, operation.subject, state)
            if RULES[operation.state].runs and RULES[state].child_state is PartitionState.OPEN:
                await self._announce_route(operation)
            return _RoundResult.STOP if RULES[state].action is None else _RoundResult.ADVANCED
        if RULES[state].successor is None and not problem:
            return _RoundResult.STOP
        if next_action(operation.state, operation.pending) is not NextAction.WAIT:
            return _RoundResult.RETRY  # a broker refused, or a new consumer group must be announced
        if self._logged_waits.get(operation_id) != problem:
            if len(self._logged_waits) >= WAITS_LOGGED_MAX:
                self._logged_waits.clear()
            self._logged_waits[operation_id] = problem
            log.info("operation %d on %s waits: %s", operation_id, operation.subject, problem)
        pause_ms = PAUSE_MS if RULES[state].action is BrokerAction.ANNOUNCE else 0
        await self._database.write(
            release_operation, operation_id, driver=self.driver_id, pause_ms=pause_ms
        )
        return _RoundResult.STOP

    async def _request_steps(self, operation: Operation) -> tuple[dict[int, int | None], str]:
        """
        Send brokers the requests that the operation's state requires.

        Returns:
            The finished steps, as a dict that maps each partition id to the end offset of a sealed
            partition or to None for a hosted one; and the first problem, or "".
        """
        results = await asyncio.gather(
            *(self._request_step(operation, partition) for partition in operation.targets)
        )
        replies = [reply for reply in results if not isinstance(reply, str)]
        end_times_ms = {reply.partition_id: reply.ended_ms for reply in replies if reply.ended_ms}
        start_times = find_start_times(operation.children_to_open, operation.targets, end_times_ms)
        send = partial(self._send_start_time, operation)
        if not await send_start_times(start_times, send, lambda: BACKOFF.pauses(self._rng)):
            self._after_step("untold")
        end_offsets = {reply.partition_id: reply.end_offset for reply in replies}
        problems = [reply for reply in results if isinstance(reply, str)]
        action = RULES[operation.state].action
        if end_offsets and action in _STEP_OF_ACTION:
            self._after_step(_STEP_OF_ACTION[action])
        if not problems:
            problems = [describe_silent_parents(operation.state, operation.pending)]
        if not any(problems):
            problems = await asyncio.gather(
                *(self._read_seal_refusal(parent) for parent in operation.sources)
            )
        return end_offsets, next(filter(None, problems), "")

    async def _request_step(self, operation: Operation, partition: Partition) -> _StepReply | str:
        """Ask a broker to host or seal a partition. Return its reply, or a description of the
        problem.
        """
        if partition.address is None:
            return describe_silent_broker(operation.state, partition.broker_group)
        rule = RULES[operation.state]
        is_canceled = rule.child_state is PartitionState.EXPIRED
        broker = BrokerClient(self._network, partition.address, timeout_ms=CALL_TIMEOUT_MS)
        async with self._brokers_limit:
            try:
                if rule.action is BrokerAction.SEAL:
                    status = await broker.control(
                        endpoints.SEAL,
                        query={"empty": 1 if is_canceled else None},
                        id=partition.partition_id,
                    )
                    return _StepReply(
                        partition.partition_id, status.next_offset, status.ended_at_ms
                    )
                if operation.publishes:  # a partition with messages is already hosted
                    await broker.control(
                        endpoints.REGISTER_GROUPS,
                        RegisterGroups(
                            groups=tuple(name for _, name in operation.groups),
                            complete=True,
                            tokens_above=operation.tokens_above,
                        ),
                        id=partition.partition_id,
                    )
                    return _StepReply(partition.partition_id)
                groups = tuple(name for _, name in operation.groups)
                request = _build_host_request(
                    operation, partition, groups=groups, tokens_above=operation.tokens_above
                )
                await broker.control(endpoints.HOST_PARTITION, request)
            except KeylaneError as error:
                is_unknown = isinstance(error, PartitionUnknownError)
                if is_canceled and (is_unknown or error.reason is Reason.PARTITION_IN_USE):
                    # It was never hosted. If the broker has a partition with this id, it belongs to
                    # another operation.
                    return _StepReply(partition.partition_id, 0)
                if is_unknown:
                    return (
                        f"partition {partition.partition_id} is not known to "
                        f"{partition.broker_group!r}"
                    )
                return (
                    f"partition {partition.partition_id} on {partition.broker_group!r}: "
                    f"{error.message}"
                )
        return _StepReply(partition.partition_id)

    async def _send_start_time(
        self, operation: Operation, child: Partition, times_from_ms: int
    ) -> None:
        """Send a child's start time to its broker. Raises KeylaneError."""
        assert child.address is not None
        broker = BrokerClient(self._network, child.address, timeout_ms=CALL_TIMEOUT_MS)
        async with self._brokers_limit:
            request = _build_host_request(operation, child, times_from_ms=times_from_ms)
            await broker.control(endpoints.HOST_PARTITION, request)

    async def _read_seal_refusal(self, parent: Partition) -> str:
        """Return the reason why the broker of a parent cannot seal it, or "". The request changes
        nothing.
        """
        assert parent.address is not None
        broker = BrokerClient(self._network, parent.address, timeout_ms=CALL_TIMEOUT_MS)
        async with self._brokers_limit:
            try:
                reason = (
                    await broker.control(endpoints.PARTITION, id=parent.partition_id)
                ).unsealable
            except KeylaneError as error:
                reason = error.message
        return (
            describe_unsealable(parent.partition_id, parent.broker_group, reason) if reason else ""
        )

    async def _announce_route(self, operation: Operation) -> None:
        """Wake the calls that are waiting for a new route, and settle the subject's groups."""
        self._catalogue.wake_route_waiters([operation.subject])
        for group_id in await self._database.read(groups_of, operation.subject_id):
            await self._groups.settle(group_id)

    async def stop(self) -> None:
        """Stop driving. Unfinished operations are resumed by another metaserver, or by this one
        after a restart.
        """
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _build_host_request(operation: Operation, child: Partition, **fields: Any) -> HostPartition:
    """Build the request that asks a broker to host a child, with additional fields."""
    return HostPartition(
        subject=operation.subject,
        partition=replace(child, state=PartitionState.OPEN),
        order_strategy=operation.order_strategy,
        partitions_wanted=operation.partitions_wanted,
        retention=operation.retention,
        static=operation.static,
        message_bytes_max=hosted_limit(operation.message_bytes_max),
        cluster_id=operation.cluster_id,
        **fields,
    )
