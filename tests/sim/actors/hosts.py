"""Simulated machines with the real programs on them: metaservers, brokers. Each can crash, and
start again.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from keylane.broker.control import BrokerControl
from keylane.broker.copies.follow_service import FollowService
from keylane.broker.copies.hand_over import HandingOver
from keylane.broker.copies.set_keeper import SetKeeper
from keylane.broker.parking import Parking
from keylane.broker.registration import Registration
from keylane.broker.retention.loop import RetentionLoop
from keylane.broker.scheduled.agenda import ScheduledAgenda
from keylane.broker.service import BrokerService
from keylane.broker.settings import BrokerSettings
from keylane.broker.storage.data_folder import (
    FolderIdentity,
    Opening,
    begin_opening,
    claim_folder,
    has_copies,
    record_heard,
)
from keylane.broker.store.group_changes import mark_groups_incomplete, refuse_old_tokens
from keylane.broker.store.store import Store
from keylane.checker.events import Event, Expired, Recovered, Resetting, Served
from keylane.metaserver.calls import control_routes
from keylane.metaserver.catalogue.service import Catalogue
from keylane.metaserver.cluster.brokers import broker_views
from keylane.metaserver.groups.service import GroupService
from keylane.metaserver.operations.balancing import Balancer
from keylane.metaserver.operations.driver import OperationDriver
from keylane.metaserver.periodic_tasks import PeriodicTasks
from keylane.metaserver.publications.service import PublicationService
from keylane.metaserver.removals.service import RemovalService
from keylane.metaserver.resets.live import LiveResets
from keylane.metaserver.resets.service import ResetService
from keylane.metaserver.retention.announcer import Announcer
from keylane.metaserver.retention.empty_partitions import PartitionExpirer
from keylane.metaserver.retention.history import HistoryExpirer
from keylane.metaserver.settings import MetaserverSettings
from keylane.metaserver.sql.clock_restart import give_time_back, restart_times_after_boot
from keylane.metaserver.starts.service import StartService
from keylane.protocol import endpoints
from keylane.protocol.control import BrokerHeartbeat, Health, Retention
from keylane.protocol.errors import KeylaneError
from keylane.protocol.frames import Follow
from keylane.rpc.client import MetaClient
from keylane.rpc.server import ControlRoute, Params
from keylane.testing.machines.disk import Crashed, SimDisk
from keylane.testing.machines.loop import Process, SimLoop
from keylane.testing.machines.machine import Machine
from keylane.testing.machines.network import Internet, Listener, SimNetwork
from sim.machines.database import Shelf, SimDatabase
from sim.machines.logs import Removed
from sim.machines.promises import Claims, DurableEnds
from sim.machines.quick_sync import HostQuickSync
from sim.machines.store import settings_of
from sim.machines.watched import WatchedService

META_SETTINGS = MetaserverSettings(
    data=Path("meta"), broker_heartbeat_ms=500, broker_ttl_ms=3_000, repair_ms=1_000, expire_ms=700
)


CLEAN_S = 1.0
TORN_BYTES = 64
"""A write that was not synced is torn into pieces of this."""


class Host:
    """A machine with one program on it, of which one process runs at a time."""

    leaving = False
    """True while the program closes in good manners."""

    def __init__(self, internet: Internet, machine: Machine, name: str, rng: random.Random) -> None:
        self.internet = internet
        self.loop: SimLoop = internet.loop
        self.machine = machine
        self.name = name
        self.rng = rng
        self.process = Process(name, machine.rate)
        self.process.alive = False
        self.starts = 0

    @property
    def running(self) -> bool:
        return self.process.alive

    def new_process(self) -> Process:
        assert not self.process.alive
        self.machine.up = True
        self.starts += 1
        self.process = Process(self.name, self.machine.rate)
        self.process.owner = self
        return self.process

    def spawn(self, work: Coroutine[Any, Any, None], context: contextvars.Context) -> None:
        """Run a task of the host's process; an exception it ends with is a find."""
        task = self.loop.create_task(work, context=context)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.loop.faults.append(error)

    def end(self, *, machine_down: bool) -> None:
        """End the process at once, in the middle of its work."""
        process = self.process
        process.kill()
        self.machine.up = not machine_down
        self.internet.remove_process(process, machine_down=machine_down)


class MetaHost(Host):
    """One metaserver process over a shelf that it may share with another."""

    def __init__(
        self,
        *args: Any,
        shelf: Shelf,
        address: str,
        slow_s: float,
        expires: bool,
        settings: MetaserverSettings = META_SETTINGS,
    ) -> None:
        super().__init__(*args)
        self._settings = settings
        self._expires = expires
        self.address = address
        self._shelf = shelf
        self._slow_s = slow_s
        self.crash_after_commits: int | None = None
        self.crash_after_steps: int | None = None
        self.resumes_resets = False
        """Where groups are reset under their consumers; elsewhere there is nothing to resume."""
        self.history_speed = 0
        """How much faster time passes for what is over; 0: nothing of it is forgotten."""
        self.tenant = ""
        """The principal of all consumers, where there is access control; "": there is none."""
        self.untold = False
        """It gave up to tell a child's broker when the parents ended."""
        self.crash_at_step = ""
        """The next step of this name is the last thing that the process does."""

    def start(self) -> None:
        process = self.new_process()
        process.context.run(self._start)

    def _start(self) -> None:
        database = SimDatabase(
            self._shelf, self.rng, after_commit=self._committed, slow_s=self._slow_s
        )
        self._shelf.run(
            restart_times_after_boot,
            (f"boot {self.machine.boots}",),
            {"broker_ttl_ms": self._settings.broker_ttl_ms},
            durable=True,
        )
        self._shelf.boot = self.machine.boots
        broker_ttl_ms = self._settings.broker_ttl_ms
        self._shelf.run(
            give_time_back, (), {"away_ms": None, "broker_ttl_ms": broker_ttl_ms}, durable=True
        )
        catalogue = Catalogue(database, SimNetwork(self.internet, self.process), self._settings)
        network = SimNetwork(self.internet, self.process)
        announcer = Announcer(
            database,
            network,
            self._settings,
            catalogue=catalogue,
            holder=f"{self.name}.{self.starts}",
        )
        starts = StartService(
            database, network, announce=announcer.announce, after_step=self._stepped
        )
        groups = GroupService(
            database, self._settings, announce=announcer.announce, create_group=starts.begin
        )
        if self.tenant:
            groups._quota_principal = lambda: self.tenant  # type: ignore[method-assign]
        operations = self._operations(database, network, catalogue, groups)

        async def health() -> Health:
            details = {"brokers": to_builtins(await database.read(broker_views))}
            return Health(program="metaserver", ready=True, details=details)

        resetter = LiveResets(
            database,
            ResetService(
                database,
                network,
                self._settings,
                holder=f"{self.name}.{self.starts}",
                after_step=self._stepped,
            ),
            groups.settle,
            clock=self.machine,
        )
        removals = RemovalService(
            database, network, catalogue=catalogue, groups=groups, after_step=self._stepped
        )
        routes = control_routes(
            database,
            network,
            catalogue,
            groups,
            health,
            operations,
            resets=resetter,
            removals=removals,
            starts=starts,
            balancer=Balancer(
                database,
                network,
                self._settings,
                operations,
                holder=f"{self.name}.{self.starts}",
                wait_until_settled=partial(asyncio.sleep, 0),
                hand_over=catalogue.hand_over,
            ),
            publications=PublicationService(
                database,
                self._settings,
                catalogue=catalogue,
                operations=operations,
                after_step=self._stepped,
            ),
        )
        self.internet.listen(self.address, Listener(self.process, self.machine, routes))
        duties = self._duties(database, network, catalogue) if self._expires else ()
        if self.history_speed:
            duties += (self._history_expirer(database).run_once,)
        more = (resetter.resume,) if self.resumes_resets else ()
        periodic_tasks = PeriodicTasks(
            database,
            groups,
            catalogue,
            self._settings,
            operations,
            duties=duties,
            removals=removals,
            quick_duties=(announcer.run_once, starts.resume, *more),
        )
        self.spawn(periodic_tasks.run(), self.process.context.copy())

    def _operations(
        self, database: Any, network: SimNetwork, catalogue: Catalogue, groups: GroupService
    ) -> OperationDriver:
        return OperationDriver(
            database,
            network,
            self._settings,
            catalogue=catalogue,
            groups=groups,
            driver=f"{self.name}.{self.starts}",
            rng=self.rng,
            after_step=self._stepped,
        )

    def _duties(self, database: Any, network: SimNetwork, catalogue: Catalogue) -> tuple[Any, ...]:
        holder = f"{self.name}.{self.starts}"
        expirer = PartitionExpirer(
            database, network, self._settings, catalogue=catalogue, holder=holder
        )
        return (expirer.run_once,)

    def _history_expirer(self, database: Any) -> HistoryExpirer:
        def now_ms() -> int:
            return int(asyncio.get_running_loop().time() * 1_000 * self.history_speed)

        holder = f"{self.name}.{self.starts}"
        return HistoryExpirer(database, self._settings, holder=holder, now_ms=now_ms)

    def _stepped(self, step: str) -> None:
        """Note that an operation has finished a step; after some steps the process dies."""
        self.untold |= step == "untold"
        if step == self.crash_at_step:
            self.crash_at_step = ""
            self.end(machine_down=False)
            raise Crashed(step)
        if self.crash_after_steps is None:
            return
        self.crash_after_steps -= 1
        if self.crash_after_steps <= 0:
            self.crash_after_steps = None
            self.end(machine_down=False)
            raise Crashed(step)

    def _committed(self) -> None:
        if self.crash_after_commits is None:
            return
        self.crash_after_commits -= 1
        if self.crash_after_commits <= 0:
            self.crash_after_commits = None
            self.end(machine_down=False)
            raise Crashed("after a commit")


class DiskHost(Host):
    """A machine with a disk, on which one of our programs keeps its data folder."""

    commits: frozenset[str] = frozenset({"_write", "fdatasync"})
    """The blocking functions that make something durable."""

    def __init__(self, *args: Any, disk_s: float) -> None:
        super().__init__(*args)
        self.disk = self._empty_disk()
        self._disk_s = disk_s
        self.gone = False
        """Only an operator starts it again."""
        self.stalled_until = 0.0
        """Nothing comes back from the disk before."""
        self.crash_after_commits: int | None = None

    def _empty_disk(self) -> SimDisk:
        return SimDisk(TORN_BYTES)

    async def _blocking(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Run `function` as a thread does: wait, work at one instant, wait."""
        rng = self.rng
        await asyncio.sleep(self._disk_s * rng.random())
        while self.loop.now < self.stalled_until:
            # By a clock that drifts: never less than what lets time pass.
            await asyncio.sleep(max(0.001, self.stalled_until - self.loop.now))
        try:
            result = function(*args)
        except Crashed:
            self.lose_power()
            raise
        self._committed(function)
        if rng.random() < 0.3:
            await asyncio.sleep(self._disk_s / 2 * rng.random())
        return result

    def _committed(self, function: Callable[..., Any]) -> None:
        """The host may die right after a sync, before any caller is answered."""
        name = getattr(function, "__name__", "")  # of a partial there is none
        if self.crash_after_commits is None or name not in self.commits:
            return
        self.crash_after_commits -= 1
        if self.crash_after_commits <= 0:
            self.end(machine_down=False)
            raise Crashed("after a commit")

    def end(self, *, machine_down: bool) -> None:
        super().end(machine_down=machine_down)
        self.crash_after_commits = None
        self.disk.close()
        self.disk.crash_at = None
        self.disk.tear_next = False

    def lose_power(self) -> None:
        """Stop the machine: writes that were not synced may be lost."""
        self.stalled_until = 0.0
        self.end(machine_down=True)
        self.disk = self.disk.disk_after_crash(self.rng)


class BrokerHost(DiskHost):
    """A broker with its disk."""

    def __init__(
        self,
        *args: Any,
        group: str,
        meta: list[str],
        port: int,
        record: Callable[[Event], None],
        clock_tick: Callable[[], int],
        settings: dict[str, Any],
        queued_bytes: int,
        disk_s: float,
        claims: Claims,
    ) -> None:
        self._settings = settings
        super().__init__(*args, disk_s=disk_s)
        self.group = group
        self._claims = claims
        self.store: Store | None = None
        self.port = port
        self._meta = meta
        self._record = record
        self._tick = clock_tick
        self._queued_bytes = queued_bytes
        self.removed = Removed()
        self.copied = False
        """The disk is an older copy at the moment: messages stored on it do not count."""
        self.lost_disk: SimDisk | None = None
        """What was on the disk that was lost."""
        self.copy_lag_ms: int | None = None
        """How long its commits wait for a late copy; None where there are no copies."""
        self._keeper: SetKeeper | None = None
        self.on_durable: Callable[[BrokerHost, int], None] = lambda _host, _end: None
        """Called when the end of its durable log has risen, where there are copies."""
        self._registration: Registration | None = None
        self._cleaning: RetentionLoop | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def heard(self) -> bool:
        """Whether the broker is registered: a metaserver has answered since its start, and the last
        call succeeded.
        """
        return self._registration is not None and not self._registration.problem

    def start(self) -> None:
        process = self.new_process()
        process.context.run(self._start)

    def _start(self) -> None:
        disk, machine = self.disk, self.machine
        disk.lock()
        identity = claim_folder(disk, broker_group=self.group, rng=self.rng)
        store = self.store = self._open_store()
        # From a generator of its own: what else a seed draws does not depend on it.
        opening = begin_opening(disk, rng=random.Random(f"{self.name} opening {self.starts}"))
        durable = DurableEnds(store)
        network = SimNetwork(self.internet, self.process)

        async def heard() -> None:
            record_heard(disk, opening)

        self._cleaning = None
        registration = self._registration = Registration(
            MetaClient(network, self._meta),
            lambda: self._heartbeat(store, identity, opening),
            rng=self.rng,
            clock=machine,
            on_accepted=heard,
            on_missed=lambda: mark_groups_incomplete(store),
            on_fence=lambda token: refuse_old_tokens(store, token),
            awaits_copies=has_copies(disk),
        )
        service = BrokerService(store, clock=machine, folder_ownership=registration)
        control = BrokerControl(
            store,
            broker_group=self.group,
            broker_id=identity.broker_id,
            opening=opening.opening,
            folder_ownership=registration,
            clock=machine,
            registration=lambda: registration.problem,
        )

        watched = WatchedService(
            service, durable, tick=self._tick, record=self._record_told, faults=self.loop.faults
        )
        self._begin_more(store, service, registration, network)
        more: list[ControlRoute] = []
        if self.copy_lag_ms is not None:
            handing = self._keep_copies(store, service, registration, identity, opening)
            more.append(handing.route())
        parking = Parking(store, service, clock=machine, folder_ownership=registration)
        routes = [self._watched(route) for route in (*control.routes(), *parking.routes(), *more)]
        listener = Listener(self.process, machine, routes, watched)
        self.internet.listen(self.address, listener)
        self.spawn(registration.run(), self.process.context.copy())
        if "retention_bytes" in self._settings:
            self.spawn(self._clean(store), self.process.context.copy())

    def _record_told(self, event: Event) -> None:
        """
        Record what the broker tells, but not the cursor with which it answers an ack that stores
        nothing once a copy has its place: it needs no copy for that, and does not know of the later
        acks. Sessions take no lower cursor from an ack.
        """
        is_idle_ack = isinstance(event, Served) and event.kind == "ack" and not event.ranges
        if not (is_idle_ack and self.copied and self.copy_lag_ms is not None):
            self._record(event)

    def _begin_more(
        self, store: Store, service: BrokerService, registration: Registration, network: SimNetwork
    ) -> None:
        """Begin what only some brokers do."""

    def succeed(self, other: BrokerHost) -> None:
        """Take over what is known of the group's log, with the folder of its copy."""
        self.removed = other.removed

    @property
    def is_behind(self) -> bool:
        """Whether a metaserver has told it that another folder has its place."""
        registration = self._registration
        return self.running and registration is not None and registration.is_behind.is_set()

    @property
    def is_replaced(self) -> bool:
        """Whether it was told that a copy was promoted."""
        return self._keeper is not None and self._keeper.is_replaced

    @property
    def least_folders(self) -> int:
        """How many data folders must have what it makes durable."""
        return 1 if self._keeper is None else self._keeper.commitment.least

    def _keep_copies(
        self,
        store: Store,
        service: BrokerService,
        registration: Registration,
        identity: FolderIdentity,
        opening: Opening,
    ) -> HandingOver:
        """Answer copies, let acks wait for them, and hand over to one."""
        assert self.copy_lag_ms is not None
        following = FollowService(
            store,
            broker_group=self.group,
            broker_id=identity.broker_id,
            opening=opening.opening,
            clock=self.machine,
            run_read=self._read_cached,
            background_turn=service.wait_background_turn,
            is_accepted=lambda: registration.is_current,
        )
        meta = MetaClient(SimNetwork(self.internet, self.process), self._meta)
        self._keeper = SetKeeper(
            store,
            self.disk,
            broker_group=self.group,
            broker_id=identity.broker_id,
            opening=opening.opening,
            change=partial(meta.call, endpoints.CHANGE_COPY_SET, group=self.group),
            offer=partial(meta.call, endpoints.OFFER_PLACE, group=self.group),
            known=registration.answered,
            is_registered=lambda: self.heard,
            run_blocking=self._blocking,
            clock=self.machine,
            rng=random.Random(f"{self.name} copies {self.starts}"),
            lag_ms=self.copy_lag_ms,
        )
        self._keeper.on_copied = registration.note_copied
        following.on_report = self._keeper.note_report
        following.may_be_ahead = self._keeper.may_be_ahead
        following.knows_durable_end = self._keeper.knows_durable_end
        service.register_handler(Follow, following.follow)
        end = store.log.end

        def note() -> None:
            nonlocal end
            if store.log.end > end:
                end = store.log.end
                self.on_durable(self, end)

        store.commit.on_commit.insert(0, note)
        self.spawn(self._keeper.run(), self.process.context.copy())

        def note_replaced(reason: str) -> None:
            registration.note_replaced(reason)
            service.close()

        return HandingOver(
            store.commit,
            following,
            self._keeper,
            broker_group=self.group,
            clock=self.machine,
            folder_ownership=registration,
            on_replaced=note_replaced,
        )

    async def _read_cached(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Read what is in the page cache: a disk that hangs does not matter."""
        await asyncio.sleep(self._disk_s * self.rng.random() ** 4)
        return function(*args)

    def _heartbeat(
        self, store: Store, identity: FolderIdentity, opening: Opening
    ) -> BrokerHeartbeat:
        return BrokerHeartbeat(
            broker_group=self.group,
            broker_id=identity.broker_id,
            address=self.address,
            writable=not store.commit.refusal_reason,
            problem=store.commit.refusal_reason,
            opening=opening.opening,
            opened_after=opening.earlier if self._registration.problem else (),
            log_end=store.log.end,
            hosted=len(store.state.partitions),
            untold=() if self._cleaning is None else self._cleaning.untold,
        )

    async def _clean(self, store: Store) -> None:
        """Run retention, more often than brokers do in production."""
        cleaning = self._cleaning = RetentionLoop(
            store,
            self.disk,
            self._broker_settings(),
            clock=self.machine,
            run_commit=self._blocking,
            run_read=self._blocking,
            folder_ownership=self._registration,
        )
        rise = store.first_offsets.raise_pending

        def watched(partition_id: int) -> None:
            partition = store.state.partitions.get(partition_id)
            first = store.first_offsets.pending_offsets.get(partition_id, 0)
            if partition is not None and partition.first_offset < first:
                self.removed.note(store, partition_id, partition.first_offset, first)
                by_age = partition.facts.retention is Retention.TIME
                claims = () if by_age else self._claims.of(partition_id)
                self._record(Expired(partition_id, first, claims))
            rise(partition_id)

        store.first_offsets.raise_pending = watched  # type: ignore[method-assign]
        while True:
            await asyncio.sleep(CLEAN_S)
            with contextlib.suppress(KeylaneError):  # with the next look
                await cleaning.check()

    def _watched(self, route: ControlRoute) -> ControlRoute:
        """Wrap a route: the calls of a reset are noted when they begin and when they end."""
        if route.endpoint is not endpoints.SET_CURSOR:
            return route

        async def watched(body: Any, params: Params) -> object:
            fields = (body.group, int(params["id"]), body.token)
            began = self._tick()
            self._record(Resetting(*fields, body.cursor, alone=bool(body.kept_children)))
            answer = await route.handler(body, params)
            self._record(Served("reset", *fields, began, body.cursor))
            return answer

        return replace(route, handler=watched)

    def _open_store(self) -> Store:
        """Open the store on the disk."""
        store = Store.open(
            self.disk,
            self._broker_settings(),
            clock=self.machine,
            run_commit=self._blocking,
            run_read=self._blocking,
            run_background=self._blocking,
            quick=HostQuickSync(self._blocking, self.lose_power),
            agenda=ScheduledAgenda(self.disk, self.machine),
        )
        # Less than settings allow, so that it is full at times.
        store.commit._queued_bytes_max = self._queued_bytes
        for partition_id, partition in (
            () if self.copied else sorted(store.state.partitions.items())
        ):
            for name, group in sorted(partition.groups.items()):
                self._record(Recovered(name, partition_id, group.lock.fence, group.acked.cursor))
        return store

    def _broker_settings(self) -> BrokerSettings:
        return settings_of(group=self.group, meta=tuple(self._meta), **self._settings)

    async def close_store(self) -> None:
        """Close the store as a broker that is stopped: with a snapshot of everything."""
        if self._keeper is not None:
            await self._keeper.close()
        if self.store is not None:
            await self.store.close()

    def look_at_disk(self, *, quiet: bool) -> Store:
        """The power goes; the seals left on the disk were durable, and if all was quiet there are
        no others.
        """
        sealed = set() if self.store is None else _sealed(self.store)
        self.disk.failing_operation, self.disk.free_space = "", None
        self.lose_power()
        store = self._open_store()
        sealed_now = _sealed(store)
        for partition_id in sorted(sealed - sealed_now):
            self.loop.faults.append(f"partition {partition_id} is sealed no more")
        for partition_id in sorted(sealed_now - sealed) if quiet else ():
            self.loop.faults.append(f"partition {partition_id} was sealed, and took messages")
        return store

    def _empty_disk(self) -> SimDisk:
        """In two of three worlds one that reserves bytes for logs."""
        disk = SimDisk(TORN_BYTES)
        disk.reserves = self._settings.get("segment_bytes") != 1 << 16
        return disk

    def replace_disk(self) -> None:
        """Lose the disk; the broker's next start finds an empty one."""
        self.lost_disk = self.disk
        self.disk = self._empty_disk()
        self.store = None

    def look_at_lost_disk(self) -> Store | None:
        """The store of the lost disk, for the judges only; None if no disk was lost."""
        if self.lost_disk is None:
            return None
        self.disk, self.copied = self.lost_disk, True
        self.disk.failing_operation, self.disk.free_space = "", None
        return self._open_store()


def _sealed(store: Store) -> set[int]:
    """The partitions whose seal has been told."""
    return {key for key, partition in store.state.partitions.items() if partition.ended}
