"""The faults: what each does to a world, and how it ends. Every fault mends itself after a while,
or is healed at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from keylane.protocol.errors import StorageError
from keylane.protocol.operations import OperationKind, Reshape
from keylane.testing.machines.disk import Crashed, SimDisk
from sim.actors.clients import SUBJECT, ProducerHost
from sim.actors.hosts import BrokerHost, DiskHost, Host, MetaHost
from sim.network_faults import NetworkFaults

if TYPE_CHECKING:
    from sim.world import World

STORIES = ("resize", "move", "split", "merge", "evacuate", "lost_lease", "ghosts")
"""Drawn more often than each fault: every one of them is a story of its own."""


class Faults(NetworkFaults):
    """Brings faults upon a world and heals it; `done` counts them."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.done = 0
        self._kinds: dict[str, Callable[[], None]] = {
            name: getattr(self, f"_{name}")
            for name in sorted(world.swarm.faults)
            if hasattr(self, f"_{name}")
        }

    def strike(self) -> None:
        """One fault, drawn from those of the swarm."""
        if self._kinds:
            self.done += 1
            some = [name for name in STORIES if name in self._kinds]
            often = bool(some) and self._rng.random() < 0.3
            name = self._rng.choice(some if often else list(self._kinds))
            self._world.trace(f"fault {name}")
            self._kinds[name]()

    # ── processes ─────────────────────────────────────────────────────────────────────────────────
    def restart(self, host: Host) -> None:
        """Start a host that is down; a broker that dies while starting is started again."""
        if isinstance(host, DiskHost) and host.gone:
            return
        if host.running:
            if self.healed and host.leaving:  # it was stopped in its goodbye
                self._later(0.5, self.restart, host)
            return
        try:
            if host in self._world.producers:
                self._world.start_producer(host)  # type: ignore[arg-type]
            else:
                host.start()  # type: ignore[attr-defined]
        except (Crashed, StorageError) as error:
            assert isinstance(host, BrokerHost)
            if (
                isinstance(error, StorageError)
                and not host.disk.failing_operation
                and host.disk.free_space is None
            ):
                self._loop.faults.append(error)
            if host.running:
                host.lose_power()
            self._later(0.5, self.restart, host)

    def _crash(self, hosts: list[Host], *, down_s: float = 3.0) -> None:
        host = self._some(hosts)
        if host is not None:
            host.end(machine_down=self._rng.random() < 0.3)
            self._later(down_s * self._rng.random(), self.restart, host)

    def _pause(self, hosts: list[Host], longest_s: float) -> None:
        """Freeze a host for a while; at times its calendar jumps meanwhile."""
        host = self._some(hosts)
        if host is not None and not host.process.paused:
            process = host.process
            process.paused = True
            if "wall_jump" in self._world.swarm.faults and self._rng.random() < 0.5:
                self._jump(host)
            self._later(longest_s * self._rng.random() ** 2, self._loop.resume, process)

    def _consumer_crash(self) -> None:
        self._crash(list(self._world.consumers))

    def _producer_crash(self) -> None:
        self._crash(list(self._world.producers))

    def _producer_close(self) -> None:
        """A producer is closed in the middle of its work; it tells the outcome of each message."""
        host = self._some(list(self._world.producers))
        if isinstance(host, ProducerHost):
            host.close()
            self._later(2 + self._rng.random(), self.restart, host)

    def _consumer_pause(self) -> None:
        self._pause(list(self._world.consumers), self._world.swarm.ttl_ms / 100)

    def _producer_pause(self) -> None:
        self._pause(list(self._world.producers), 5.0)

    def _broker_pause(self) -> None:
        self._pause(list(self._world.brokers), 5.0)

    def _meta_pause(self) -> None:
        self._pause(list(self._world.metas), 5.0)

    def _consumer_leave(self) -> None:
        host = self._some(list(self._world.consumers))
        if host is not None:
            host.leave()  # type: ignore[attr-defined]
            self._later(1 + 3 * self._rng.random(), self.restart, host)

    def _consumer_suspend(self) -> None:
        host = self._some(list(self._world.consumers))
        if host is not None:
            host.suspend(4 * self._rng.random())  # type: ignore[attr-defined]

    def _consumer_join(self) -> None:
        if len(self._world.consumers) < 8:
            self._world.add_consumer().start()

    # ── brokers ───────────────────────────────────────────────────────────────────────────────────
    def _broker_crash(self) -> None:
        self._crash(list(self._world.brokers), down_s=2.0)

    def _broker_power(self) -> None:
        host = self._some(list(self._world.brokers))
        if isinstance(host, BrokerHost):
            host.lose_power()
            self._later(0.2 + 2 * self._rng.random(), self.restart, host)

    def _broker_torn(self) -> None:
        """The power goes in the middle of one of the next operations of the disk."""
        host = self._some(list(self._world.brokers))
        if isinstance(host, BrokerHost):
            if self._rng.random() < 0.5:
                host.disk.tear_next = True
            else:
                host.disk.crash_at = host.disk.steps + self._rng.randint(1, 8)
            self._later(2.0, self.restart, host)
            self._later(4.0, self.restart, host)

    def _broker_commit(self) -> None:
        """The broker dies right after one of the next syncs, before any caller is answered; most of
        the callers send again.
        """
        host = self._some(list(self._world.brokers))
        if isinstance(host, BrokerHost):
            host.crash_after_commits = self._rng.randint(1, 4)
            self._later(1.0 + self._rng.random(), self.restart, host)
            self._later(3.0, self.restart, host)

    def _broker_stall(self) -> None:
        """A broker's disk does not answer for a while; in half of the cases the power fails
        meanwhile.
        """
        host = self._some(list(self._world.brokers))
        if isinstance(host, BrokerHost):
            seconds = 0.5 + 2 * self._rng.random()
            host.stalled_until = self._loop.now + seconds
            if self._rng.random() < 0.5:
                self._later(seconds * self._rng.random(), self._cut_power, host, host.starts)

    def _cut_power(self, host: BrokerHost, starts: int) -> None:
        """Cut the power after another fault; nothing happens after the healing."""
        if host.running and host.starts == starts and not self.healed:
            host.lose_power()
            self._later(0.1 + 0.5 * self._rng.random(), self.restart, host)

    def _broker_flush(self) -> None:
        """A write or a flush fails; an operator starts the broker again."""
        host = self._some(list(self._world.brokers))
        if isinstance(host, BrokerHost):
            host.disk.failing_operation = self._rng.choice(("fdatasync", "write"))
            if self._rng.random() < 0.5:  # once only, and no start looks for a while
                self._later(0.2 * self._rng.random(), _end_failures, host.disk)
            self._later(0.5 + self._rng.random(), self._change_disk, host)

    def _change_disk(self, host: BrokerHost) -> None:
        host.disk.failing_operation = ""
        if host.running:
            host.lose_power()
        self._later(0.5, self.restart, host)

    def _broker_full(self) -> None:
        host = self._some(list(self._world.brokers))
        if isinstance(host, BrokerHost):
            disk = host.disk
            disk.free_space = self._rng.randint(0, 2_000)
            self._later(2.0, _free_space, disk)

    def _broker_moves(self) -> None:
        """A broker restarts at another address."""
        host = self._some(list(self._world.brokers))
        if isinstance(host, BrokerHost):
            host.end(machine_down=False)
            host.port += 10
            self._later(self._rng.random(), self.restart, host)

    # ── metaservers ───────────────────────────────────────────────────────────────────────────────
    def _meta_crash(self) -> None:
        self._crash(list(self._world.metas))

    def _meta_commit(self) -> None:
        """The metaserver dies right after a commit, before any caller is answered."""
        host = self._some(list(self._world.metas))
        if isinstance(host, MetaHost):
            host.crash_after_commits = self._rng.randint(1, 6)
            self._later(3.0, self.restart, host)

    def _meta_power(self) -> None:
        """The metaservers' machine stops: another boot, and what was not synced may be gone."""
        world = self._world
        for host in world.metas:
            if host.running:
                host.end(machine_down=True)
        if self._rng.random() < 0.7:
            world.shelf.lose_power()
        world.metas[0].machine.reboot(self._rng.choice((1.0, 100.0, 1e6)))
        for host in world.metas:
            self._later(0.2 + 2 * self._rng.random(), self.restart, host)

    def _meta_step(self) -> None:
        """A metaserver dies right after a step of an operation on partitions."""
        host = self._some(list(self._world.metas))
        if isinstance(host, MetaHost):
            host.crash_after_steps = self._rng.randint(1, 4)
            self._later(3.0, self.restart, host)

    def _meta_told(self) -> None:
        """A metaserver dies at a step between hosting the new partitions and the later calls, and
        stays down for seconds.
        """
        host = self._some(list(self._world.metas))
        if isinstance(host, MetaHost):
            host.crash_at_step = self._rng.choice(
                ("hosted", "sealing", "telling", "opened", "opened")
            )
            self._later(3.0 + 3 * self._rng.random(), self.restart, host)
            self._move()

    # ── consumer groups ───────────────────────────────────────────────────────────────────────────
    def _dead_group(self) -> None:
        """A consumer of a new group is granted partitions and dies before it has asked a broker for
        any; at times while brokers cannot hear of the group.
        """
        if self._rng.random() < 0.5:
            self._broker_crash()
        self._world.add_dead_group()

    # ── partitions ────────────────────────────────────────────────────────────────────────────────
    def _resize(self) -> None:
        count = self._rng.randint(1, 6)
        self._world.operate(Reshape(kind=OperationKind.RESIZE, subject=SUBJECT, partitions=count))

    def _split(self) -> None:
        self._world.operate_on(1, OperationKind.SPLIT)

    def _merge(self) -> None:
        self._world.operate_on(2, OperationKind.MERGE)

    def _move(self) -> None:
        self._world.operate_on(1, OperationKind.MOVE, self._rng.choice(("g0", "g1")))

    def _evacuate(self) -> None:
        group = self._rng.choice(("g0", "g1"))
        self._world.operate(Reshape(kind=OperationKind.EVACUATE, broker_group=group))

    def _cordon(self) -> None:
        self._world.cordon(self._rng.choice(("g0", "g1")), 2 * self._rng.random())

    # ── the end ───────────────────────────────────────────────────────────────────────────────────
    def heal(self) -> None:
        """Bring everything up, connected and calm; the faults under way end within seconds."""
        self.healed = True
        world = self._world
        world.internet.heal()
        for broker in world.brokers:
            broker.crash_after_commits = None
            broker.disk.free_space = None
            broker.disk.tear_next = False
            if broker.disk.failing_operation or broker.disk.crash_at is not None:
                broker.disk.crash_at = None
                self._change_disk(broker)
        for meta in world.metas:
            meta.crash_after_commits = meta.crash_after_steps = None
            meta.crash_at_step = ""
        for consumer in world.consumers:
            consumer.calm = True
        for host in world.hosts:
            self._loop.resume(host.process)
            self.restart(host)


def _end_failures(disk: SimDisk) -> None:
    disk.failing_operation = ""


def _free_space(disk: SimDisk) -> None:
    disk.free_space = None
