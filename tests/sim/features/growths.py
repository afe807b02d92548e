"""A static subject is given more queues while messages flow: numbers, logic offsets and first
halves stay as they are.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from keylane.broker.partition.partition import HostedPartition
from keylane.checker.findings import Findings
from keylane.protocol import endpoints
from keylane.protocol.limits import LOGICAL_PARTITIONS
from keylane.protocol.message import Message, Receipt
from keylane.protocol.operations import OperationKind, Reshape
from sim.actors.clients import SUBJECT
from sim.features.feature import Feature
from sim.swarm import Swarm

QUEUES_MAX = 12
Place = tuple[int, int]
"""Queue and logic offset."""


class Growths(Feature):
    """See the module."""

    faults = frozenset({"meta_step", "move", "broker_crash"})

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        return replace(
            swarm, static=True, partitions=rng.choice((1, 2, 3)), messages=rng.choice((40, 80))
        )

    def build(self) -> None:
        self._members: set[int] | None = None
        """The partitions that are in queues; None if the world has starved, and nothing was
        asked.
        """
        self._told: dict[tuple[int, int], Place] = {}
        """Partition and offset → the queue and the logic offset that a receipt or a message had."""
        for producer in self.world.producers:
            producer.on_receipt = self._note_receipt
        for consumer in self.world.consumers:
            consumer.on_message = self.on_message

    def _note_receipt(self, _value: bytes, receipt: Receipt) -> None:
        assert receipt.logic_offset is not None
        self._note(receipt.partition_id, receipt.offset, receipt.queue, receipt.logic_offset)

    def on_message(self, message: Message) -> None:
        self._note(message.partition_id, message.offset, message.queue, message.logic_offset)

    def _note(self, partition_id: int, offset: int, queue: int, logic_offset: int) -> None:
        place = queue, logic_offset
        if self._told.setdefault((partition_id, offset), place) != place:
            self.problems.append(
                f"{partition_id}/{offset} is at {place}, and at {self._told[partition_id, offset]}"
            )

    async def work(self) -> None:
        """Grow again and again; a growth that is refused is no loss."""
        world, rng = self.world, self.rng
        queues = world.swarm.partitions
        while not world.faults.healed and queues < QUEUES_MAX:
            await self.pause(2.5)
            if rng.random() < 0.5:
                queues += rng.choice((1, 2, 3))
                ask = Reshape(kind=OperationKind.GROW, subject=SUBJECT, partitions=queues)
            else:
                chosen = (rng.randrange(queues),)
                ask = Reshape(kind=OperationKind.GROW, subject=SUBJECT, queues=chosen)
                queues += 1
            world.faults.done += 1
            await world._reshape(ask)

    async def look(self) -> None:
        """Ask for the queues at the end: partitions of canceled operations are in none."""
        queues = (await self.world._operator_meta.call(endpoints.QUEUES, subject=SUBJECT)).queues
        self._members = {
            int(segment.partition.partition_id) for queue in queues for segment in queue.segments
        }

    def check(self, findings: Findings, hosted: dict[int, HostedPartition]) -> None:
        if self._members is None:
            return
        mine = {number: hosted[number] for number in self.world.partitions_of(SUBJECT)}
        for number in sorted(mine.keys() - self._members):
            if mine.pop(number).next_offset:
                self.problems.append(f"partition {number} has messages, and is in no queue")
        chains = Chains(mine)
        self.problems += chains.problems
        for (partition_id, offset), place in self._told.items():
            if partition_id in mine and place != chains.place(partition_id, offset):
                self.problems.append(
                    f"{partition_id}/{offset} was told to be at {place}, and is at "
                    f"{chains.place(partition_id, offset)}"
                )
        self.problems = self.problems[:8]


class Chains:
    """The queues, worked out from what brokers have on their disks: ranges, parents, and numbers of
    messages.
    """

    def __init__(self, hosted: dict[int, HostedPartition]) -> None:
        self._hosted = hosted
        self.problems: list[str] = []
        self._starts: dict[int, int] = {}
        """Partition → its first logic offset."""
        tails: dict[int, int] = {}
        """Queue → its last partition."""
        for partition_id, partition in sorted(hosted.items()):
            facts = partition.facts.partition
            queue = int(facts.queue)
            for parent in map(int, facts.parents):
                self._check_child(partition_id, parent)
            before = tails.get(queue)
            self._starts[partition_id] = 0
            if before is not None:
                self._starts[partition_id] = self._starts[before] + self._hosted[before].next_offset
                if before not in facts.parents:
                    self.problems.append(f"queue {queue} goes from {before} to {partition_id}")
            tails[queue] = partition_id
        self._check_ranges(tails)

    def _check_child(self, partition_id: int, parent_id: int) -> None:
        """A child that begins where its parent did continues its queue; the second half of a cut
        does not.
        """
        child, parent = (self._facts(number) for number in (partition_id, parent_id))
        first_half = child.range_start == parent.range_start
        if first_half != (child.queue == parent.queue):
            self.problems.append(
                f"partition {partition_id} from {child.range_start} on has queue {child.queue}; "
                f"its parent from "
                f"{parent.range_start} on has queue {parent.queue}"
            )

    def _facts(self, partition_id: int) -> Any:
        return self._hosted[partition_id].facts.partition

    def _check_ranges(self, tails: dict[int, int]) -> None:
        if sorted(tails) != list(range(len(tails))):
            self.problems.append(f"the queues are {sorted(tails)}")
        edge = 0
        for facts in sorted(map(self._facts, tails.values()), key=lambda facts: facts.range_start):
            if facts.range_start != edge:
                self.problems.append(f"a queue begins at {facts.range_start}, not at {edge}")
            edge = facts.range_end
        if edge != LOGICAL_PARTITIONS:
            self.problems.append(f"the queues end at {edge}")

    def place(self, partition_id: int, offset: int) -> Place:
        """The queue and the logic offset of a stored message."""
        return int(self._facts(partition_id).queue), self._starts[partition_id] + offset
