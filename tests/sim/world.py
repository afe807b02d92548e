"""One seed: a cluster built, troubled, healed, drained and judged. The same seed is the same run,
to the byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from keylane.broker.partition.partition import HostedPartition
from keylane.broker.store.store import Store
from keylane.checker.events import Abandoned, Event, Ranged, Stored
from keylane.checker.findings import Findings
from keylane.checker.judge import check_history
from keylane.consumer.session_shell import SessionShell
from keylane.metaserver.settings import MetaserverSettings
from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject, Retention
from keylane.protocol.errors import KeylaneError
from keylane.protocol.operations import Cordon, OperationKind, OperationState, Reshape
from keylane.protocol.routing import OrderStrategy
from keylane.rpc.client import MetaClient
from keylane.rpc.environment import AMBIENT, Environment
from keylane.testing.machines.disk import Crashed
from keylane.testing.machines.loop import Process, SimLoop, StuckError
from keylane.testing.machines.machine import Machine
from keylane.testing.machines.network import Internet, SimNetwork
from sim.actors.clients import SUBJECT, ProducerHost
from sim.actors.consumers import BESIDE, ConsumerHost
from sim.actors.copying import Copying, has_copies
from sim.actors.creating import SECOND, Creator, is_creating
from sim.actors.hosts import META_SETTINGS, BrokerHost, Host, MetaHost
from sim.actors.losing import Loser, is_losing
from sim.actors.onlooker import read_everything
from sim.actors.operators import Operator, is_operated, uncordon
from sim.actors.outages import Outage, is_away
from sim.actors.outboxes import Outboxes, has_outbox
from sim.actors.poison import owed, told, unhandled
from sim.actors.retaining import DeadGroupHost, verify_on_the_way
from sim.actors.users import SHARED, Preloaded, Users
from sim.copies import Copier, is_copied
from sim.faults import Faults
from sim.lateness import misallocated, outlast_reasons
from sim.machines.calls import WatchedCalls
from sim.machines.database import Shelf
from sim.machines.logs import Removed, read_log
from sim.machines.movements import watched_movements
from sim.machines.real_clock import no_real_clock
from sim.machines.threads import simulated_threads
from sim.plans import usual_plan
from sim.service import Idleness, Service
from sim.swarm import Swarm, draw, has_company, has_twins, keyed_share
from sim.times import Times

DRAIN_S = 90.0
"""Virtual time that is enough, after everything is healed, to settle and handle every message."""
LOOK_S = 0.25
IDLE_LOOK_S = 0.05
QUIET_S = 4.0
"""After the healing a broker has reported itself within this, wherever it is now, unless a report
was lost just before.
"""
T = TypeVar("T")


@dataclass(slots=True)
class Outcome:
    """The result of a seed."""

    seed: int
    findings: Findings
    faults: int
    events: int
    trace: str
    virtual_s: float
    habits: list[str] = field(default_factory=list)
    """What its users did; see `users.HABITS`."""
    problems: list[str] = field(default_factory=list)
    """Uncaught exceptions, and loops that never end."""

    @property
    def violations(self) -> int:
        return self.findings.total + len(self.problems)


class World:
    """Every host of one seed."""

    broker_kind: type[BrokerHost] = BrokerHost
    meta_settings: MetaserverSettings = META_SETTINGS
    retention = Retention.ACKED
    drain_s = DRAIN_S
    is_usual = True
    """Its seed may bring company to consumers, and many messages without a key."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.swarm: Swarm = self._plan(draw(self.rng))
        self.preloaded = Preloaded()
        self.poison: set[bytes] = set()
        """Keys whose handlers fail."""
        if "poison" in self.swarm.habits:
            self.poison |= {b"k%d" % number for number in range((self.swarm.keys + 1) // 2)}
        self.loop = SimLoop(random.Random(self.rng.getrandbits(64)))
        self.internet = Internet(self.loop, self._new_rng())
        self.calls = WatchedCalls(self.internet)
        self.internet.conditions.delay_s = self.swarm.delay_s
        self.internet.conditions.orphan_chance = 0.5 if "ghosts" in self.swarm.faults else 0.0
        self.internet.conditions.duplicate_chance = 0.2 if "twice" in self.swarm.faults else 0.0
        self.history: list[Event] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self.machines: list[Machine] = []
        self.metas: list[MetaHost] = []
        self.brokers: list[BrokerHost] = []
        self.producers: list[ProducerHost] = []
        self.consumers: list[ConsumerHost] = []
        self._build()
        self.outboxes = self._add_outboxes()
        self._operator = Process("operator")
        network = SimNetwork(self.internet, self._operator)
        # Nothing is drawn for it: its readers and its admins are the same in every seed.
        clock = Machine(self.loop, "operator", rate=1.0, boot_s=1_000.0)
        surroundings = Environment(network=network, clock=clock, rng=random.Random(seed))
        self._operator.context.run(AMBIENT.set, surroundings)
        self._operator_meta = MetaClient(network, self._meta)
        self._operations: list[asyncio.Task[None]] = []
        self.faults = Faults(self)
        self.operator = Operator(self, self._operator_meta)
        self.copier = Copier(self)
        self.times = Times(self)
        self.loser = Loser(self, self._operator_meta)
        if is_losing(seed):
            self.shelf.watches_losses = True
            for producer in self.producers:
                producer.on_lost = self.loser.check_registered
        self.creator = Creator(self, self._operator_meta)
        self.outage: Outage | None = None
        self.copying = Copying(self, self._operator_meta)
        if self._has_copies():
            self.copying.add(self._meta)
        self.users = Users(self)
        groups = [f"group{index}" for index in range(self.swarm.groups)]
        if "share" in self.swarm.habits:
            groups.append(SHARED)
        if any(consumer.has_company for consumer in self.consumers):
            groups.append(BESIDE)
        self.service = Service(self.brokers, groups, ttl_ms=self.swarm.ttl_ms)
        self.idleness = Idleness()

    def _has_copies(self) -> bool:
        other = is_copied(self.seed) or is_losing(self.seed) or is_creating(self.seed)
        return has_copies(self.seed) and not other

    def _plan(self, swarm: Swarm) -> Swarm:
        """The plan of this seed, out of what it has drawn."""
        return usual_plan(self.seed, swarm)

    @property
    def hosts(self) -> list[Host]:
        copying = self.copying
        return [
            *self.metas,
            *self.brokers,
            *self.producers,
            *self.consumers,
            *self.outboxes.hosts,
            *copying.copies,
            *copying.given_up,
        ]

    @property
    def at_rest(self) -> bool:
        """Whether no operation of an operator is under way."""
        idle = self.operator.idle and self.loser.idle and self.creator.idle
        return idle and self.copying.idle

    def _new_rng(self) -> random.Random:
        return random.Random(self.rng.getrandbits(64))

    def record(self, event: Event) -> None:
        self.history.append(event)
        self.calls.recorded(event)
        self._digest.update(f"{self.loop.now!r}{event!r}".encode())

    def trace(self, text: str) -> None:
        self._digest.update(f"{self.loop.now!r}{text}".encode())

    # ── building ──────────────────────────────────────────────────────────────────────────────────
    def _machine(self, name: str) -> Machine:
        drift = 0.05 * (2 * self.rng.random() - 1) if "drift" in self.swarm.faults else 0.0
        boot_s = self.rng.choice((10.0, 1_000.0, 1e6))
        machine = Machine(self.loop, name, rate=1.0 + drift, boot_s=boot_s)
        if "wall_jump" in self.swarm.faults:
            machine.wall_jump_ms = self.rng.choice((0, 0, -3_600_000, 3_600_000))
        self.machines.append(machine)
        return machine

    def _build(self) -> None:
        """Add every host; what each draws depends on this order."""
        self._add_metaservers()
        self._add_brokers()
        self._add_producers()
        for _ in range(self.swarm.consumers * self.swarm.groups):
            self.add_consumer()
        if "share" in self.swarm.habits:
            for _ in range(2):
                self.add_consumer(group=SHARED)

    def _add_metaservers(self) -> None:
        machine = self._machine("meta")
        self.shelf = Shelf(machine, self.record)
        self.shelf.watched = "retention_bytes" in self.swarm.broker
        self._meta = [f"127.0.0.1:{7000 + index}" for index in range(self.swarm.metaservers)]
        for index, address in enumerate(self._meta):
            self.metas.append(
                MetaHost(
                    self.internet,
                    machine,
                    f"m{index}",
                    self._new_rng(),
                    shelf=self.shelf,
                    address=address,
                    slow_s=self.rng.choice((0.0, 0.005, 0.1)),
                    expires="retention_bytes" in self.swarm.broker,
                    settings=self.meta_settings,
                )
            )

    def _add_brokers(self) -> None:
        for index in range(2):
            name = f"b{index}"
            parts = self.internet, self._machine(name), name, self._new_rng()
            self.brokers.append(self._new_broker(*parts, group=f"g{index}", port=8000 + index))

    def _new_broker(self, *parts: Any, group: str, port: int) -> BrokerHost:
        return self.broker_kind(
            *parts,
            group=group,
            meta=self._meta,
            port=port,
            record=self.record,
            clock_tick=lambda: len(self.history),
            settings=self.swarm.broker,
            queued_bytes=self.swarm.queued_bytes,
            disk_s=self.swarm.disk_s,
            claims=self.shelf.claims,
        )

    def parts_of(self, name: str, rng: random.Random) -> tuple[Any, ...]:
        """A host's machine and what belongs to it, drawn from a generator of their own."""
        drift = 0.05 * (2 * rng.random() - 1) if "drift" in self.swarm.faults else 0.0
        machine = Machine(self.loop, name, rate=1.0 + drift, boot_s=rng.choice((10.0, 1e6)))
        self.machines.append(machine)
        return self.internet, machine, name, random.Random(rng.getrandbits(64))

    def new_broker(self, name: str, group: str, port: int, rng: random.Random) -> BrokerHost:
        """A further broker, which is not started yet."""
        return self._new_broker(*self.parts_of(name, rng), group=group, port=port)

    def _add_producers(self) -> None:
        swarm = self.swarm
        shared = [b"k%d" % number for number in range(swarm.keys)]
        for index in range(swarm.producers):
            self.producers.append(
                ProducerHost(
                    self.internet,
                    self._machine(f"p{index}"),
                    f"p{index}",
                    self._new_rng(),
                    record=self.record,
                    meta=self._meta,
                    keys=shared,
                    settings=swarm.producer,
                    strict=swarm.strict or swarm.static,
                    brokers=self.brokers,
                    padding_bytes=swarm.padding_bytes,
                    pace=swarm.pace,
                    twins=has_twins(self.seed),
                    habits=swarm.habits,
                    preloaded=self.preloaded,
                )
            )
            if self.is_usual:
                self.producers[-1].keyed_share = keyed_share(self.seed)

    def _add_outboxes(self) -> Outboxes:
        return Outboxes(self, self._meta, present=has_outbox(self.seed))

    def add_dead_group(self) -> None:
        """A consumer of a group of its own: it is killed when it is first granted something."""
        if any(isinstance(consumer, DeadGroupHost) for consumer in self.consumers):
            return
        host = self.add_consumer(DeadGroupHost, group="dead")
        self.service.expect("dead")
        host.start()

    def add_consumer(
        self, kind: type[ConsumerHost] | None = None, *, group: str = ""
    ) -> ConsumerHost:
        """Add a consumer to `group`; by default, to the groups with an order in turn."""
        kind = kind or ConsumerHost
        index = len(self.consumers)
        host = kind(
            self.internet,
            self._machine(f"c{index}"),
            f"c{index}",
            self._new_rng(),
            record=self.record,
            meta=self._meta,
            group=group or f"group{index % self.swarm.groups}",
            ttl_ms=self.swarm.ttl_ms,
            manners=self.swarm.manners,
            settings=self.swarm.consumer,
            left_ms=self.shelf.left_ms,
            habits=self.swarm.habits,
            preloaded=self.preloaded,
            poison=set() if group == SHARED else self.poison,
        )
        company = self.is_usual and has_company(self.seed)
        host.has_company = company and not self.swarm.habits
        self.consumers.append(host)
        return host

    def start_producer(self, host: ProducerHost) -> None:
        host.start(5 if self.faults.healed else self.swarm.messages)

    # ── running ───────────────────────────────────────────────────────────────────────────────────
    async def _create(self) -> None:
        strategy = OrderStrategy.STRICT if self.swarm.strict else OrderStrategy.BEST_TRIED
        ask = CreateSubject(
            subject=SUBJECT,
            partitions=self.swarm.partitions,
            order_strategy=strategy,
            static=self.swarm.static,
            retention=self.retention,
        )
        while True:
            try:
                await self._operator_meta.create_subject(ask)
                return
            except KeylaneError:
                await asyncio.sleep(0.2)

    def operate(self, ask: Reshape) -> None:
        """Ask for an operation on partitions, once; a refusal is fine."""
        self._operator_does(self._reshape(ask))

    def cordon(self, broker_group: str, seconds: float) -> None:
        """Keep a broker group from new partitions for a while."""
        self._operator_does(self._cordon(broker_group, seconds))

    async def _cordon(self, broker_group: str, seconds: float) -> None:
        with contextlib.suppress(KeylaneError):
            await self._operator_meta.call(
                endpoints.CORDON, Cordon(cordoned=True), group=broker_group
            )
        await asyncio.sleep(seconds)
        # Until it is heard, or no group may be left for a creation.
        await uncordon(broker_group, self._operator_meta)

    def operate_on(self, count: int, kind: OperationKind, broker_group: str = "") -> None:
        """Ask for an operation on `count` open partitions that lie side by side."""
        self._operator_does(self._reshape_some(count, kind, broker_group))

    def _operator_does(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work, context=self._operator.context.copy())
        task.add_done_callback(self._operator_did)
        self._operations.append(task)

    def _operator_did(self, task: asyncio.Task[None]) -> None:
        """An error that is none of ours ends an operator's work, and is a find."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, KeylaneError):
            self.loop.faults.append(error)

    async def _reshape_some(self, count: int, kind: OperationKind, broker_group: str) -> None:
        try:
            partitions = (await self._operator_meta.route(SUBJECT)).open_partitions()
        except KeylaneError:
            return
        start = self.rng.randrange(max(1, len(partitions) - count + 1))
        ids = tuple(partition.partition_id for partition in partitions[start : start + count])
        await self._reshape(Reshape(kind=kind, partition_ids=ids, broker_group=broker_group))

    async def _reshape(self, ask: Reshape) -> None:
        # Traces leave out the field that these operations never have.
        self.trace(f"operation {ask!r}".replace("queues=(), ", ""))
        try:
            if (
                ask.kind is OperationKind.EVACUATE
            ):  # the group that was evacuated before is well by now
                for group in {"g0", "g1"} - {ask.broker_group}:
                    await self._operator_meta.call(
                        endpoints.CORDON, Cordon(cordoned=False), group=group
                    )
            answer = await self._operator_meta.call(endpoints.RESHAPE, ask)
            self.trace(f"begun {answer!r}")
            if "cancel" in self.swarm.faults and self.rng.random() < 0.5:
                await asyncio.sleep(0.1 * self.rng.random() ** 2)
                for operation in answer.operations:
                    await self._operator_meta.call(
                        endpoints.CANCEL_OPERATION, id=operation.operation_id
                    )
        except KeylaneError as error:
            self.trace(f"not begun: {error!r}")

    async def _verify(self) -> list[str]:
        """The violations that `verify` finds once all is quiet."""
        seen = await self._operator_meta.call(endpoints.VERIFY)
        return [
            f"{check.code} {check.name}: {violation}"
            for check in seen.checks
            for violation in check.violations
        ]

    async def _operations_done(self) -> bool:
        subjects = [SUBJECT, SECOND] if is_creating(self.seed) else [SUBJECT]
        try:
            running = [
                operation
                for subject in subjects
                for operation in (
                    await self._operator_meta.call(endpoints.OPERATIONS, subject=subject)
                ).operations
            ]
        except KeylaneError:
            return False
        ended = {OperationState.DONE, OperationState.CANCELED}
        return all(operation.state in ended for operation in running)

    async def _tell_abandoned(self) -> None:
        """Record the partitions of which operators were told that their remaining messages are
        reordered, where that is allowed.
        """
        if self.swarm.strict or self.swarm.static:
            return
        for operation in (
            await self._operator_meta.call(endpoints.OPERATIONS, subject=SUBJECT)
        ).operations:
            for partition_id in operation.reordered:
                self.record(Abandoned(partition_id))

    async def live(self) -> float:
        """Run the seed; returns the virtual seconds that draining took, or -1 if it did not end."""
        await self._start_hosts()
        self._start_deeds()
        until = self.loop.now + self.swarm.fault_s
        while self.loop.now < until:
            await self._look_for(self.swarm.gap_s * 2 * self.rng.random())
            self.faults.strike()
        await asyncio.sleep(1.0)
        self.faults.heal()
        await asyncio.sleep(QUIET_S)
        if self.poison:
            await self._outlive_poison()
        healed_at = self.loop.now - QUIET_S
        if not await self._drain(healed_at + self.drain_s):
            return -1.0
        drained_s = self.loop.now - healed_at
        self.loop.faults += await misallocated(self.shelf, self.service.limit_s)
        self.outboxes.settle()
        await self._in_operator(self._tell_abandoned())
        self.loop.faults += await self._in_operator(
            read_everything(self._operator_meta, self._meta, SUBJECT)
        )
        for broker in self.brokers:
            if self.rng.random() < 0.5:
                work = broker.close_store()
                await self.loop.create_task(work, context=broker.process.context.copy())
        return drained_s

    async def _start_hosts(self) -> None:
        for meta in self.metas:
            meta.start()
        for broker in self.brokers:
            broker.start()
        await asyncio.sleep(0.7)
        await self._in_operator(self._create())
        for consumer in self.consumers:
            consumer.start()
        for producer in self.producers:
            self.start_producer(producer)
        for host in self.outboxes.hosts:
            host.start()
        if self.outboxes.hosts:
            self._operator_does(self.outboxes.work())

    def _start_deeds(self) -> None:
        """Begin what operators and users of this seed do besides."""
        if is_operated(self.seed):
            self._operator_does(self.operator.work())
        if is_copied(self.seed):
            self._operator_does(self.copier.work())
        if is_losing(self.seed):
            self._operator_does(self.loser.work())
        if is_creating(self.seed):
            self._operator_does(self.creator.work())
        if is_away(self.seed) and self.is_usual:
            self.outage = Outage(self)
            self._operator_does(self.outage.work())
        self._start_copying()
        if self.shelf.watched:
            self._operator_does(verify_on_the_way(self, self._operator_meta))
        if self.users.deeds:
            self._operator_does(self.users.work())

    def _start_copying(self) -> None:
        if self.copying.copies:
            self._operator_does(self.copying.work())

    async def _drain(self, until: float) -> bool:
        """Wait until all is handled, done and verified; returns False if that takes longer."""
        verified = False
        # The last look is the moment of the final log.
        while not (verified and self._drained() and self.at_rest):
            if self.loop.now > until:
                return False
            await asyncio.sleep(LOOK_S)
            if self.at_rest:
                self.service.look(self.loop.now)
            quiet = self._drained() and self.at_rest
            if quiet and await self._in_operator(self._operations_done()):
                violations = await self._in_operator(self._verify())
                # A broker may be looked for at its old address until it has reported itself.
                verified = not violations or all(broker.heard for broker in self.brokers)
                if verified:
                    self.loop.faults += violations
        return True

    async def _outlive_poison(self) -> None:
        """Nothing else fails any more: messages of other keys are all handled, and afterwards those
        of the failing keys.
        """
        stores = [
            broker.store for broker in self.brokers if broker.running and broker.store is not None
        ]
        debts = owed(self.service, stores, self.poison) if self.at_rest else {}
        await asyncio.sleep(self.service.limit_s)
        await outlast_reasons(self.consumers, lambda: unhandled(debts, self.history))
        if self.at_rest:  # else a group may have been stopped
            self.loop.faults += told(unhandled(debts, self.history))
        self.poison.clear()

    async def _look_for(self, seconds: float) -> None:
        """Watch the consumers for `seconds`."""
        until = self.loop.now + seconds
        while (left := until - self.loop.now) > 0:
            await asyncio.sleep(min(left, IDLE_LOOK_S))
            self.idleness.look(self.consumers)

    async def _in_operator(self, work: Coroutine[Any, Any, T]) -> T:
        return await self.loop.create_task(work, context=self._operator.context.copy())

    def _drained(self) -> bool:
        if any(producer.busy or producer.waiting for producer in self.producers):
            return False
        return self.outboxes.drained and self.service.drained and self.copying.complete

    def read_logs(self, *, quiet: bool) -> None:
        """The final log into the history, as the brokers' disks give it to readers after the power
        went.
        """
        lost_disks: list[Store] = []
        for broker in self.brokers:
            try:
                store = broker.look_at_disk(quiet=quiet)
                for partition_id, partition in sorted(store.state.partitions.items()):
                    self._read_log(store, partition_id, partition, broker.removed)
                lost = broker.look_at_lost_disk()
                if lost is not None:
                    lost_disks.append(lost)
                    for partition_id, partition in sorted(lost.state.partitions.items()):
                        self._read_log(lost, partition_id, partition, broker.removed)
            except KeylaneError as error:  # what was told as durable cannot be read
                self.loop.faults.append(error)
        self.loser.check_lost(lost_disks)

    def _read_log(
        self, store: Store, partition_id: int, partition: HostedPartition, removed: Removed
    ) -> None:
        facts = partition.facts.partition
        self.record(Ranged(partition_id, facts.range_start, facts.range_end))
        self.times.note(store, partition_id, partition)
        first = partition.first_offset
        gone = removed.before(partition_id, first)
        if sum(type(message) is Stored for message in gone) != first:
            self.loop.faults.append(
                f"partition {partition_id} begins at {first} for no reason on record"
            )
        for event in (*gone, *read_log(store, partition_id, first, partition.readable_offset)):
            self.record(event)

    def _check(self) -> Findings:
        """What the history shows."""
        return check_history(self.history)

    def judge(self, drained_s: float) -> Outcome:
        self.read_logs(quiet=drained_s >= 0)
        findings = self._check()
        problems = [
            f"{type(fault).__name__}: {fault}" if isinstance(fault, BaseException) else fault
            for fault in self.loop.faults
            if not isinstance(fault, Crashed)
        ]
        problems += self.service.problems.values()
        problems += self.times.problems()
        problems += self.idleness.problems.values()
        problems += self.copying.problems
        if drained_s < 0 and not findings.total:
            findings.note("starvation", f"not drained after {self.drain_s} s")
        return Outcome(
            seed=self.seed,
            findings=findings,
            faults=self.faults.done,
            events=len(self.history),
            trace=self._digest.hexdigest(),
            virtual_s=self.loop.now,
            habits=sorted(self.swarm.habits),
            problems=problems,
        )


def run_seed(seed: int, kind: type[World] = World) -> Outcome:
    """Build, run and judge one seed."""
    log = logging.getLogger("keylane")
    log.setLevel(logging.CRITICAL + 1)
    if not log.handlers:
        log.addHandler(logging.NullHandler())  # no ready lines of consumers
    gc.disable()
    world = kind(seed)
    try:
        drained_s = -1.0
        try:
            watched = watched_movements(world.shelf.problems)
            with simulated_threads(), no_real_clock(), watched:
                drained_s = world.loop.run_until_complete(world.live())
        except StuckError as error:
            world.loop.faults.append(error)
        return world.judge(drained_s)
    finally:
        world.loop.dispose()
        world.outboxes.close()
        _cut_rings()
        gc.enable()


def _cut_rings() -> None:
    """
    Empty the objects that messages and futures of sends refer to.

    The garbage collector does not look into messages and futures (`gc=False`), so a ring through
    one of them would keep the whole world. What the seed made is in the youngest generation:
    nothing was collected meanwhile.
    """
    for thing in gc.get_objects(generation=0):
        if issubclass(type(thing), (Host, SessionShell)):
            vars(thing).clear()
