"""Drives operations on partitions until they are done: hosts children, seals parents, changes the
route. Shell around SQL.

    begin ─▶ journal ─▶ claim ─▶ ask the brokers for what the state needs ─▶ finish the round:
                          ▲                                     next states, perhaps the route
                          └────────────────────────────────────────────────┘

Invariants
    Every step may be repeated, also by two metaservers at once: brokers and SQL change nothing the
    second time.
    Correctness does not depend on the driver's lease, which only saves two drivers from doing the
    same work.
    No parent is sealed before every child is hosted and every parent's broker confirms that it can
    seal. So writes stop only for one seal and one transaction, and for one call to brokers of
    children elsewhere: see `driver.py`.
    A child opens after its broker has stored every consumer group of the subject.

Tells the brokers of child partitions when their parents were sealed, so that no message of a child
has an earlier time.

    SEAL: each parent's broker has sealed, and reports the time
      ─▶ the brokers of its children on other broker groups get the time
      ─▶ the round ends: the database has the seal, and perhaps the route changes

Invariants
    Correctness does not depend on it, so no operation waits for it longer than SEND_MS:
    see docs/decisions/0102.
    A seal not yet stored in the database is requested again, and its time is sent again.
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
    SubjectHistory,
)
from ...protocol.progress import KnowGroups
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
    Ask,
    NextAction,
    broker_silent,
    next_action,
    parents_silent,
    unsealable,
    waiting_reason,
)
from .views import operation_views, subject_history, subject_operations

log = logging.getLogger("keylane.metaserver")

SEND_MS = 5_000
"""How long the broker of a child is asked, which has hosted it a moment ago."""

Send = Callable[[Partition, int], Awaitable[object]]
"""Tells the broker of a child from when on it has its times, in milliseconds since 1970."""


def first_times(
    children: Sequence[Partition], parents: Collection[Partition], ended_ms: Mapping[int, int]
) -> list[tuple[Partition, int]]:
    """
    Return the children whose brokers need a time, each with the latest end of a parent on another
    broker.

    A broker knows the ends of the parents that it hosts itself.

    Args:
        ended_ms: parent id → time of its end, in milliseconds since 1970, if its broker has
            reported it.
    """
    elsewhere = {int(parent.partition_id): parent.broker_group for parent in parents}
    times = []
    for child in children:
        from_ms = max(
            (
                ended_ms.get(parent, 0)
                for parent in map(int, child.parents)
                if elsewhere.get(parent, child.broker_group) != child.broker_group
            ),
            default=0,
        )
        if from_ms:
            times.append((child, from_ms))
    return times


async def send_first_times(
    times: Sequence[tuple[Partition, int]], send: Send, pauses: Callable[[], Pauses]
) -> bool:
    """Tell them all at once, each for TELL_MS at most; False: one begins by its own calendar, and
    the log says so.
    """
    sends = (_send(child, from_ms, send, pauses()) for child, from_ms in times)
    return all(await asyncio.gather(*sends))


async def _send(child: Partition, from_ms: int, send: Send, pauses: Pauses) -> bool:
    why = "it is silent"
    try:
        async with asyncio.timeout(SEND_MS / 1000):
            while child.address is not None:
                try:
                    await send(child, from_ms)
                    return True
                except InvalidRequestError as error:
                    if error.reason is not Reason.PARTITION_IN_USE:
                        raise
                    # open: another driver has told it; dropped or sealed: it takes no message any
                    # more
                    return True
                except (UnreachableError, OverloadedError) as error:
                    why = error.message
                await asyncio.sleep(pauses.next_ms() / 1000)
    except TimeoutError:
        pass
    except KeylaneError as error:
        why = error.message
    log.warning(
        "partition %d starts with the clock of broker group %r, which could not be sent the "
        "times of its parents: %s",
        child.partition_id,
        child.broker_group,
        why,
    )
    return False


CALL_TIMEOUT_MS = 2_000
DRIVEN_AT_ONCE_MAX = 64
IDS_MAX = 1_024
WAITS = Backoff(first_ms=20, max_ms=500)
ATTEMPTS_MAX = 10
"""Number of rounds in a row that change nothing, after which the operation is released and tried
again after a pause.
"""
PAUSE_MS = 2_000
_ENTERED = {
    OperationState.SEAL: "hosted",
    OperationState.OPEN: "sealed",
    OperationState.FENCE: "opened",
    OperationState.DONE: "opened",
    OperationState.CANCELED: "canceled",
}
_ANSWERED = {Ask.SEAL: "sealing", Ask.ANNOUNCE: "telling"}
"""Name of the step that `after_step` gets when a broker has answered; hosting a child has none."""


class _Round(enum.Enum):
    """The result of a round of a driver."""

    ADVANCED = enum.auto()
    """The operation has entered another state."""
    RETRY = enum.auto()
    """The state is the same, but another round may change it soon."""
    STOP = enum.auto()
    """The driver has nothing to do now."""


def _ignore_step(_step: str) -> None:
    """Ignore a step."""


class _Answer(NamedTuple):
    """The answer of a broker that has done a step."""

    partition_id: int
    end_offset: int | None = None
    """End offset of a sealed partition; None for a hosted one."""
    ended_ms: int = 0
    """Time at which a sealed partition ends, in milliseconds since 1970; 0: the partition is
    hosted, or the broker does not report it.
    """


class OperationDriver:
    """
    Begins operations and drives them.

    `begin(Reshape(...))` journals an operation and starts a task in this event loop that drives it
    to its end. The periodic tasks of every metaserver call `resume()`, which starts tasks for
    operations without a driver, because their metaserver has crashed or has released them. An
    operation that waits for a silent broker has no task until the broker reports itself again. An
    operation whose brokers keep refusing has no task for PAUSE_MS, so that another operation can
    have one.

    Args:
        driver: id of this process, which no other metaserver ever uses.
        after_step: called with the name of each finished step: planned, hosted, sealing (a broker
            has sealed, which SQL does not have yet), untold (a child begins by its own calendar),
            sealed (the operation waits in OPEN), telling (a broker has stored new groups, which SQL
            does not have yet), opened.
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
        self._driver = driver
        self._rng = rng
        self._after_step = after_step
        self._driving: dict[int, asyncio.Task[None]] = {}
        self._brokers_limit = asyncio.Semaphore(HOSTED_AT_ONCE_MAX)

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────
    async def begin(self, ask: Reshape) -> OperationList:
        """
        Journal operations and start to drive them; returns before they are done. A dry run only
        plans.

        Raises:
            InvalidRequestError, SubjectUnknownError, PartitionUnknownError,
            NotFoundError, UnavailableError,
            BusyError: nothing was changed.
        """
        if max(len(ask.partition_ids), len(ask.queues)) > IDS_MAX:
            raise InvalidRequestError(f"at most {IDS_MAX} partitions or queues at once")
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
        # Operations over the limit are resumed by any metaserver after their lease has expired.
        idle = [
            planned.view(ask)
            for operation_id, planned in begun
            if not (operation_id or planned.busy)
        ]
        return OperationList(
            operations=[*await self._database.read(operation_views, ids), *idle],
            busy=[planned.busy for _, planned in begun if planned.busy],
            cordoned=ask.broker_group if ask.kind is OperationKind.EVACUATE else "",
        )

    async def set_subject(self, subject: str, ask: SetSubject) -> OperationList:
        """Journal a change of a subject's settings, and start to drive it. Raises as `begin`."""
        return await self.begin(replace(ask, kind=OperationKind.SET, subject=subject))

    async def _planned(self, ask: Reshape) -> OperationList:
        """Return the plans of a dry run, in the form of the answer of `begin`."""
        plans = await self._database.read(plan_operations, ask)
        losses = {planned.freed: planned.losses for planned in plans}
        freed = await self._database.read(operation_views, [planned.freed for planned in plans])
        shown = [
            planned
            for planned in plans
            if not planned.freed and (planned.plan.sealed or not planned.busy)
        ]
        return OperationList(
            operations=[
                *(
                    replace(view, without_source=True, losses=losses[view.operation_id])
                    for view in freed
                ),
                *(planned.view(ask) for planned in shown),
            ],
            busy=[planned.busy for planned in plans if planned.busy],
        )

    async def cancel(self, operation_id: int) -> OperationView:
        """
        Cancel an operation that is in PLAN; a repeat changes nothing.

        Raises:
            NotFoundError, ConflictError
        """
        await self._database.write(cancel_operation, operation_id)
        self._drive_soon(operation_id)
        (view,) = await self._database.read(operation_views, [operation_id])
        return view

    async def operations(self, subject: str) -> OperationList:
        """Return the latest operations of a subject, the newest first. Raises
        SubjectUnknownError.
        """
        views = await self._database.read(subject_operations, subject)
        return OperationList(operations=[await self._explained(view) for view in views])

    async def _explained(self, view: OperationView) -> OperationView:
        """Add the reason for waiting if no driver has stored one, for example because it crashed
        before it asked a broker.
        """
        if view.problem or all(step.done for step in view.steps):
            return view
        operation = await self._database.read(read_operation, view.operation_id)
        if operation.state is not view.state:
            return view
        return replace(view, problem=waiting_reason(operation.state, operation.pending))

    async def history(self, subject: str) -> SubjectHistory:
        """Return every partition that a subject ever had. Raises SubjectUnknownError."""
        return await self._database.read(subject_history, subject)

    @property
    def driver_id(self) -> str:
        """The id under which this process claims operations."""
        return self._driver

    async def drive(self, operation_id: int) -> OperationView | None:
        """Drive a journaled operation unless it is done, and return it; None if it was deleted with
        its subject.
        """
        views = await self._database.read(operation_views, [operation_id])
        if views and views[0].state is OperationState.PLAN:
            self._after_step("planned")
        if views and RULES[views[0].state].after is not None:
            self._drive_soon(operation_id)
        return await self._explained(views[0]) if views else None

    # ── driving ───────────────────────────────────────────────────────────────────────────────────
    async def resume(self) -> None:
        """Drive the operations that have no driver and can continue. Raises StorageError."""
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
            log.exception("operation %d stopped with an unexpected error", operation_id)
            raise
        finally:
            del self._driving[operation_id]

    async def _pause(self, operation_id: int) -> None:
        """Release an operation, which nobody claims for PAUSE_MS; `resume` takes the longest
        waiting operations first.
        """
        try:
            await self._database.write(
                release_operation, operation_id, driver=self._driver, pause_ms=PAUSE_MS
            )
        except StorageError as error:
            # The operation is resumed after its lease has expired.
            log.warning("operation %d: %s", operation_id, error.message)

    async def _step(self, operation_id: int) -> _Round:
        """Drive an operation for one round: claim it, ask its brokers, and store their answers."""
        operation = await self._database.write(
            claim_operation,
            operation_id,
            driver=self._driver,
            lease_ms=self._settings.operation_lease_ms,
        )
        if operation is None:
            return _Round.STOP
        done, problem = await self._ask_brokers(operation)
        sealable = () if problem else tuple(parent.partition_id for parent in operation.sources)
        heard = [group_id for group_id, _ in operation.groups]
        state = await self._database.write(
            finish_round,
            operation_id,
            done,
            problem,
            heard=heard,
            sealable=sealable,
            openings=operation.openings,
        )
        if state is not operation.state:
            self._after_step(_ENTERED[state])
            if RULES[operation.state].runs and RULES[state].children is PartitionState.OPEN:
                await self._announce_route(operation)
            return _Round.STOP if RULES[state].asks is None else _Round.ADVANCED
        if RULES[state].after is None and not problem:
            return _Round.STOP
        if next_action(operation.state, operation.pending) is not NextAction.WAIT:
            return _Round.RETRY  # a broker has refused, or a new consumer group is to be told
        log.info("operation %d waits: %s", operation_id, problem)
        pause_ms = PAUSE_MS if RULES[state].asks is Ask.ANNOUNCE else 0
        await self._database.write(
            release_operation, operation_id, driver=self._driver, pause_ms=pause_ms
        )
        return _Round.STOP

    async def _ask_brokers(self, operation: Operation) -> tuple[dict[int, int | None], str]:
        """
        Ask the brokers for what the operation's state needs.

        Returns:
            The finished steps, as partition id → end offset of a sealed partition, None for a
            hosted one; and the first problem, or "".
        """
        asked = await asyncio.gather(
            *(self._ask(operation, partition) for partition in operation.todo)
        )
        answers = [answer for answer in asked if not isinstance(answer, str)]
        ended_ms = {answer.partition_id: answer.ended_ms for answer in answers if answer.ended_ms}
        told = first_times(operation.opening, operation.todo, ended_ms)
        send = partial(self._send_first_time, operation)
        if not await send_first_times(told, send, lambda: WAITS.pauses(self._rng)):
            self._after_step("untold")
        done = {answer.partition_id: answer.end_offset for answer in answers}
        problems = [answer for answer in asked if isinstance(answer, str)]
        asks = RULES[operation.state].asks
        if done and asks in _ANSWERED:
            self._after_step(_ANSWERED[asks])
        if not problems:
            problems = [parents_silent(operation.state, operation.pending)]
        if not any(problems):
            problems = await asyncio.gather(
                *(self._refusal(parent) for parent in operation.sources)
            )
        return done, next(filter(None, problems), "")

    async def _ask(self, operation: Operation, partition: Partition) -> _Answer | str:
        """Ask a broker to host or seal a partition; returns its answer or the problem."""
        if partition.address is None:
            return broker_silent(operation.state, partition.broker_group)
        rule = RULES[operation.state]
        canceled = rule.children is PartitionState.EXPIRED
        broker = BrokerClient(self._network, partition.address, timeout_ms=CALL_TIMEOUT_MS)
        async with self._brokers_limit:
            try:
                if rule.asks is Ask.SEAL:
                    status = await broker.control(
                        endpoints.SEAL,
                        query={"empty": 1 if canceled else None},
                        id=partition.partition_id,
                    )
                    return _Answer(partition.partition_id, status.next_offset, status.ended_at_ms)
                if operation.publishes:  # a broker hosts no partition anew that has messages
                    await broker.control(
                        endpoints.KNOW_GROUPS,
                        KnowGroups(
                            groups=tuple(name for _, name in operation.groups),
                            complete=True,
                            tokens_above=operation.tokens_above,
                        ),
                        id=partition.partition_id,
                    )
                    return _Answer(partition.partition_id)
                groups = tuple(name for _, name in operation.groups)
                facts = _facts(
                    operation, partition, groups=groups, tokens_above=operation.tokens_above
                )
                await broker.control(endpoints.HOST_PARTITION, facts)
            except KeylaneError as error:
                unknown = isinstance(error, PartitionUnknownError)
                if canceled and (unknown or error.reason is Reason.PARTITION_IN_USE):
                    # Never hosted: a partition of that id at the broker is not of this operation.
                    return _Answer(partition.partition_id, 0)
                if unknown:
                    return (
                        f"partition {partition.partition_id} is not known to "
                        f"{partition.broker_group!r}"
                    )
                return (
                    f"partition {partition.partition_id} on {partition.broker_group!r}: "
                    f"{error.message}"
                )
        return _Answer(partition.partition_id)

    async def _send_first_time(
        self, operation: Operation, child: Partition, times_from_ms: int
    ) -> None:
        """Tell the broker of a child from when on it has its times. Raises KeylaneError."""
        assert child.address is not None
        broker = BrokerClient(self._network, child.address, timeout_ms=CALL_TIMEOUT_MS)
        async with self._brokers_limit:
            facts = _facts(operation, child, times_from_ms=times_from_ms)
            await broker.control(endpoints.HOST_PARTITION, facts)

    async def _refusal(self, parent: Partition) -> str:
        """Return the reason why the broker of a parent cannot seal it, or ""; changes nothing at
        the broker.
        """
        assert parent.address is not None
        broker = BrokerClient(self._network, parent.address, timeout_ms=CALL_TIMEOUT_MS)
        async with self._brokers_limit:
            try:
                why = (await broker.control(endpoints.PARTITION, id=parent.partition_id)).unsealable
            except KeylaneError as error:
                why = error.message
        return unsealable(parent.partition_id, parent.broker_group, why) if why else ""

    async def _announce_route(self, operation: Operation) -> None:
        """Announce a new route: wake the calls that wait for the route, and settle the subject's
        groups.
        """
        self._catalogue.wake([operation.subject])
        for group_id in await self._database.read(groups_of, operation.subject_id):
            await self._groups.settle(group_id)

    async def stop(self) -> None:
        """Stop driving; another metaserver, or this one after a restart, resumes unfinished
        operations.
        """
        tasks = list(self._driving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _facts(operation: Operation, child: Partition, **told: Any) -> HostPartition:
    """Build the facts that the broker of a child keeps, with further fields of the call."""
    return HostPartition(
        subject=operation.subject,
        partition=replace(child, state=PartitionState.OPEN),
        order_strategy=operation.order_strategy,
        partitions_wanted=operation.partitions_wanted,
        retention=operation.retention,
        static=operation.static,
        message_bytes_max=hosted_limit(operation.message_bytes_max),
        **told,
    )
