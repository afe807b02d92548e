"""Messages that wait for retry, and dead letters, whose sources lack some of them: damaged, removed
by age, or lost with a disk.

damaged   a disk spoils a few of the batches, until an operator mends them: nothing else waits for
that removed   the subject's retention is by age: what was removed is given up, and nothing else is
lost      the disk of a broker is lost for good, and an operator accepts the loss: what was on it is
given up copied    a broker runs on an older copy of its folder for a while: nothing is given up
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace

from keylane.broker.partition.parked import Parked
from keylane.broker.partition.partition import HostedPartition
from keylane.broker.storage.log.commit_log import segment_path
from keylane.checker.events import Served, SetAside
from keylane.protocol.control import Retention
from keylane.protocol.record import HEADER_BYTES
from sim.actors.hosts import BrokerHost
from sim.actors.losing import for_losses
from sim.copies import for_copies
from sim.features.parks import GROUP, parked_on
from sim.features.retries import Retries
from sim.swarm import Swarm

Place = tuple[int, int]
"""Partition and offset."""
Row = tuple[int, int, int]
"""Partition, and offsets `[start, end)`."""
SPOILED_SHARE = 0.4
"""Of the batches that have messages which wait."""


def place_of_batch(broker: BrokerHost, source: int, offset: int) -> tuple[str, int, range] | None:
    """The segment of the batch with a message, the position there behind its header, and its
    offsets; None if the broker is down or has none.
    """
    store = broker.store
    if store is None or source not in store.state.partitions:
        return None
    (unit,) = store.queues.find(source, offset, end=offset + 1, bytes_max=1)
    base = max(each for each in store.log.bases if each <= unit.position)
    at = unit.position - base + HEADER_BYTES
    return segment_path(base), at, range(unit.base_offset, unit.next_offset)


def flip(broker: BrokerHost, path: str, at: int) -> None:
    """Damage a byte of a file, or put it back."""
    broker.disk.contents[path].data[at] ^= 0xFF


class Damaged(Retries):
    """See the module."""

    may_have_copies = False

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        plan = super().plan(swarm, rng)
        return replace(plan, broker=plan.broker | {"cache_bytes": 0})

    def build(self) -> None:
        super().build()
        self._spoiled: set[Place] = set()
        """Messages that no broker can read."""
        self._flipped: list[tuple[BrokerHost, str, int]] = []

    async def work(self) -> None:
        """
        Once every message was looked at, spoil some that wait, and have no handler fail: all others
        are handled.

        A dead letter waits for nothing either, so an operator redrives all of them. Then the
        batches are mended.
        """
        await self.look_at_all()
        self._spoil()
        self._fails = False
        self._redriven = len(self.world.history)
        redriving = asyncio.ensure_future(self._redrive())
        await self.retry_all()
        redriving.cancel()
        held = self._waiting()[0] - self._spoiled
        if held:
            self.problems.append(
                f"{len(held)} dead letters wait for others, as {min(held)} for "
                f"{min(self._spoiled, default=None)}"
            )
        self._mend()
        await self.retry_all()
        await self.redrive_all()

    async def _redrive(self) -> None:
        while True:
            await self.keys.change_some(chance=1.0)
            await asyncio.sleep(0.5)

    def _spoil(self) -> None:
        """Flip a byte in some of the batches that have messages which wait."""
        dead, retrying = self._waiting()
        for place in sorted(dead | retrying.keys()):
            if place not in self._spoiled and self.rng.random() < SPOILED_SHARE:
                self._spoil_batch(*place)

    def _spoil_batch(self, source: int, offset: int) -> None:
        for broker in self.world.brokers:
            batch = place_of_batch(broker, source, offset)
            if batch is None:
                continue
            path, at, offsets = batch
            flip(broker, path, at)
            self._flipped.append((broker, path, at))
            self._spoiled |= {(source, each) for each in offsets}
            self.world.faults.done += 1
            self.world.trace(f"batch of {source}/{offset} is spoiled")

    def _mend(self) -> None:
        """Put the bytes back, and start brokers again without a snapshot, which may tell of the
        damage.
        """
        for broker, path, at in self._flipped:
            flip(broker, path, at)
        for broker in {id(each): each for each, _, _ in self._flipped}.values():
            broker.end(machine_down=False)
            for name in broker.disk.list("snapshot"):
                broker.disk.remove(f"snapshot/{name}")
            self.world.faults.restart(broker)
        self._spoiled = set()

    def _still_waiting(self) -> set[Place]:
        return super()._still_waiting() - self._spoiled


class RemovedByAge(Retries):
    """See the module."""

    retention = Retention.TIME

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        plan = super().plan(swarm, rng)
        few = {"segment_bytes": 4_096, "retention_bytes": rng.choice((1, 8_192, 16_384))}
        return replace(
            plan,
            messages=rng.choice((60, 120)),
            pace=3.0,
            padding_bytes=300,
            broker=plan.broker | few,
        )

    def _is_gone(self, place: Place) -> bool:
        return any(broker.removed.upto(place[0]) > place[1] for broker in self.world.brokers)


class OnLostDisks(Retries):
    """See the module."""

    may_have_copies = False

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        return for_losses(super().plan(swarm, rng))

    def build(self) -> None:
        super().build()
        self._gone: set[Place] = set()
        """Messages that waited, as only the lost disk knew."""
        world = self.world
        world.shelf.watches_losses = True
        for producer in world.producers:
            producer.on_lost = world.loser.check_registered

    async def work(self) -> None:
        self.world._operator_does(self.world.loser.work())
        await super().work()

    def lost(self, partitions: Iterable[HostedPartition]) -> None:
        """
        Note what only the lost disk knew to wait: a message that a lost partition had taken over
        may be on another disk.

        It is handled all the same while an ancestor there, the first behind partitions that are
        lost, has it in its list. An ancestor forgets its list when nothing of what it stores itself
        is parked any more.
        """
        here = {int(each.partition_id): each for each in partitions}
        living = {
            number: rows_of(parked)
            for broker in self.world.brokers
            if broker.store is not None
            for number, parked in parked_on(broker.store).items()
            if number not in here
        }
        ranges = {
            number: (each.facts.partition.range_start, each.facts.partition.range_end)
            for hosted in (here, *self._hosted())
            for number, each in hosted.items()
        }
        for number, partition in here.items():
            group = partition.groups.get(GROUP)
            if group is None or group.parked is None or group.parked.frozen:
                continue
            kept = {
                place
                for ancestor in _before(number, here, ranges)
                for place in _places(living.get(ancestor, []))
            }
            gone = _places(rows_of(group.parked)) - kept
            for source, offset in sorted(gone):
                row = ((offset, offset + 1),)
                self.world.record(SetAside(GROUP, source, 0, row, skipped=True))
            self._gone |= gone

    def _hosted(self) -> list[Mapping[int, HostedPartition]]:
        stores = [broker.store for broker in self.world.brokers]
        return [dict(store.state.partitions.items()) for store in stores if store is not None]

    def _is_gone(self, place: Place) -> bool:
        return place in self._gone or place[0] in self.world.shelf.lost

    def _forgotten(self) -> set[int]:
        """Only the lost disk knew how often messages were tried under leases of its partitions, and
        that they were handled.
        """
        return {
            event.token
            for event in self.world.history
            if isinstance(event, Served) and event.kind == "acquire"
            if event.partition_id in self.world.shelf.lost
        }


class OnCopies(Retries):
    """See the module."""

    may_have_copies = False

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        return for_copies(super().plan(swarm, rng))

    async def work(self) -> None:
        self.world._operator_does(self.world.copier.work())
        await super().work()


def rows_of(parked: Parked) -> list[Row]:
    """All that is parked on a partition."""
    return [row for _, known in parked.items() for row in known.rows(0, 1 << 30)]


def _places(rows: Iterable[Row]) -> set[Place]:
    return {(source, offset) for source, start, end in rows for offset in range(start, end)}


def _before(
    number: int, lost: Mapping[int, HostedPartition], ranges: Mapping[int, tuple[int, int]]
) -> set[int]:
    """
    The first living ancestors of a lost partition whose list goes to those that continue it.

    Retries and dead letters are loose: they go where the first logical partition of the ancestor
    goes.

    Args:
        ranges: the logical partitions of every partition.
    """
    ancestors: set[int] = set()
    left = [(number, *ranges[number])]
    while left:
        below, start, end = left.pop()
        for parent in map(int, lost[below].facts.partition.parents):
            first, last = ranges.get(parent, (0, 0))
            part = max(start, first), min(end, last)
            if parent in lost:
                left.append((parent, *part))
            elif part[0] <= first < part[1]:
                ancestors.add(parent)
    return ancestors
