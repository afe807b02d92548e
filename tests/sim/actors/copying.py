"""In some worlds of every kind brokers have copies of their folders, and acks wait for them.

    brokers and copies end, lose power, stand still, are cut off from each other and from
    metaservers; disks of copies are lost, full, fail, lie and are older images; the database is
    restored from a backup; a broker is given up, dead or not, and a copy takes its place

What an operator gives up is never restarted as the broker of its group, but it may run on for a
while, and not know. It draws from generators of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from keylane.broker.copies.folding import Folding
from keylane.broker.copies.follower import Follower
from keylane.broker.offline.promotion import demote_folder, promote_candidate, read_candidate
from keylane.broker.partition.image import encode_partition
from keylane.broker.scheduled.agenda import ScheduledAgenda
from keylane.broker.storage.copy_file import Candidate
from keylane.broker.storage.index.kinds import mark_incomplete, open_index
from keylane.broker.storage.log.commit_log import segment_bases, segment_path
from keylane.broker.store.opening import OpenedState, Recovery
from keylane.metaserver.cluster.fall_backs import note_history, read_history
from keylane.metaserver.sql.schema import copy_sets
from keylane.protocol import endpoints
from keylane.protocol.copies import HandOver, PromoteCopy, SetCopies
from keylane.protocol.errors import (
    ConflictError,
    DataFolderError,
    KeylaneError,
    Reason,
    StorageError,
)
from keylane.rpc.client import MetaClient
from keylane.testing.machines.disk import SimDisk
from keylane.testing.machines.network import SimNetwork
from sim.actors.folders import copy_of
from sim.actors.hosts import META_SETTINGS, BrokerHost, DiskHost

if TYPE_CHECKING:
    from sim.world import World

FIRST_NUMBER = 100_000_000
"""Worlds before are what they were: faults and mutants are known by them."""
EVERY_NUMBER = range(400_000_000, 500_000_000)
"""All of these have copies; of the others a quarter."""
TAKING_OVER = range(450_000_000, 500_000_000)
"""In these, a copy takes the place of a broker that is gone by itself, and brokers that were
replaced become copies.
"""
HANDING_OVER = range(460_000_000, 500_000_000)
"""In these of them, operators let brokers hand over to copies as well."""
LOOK_S = 0.5
NEAR_BYTES = 20_000
"""So much of the end of a log is compared at each commit."""
REQUEST_S = 2.0
"""Within this time a request that was sent is answered, or lost."""
REFUSED_S = 1 + META_SETTINGS.broker_ttl_ms / 1000
"""So long a broker that was given up is known as refused."""


def has_copies(number: int) -> bool:
    """Whether brokers have copies in the world of this number, of any kind."""
    return number in EVERY_NUMBER or (number >= FIRST_NUMBER and number % 4 == 3)


class CopyHost(DiskHost):
    """A program that keeps a copy of a broker's folder."""

    commits = frozenset({"append", "_store"})

    def __init__(self, *args: Any, group: str, meta: list[str], disk_s: float) -> None:
        super().__init__(*args, disk_s=disk_s)
        self.group = group
        self._meta = meta
        self.disk.reserves = True
        self.on_cut: Callable[[CopyHost, int], None] = lambda _host, _position: None
        """Called before its log is cut to a position."""
        self.on_unusable: Callable[[CopyHost], None] = lambda _host: None
        """Called when the follower has found that its disk has lost what it had synced."""
        self.has_lied = False
        """True if the disk has lost what it had synced."""
        self.disk_fails = False
        """True while the disk is full or takes no writes."""
        self.former: list[SimDisk] = []
        """Disks of which something was lost: the broker may count with what they had."""
        self.takes_over = False
        self.folds = False
        """Whether it is kept ready to serve."""
        self.on_place: Callable[[CopyHost], None] = lambda _host: None
        """Called when the copy has the place of its broker."""

    def start(self) -> None:
        process = self.new_process()
        process.context.run(self._start)

    def _start(self) -> None:
        self.disk.lock()
        network = SimNetwork(self.internet, self.process)
        folding = Folding(
            self.disk,
            "file",
            make_agenda=partial(ScheduledAgenda, self.disk, self.machine),
            clock=self.machine,
            run_blocking=self._fold,
        )
        follower = Follower(
            self.disk,
            self.group,
            meta=MetaClient(network, self._meta),
            network=network,
            run_blocking=self._blocking,
            clock=self.machine,
            rng=random.Random(f"{self.name} {self.starts}"),
            takes_over=self.takes_over,
            folding=folding if self.folds else None,
        )
        self.spawn(self._follow(follower, folding), self.process.context.copy())

    async def _follow(self, follower: Follower, folding: Folding) -> None:
        """Follow until the disk fails or the copy has the broker's place; what else ends a copy is a
        find.
        """
        try:
            await follower.run()
            if self.folds:
                self._compare_folded(await folding.finish())
            self.on_place(self)
        except StorageError as error:
            if self.has_lied and error.reason in {Reason.COPY_UNUSABLE, Reason.COPY_DIFFERS}:
                self.end(machine_down=False)
                self.on_unusable(self)
                return
            if not self.disk_fails:
                raise
            self.end(machine_down=False)

    async def _fold(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """In a thread of its own."""
        return await super()._blocking(function, *args)

    def _compare_folded(self, recovery: Recovery | None) -> None:
        """What was applied while it followed is what a broker reads from the folder."""
        if recovery is None:
            return
        disk = copy_of(self.disk)
        agenda = ScheduledAgenda(disk, self.machine)
        mark_incomplete(disk, "file")
        read = Recovery(disk, open_index(disk, "file"), agenda, clock=self.machine).finish()
        ours, theirs = _images(recovery.finish()), _images(read)
        recovery.queues.close_unflushed()
        if ours != theirs:
            ids = [each for each in theirs if ours.get(each) != theirs[each]]
            self.loop.faults.append(f"{self.name} has applied other records: {ids or sorted(ours)}")

    async def _blocking(self, function: Callable[..., Any], /, *args: Any) -> Any:
        if getattr(function, "__name__", "") == "cut":
            self.on_cut(self, *args)
        return await super()._blocking(function, *args)

    def new_folder(self) -> SimDisk:
        """Give its folder away, and go on with an empty one."""
        given, self.disk = self.disk, self._empty_disk()
        self.has_lied = False
        return given


class Copying:
    """The copies of a world, what troubles them, and what is promised of them."""

    def __init__(self, world: World, meta: MetaClient) -> None:
        self._world = world
        self._meta = meta
        self._rng = random.Random(f"copying {world.seed}")
        self.copies: list[CopyHost] = []
        self.given_up: list[BrokerHost] = []
        """Brokers in whose place a copy has come, and which may run on."""
        self._given_up_at: dict[BrokerHost, int] = {}
        """By such a broker, the end of the copy that has its place. The copy's last report may have
        been on its way then.
        """
        self._tears = self._rng.random() < 0.3
        """Mostly, brokers lose power while they sync."""
        self.promoted = 0
        self.handed_over = 0
        self.fallen_back = 0
        self._asking: list[asyncio.Future[None]] = []
        """The hand-overs that were asked for."""
        self._replaced: list[tuple[BrokerHost, CopyHost]] = []
        """Brokers whose folder becomes a copy, each with the host that keeps it then."""
        self._old: set[CopyHost] = set()
        """Copies whose disk is an older image, until they have caught up."""
        self._is_settled = True
        """True once no copy is promoted on purpose any more."""
        self._refused_until_s = 0.0
        """Until then metaservers may know a broker that was given up as refused."""
        self._ends: dict[str, int] = {}
        """By group, the end of what was durable: acked, or about to be."""
        self.problems: list[str] = []

    # ── building ──────────────────────────────────────────────────────────────────────────────────
    def add(self, meta: list[str]) -> None:
        """Add copies of one or two brokers."""
        world, rng = self._world, self._rng
        for broker in rng.sample(world.brokers, rng.choice((1, 1, 2))):
            self._watch(broker, rng.choice((200, 1_000)))
            for index in range(rng.choice((1, 1, 2))):
                name = f"{broker.name}copy{index}"
                host = CopyHost(
                    *world.parts_of(name, rng),
                    group=broker.group,
                    meta=meta,
                    disk_s=world.swarm.disk_s,
                )
                host.on_cut, host.on_unusable = self._note_cut, self._begin_anew
                host.takes_over = world.seed % 10**9 in TAKING_OVER
                host.folds = world.seed % 10**9 in HANDING_OVER
                host.on_place = self._take_over
                self.copies.append(host)

    def _watch(self, broker: BrokerHost, lag_ms: int) -> None:
        broker.copy_lag_ms = lag_ms
        broker.on_durable = self._note_durable

    def _note_durable(self, broker: BrokerHost, end: int) -> None:
        if broker in self.given_up:
            if end > self._given_up_at[broker]:
                self.problems.append(
                    f"{broker.name} has made {end} durable, and a copy was promoted in its place"
                )
            return
        self._ends[broker.group] = end
        for copy in self._members(broker.group):
            if lacking := _lacks(copy.disk, broker.disk, end, start=end - NEAR_BYTES):
                self.problems.append(
                    f"{broker.name} has made {end} durable, {copy.name} may be promoted in its "
                    f"place, {lacking}"
                )
        least = broker.least_folders
        folders = 1 + sum(
            any(
                not _lacks(disk, broker.disk, end, start=end - NEAR_BYTES)
                for disk in (copy.disk, *copy.former)
            )
            for copy in (self._copies_of(broker.group) if least > 1 else ())
        )
        if folders < least:
            self.problems.append(
                f"{broker.name} has made {end} durable, which {folders} of {least} folders have"
            )

    def _note_cut(self, copy: CopyHost, position: int) -> None:
        end = self._ends.get(copy.group, 0)
        if position < end and copy in self._members(copy.group):
            self.problems.append(
                f"{copy.name} is cut to {position}, may be promoted, and {end} is durable"
            )

    def _copies_of(self, group: str) -> list[CopyHost]:
        return [copy for copy in self.copies if copy.group == group]

    # ── running ───────────────────────────────────────────────────────────────────────────────────
    async def work(self) -> None:
        """Start the copies, have acks wait for them, and trouble them until all is healed."""
        world, rng = self._world, self._rng
        self._is_settled = False
        for copy in self.copies:
            copy.start()
        await self._want_all()
        while not world.faults.healed:
            await asyncio.sleep(LOOK_S * rng.random())
            self._check_sets()
            self._look_after_brokers()
            if world.faults.healed:
                break
            if world.outage is not None and world.outage.is_quiet:
                continue
            if self._tears and rng.random() < 0.7:
                self._tear(rng.choice(self.copies).group)
            else:
                await self._trouble(rng.random())
        for broker in self.given_up:
            broker.gone = True
            if broker.running:
                broker.end(machine_down=False)
        for _, copy in self._replaced:
            self._start_anew(copy)
        self._replaced.clear()
        await self._want_all()
        self._refused_until_s = world.loop.now + REFUSED_S
        self._is_settled = True
        while True:
            await asyncio.sleep(LOOK_S)
            await self._want_all()  # a request of before may have come late
            self._check_sets()
            self._look_after_brokers()

    def _look_after_brokers(self) -> None:
        """Restart a broker that was told of a promotion which its operator has given up, and one
        that was given up, once another serves.
        """
        world = self._world
        for broker in world.brokers:
            if broker.running and broker.is_replaced:
                broker.end(machine_down=False)
                world.faults.restart(broker)
        for pair in [each for each in self._replaced if each[0].is_behind]:
            self._replaced.remove(pair)
            self._demote(*pair)
        serving = {broker.group for broker in world.brokers if broker.running and broker.heard}
        for broker in self.given_up:
            if broker.gone and broker.group in serving and not world.faults.healed:
                broker.gone = False
                world.faults.restart(broker)

    async def _want_all(self) -> None:
        for group in sorted({copy.group for copy in self.copies}):
            wanted = 1 + len(self._copies_of(group))
            query = "SELECT wanted, quarantine FROM copy_sets WHERE broker_group = ?"
            if self._world.shelf.ask(query, (group,)) != [(wanted, "")]:
                # A copy may be gone that would have to follow; none was promoted unnoticed.
                request = SetCopies(wanted=wanted, end_quarantine=True)
                await self._call(endpoints.SET_COPIES, request, group)

    async def _trouble(self, deed: float) -> None:
        world, rng = self._world, self._rng
        host = rng.choice(self.copies)
        if host.takes_over and rng.random() < 0.3:
            self._stop_broker(host.group)
        elif host.folds and rng.random() < 0.3:
            copy_id = _id_of(host.disk) if rng.random() < 0.5 else ""
            # Its answer may be lost: other troubles do not wait for it.
            self._asking.append(asyncio.ensure_future(self._hand_over(host.group, copy_id)))
        elif deed < 0.12:
            host.end(machine_down=rng.random() < 0.3)
            world.loop.after(4 * rng.random(), world.faults.restart, host)
        elif deed < 0.24:
            host.lose_power()
            world.loop.after(4 * rng.random(), world.faults.restart, host)
        elif deed < 0.32 and host.running and not host.process.paused:
            host.process.paused = True
            world.loop.after(4 * rng.random() ** 2, world.loop.resume, host.process)
        elif deed < 0.40:
            host.stalled_until = world.loop.now + 3 * rng.random()
        elif deed < 0.55:
            self._cut(host)
        elif deed < 0.65:
            self._black_out(host.group)
        elif deed < 0.73 and self.promoted < 2:
            await self._give_up(host.group)
        elif deed < 0.83 and self._is_promoted(host):
            pass  # only an operator could say what is to be given up
        elif deed < 0.77:
            await self._lose_disk(host)
        elif deed < 0.81:
            await self._put_back(host)
        elif deed < 0.83:
            self._lie(host)
        elif deed < 0.86:
            count = rng.randint(1, 1 + len(self._copies_of(host.group)))
            await self._call(endpoints.SET_COPIES, SetCopies(wanted=count), host.group)
        elif deed < 0.91:
            self._tear(host.group)
        elif deed < 0.94:
            self._fail_disk(host)
        else:
            # Other troubles do not wait for it: they change the set meanwhile.
            self._asking.append(asyncio.ensure_future(self._fall_back(host.group)))

    async def _lose_disk(self, host: CopyHost) -> None:
        if await self._ends_without_place(host):
            host.former.append(host.new_folder())
        self._world.loop.after(2 * self._rng.random(), self._world.faults.restart, host)

    def _fail_disk(self, host: CopyHost) -> None:
        """A copy's disk is full, or takes no writes, for a while."""
        if host.gone or not host.running:
            return
        host.disk_fails = True
        if self._rng.random() < 0.5:
            host.disk.free_space = self._rng.randint(0, 2_000)
        else:
            host.disk.failing_operation = self._rng.choice(("fdatasync", "write"))
        self._world.loop.after(3 * self._rng.random(), self._mend_disk, host, host.disk)

    def _mend_disk(self, host: CopyHost, disk: SimDisk) -> None:
        """An operator makes room, or the disk takes writes again; what was not synced is gone."""
        for each in (disk, host.disk):
            has_failed = each.failing_operation
            each.free_space, each.failing_operation = None, ""
            if has_failed and each is host.disk:
                host.lose_power()
        host.disk_fails = False
        self._world.faults.restart(host)

    async def _fall_back(self, group: str) -> None:
        """The database falls back, as far as it knows of copies; in half of the cases the disk of a
        copy is lost meanwhile.
        """
        rng, shelf = self._rng, self._world.shelf
        ask = (
            "SELECT wanted, least, members, term, version, durable_end, quarantine FROM copy_sets "
            "WHERE broker_group = ? AND promoted = ''"
        )
        [*before] = shelf.ask(ask, (group,))
        now, until = before, self._world.loop.now + 5 * rng.random()
        while [row[4] for row in now] == [row[4] for row in before]:
            if self._world.loop.now > until:
                break
            await asyncio.sleep(LOOK_S * rng.random())
            [*now] = shelf.ask(ask, (group,))
        if self._world.faults.healed:
            return
        if not before or not now or before[0][3] != now[0][3]:
            return  # a copy was promoted: the broker's row would be another one as well
        if shelf.run(_put_back_rows, (group, before[0]), {}, durable=True):
            self.fallen_back += 1
        if rng.random() < 0.5:
            await self._lose_disk(rng.choice(self._copies_of(group)))

    async def _put_back(self, host: CopyHost) -> None:
        """An older image of a copy's disk takes the place of the disk, of which the broker has
        reported that it has more.
        """
        world, rng = self._world, self._rng
        image = copy_of(host.disk)
        await asyncio.sleep(3 * rng.random())
        if _id_of(host.disk) == _id_of(image) and self._reported(host.group) > _synced_end(image):
            if await self._ends_without_place(host):
                host.former.append(host.disk)
                host.disk = image
                self._old.add(host)
            world.loop.after(rng.random(), world.faults.restart, host)

    def _lie(self, host: CopyHost) -> None:
        """The power of a copy goes, and its disk has lost bytes that it had synced, of which the
        broker has reported that they are durable.
        """
        world, rng = self._world, self._rng
        bases = segment_bases(host.disk)
        if not bases:
            return
        host.lose_power()
        kept = _synced_end(host.disk) - rng.randint(1, 3_000)
        if max(bases[-1], self._reported(host.group) - 3_000) <= kept < self._reported(host.group):
            host.former.append(copy_of(host.disk))
            content = host.disk.contents[segment_path(bases[-1])]
            for data in (content.data, content.synced):
                del data[kept - bases[-1] :]
            host.has_lied = True
            self._old.add(host)
        world.loop.after(2 * rng.random(), world.faults.restart, host)

    async def _ends_without_place(self, host: CopyHost) -> bool:
        """End a copy whose disk is about to be lost. Return False if it was started again
        meanwhile, or gets the place of its broker, because its request was on its way.
        """
        host.end(machine_down=True)
        if host.takes_over:
            await asyncio.sleep(REQUEST_S)
        return not (host.running or self._is_promoted(host))

    def _is_promoted(self, host: CopyHost) -> bool:
        """Whether the copy has the place of its broker, and may not know it yet, or asks for it."""
        if not host.takes_over:
            return False
        promoted = self._world.shelf.ask("SELECT promoted FROM copy_sets")
        broker = next(each for each in self._world.brokers if each.group == host.group)
        return _id_of(host.disk) in {each for (each,) in promoted if each} or not (
            broker.running and broker.heard
        )

    def _begin_anew(self, host: CopyHost) -> None:
        """An operator gives a copy an empty folder."""
        host.former.append(host.new_folder())
        self._world.loop.after(self._rng.random(), self._world.faults.restart, host)

    def _reported(self, group: str) -> int:
        """The end of the log that a metaserver knows of: a copy that has less is not promoted."""
        ask = "SELECT durable_end FROM copy_sets WHERE broker_group = ?"
        return max((int(end) for (end,) in self._world.shelf.ask(ask, (group,))), default=0)

    def _cut(self, host: CopyHost) -> None:
        world, rng = self._world, self._rng
        broker = next(each for each in world.brokers if each.group == host.group)
        other, seconds = rng.choice([*world.metas, broker]), rng.choice((0.5, 2.0)) * rng.random()
        one = broker if other is not broker and rng.random() < 0.7 else host
        links = [(one.name, other.name), (other.name, one.name)]
        for link in links if rng.random() < 0.6 else [rng.choice(links)]:
            world.internet.cut_link(*link)
            world.loop.after(seconds, world.internet.heal_link, *link)

    def _black_out(self, group: str) -> None:
        """The power of a broker and its copies goes at one instant."""
        world, rng = self._world, self._rng
        brokers = [each for each in world.brokers if each.group == group]
        for host in (*brokers, *self._copies_of(group)):
            if rng.random() < 0.8 and not host.gone:
                host.lose_power()
                world.loop.after(2 * rng.random(), world.faults.restart, host)

    def _stop_broker(self, group: str) -> None:
        """A broker is killed, or cut off from its metaservers, for longer than its ttl at times."""
        world, rng = self._world, self._rng
        broker = next(each for each in world.brokers if each.group == group)
        if not broker.running or not self._members(group):
            return
        if rng.random() < 0.7:
            broker.end(machine_down=rng.random() < 0.3)
            world.loop.after(6 * rng.random(), world.faults.restart, broker)
        else:
            self._isolate(broker)

    def kill_brokers(self) -> bool:
        """Kill the brokers whose copies may take their places. Return True if there are any."""
        world = self._world
        groups = {copy.group for copy in self.copies if copy.takes_over}
        brokers = [each for each in world.brokers if each.group in groups and each.running]
        for broker in brokers:
            if self._members(broker.group):
                broker.end(machine_down=self._rng.random() < 0.3)
                world.loop.after(20.0, world.faults.restart, broker)
        return bool(brokers)

    def _tear(self, group: str) -> None:
        """The power of a broker goes while it syncs its next commit: copies may have what it loses,
        and at times they are away when it returns.
        """
        world, rng = self._world, self._rng
        broker = next(each for each in world.brokers if each.group == group)
        if not broker.running or broker.store is None or not self._members(group):
            return
        commit, starts = broker.store.commit, broker.starts
        wake = commit.copy_wait.on_write

        def lose_power() -> None:
            if broker.running and broker.starts == starts and not broker.gone:
                for copy in self._copies_of(group) if rng.random() < 0.3 else ():
                    copy.end(machine_down=False)
                    world.loop.after(3 * rng.random(), world.faults.restart, copy)
                broker.lose_power()
                world.loop.after(0.5 * rng.random(), world.faults.restart, broker)

        def written() -> None:
            commit.copy_wait.on_write = wake
            wake()
            # The disk hangs for as long as a copy needs.
            seconds = 0.05 + 8 * world.swarm.delay_s + 4 * world.swarm.disk_s
            broker.stalled_until = world.loop.now + seconds
            world.loop.after(seconds * rng.choice((0.3, 0.6, 0.95)), lose_power)

        commit.copy_wait.on_write = written
        for producer in world.producers:
            world.faults.burst(producer)

    # ── promotion ─────────────────────────────────────────────────────────────────────────────────
    async def _give_up(self, group: str) -> None:
        """An operator takes a broker for lost, and promotes a copy if none of what was acked is
        lost.
        """
        world, rng = self._world, self._rng
        broker = next(each for each in world.brokers if each.group == group)
        copy = rng.choice(self._copies_of(group))
        if copy.gone or copy.disk_fails:
            return  # it waits for the folder of a broker that was replaced, or for its disk
        broker.gone = copy.gone = True
        runs_on = rng.random() < 0.5 and broker.running
        if runs_on:
            self._isolate(broker)
        else:
            broker.lose_power()
        await asyncio.sleep(3 * rng.random())
        if broker not in world.brokers:  # a copy has taken its place by itself meanwhile
            if all(copy is not each for _, each in self._replaced):
                self._start_anew(copy)
            return
        if copy.running:
            copy.end(machine_down=False)
        # What it has may be as much as was reported, and less than was durable since.
        is_between = copy in self._old and _synced_end(copy.disk) >= self._reported(group)
        candidate = None if is_between else await self._asked_for(copy, broker)
        copy.gone = False
        if candidate is None:
            broker.gone = False
            world.faults.restart(broker)
        else:
            self._promote(broker, copy, candidate)
        world.faults.restart(copy)

    async def _hand_over(self, group: str, copy_id: str) -> None:
        """An operator asks for a hand-over, to this copy or any; while other faults are near."""
        with contextlib.suppress(KeylaneError):
            await self._meta.call(endpoints.HAND_OVER, HandOver(copy_id=copy_id), group=group)
            self.handed_over += 1

    def _isolate(self, broker: BrokerHost) -> None:
        """Cut a broker off from all metaservers, until it is taken for dead; it runs on."""
        world = self._world
        for meta in world.metas:
            for link in ((broker.name, meta.name), (meta.name, broker.name)):
                world.internet.cut_link(*link)
                world.loop.after(8 + 4 * self._rng.random(), world.internet.heal_link, *link)

    async def _asked_for(self, copy: CopyHost, broker: BrokerHost) -> Candidate | None:
        """Ask for the promotion of a copy; None if it may lack something."""
        try:
            candidate = read_candidate(copy.disk)
        except DataFolderError:  # never complete
            return None
        request = PromoteCopy(
            copy_id=candidate.copy.copy_id,
            broker_id=candidate.broker_id,
            log_end=candidate.log_end,
        )
        patient_until = self._world.loop.now + 15
        while True:
            try:
                await self._meta.call(endpoints.PROMOTE_COPY, request, group=copy.group)
            except ConflictError as error:
                if error.reason is not Reason.BROKER_SERVES or broker in self.given_up:
                    return None
                if self._world.loop.now > patient_until and broker.running:
                    broker.lose_power()
            except KeylaneError:  # it may have been promoted: the operator asks until it is known
                pass
            else:
                return candidate
            await asyncio.sleep(0.3)

    def _promote(self, broker: BrokerHost, copy: CopyHost, candidate: Candidate) -> None:
        """A broker of its own serves the folder of the copy."""
        world = self._world
        self.promoted += 1
        world.faults.done += 1
        world.trace(f"copy of {broker.name} promoted")
        self.given_up.append(broker)
        self._given_up_at[broker] = candidate.log_end
        broker.copied = True
        promote_candidate(copy.disk, candidate)
        successor = world.new_broker(
            f"{broker.name}{self.promoted}", broker.group, 8_100 + self.promoted, self._rng
        )
        successor.succeed(broker)
        self._watch(successor, broker.copy_lag_ms or 0)
        copy.disk.close()
        successor.disk = copy.new_folder()
        world.brokers[world.brokers.index(broker)] = successor
        world.faults.restart(successor)

    def _take_over(self, copy: CopyHost) -> None:
        """A copy has asked for the place of its broker, and has it. The broker's own folder becomes
        a copy, or is never seen again.
        """
        world = self._world
        broker = next(each for each in world.brokers if each.group == copy.group)
        copy.end(machine_down=False)
        if copy.disk_fails:  # its program ends again and again until it can go on
            copy.disk.free_space, copy.disk.failing_operation = None, ""
        self._promote(broker, copy, read_candidate(copy.disk))
        if self._rng.random() < 0.7 and not world.faults.healed:
            broker.gone = not broker.running
            copy.gone = True
            self._replaced.append((broker, copy))
        else:
            self._start_anew(copy)
        if world.faults.healed:
            broker.gone = True
            if broker.running:
                broker.end(machine_down=False)
            self._refused_until_s = world.loop.now + REFUSED_S

    def _start_anew(self, copy: CopyHost) -> None:
        copy.gone = False
        self._world.faults.restart(copy)

    def _demote(self, broker: BrokerHost, copy: CopyHost) -> None:
        """The folder of a broker that was replaced becomes a copy."""
        broker.end(machine_down=False)
        broker.gone = True
        self.given_up.remove(broker)
        self._world.trace(f"{broker.name} becomes {copy.name}")
        copy_id = f"{self._rng.getrandbits(128):032x}"
        try:
            demote_folder(broker.disk, copy_id=copy_id)
        except StorageError:  # its program is started again once the disk works
            broker.disk.free_space, broker.disk.failing_operation = None, ""
            demote_folder(broker.disk, copy_id=copy_id)
        copy.disk, broker.disk = broker.disk, copy.disk
        self._start_anew(copy)

    async def _call(self, endpoint: Any, body: Any, group: str) -> Any:
        while True:
            try:
                return await self._meta.call(endpoint, body, group=group)
            except KeylaneError:
                await asyncio.sleep(0.3)

    # ── judging ───────────────────────────────────────────────────────────────────────────────────
    def _check_sets(self) -> None:
        """Every copy in SQL's set has synced everything that is durable, byte for byte."""
        world = self._world
        for broker in world.brokers:
            for copy in self._members(broker.group):
                end = self._ends.get(broker.group, 0)
                if lacking := _lacks(copy.disk, broker.disk, end):
                    self.problems.append(
                        f"{copy.name} may be promoted in place of {broker.name}, {lacking}"
                    )

    def _members(self, group: str) -> list[CopyHost]:
        stored = self._world.shelf.ask(
            "SELECT members FROM copy_sets WHERE broker_group = ? AND quarantine = ''", (group,)
        )
        ids = {each for (members,) in stored for each in msgspec.json.decode(members)}
        members = [copy for copy in self._copies_of(group) if _id_of(copy.disk) in ids]
        if self._old:
            end = max(self._reported(group), self._ends.get(group, 0))
            self._old -= {copy for copy in members if _synced_end(copy.disk) >= end}
        return [copy for copy in members if copy not in self._old]

    @property
    def idle(self) -> bool:
        """True once no copy is promoted any more, and no broker is refused."""
        return self._is_settled and self._world.loop.now >= self._refused_until_s

    @property
    def complete(self) -> bool:
        """Whether acks wait for every copy, as it is wanted."""
        groups = {copy.group for copy in self.copies}
        return all(len(self._members(each)) == len(self._copies_of(each)) for each in groups)


def _put_back_rows(connection: Connection, group: str, before: tuple[Any, ...]) -> bool:
    """Store what was known earlier of the copies of a broker group; a metaserver knows more at once.
    Return whether it has noticed.
    """
    columns = ("wanted", "least", "members", "term", "version", "durable_end", "quarantine")
    known = read_history(connection).changes
    connection.execute(
        sa.update(copy_sets)
        .where(copy_sets.c.broker_group == group)
        .values(dict(zip(columns, before, strict=True)))
    )
    return note_history(connection, known) is not None


def _images(opened: OpenedState) -> dict[int, bytes]:
    """The state of each partition; groups are in the order in which they were written last."""
    partitions = opened.state.partitions
    for each in partitions.values():
        each.groups = dict(sorted(each.groups.items()))
    return {each: encode_partition(partitions[each]) for each in partitions.ids()}


def _id_of(disk: SimDisk) -> str:
    content = disk.contents.get("copy.json")
    return "" if content is None else msgspec.json.decode(bytes(content.data))["copy_id"]


def _synced_end(disk: SimDisk) -> int:
    """The end of what a copy has synced."""
    bases = segment_bases(disk)
    return bases[-1] + len(disk.contents[segment_path(bases[-1])].synced) if bases else 0


def _lacks(copy: SimDisk, broker: SimDisk, end: int, *, start: int = 0) -> str:
    """What a copy's disk lacks of the log in `[start, end)`, or has otherwise; "" if nothing."""
    ours, theirs = segment_bases(copy), segment_bases(broker)
    if not ours or not theirs:
        return "" if end <= (theirs[0] if theirs else 0) else "and has no log"
    for index, base in enumerate(theirs):
        until = min(end, theirs[index + 1] if index + 1 < len(theirs) else end)
        if base < ours[0] or until <= max(base, start):
            continue
        content = copy.contents.get(segment_path(base))
        synced = b"" if content is None else bytes(content.synced[: until - base])
        if synced != bytes(broker.contents[segment_path(base)].data[: until - base]):
            return f"and has {len(synced)} equal or other bytes of {until - base} from {base} on"
    return ""
