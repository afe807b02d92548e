"""The programs of a soak: a cluster with copies, clients that stay and clients that come and go, and
what happens to them.

Broker group g2, the first metaserver and the clients that stay are never killed: their memory shows
whether something grows.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

import aiohttp

from keylane import Admin
from keylane.admin import PartitionState
from keylane.errors import KeylaneError
from soak.clients import GROUPS, POISONED, SUBJECT
from soak.flatness import Sample, take_sample
from support.ports import free_port
from support.running.shared_end import ending_with_parent

META_SETTINGS = """
broker_heartbeat_ms = 1000
broker_ttl_ms = 5000
expire_ms = 5000
history_retention_ms = 600000
"""
BROKER_SETTINGS = """
copy_lag_ms = 1000
segment_bytes = 262144
snapshot_bytes = 262144
retention_ms = 120000
"""
HOSTS = {"g1": 3, "g2": 2}
"""How many hosts each broker group has; all of them have its data."""
KILLED_GROUP = "g1"
STAYING_PER_SECOND, PASSING_PER_SECOND = 25.0, 10.0
PARTITIONS = (2, 3, 4, 6)
SETTLED_S = 60.0
END_S = 60.0


class SoakProgram:
    """One process, with its log, which can be ended and started again."""

    def __init__(self, name: str, folder: Path, module: str, *arguments: str) -> None:
        self.name = name
        self.data = folder / name
        self._log = folder / f"{name}.log"
        self._command = [sys.executable, "-m", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self.samples: list[Sample] = []

    def start(self, *more: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, *more],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=ending_with_parent(),  # noqa: PLW1509  it calls nothing but the kernel
            )

    @property
    def has_died(self) -> bool:
        """True if it has ended, and nobody has ended it."""
        return self._process is not None and self._process.poll() is not None

    def send_signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal that ends it, and wait for that."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            await asyncio.to_thread(process.wait, END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"{self.name} has not ended within {END_S:.0f} s") from None

    def sample(self, at_s: float) -> None:
        if self._process is not None:
            sample = take_sample(at_s, self._process.pid, self.data if self.data.exists() else None)
            if sample is not None:
                self.samples.append(sample)


class SoakStage:
    """
    The cluster and its clients.

    Args:
        database_url: the metaservers' database.
    """

    def __init__(self, folder: Path, database_url: str, rng: random.Random) -> None:
        self.folder = folder
        self.counts: Counter[str] = Counter()
        """How often each thing happened, or was refused."""
        self.dead: set[str] = set()
        """The programs that have ended by themselves."""
        self._rng = rng
        self._numbers = itertools.count()
        self._healing = folder / "healing"
        (folder / "metaserver.toml").write_text(f'{META_SETTINGS}database_url = "{database_url}"\n')
        (folder / "broker.toml").write_text(BROKER_SETTINGS)
        ports = {f"m{number}": free_port() for number in (1, 2)}
        self.addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        self.meta = ",".join(self.addresses.values())
        self.metas = [
            SoakProgram(
                *(name, folder, "keylane.metaserver", "--config", str(folder / "metaserver.toml")),
                *("--data", str(folder / name), "--port", str(port)),
            )
            for name, port in ports.items()
        ]
        self.hosts: dict[str, list[SoakProgram]] = {}
        for group, count in HOSTS.items():
            self.hosts[group] = [self._host(group, number) for number in range(1, count + 1)]
        self.staying = [
            self._producer("p-stays", STAYING_PER_SECOND),
            *(self._consumer(f"c-{group}-stays", group) for group in GROUPS),
        ]
        self.passing: dict[str, SoakProgram] = {}

    def _host(self, group: str, number: int) -> SoakProgram:
        name, port = f"{group}-host{number}", free_port()
        self.addresses[name] = f"127.0.0.1:{port}"
        return SoakProgram(
            *(name, self.folder, "keylane.broker", "--config", str(self.folder / "broker.toml")),
            *("--group", group, "--data", str(self.folder / name), "--meta", self.meta),
            *("--port", str(port), "--failover", "true"),
        )

    def _producer(self, name: str, per_second: float) -> SoakProgram:
        record = str(self.folder / f"{name}.acked")
        arguments = ("produce", self.meta, name, str(per_second), record)
        return SoakProgram(name, self.folder, "soak.clients", *arguments)

    def _consumer(self, name: str, group: str) -> SoakProgram:
        record = str(self.folder / f"{name}.{group}.handled")
        arguments = ("consume", self.meta, group, record, str(self._healing))
        return SoakProgram(name, self.folder, "soak.clients", *arguments)

    @property
    def lasting(self) -> list[SoakProgram]:
        """The programs that run from the beginning to the end, some with interruptions."""
        hosts = itertools.chain.from_iterable(self.hosts.values())
        return [*self.metas, *hosts, *self.staying]

    @property
    def programs(self) -> list[SoakProgram]:
        return [*self.lasting, *self.passing.values()]

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _open(self) -> None:
        self.admin = Admin(self.meta, wait_s=60)
        self.http = aiohttp.ClientSession()
        for metaserver in self.metas:
            metaserver.start()
            await self._until_live(metaserver.name)
        for first, *_ in self.hosts.values():
            first.start()
        for first, *_ in self.hosts.values():
            await self._until_live(first.name)
        await self.admin.__aenter__()
        await self._until(self._all_available)
        await self.admin.create_subject(SUBJECT, partitions=4)
        for group, (_, *copies) in self.hosts.items():
            await self.admin.set_copies(group, 2, may_share_machine=True)
            for copy in copies:
                copy.start("--follow", "true")
        for group in GROUPS:
            await self.admin.create_group(SUBJECT, group, start="earliest")
        for client in self.staying:
            client.start()
        for group in self.hosts:
            await self._until(lambda group=group: self._has_members(group))

    async def __aexit__(self, *_error: object) -> None:
        for program in reversed(self.programs):
            await program.end(signal.SIGKILL)
        await self.admin.close()
        await self.http.close()

    # ── looking ───────────────────────────────────────────────────────────────────────────────────
    async def _until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(SETTLED_S):
            while not await condition():
                await asyncio.sleep(0.2)

    async def _until_live(self, name: str) -> None:
        async def is_live() -> bool:
            try:
                return bool(await self._get(name, "/health/live"))
            except (aiohttp.ClientError, OSError):
                return False

        await self._until(is_live)

    async def _get(self, name: str, path: str) -> str:
        async with self.http.get(f"http://{self.addresses[name]}{path}") as answer:
            text = await answer.text()
            if answer.status != 200:
                self.counts[f"{path} answered {answer.status}"] += 1
            return text

    async def _all_available(self) -> bool:
        found = (await self.admin.list_brokers()).brokers
        return {each.broker_group for each in found if each.available} == set(self.hosts)

    async def _has_members(self, group: str) -> bool:
        try:
            return len((await self.admin.copies(group)).members) >= 1
        except KeylaneError:
            return False

    async def _serving(self, group: str) -> SoakProgram | None:
        by_address = {self.addresses[host.name]: host for host in self.hosts[group]}
        for view in (await self.admin.list_brokers()).brokers:
            if view.broker_group == group and view.available:
                return by_address.get(view.address)
        return None

    async def watch(self) -> None:
        """Ask for the console's pages and everybody's metrics, as browsers and Prometheus do."""
        pages = ("", "/subjects", f"/subjects/{SUBJECT}", f"/subjects/{SUBJECT}/lineage")
        pages += (f"/subjects/{SUBJECT}/groups/billing/parked", "/consumers", "/brokers")
        hosts = [host.name for group in self.hosts for host in self.hosts[group]]
        asked = [(meta.name, f"/console{page}") for meta in self.metas[:1] for page in pages]
        asked += [(name, "/metrics") for name in (*(meta.name for meta in self.metas), *hosts)]
        for name, path in asked:
            try:
                await self._get(name, path)
                self.counts["pages and metrics"] += 1
            except (aiohttp.ClientError, OSError):
                self.counts["pages and metrics refused"] += 1  # it is down, or follows

    def sample(self, at_s: float) -> None:
        for program in self.programs:
            program.sample(at_s)
        self.note_dead()

    def note_dead(self) -> None:
        """Note the programs that have ended by themselves."""
        self.dead.update(program.name for program in self.programs if program.has_died)

    # ── what happens ──────────────────────────────────────────────────────────────────────────────
    async def happen(self) -> str:
        """One thing, drawn at random; returns its name."""
        acts: dict[Callable[[], Awaitable[None]], int] = {
            self.resize: 3,
            self.move: 3,
            self.hand_over: 3,
            self.heal: 3,
            self.change_consumer: 4,
            self.change_producer: 1,
            self.kill_host: 2,
            self.hang_host: 1,
            self.restart_metaserver: 2,
        }
        (act,) = self._rng.choices(list(acts), list(acts.values()))
        try:
            await act()
        except (KeylaneError, TimeoutError) as error:
            self.counts[f"{act.__name__} refused: {getattr(error, 'name', error)!s:.60}"] += 1
        else:
            self.counts[act.__name__] += 1
        return act.__name__

    async def resize(self) -> None:
        operation = await self.admin.resize(SUBJECT, self._rng.choice(PARTITIONS))
        async with asyncio.timeout(SETTLED_S):
            await self.admin.wait(operation)

    async def move(self) -> None:
        partitions = (await self.admin.describe_subject(SUBJECT)).partitions
        each = self._rng.choice([part for part in partitions if part.state is PartitionState.OPEN])
        target = "g2" if each.broker_group == "g1" else "g1"
        operation = await self.admin.move([each.partition_id], to=target)
        async with asyncio.timeout(SETTLED_S):
            await self.admin.wait(operation)

    async def hand_over(self) -> None:
        await self.admin.hand_over(self._rng.choice(list(self.hosts)))

    async def heal(self) -> None:
        """Have parked keys handled again, and no handler fails meanwhile."""
        parked = [view async for view in self.admin.parked(SUBJECT, "billing")]
        self.counts["keys redriven"] += len(parked)
        if parked:
            self._healing.touch()
            await self.admin.redrive(SUBJECT, "billing", all=True)
            await asyncio.sleep(3.0)
            self._healing.unlink(missing_ok=True)

    async def change_consumer(self) -> None:
        """Another consumer of a group joins; or one is killed, or leaves."""
        consumers = [name for name in self.passing if name.startswith("c-")]
        if len(consumers) < 3:
            group = self._rng.choice(list(GROUPS))
            name = f"c-{group}-{next(self._numbers)}"
            self.passing[name] = self._consumer(name, group)
            self.passing[name].start()
        else:
            leaving = self.passing.pop(self._rng.choice(consumers))
            await leaving.end(self._rng.choice((signal.SIGKILL, signal.SIGTERM)))

    async def change_producer(self) -> None:
        """Another producer begins, with keys of its own; the one before ends in good order."""
        for name in [name for name in self.passing if name.startswith("p-")]:
            await self.passing.pop(name).end()
        name = f"p-{next(self._numbers)}"
        self.passing[name] = self._producer(name, PASSING_PER_SECOND)
        self.passing[name].start()

    async def kill_host(self) -> None:
        """Kill the broker or a copy of the group that is killed, and start it again."""
        await self._until(lambda: self._has_members(KILLED_GROUP))
        host = self._rng.choice(self.hosts[KILLED_GROUP])
        await host.end(self._rng.choice((signal.SIGKILL, signal.SIGTERM)))
        await asyncio.sleep(self._rng.uniform(0.0, 3.0))
        host.start("--follow", "true")

    async def hang_host(self) -> None:
        await self._until(lambda: self._has_members(KILLED_GROUP))
        host = await self._serving(KILLED_GROUP)
        if host is not None:
            host.send_signal(signal.SIGSTOP)
            await asyncio.sleep(self._rng.uniform(0.5, 9.0))
            host.send_signal(signal.SIGCONT)

    async def restart_metaserver(self) -> None:
        metaserver = self.metas[1]
        await metaserver.end(self._rng.choice((signal.SIGKILL, signal.SIGTERM)))
        await asyncio.sleep(self._rng.uniform(0.0, 3.0))
        metaserver.start()

    # ── the end ───────────────────────────────────────────────────────────────────────────────────
    async def drain(self, seconds: float) -> list[str]:
        """End the producers, let consumers handle everything, and return what they have not."""
        for program in self.programs:
            if program.name.startswith("p-"):
                await program.end()
        self._healing.touch()
        left: list[str] = []
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            try:
                await self.admin.redrive(SUBJECT, "billing", all=True)
                left = [
                    f"{group} lags by {lag}"
                    for group in GROUPS
                    if (lag := await self.admin.lag(SUBJECT, group))
                ]
                parked = [view async for view in self.admin.parked(SUBJECT, "billing")]
                left += [f"{len(parked)} keys are parked"] if parked else []
            except KeylaneError as error:
                left = [repr(error)]
            if not left:
                break
            await asyncio.sleep(1.0)
        return left

    def count_tracebacks(self) -> dict[str, int]:
        """How many tracebacks are in the log of each program, but for those of failing handlers."""
        counts = {}
        for path in sorted(self.folder.glob("*.log")):
            log = path.read_text("utf-8", "replace")
            count = log.count("Traceback (most recent call last)") - log.count(f"\n{POISONED}")
            if count:
                counts[path.name] = count
        return counts
