"""`keylane cluster balance`: shows what balances a cluster, moves and hand-overs, and does it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import click
import msgspec
from msgspec import Struct

from ....admin import Admin, BalanceHandOver, BalanceMove, BalancePlan, LeftOut
from ....protocol.errors import (
    BusyError,
    ConflictError,
    KeylaneError,
    NotFoundError,
    PartitionUnknownError,
    UnavailableError,
    UnreachableError,
)
from ....protocol.operations import OperationState
from ....protocol.text import counted
from ...confirmation import confirm
from ...connection import open_admin
from ...options import OutputFormat
from ...screen import make_table, show_data, show_line, show_table
from ...status import showing

AGAIN = "keylane cluster balance"
POLL_S = 0.1
SETS_S = 60.0
"""How long the broker before may take to follow as a copy, in seconds."""
_OUTDATED = (BusyError, ConflictError, NotFoundError, PartitionUnknownError, UnavailableError)
"""A move is refused like this if the cluster has changed since the plan was made."""


class LeftMove(Struct, frozen=True, kw_only=True):
    """A move that was not done."""

    move: BalanceMove
    reason: str


class LeftHandOver(Struct, frozen=True, kw_only=True):
    """A hand-over that was not done."""

    hand_over: BalanceHandOver
    reason: str


class Balanced(Struct, frozen=True, kw_only=True):
    """What `keylane cluster balance` has done."""

    plan: BalancePlan
    done: list[BalanceMove]
    left: list[LeftMove]
    handed_over: list[BalanceHandOver] = msgspec.field(default_factory=list)
    left_hand_overs: list[LeftHandOver] = msgspec.field(default_factory=list)


async def balance_cluster(
    meta: str,
    output: OutputFormat,
    *,
    exclude: Sequence[str],
    dry_run: bool,
    at_once: int,
    yes: bool,
) -> None:
    """Show the plan, ask, and do it. The exit status is 1 if moves are left."""
    as_table = output is OutputFormat.TABLE
    async with open_admin(meta) as admin:
        with showing("asking the brokers for their rates"):
            plan = await admin.plan_balance(exclude=exclude)
        if as_table:
            _show_plan(plan)
        work = _Moves(plan.moves, as_table=as_table)
        balanced = Balanced(plan=plan, done=work.done, left=work.left)
        if (plan.moves or plan.hand_overs) and not dry_run:
            counts = _counts_text(len(plan.hand_overs), len(plan.moves))
            confirm(f"Do {counts}?", yes=yes, required=True)
            try:
                with showing("handing over, one broker group at a time"):
                    await _hand_over(admin, plan.hand_overs, balanced, as_table=as_table)
                await work.run(admin, at_once)
            finally:
                if work.pending_count:
                    show_line(
                        f"{work.pending_count} of {counted(len(plan.moves), 'move')} left; the "
                        f"metaserver completes those that have begun. To continue: {AGAIN}",
                        errors=True,
                    )
    if not as_table:
        show_data(output, balanced)
    left = _counts_text(len(balanced.left_hand_overs), len(balanced.left))
    if left:
        show_line(f"{left} could not be done; make a new plan: {AGAIN}", errors=True)
        raise click.exceptions.Exit(1)
    if as_table and (balanced.done or balanced.handed_over):
        show_line("the broker groups are balanced")


async def set_stopped(admin: Admin, *, stopped: bool) -> Balanced:
    """Stop the metaservers that balance by themselves, or let them balance again."""
    return Balanced(plan=await admin.stop_balance(stopped=stopped), done=[], left=[])


def show_stopped(balanced: Balanced) -> None:
    """Show whether the metaservers balance by themselves."""
    if balanced.plan.stopped:
        show_line(f"metaservers do not balance by themselves until: {AGAIN} --start")
    else:
        show_line("metaservers with the setting balance = true balance by themselves")


def _counts_text(hand_overs: int, moves: int) -> str:
    counts = {"hand-over": hand_overs, "move": moves}
    return " and ".join(counted(count, noun) for noun, count in counts.items() if count)


def _show_plan(plan: BalancePlan) -> None:
    handed = [
        (each.broker_group, each.source, each.target, each.reason) for each in plan.hand_overs
    ]
    if handed:
        title = f"{counted(len(handed), 'hand-over')} between hosts"
        show_table(make_table(title, ("broker group", "from", "to", "because"), handed))
    rows = [
        (move.partition_id, move.subject, move.source, move.target, move.reason)
        for move in plan.moves
    ]
    if rows:
        title = f"{counted(len(rows), 'move')} between {', '.join(plan.broker_groups)}"
        show_table(make_table(title, ("id#", "subject", "from", "to", "because"), rows))
    elif not handed:
        groups, verb = ", ".join(plan.broker_groups), "are even"
        if len(plan.broker_groups) < 2:
            groups, verb = f"only {groups}" if groups else "no broker group", "can get partitions"
        show_line(f"nothing to balance: {groups} {verb}")
    _show_left_out("broker group", plan.left_out_groups)
    _show_left_out("subject", plan.left_out_subjects)
    for group in plan.unknown_rates:
        show_line(f"the rates of {group} are unknown, and count as 0")


def _show_left_out(noun: str, entries: Sequence[LeftOut]) -> None:
    for entry in entries:
        show_line(f"{noun} {entry.name} is left out: {entry.reason}")


async def _wait_for_sets(admin: Admin) -> None:
    """Wait until no set lacks a copy."""
    while True:
        brokers = (await admin.list_brokers()).brokers
        if all(broker.folders >= broker.folders_wanted for broker in brokers):
            return
        await asyncio.sleep(POLL_S)


async def _hand_over(
    admin: Admin, planned: Sequence[BalanceHandOver], balanced: Balanced, *, as_table: bool
) -> None:
    """Do hand-overs one at a time, each when no set lacks a copy, and note what became of them.
    Raises KeylaneError.
    """
    for each in planned:
        problem = ""
        try:
            async with asyncio.timeout(SETS_S):
                await _wait_for_sets(admin)
            await admin.hand_over(each.broker_group, copy_id=each.copy_id)
        except TimeoutError:
            problem = f"after {SETS_S:.0f} s, acks still wait for fewer copies than wanted"
        except _OUTDATED as error:
            problem = error.message
        if problem:
            balanced.left_hand_overs.append(LeftHandOver(hand_over=each, reason=problem))
        else:
            balanced.handed_over.append(each)
        if as_table:
            text = f"broker group {each.broker_group} is "
            show_line(text + (f"not handed over: {problem}" if problem else f"on {each.target}"))


class _Moves:
    """The moves of a plan, which are done a few at a time, and one at a time of each subject."""

    def __init__(self, moves: Sequence[BalanceMove], *, as_table: bool) -> None:
        self._waiting: dict[str, list[BalanceMove]] = {}
        for move in moves:
            self._waiting.setdefault(move.subject, []).append(move)
        self.pending_count = len(moves)
        """The number of moves that are neither done nor refused."""
        self._as_table = as_table
        self.done: list[BalanceMove] = []
        self.left: list[LeftMove] = []

    async def run(self, admin: Admin, at_once: int) -> None:
        """Do the moves. Raises KeylaneError."""
        subjects = list(self._waiting.values())

        async def work() -> None:
            while subjects:
                for move in subjects.pop(0):
                    await self._do(admin, move)

        with showing(lambda: f"moving partitions, {self.pending_count} left"):
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(at_once):
                        group.create_task(work())
            except* KeylaneError as errors:
                raise errors.exceptions[0] from None

    async def _do(self, admin: Admin, move: BalanceMove) -> None:
        """Do one move, or add it to those that are left."""
        problem = ""
        try:
            operation = await admin.move([move.partition_id], to=move.target)
            while True:
                try:
                    operation = await admin.wait(operation)
                    break
                except UnreachableError:  # the metaserver completes it meanwhile
                    await asyncio.sleep(POLL_S)
            if operation.state is OperationState.CANCELED:
                problem = f"operation {operation.operation_id} was canceled"
        except _OUTDATED as error:
            problem = error.message
        self.pending_count -= 1
        if problem:
            self.left.append(LeftMove(move=move, reason=problem))
        else:
            self.done.append(move)
        if self._as_table:
            text = f"partition {move.partition_id} of {move.subject} is "
            text += f"not moved: {problem}" if problem else f"on {move.target}"
            show_line(f"{text}; {self.pending_count} left")
