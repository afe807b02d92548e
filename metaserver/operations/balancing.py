"""Balances broker groups: reads what a plan needs, and moves partitions and hands over by itself if
that is switched on. Does network I/O and runs SQL; the decisions are made in `balance_plan.py` and
`master_plan.py`.

    every balance_interval_ms, if the setting `balance` is on and no operator has stopped it
      ─▶ one metaserver has the duty
      ─▶ no partition is being moved
      ─▶ the first hand-over of a new plan is done, else its first move begins
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.copies import HandOver
from ...protocol.errors import KeylaneError
from ...protocol.ids import BrokerGroup, check_name
from ...protocol.log_filter import LogFilter
from ...protocol.membership.views import BrokerView
from ...protocol.operations import (
    BalanceHandOver,
    BalanceMove,
    BalancePlan,
    LeftOut,
    OperationKind,
    Reshape,
    SetBalance,
)
from ...protocol.routing import PartitionState
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..cluster.brokers import broker_views, unknown_broker_group_error, writable_groups
from ..settings import MetaserverSettings
from ..sql.database import Database
from ..sql.dialect import begin_snapshot, insert_new
from ..sql.duties import take_duty
from ..sql.schema import facts, operations, partitions, subjects
from .balance_plan import PlacedPartition, plan_balance
from .driver import CALL_TIMEOUT_MS, OperationDriver
from .master_plan import PlacedMaster, place_master, plan_masters

log = logging.getLogger("keylane.metaserver")
DUTY = "balance"
STOPPED = "balance is stopped"
"""Name of the fact that an operator has stopped the metaservers that balance by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceInputs:
    """What the database says about partitions that may move."""

    movable: tuple[PlacedPartition, ...]
    """Those on broker groups that are balanced, without rates."""
    addresses: Mapping[BrokerGroup, str]
    """Maps each broker group that is balanced to its address."""
    fixed: Mapping[BrokerGroup, int]
    complete: Mapping[BrokerGroup, bool]
    """By broker group, whether as many data folders as wanted have everything. Empty if none has
    copies.
    """
    left_out_groups: tuple[LeftOut, ...]
    left_out_subjects: tuple[LeftOut, ...]
    stopped: bool


_open_query = (
    sa.select(
        partitions.c.partition_id,
        partitions.c.broker_group,
        subjects.c.name,
        subjects.c.hidden_for,
        operations.c.operation_id,
    )
    .join(subjects, subjects.c.subject_id == partitions.c.subject_id)
    .outerjoin(operations, operations.c.running == subjects.c.subject_id)
    .where(partitions.c.state == PartitionState.OPEN, sa.not_(subjects.c.deleting))
)
_stopped_query = sa.select(facts.c.value).where(facts.c.name == STOPPED)
_moving_query = sa.select(operations.c.operation_id).where(
    operations.c.running.is_not(None), operations.c.kind == OperationKind.MOVE
)


def read_balance_inputs(connection: Connection, excluded: Collection[str] = ()) -> BalanceInputs:
    """
    Read one snapshot of what a plan needs. Must be the first read of its transaction.

    Args:
        excluded: broker groups that are left out.

    Raises:
        NotFoundError: one of them has never sent a report.
    """
    begin_snapshot(connection)
    views = {view.broker_group: view for view in broker_views(connection)}
    for name in excluded:
        if name not in views:
            raise unknown_broker_group_error(connection, name)
    hosts = writable_groups(connection)
    loads = {group: hosts[group] for group in sorted(hosts) if group not in excluded}
    movable, reasons = [], {}
    for row in connection.execute(_open_query.order_by(partitions.c.partition_id)):
        if row.operation_id is not None:
            reasons[row.name] = f"operation {row.operation_id} on it is running"
        elif row.hidden_for:
            reasons[row.name] = f"it is hidden until it is published in {row.hidden_for}"
        elif row.broker_group in loads:
            movable.append(
                PlacedPartition(
                    partition_id=row.partition_id,
                    subject=row.name,
                    broker_group=BrokerGroup(row.broker_group),
                )
            )
    movable_counts = Counter(partition.broker_group for partition in movable)
    return BalanceInputs(
        movable=tuple(movable),
        addresses={group: views[group].address for group in loads},
        fixed={group: load - movable_counts[group] for group, load in loads.items()},
        complete={
            group: views[group].folders >= views[group].folders_wanted
            for group in loads
            if any(views[each].folders_wanted > 1 for each in loads)
        },
        left_out_groups=tuple(
            LeftOut(name=name, reason="it is excluded" if name in excluded else _reason(view))
            for name, view in views.items()
            if name not in loads
        ),
        left_out_subjects=tuple(
            LeftOut(name=name, reason=reason) for name, reason in sorted(reasons.items())
        ),
        stopped=_is_stopped(connection),
    )


def _reason(view: BrokerView) -> str:
    """Return why a broker group can get no partitions."""
    if view.available and view.writable:
        return "it is cordoned"
    return f"it {view.state}" if view.available else f"it is {view.state}"


def _is_stopped(connection: Connection) -> bool:
    return connection.execute(_stopped_query).first() is not None


def _is_due(connection: Connection) -> bool:
    """Return True if balancing is not stopped, and no partition is being moved."""
    return not _is_stopped(connection) and connection.execute(_moving_query).first() is None


def store_stopped(connection: Connection, stopped: bool) -> None:
    """Record whether the metaservers that balance by themselves are stopped. Idempotent."""
    if stopped:
        insert_new(connection, facts, {"name": STOPPED, "value": "1"})
    else:
        connection.execute(sa.delete(facts).where(facts.c.name == STOPPED))


class Balancer:
    """
    Plans moves and hand-overs and, if the setting `balance` is on, begins them one at a time.

    Args:
        hand_over: lets the broker of a group hand over to a copy.
        holder: this metaserver's unique id.
        wait_until_settled: waits until the database has been compared with the brokers.
    """

    def __init__(
        self,
        database: Database,
        network: Network,
        settings: MetaserverSettings,
        operations: OperationDriver,
        *,
        holder: str,
        wait_until_settled: Callable[[], Awaitable[None]],
        hand_over: Callable[[str, HandOver], Awaitable[object]],
    ) -> None:
        self._hand_over = hand_over
        self._database = database
        self._network = network
        self._operations = operations
        self._holder = holder
        self._wait_until_settled = wait_until_settled
        self._failures = LogFilter()
        self.apply_settings(settings)

    def apply_settings(self, settings: MetaserverSettings) -> None:
        """Use the settings `balance` and `balance_interval_ms`."""
        self._enabled = settings.balance
        self._interval_ms = settings.balance_interval_ms

    async def plan(self, excluded: Collection[str] = ()) -> BalancePlan:
        """
        Plan the moves that balance the broker groups. Changes nothing.

        Args:
            excluded: broker groups that neither get nor give partitions.

        Raises:
            InvalidRequestError: the name of an excluded broker group is invalid.
            NotFoundError: an excluded broker group has never sent a report.
            StorageError
        """
        for name in excluded:
            check_name("broker group", name)
        inputs = await self._database.read(read_balance_inputs, excluded)
        (rates, unknown), masters = await asyncio.gather(
            self._read_rates(inputs.addresses), self._read_masters(inputs)
        )
        movable = [
            replace(each, bytes_per_s=rates.get(each.partition_id, 0)) for each in inputs.movable
        ]
        moves = await asyncio.to_thread(
            plan_balance, movable, list(inputs.addresses), fixed=inputs.fixed
        )
        return BalancePlan(
            moves=tuple(moves),
            hand_overs=tuple(plan_masters(masters)),
            broker_groups=tuple(inputs.addresses),
            left_out_groups=inputs.left_out_groups,
            left_out_subjects=inputs.left_out_subjects,
            unknown_rates=tuple(unknown),
            automatic=self._enabled,
            stopped=inputs.stopped,
        )

    async def change(self, body: SetBalance) -> BalancePlan:
        """Stop the metaservers that balance by themselves, or let them continue; return the plan at
        that time. Idempotent.
        """
        await self._database.write(store_stopped, body.stopped)
        return await self.plan()

    async def run(self) -> None:
        """Begin moves until cancelled, every `balance_interval_ms`."""
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            try:
                await self.run_once()
            except KeylaneError as error:
                now_ms = round(asyncio.get_running_loop().time() * 1000)
                if line := self._failures.count_failure(error.message, now_ms):
                    log.warning("balancing failed and will be tried again: %s", line)

    async def run_once(self) -> BalanceMove | BalanceHandOver | None:
        """
        Do the first hand-over of a new plan, or begin its first move, and return it. Return None if
        balancing is switched off or stopped, another metaserver does it, a partition is being
        moved, or all is balanced.

        Raises:
            KeylaneError: the move cannot begin; nothing was changed.
        """
        if not self._enabled or not await self._database.read(_is_due):
            return None
        lease_ms = 2 * self._interval_ms + CALL_TIMEOUT_MS
        if not await self._database.renew(take_duty, DUTY, holder=self._holder, lease_ms=lease_ms):
            return None
        await self._wait_until_settled()
        plan = await self.plan()
        if not (plan.moves or plan.hand_overs) or not await self._database.read(_is_due):
            return None
        if plan.hand_overs and await self._do_hand_over(plan.hand_overs[0]):
            return plan.hand_overs[0]
        if not plan.moves:
            return None
        move = plan.moves[0]
        log.info(
            "balancing moves partition %d of %s from %s to %s: %s",
            *(move.partition_id, move.subject, move.source, move.target, move.reason),
        )
        await self._operations.begin(
            Reshape(
                kind=OperationKind.MOVE,
                partition_ids=(move.partition_id,),
                broker_group=move.target,
            )
        )
        return move

    async def _do_hand_over(self, planned: BalanceHandOver) -> bool:
        """Let a copy take its broker's place. Return False if that is refused: partitions are
        balanced nevertheless.
        """
        log.info(
            "balancing hands broker group %s over from %s to %s: %s",
            *(planned.broker_group, planned.source, planned.target, planned.reason),
        )
        try:
            await self._hand_over(planned.broker_group, HandOver(copy_id=planned.copy_id))
        except KeylaneError as error:
            log.warning("%s is not handed over: %s", planned.broker_group, error.message)
            return False
        return True

    async def _read_masters(self, inputs: BalanceInputs) -> list[PlacedMaster]:
        """Ask the brokers where they and their copies are. One that does not answer has an
        incomplete set.
        """

        async def read(group: BrokerGroup, is_complete: bool) -> PlacedMaster:
            address = inputs.addresses[group]
            broker = BrokerClient(self._network, address, timeout_ms=CALL_TIMEOUT_MS)
            try:
                health = await broker.health()
            except KeylaneError:
                return PlacedMaster(broker_group=group, host="", copies={}, is_complete=False)
            return place_master(group, address, health, is_complete=is_complete)

        return await asyncio.gather(*(read(*each) for each in inputs.complete.items()))

    async def _read_rates(
        self, addresses: Mapping[BrokerGroup, str]
    ) -> tuple[dict[int, int], list[BrokerGroup]]:
        """Ask brokers for the rates of their partitions. Return a dict that maps partition ids to
        bytes a second, and the broker groups that have not reported them.
        """
        rates: dict[int, int] = {}
        unknown: list[BrokerGroup] = []

        async def read(group: BrokerGroup, address: str) -> None:
            client = BrokerClient(self._network, address, timeout_ms=CALL_TIMEOUT_MS)
            try:
                statuses = (await client.partitions(storing=True)).partitions
            except KeylaneError:
                unknown.append(group)
                return
            if any(status.bytes_per_s is None for status in statuses):
                unknown.append(group)  # a broker of an earlier version
            rates.update({each.partition_id: round(each.bytes_per_s or 0) for each in statuses})

        await asyncio.gather(*(read(group, address) for group, address in addresses.items()))
        return rates, sorted(unknown)
