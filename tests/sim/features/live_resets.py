"""A group's progress is set again and again while its members live, keys are parked, partitions
change and programs crash.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import asdict
from msgspec.structs import replace as replace_fields

from keylane.admin.group_resets import reset_group
from keylane.broker.partition.partition import HostedPartition
from keylane.checker.events import Ended, Granted, Resetting, Served, SetAside, Started
from keylane.checker.findings import Findings
from keylane.protocol import endpoints
from keylane.protocol.errors import (
    ConflictError,
    Fate,
    KeylaneError,
    NotSentError,
    Reason,
)
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.progress import GroupReset, ResetGroup, ResetTo
from sim.actors.clients import SUBJECT
from sim.actors.operators import draw_reset, late_cursors, untold_resets
from sim.features.feature import Feature
from sim.features.parks import GROUP, ParkedKeys
from sim.swarm import Swarm

PARTS_FIRST = 1_000
"""Mutants are known by worlds before."""


def sets_parts(number: int) -> bool:
    """Whether most resets set a partition alone: in every second world."""
    return number >= PARTS_FIRST and number % 2 == 1


class LiveResetting(Feature):
    """See the module."""

    faults = frozenset({"meta_step", "consumer_crash", "broker_crash"})

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        policy: dict[str, Any] = {}
        if rng.random() < 0.5:
            policy = {"on_failure": "park", "tries_max": rng.choice((1, 2))}
        return replace(
            swarm,
            consumers=rng.choice((1, 2, 3)),
            keys=rng.choice((2, 3, 6)),
            messages=rng.choice((30, 60)),
            partitions=rng.choice((1, 2, 3)),
            consumer=swarm.consumer | policy,
        )

    def build(self) -> None:
        self.parked = ParkedKeys(self)
        for meta in self.world.metas:
            meta.resumes_resets = True
        self.answers: list[GroupReset] = []
        self.reset_count = 0
        """Number of resets."""
        self.answered_at = 0
        """Events in the history when the last one was answered."""
        self.answered_id = 0
        """The latest reset that the metaserver had then."""

    async def work(self) -> None:
        """Set the group back and forward; afterwards redrive until nothing is parked."""
        world, rng = self.world, self.rng
        while not world.faults.healed:
            await self.pause(1.5)
            deed = rng.random()
            if deed < 0.2:
                self.parked.poison_some()
            elif deed < 0.3:
                await self.parked.change_some(chance=0.5)
            elif deed < 0.45:
                ask = Reshape(
                    kind=OperationKind.RESIZE, subject=SUBJECT, partitions=rng.choice((1, 2, 3, 4))
                )
                world.faults.done += 1
                await world._reshape(ask)
            else:
                self.idle = False
                await self._reset()
                self.idle = True
        self.parked.poison.clear()
        while True:
            await self.parked.change_some(chance=1.0)
            await asyncio.sleep(0.5)

    async def _reset(self) -> None:
        """Ask until it is done, or known as not done."""
        world, rng = self.world, self.rng
        ask = draw_reset(world, rng)
        if ask.to in {ResetTo.SHIFT, ResetTo.CURSORS}:
            ask = ResetGroup(to=ResetTo.SHIFT, shift=rng.choice((-30, -5, 5)))
        if sets_parts(world.number) and rng.random() < 0.7:
            ask = self._of_one_partition(ask)
        fields = asdict(ask)
        fields |= {"live": True}
        meta = world._operator_meta
        call = partial(meta.call, endpoints.RESET_GROUP, subject=SUBJECT, group=GROUP)
        world.faults.done += 1
        self.reset_count += 1
        world.trace(f"live reset {fields!r}")
        if rng.random() < 0.3:
            world._operator_does(self._cancel(fields["to"]))
        first = True
        while True:
            began = len(world.history)
            try:
                answer = await reset_group(call, fields)
            except ConflictError as error:
                world.trace(f"not set: {error!r}")
                return
            except KeylaneError as error:
                world.trace(f"not set: {error!r}")
                if error.fate is Fate.NOT_DONE and not is_unsent(error):
                    self._check_not_done(began, replace_fields(ask, live=True), error)
                    return
                if first and rng.random() < 0.3:
                    return  # the operator does not wait, and it goes on by itself
                first = False
                await asyncio.sleep(0.1 + 0.4 * self.rng.random())
            else:
                world.loop.faults += untold_resets(world, GROUP, answer)
                world.loop.faults += late_cursors(world, ask, answer)
                self.answers.append(answer)
                self.answered_at = len(world.history)
                self.answered_id = world.shelf.last_reset
                return

    def _of_one_partition(self, ask: ResetGroup) -> ResetGroup:
        """The same for one partition, a sealed parent as likely as its children; now and then to an
        offset of it.
        """
        hosted = [broker.store.state.partitions for broker in self.world.brokers if broker.store]
        mine = sorted(
            (number, partition.readable_offset)
            for partitions in hosted
            for number, partition in partitions.items()
            if partition.facts.subject == SUBJECT
        )
        if not mine:
            return ask
        number, end = self.rng.choice(mine)
        if self.rng.random() < 0.3:
            offset = self.rng.randint(0, end)
            return ResetGroup(to=ResetTo.OFFSET, partition_id=number, offset=offset)
        return replace_fields(ask, partition_id=number)

    async def _cancel(self, to: ResetTo) -> None:
        """Cancel the reset that was just asked for, or the one after it; one that is told as
        canceled asks no broker.
        """
        world, number = self.world, self.reset_count
        began = len(world.history)
        await self.pause(0.6)
        try:
            canceled = await world._operator_meta.call(
                endpoints.CANCEL_RESET, subject=SUBJECT, group=GROUP
            )
        except KeylaneError as error:
            world.trace(f"not canceled: {error!r}")
            return
        world.trace(f"canceled {canceled!r}")
        if self.reset_count > number or world.shelf.last_reset > self.answered_id:
            # Another one, or a late copy of the request, which the metaserver cannot tell from
            # another one.
            began = max(began, self.answered_at)
        asked = self._asked_since(began)
        # The one before may be told as canceled again, while this one is being planned.
        if asked and canceled.asked.to is to:
            self.problems.append(f"told as canceled, and a broker was asked: {asked[0]}")

    def _asked_since(self, began: int) -> list[Resetting]:
        """What brokers were asked for, but for calls of before that the network brings again."""
        history = self.world.history
        before = {event for event in history[:began] if type(event) is Resetting}
        since = [event for event in history[began:] if type(event) is Resetting]
        return [event for event in since if event not in before]

    def _check_not_done(self, began: int, ask: ResetGroup, error: KeylaneError) -> None:
        """A reset that was told as not done has asked no broker, unless it is another one that is
        under way: also one whose request the network has brought again.
        """
        asked = self._asked_since(began)
        last_ask = self.world.shelf.last_reset_ask
        is_another = bool(last_ask) and msgspec.json.decode(last_ask, type=ResetGroup) != ask
        if asked and error.reason is not Reason.GROUP_BUSY and not is_another:
            self.problems.append(f"told as not done, and a broker was asked: {asked[0]} {error!r}")

    @property
    def drained(self) -> bool:
        return not self.world.shelf.pending_resets and self.parked.none_left

    def check(self, findings: Findings, hosted: dict[int, HostedPartition]) -> None:
        mine = {number: hosted[number] for number in self.world.partitions_of(SUBJECT)}
        self.problems += check_resets(self.world.history, set(mine))
        self.problems += granted_while_set(self.world.history, self.answers)
        if self.drained:
            ends = {number: mine[number].readable_offset for number in mine}
            self.problems += unhandled_after(self.world.history, self.answers, ends)
        self.problems = self.problems[:8]


def is_unsent(error: KeylaneError) -> bool:
    """Whether a metaserver was not reached; an earlier call may have begun the reset."""
    return isinstance(error, NotSentError) and error.partition_id is None


def check_resets(history: Sequence[Any], partitions: Collection[int]) -> list[str]:
    """
    What owners do around resets, told from tokens alone: those of a group grow with each grant and
    each reset.

    Once a broker has done a reset, no handler begins there under a lower token, and none of its
    owner's below the cursor; descendants may have taken messages over that lie there.
    """
    problems: list[str] = []
    newest: dict[int, int] = {}
    """Partition → token of the newest reset that its broker has done."""
    cursors: dict[tuple[int, int], int] = {}
    starts: dict[int, int] = {}
    """Partition → cursor of that reset."""
    homes: dict[int, int] = {}
    """Token → the partition that it is an owner's of."""
    for event in history:
        match event:
            case Resetting(_, partition_id, token, cursor) if partition_id in partitions:
                cursors[partition_id, token] = cursor
            case Served("acquire", _, partition_id, token):
                homes[token] = partition_id
            case Served("reset", _, partition_id, token) if partition_id in partitions:
                if token > newest.get(partition_id, 0):
                    newest[partition_id] = token
                    starts[partition_id] = cursors[partition_id, token]
            case Started() if event.partition_id in newest:
                reset = newest[event.partition_id]
                if event.token < reset:
                    problems.append(f"{event} begun after the reset of token {reset}")
                elif (
                    event.offset < starts[event.partition_id]
                    and homes.get(event.token, event.partition_id) == event.partition_id
                ):
                    problems.append(f"{event} begun below {starts[event.partition_id]}")
    return problems


def granted_while_set(history: Sequence[Any], answers: Sequence[GroupReset]) -> list[str]:
    """What the group was granted between the first cursor of a reset and the last."""
    asked: dict[int, int] = {}
    done: dict[int, int] = {}
    """Token → the first moment of either; a call that the network repeats sets the same cursor
    again.
    """
    for now, event in enumerate(history):
        if type(event) is Resetting:
            asked.setdefault(event.token, now)
        elif type(event) is Served and event.kind == "reset":
            done.setdefault(event.token, now)
    problems = []
    for answer in answers:
        tokens = {cursor.token for cursor in answer.cursors}
        mine = {cursor.partition_id for cursor in answer.cursors}
        first, last = min(asked[token] for token in tokens), max(done[token] for token in tokens)
        problems += [
            f"{event} granted while a reset sets {sorted(tokens)}"
            for event in history[first:last]
            if type(event) is Granted and event.partition_id in mine
        ]
    return problems


def unhandled_after(
    history: Sequence[Any], answers: Sequence[GroupReset], ends: dict[int, int]
) -> list[str]:
    """What the group has not handled from the cursor of a partition's last reset on, if an operator
    was told of that one.
    """
    done = {
        (event.partition_id, event.offset, event.token) for event in history if type(event) is Ended
    }
    skipped = {
        (event.partition_id, offset)
        for event in history
        if type(event) is SetAside and event.skipped
        for start, end in event.ranges
        for offset in range(start, end)
    }
    tokens: dict[tuple[int, int], int] = {}
    for partition_id, offset, token in done:
        tokens[partition_id, offset] = max(token, tokens.get((partition_id, offset), 0))
    newest: dict[int, int] = {}
    for event in history:
        if type(event) is Resetting:
            newest[event.partition_id] = max(event.token, newest.get(event.partition_id, 0))
    problems = []
    for cursor in (cursor for answer in answers for cursor in answer.cursors):
        if newest[cursor.partition_id] > cursor.token:
            continue
        missed = [
            offset
            for offset in range(cursor.cursor, ends.get(cursor.partition_id, 0))
            if tokens.get((cursor.partition_id, offset), 0) < cursor.token
            and (cursor.partition_id, offset) not in skipped
        ]
        if missed:
            problems.append(f"{cursor}, and offset {missed[0]} was never handled after it")
    return problems
