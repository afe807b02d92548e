"""Faults of network and clocks, and what all faults share: their targets, and their ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.actors.clients import ProducerHost
from sim.actors.hosts import Host

if TYPE_CHECKING:
    from sim.world import World


class NetworkFaults:
    """Cuts, loses, delays and doubles calls, and sets clocks wrong, until `healed`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng: random.Random = world.rng
        self._loop = world.loop
        self.healed = False
        conditions = world.internet.conditions
        self._usual = {
            name: getattr(conditions, name)
            for name in ("loss_chance", "late_chance", "duplicate_chance")
        }

    def _some(self, hosts: list[Host]) -> Host | None:
        running = [host for host in hosts if host.running]
        return self._rng.choice(running) if running else None

    def _later(self, seconds: float, action: Callable[..., None], *args: object) -> None:
        self._loop.after(seconds, action, *args)

    def _cut(self, left: list[Host], right: list[Host]) -> None:
        net = self._world.internet
        source, target = self._rng.choice(left).name, self._rng.choice(right).name
        links = [(source, target), (target, source)]
        if "one_way" in self._world.swarm.faults and self._rng.random() < 0.5:
            links = [self._rng.choice(links)]
        seconds = self._rng.choice((0.5, 2.0, 6.0)) * self._rng.random()
        for link in links:
            net.cut_link(*link)
            self._later(seconds, net.heal_link, *link)

    def _cut_consumer_meta(self) -> None:
        self._cut(list(self._world.consumers), list(self._world.metas))

    def _lost_lease(self) -> None:
        """
        A consumer falls silent in the middle of its work, to the metaservers alone or altogether,
        until others have what it held; or until its time is over by its own reckoning, and by the
        database's not quite.
        """
        world, rng = self._world, self._rng
        host = self._some(list(world.consumers))
        if host is None or host.process.paused:
            return
        ttl_s = world.swarm.ttl_ms / 1000
        for producer in world.producers:
            for share in (0.0, 0.0, 0.9, 1.1):
                self._later(ttl_s * share, self.burst, producer)
        silent_s = ttl_s * (1.2 + 2 * rng.random())
        if rng.random() < 0.4:
            silent_s = ttl_s * (0.45 + 0.55 * rng.random())
        elif "broker_power" in world.swarm.faults:
            # The brokers' machines stop while the new owners come, and the old one wakes up when
            # they are back.
            down_s = ttl_s * (0.9 + 0.7 * rng.random())
            silent_s = down_s + 0.8 * rng.random()
            for broker in world.brokers:
                if "broker_stall" in world.swarm.faults:
                    broker.stalled_until = self._loop.now + down_s
                self._later(down_s, self._cut_power, broker, broker.starts)
        if "wall_jump" in world.swarm.faults:
            self._later(ttl_s * rng.random(), self._jump, host)
        self._later(0.1 * rng.random(), self._fall_silent, host, silent_s)

    def _fall_silent(self, host: Host, silent_s: float) -> None:
        world, rng = self._world, self._rng
        if "consumer_pause" in world.swarm.faults and rng.random() < 0.5:
            host.process.paused = True
            self._later(silent_s, self._loop.resume, host.process)
            return
        only_there = "one_way" in world.swarm.faults and rng.random() < 0.5
        deaf_to: list[tuple[Host, float]] = [(meta, silent_s) for meta in world.metas]
        if "cut_consumer_broker" in world.swarm.faults and rng.random() < 0.7:
            # And to the brokers for longer: acks at a late hand-over cannot be flushed.
            deaf_to += [(broker, silent_s + 1.5 * rng.random()) for broker in world.brokers]
        for other, seconds in deaf_to:
            links = ((host.name, other.name), (other.name, host.name))
            for link in links[: 1 if only_there else 2]:
                world.internet.cut_link(*link)
                self._later(seconds, world.internet.heal_link, *link)

    def burst(self, producer: ProducerHost) -> None:
        if not self.healed:
            producer.burst()

    def _cut_consumer_broker(self) -> None:
        self._cut(list(self._world.consumers), list(self._world.brokers))

    def _cut_broker_meta(self) -> None:
        self._cut(list(self._world.brokers), list(self._world.metas))

    def _cut_producer(self) -> None:
        self._cut(list(self._world.producers), list(self._world.brokers + self._world.metas))

    def _reset(self) -> None:
        net = self._world.internet
        alive = [connection for connection in net.connections if not connection.broken]
        if alive:
            self._rng.choice(alive).reset()

    def _wall_jump(self) -> None:
        hosts = [*self._world.metas, *self._world.consumers, self._rng.choice(self._world.hosts)]
        self._jump(self._rng.choice(hosts))

    def _jump(self, host: Host) -> None:
        jump_ms = self._rng.choice((-3_600_000, -5_000, 5_000, 3_600_000))
        host.machine.wall_jump_ms += jump_ms

    def _loss(self) -> None:
        self._for_a_while("loss_chance", 0.3 * self._rng.random())

    def _late(self) -> None:
        self._for_a_while("late_chance", 0.3 * self._rng.random())

    def _twice(self) -> None:
        self._for_a_while("duplicate_chance", 0.5 * self._rng.random())

    def _ghosts(self) -> None:
        """
        Frames of a producer to a broker are stuck until its connection breaks. The next connection
        works, and the stuck frames reach the broker later; their answers are lost.
        """
        world, rng = self._world, self._rng
        producer = rng.choice(world.producers)
        alive = [connection for connection in world.internet.connections if not connection.broken]
        brokers = {
            connection.server.process.name
            for connection in alive
            if connection.client is producer.process
        }
        if not brokers:
            return
        link = (producer.name, rng.choice(sorted(brokers)))
        stuck_s = 0.3 + 1.7 * rng.random()
        world.internet.cut_link(*link)
        self._later(stuck_s, world.internet.break_link, *link)
        for after_s in (0.0, stuck_s, stuck_s + 0.2, stuck_s + 0.5):
            self._later(after_s, self.burst, producer)

    def _for_a_while(self, name: str, value: float) -> None:
        conditions = self._world.internet.conditions
        setattr(conditions, name, value)
        self._later(3 * self._rng.random(), self._calm, name)

    def _calm(self, name: str) -> None:
        """Set the conditions back to the usual ones of this seed."""
        setattr(self._world.internet.conditions, name, 0.0 if self.healed else self._usual[name])
