"""Parked keys on uneasy ground: batches under them cannot be read, or retention takes what lies
around them.

damaged    once all is healed a disk spoils some of the batches that have parked messages: a key goes on up to its first
           message that cannot be read, and no further; no other key waits for that; then the
           batches are mended
retained   brokers remove old segments all the time, and no parked message with them
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import replace

from keylane.checker.events import Sent, Started
from sim.actors.hosts import BrokerHost
from sim.features.lacking import flip, place_of_batch, rows_of
from sim.features.parks import GROUP, Parks, expired_in, parked_on
from sim.lateness import outlast_reasons
from sim.swarm import Swarm

Place = tuple[int, int]
"""Partition and offset."""
SPOILED_SHARE = 0.3
"""Of the parked messages whose batches are spoiled."""
PROBLEMS_MAX = 8


class DamagedParks(Parks):
    """See the module."""

    may_have_copies = False

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        plan = super().plan(swarm, rng)
        consumer = {name: value for name, value in plan.consumer.items() if name != "on_full"}
        return replace(
            plan,
            consumer=consumer,
            broker=plan.broker | {"cache_bytes": 0},
            producer=plan.producer | {"batch_count": rng.choice((1, 2, 5))},
            messages=60,
        )

    def build(self) -> None:
        super().build()
        self._spoiled: set[Place] = set()
        """Messages that no broker can read."""
        self._flipped: list[tuple[BrokerHost, str, int]] = []
        self._mended = False

    async def work(self) -> None:
        """As other parks until all is healed; then spoil, redrive, look, mend, and redrive until
        nothing is parked.
        """
        world, keys = self.world, self.keys
        while not world.faults.healed:
            await self.pause(0.8)
            deed = self.rng.random()
            if deed < 0.45:
                keys.poison_some()
            elif deed < 0.55:
                keys.mend_some()
            elif deed < 0.75:
                await keys.change_some(chance=0.5)
            else:
                await self._reshape()
        while any(each.busy or each.waiting for each in world.producers):
            await asyncio.sleep(0.2)
        await asyncio.sleep(world.service.limit_s)
        self._spoil()
        keys.poison.clear()
        if self.rng.random() < 0.4:
            await self._reshape()
        redriving = asyncio.ensure_future(self._redrive())
        await asyncio.sleep(world.service.limit_s)
        await outlast_reasons(world.consumers, self._late)
        redriving.cancel()
        self._judge()
        self._mend()
        await self._redrive()

    async def _redrive(self) -> None:
        while True:
            await self.keys.change_some(chance=1.0)
            await asyncio.sleep(0.5)

    @property
    def drained(self) -> bool:
        return self._mended and super().drained

    # ── what is parked ────────────────────────────────────────────────────────────────────────────
    def _parked(self) -> dict[bytes, list[Place]]:
        """By key: its parked messages, in order, of all partitions that are not taken over."""
        expired = expired_in(self.world)
        by_key: dict[bytes, set[Place]] = {}
        for broker in self.world.brokers:
            for number, parked in parked_on(broker.store).items() if broker.store else ():
                if parked.frozen or number in expired:
                    continue
                for key, known in parked.items():
                    if isinstance(key, bytes) and key:
                        rows = known.rows(0, 1 << 30)
                        places = by_key.setdefault(key, set())
                        places |= {(s, at) for s, low, high in rows for at in range(low, high)}
        return {key: sorted(places) for key, places in by_key.items()}

    def _stuck(self) -> dict[bytes, list[Place]]:
        """By key: its parked messages that are not behind one that cannot be read."""
        stuck = {}
        for key, places in self._parked().items():
            first = next((at for at, place in enumerate(places) if place in self._spoiled), None)
            if first is None or first:
                stuck[key] = places[:first]
        return stuck

    def _late(self) -> dict[tuple[str, int], set[int]]:
        late: dict[tuple[str, int], set[int]] = {}
        for places in self._stuck().values():
            for source, offset in places:
                late.setdefault((GROUP, source), set()).add(offset)
        return late

    def _judge(self) -> None:
        for key, places in self._stuck().items():
            self.problems.append(
                f"{len(places)} messages of {key!r} stay parked, as {places[0]}, which can be read"
            )
        first_of = {key: places[0] for key, places in self._parked().items()}
        history = self.world.history
        keys = {event.value: event.key for event in history if type(event) is Sent}
        for event in history[self._spoiled_at :]:
            if type(event) is Started and event.group == GROUP:
                place = event.partition_id, event.offset
                if place in self._spoiled:
                    self.problems.append(f"{place} was handled, and cannot be read")
                elif first_of.get(key := keys[event.value], place) < place:
                    self.problems.append(f"{place} of {key!r} was handled before {first_of[key]}")
        del self.problems[PROBLEMS_MAX:]

    # ── the disk ──────────────────────────────────────────────────────────────────────────────────
    def _spoil(self) -> None:
        """Flip a byte in some of the batches that have parked messages."""
        self._spoiled_at = len(self.world.history)
        for places in self._parked().values():
            for place in places:
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
        self._mended = True


class RetainedParks(Parks):
    """See the module."""

    faults = frozenset({"broker_crash", "broker_power", "resize", "move", "consumer_pause"})

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        plan = super().plan(swarm, rng)
        few = {"segment_bytes": 4_096, "retention_bytes": rng.choice((1, 1, 8_192))}
        return replace(plan, messages=120, pace=3.0, padding_bytes=300, broker=plan.broker | few)

    async def work(self) -> None:
        watching = asyncio.ensure_future(self._watch())
        try:
            await super().work()
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        """No parked message is below the first offset of its partition."""
        while True:
            await asyncio.sleep(0.25)
            for source, offset in self._gone():
                self.problems.append(f"parked message {offset} of {source} was removed")
                return

    def _gone(self) -> Iterable[Place]:
        stores = [each.store for each in self.world.brokers if each.running and each.store]
        hosted = {
            number: each for store in stores for number, each in store.state.partitions.items()
        }
        expired = expired_in(self.world)
        for store in stores:
            for number, parked in parked_on(store).items():
                if parked.frozen or number in expired:
                    continue
                for source, low, _ in rows_of(parked):
                    if source in hosted and low < hosted[source].first_offset:
                        yield source, low
