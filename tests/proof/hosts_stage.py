"""A cluster of three hosts over TLS and PostgreSQL: network namespaces, programs under watch, and
what they did.

a, b, c   a metaserver, a broker, a consumer each; on a a producer too. The brokers are of a group
          each, or of one group with copies, one of which takes the place of a broker that is lost
d         PostgreSQL
w         the test itself, and a producer
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from keylane.admin import Admin
from keylane.checker.events import Event
from keylane.checker.findings import Findings
from keylane.checker.judge import check_history
from keylane.cli.connection import wait_for_brokers
from keylane.protocol.control import CreateSubject
from keylane.protocol.errors import KeylaneError
from keylane.protocol.http.tls_settings import TlsSettings
from keylane.protocol.routing import OrderStrategy
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from proof.actor import READY_S, Actor
from proof.cluster_history import hosted, lag, stored_log
from proof.recording import Timed, one_history, read_events, starts_placed
from proof.stage import GROUP, SECONDS, SUBJECT
from support.cluster import eventually
from support.hosts.namespaces import HostNetwork, inside, netem_is_here
from support.postgres import Postgres, running_postgres
from support.server_process import run_keylane
from support.sql import noted_grants

SERVERS = ("a", "b", "c")
DATABASE, WATCH = "d", "w"
META_PORT, BROKER_PORT = 7000, 7100
TTL_MS = 4_000
SETTINGS = {
    "KEYLANE_METASERVER_OPERATION_LEASE_MS": "4000",
    "KEYLANE_METASERVER_BROKER_HEARTBEAT_MS": "500",
    "KEYLANE_METASERVER_BROKER_TTL_MS": "4000",
}


class HostsStage:
    """Programs on hosts; a program is named by its kind and host, as `broker-a`."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        keys: int = 500,
        per_second: int = 200,
        copies: bool = False,
    ) -> None:
        self.folder = folder
        self._has_copies = copies
        self.actors: dict[str, Actor] = {}
        self.stamps_ns: list[int] = []
        """When the messages were sent, by the calendars of their producers."""
        self.network = HostNetwork([*SERVERS, DATABASE, WATCH], seed=seed)
        self._load = [str(keys), str(per_second)]
        self._sessions = 0
        self._closing = contextlib.AsyncExitStack()
        self._environment: dict[str, str] = {}

    # ── the cast ──────────────────────────────────────────────────────────────────────────────────
    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _open(self) -> None:
        # it starts the process that the tests fork from, which must not be on a host
        made = run_keylane(
            *("cluster", "init", str(self.folder / "made"), "--data", str(self.folder / "data")),
            *(f"--host={self.network.address(host)}" for host in SERVERS),
            *("--meta-port", str(META_PORT), "--broker-port", str(BROKER_PORT)),
            *("--postgresql", f"postgresql://keylane@{self.network.address(DATABASE)}/test_1"),
            *("--output", "json"),
            *(["--one-group"] if self._has_copies else []),
        )
        assert made.returncode == 0, made.stderr
        closing = self._closing
        closing.enter_context(self.network)
        with self._on(DATABASE):
            address = self.network.address(DATABASE)
            self._postgres: Postgres = closing.enter_context(running_postgres(address=address))
        self._postgres.url()
        closing.enter_context(self._on(WATCH))
        told = json.loads(made.stdout)
        tls, token = TlsSettings(ca=told["ca"]), told["admin_token"]
        self._environment = SETTINGS | {"KEYLANE_TLS_CA": tls.ca, "KEYLANE_TOKEN": token}
        self._network = HttpNetwork(tls, token=token)
        closing.push_async_callback(self._network.close)
        self._metaservers = [f"{self.network.address(host)}:{META_PORT}" for host in SERVERS]
        self.meta = MetaClient(self._network, self._metaservers)
        await self._start_all([self._program("metaserver", host) for host in SERVERS])
        await self._start_brokers()
        for statement in (noted_grants.TABLE, noted_grants.FUNCTION, noted_grants.TRIGGER):
            self.execute(statement)
        await self._create()
        clients = [self._consumer(host) for host in SERVERS]
        await self._start_all([*clients, self._producer("a"), self._producer(WATCH)])

    def _on(self, host: str) -> contextlib.AbstractContextManager[None]:
        return inside(self.network.namespace(host))

    def execute(self, statement: str) -> list[Any]:
        """Run a statement on the database of the metaservers."""
        return self._postgres.execute(statement, database="test_1")

    async def _start_brokers(self) -> None:
        brokers = [self._program("broker", host) for host in SERVERS]
        if not self._has_copies:
            await self._start_all(brokers)
            return
        first, *others = brokers
        await self._start_all([first])
        async with self._admin() as admin:
            await wait_for_brokers(admin, 1)
            await admin.set_copies("g1", len(SERVERS), may_share_machine=True)
        for follower in others:
            follower.spawn()
        await self.wait_for_copies()

    async def wait_for_copies(self) -> None:
        """Wait until acks wait for every other folder of the broker group."""
        async with self._admin() as admin, asyncio.timeout(READY_S):
            while len((await admin.copies("g1")).members) < len(SERVERS) - 1:
                await asyncio.sleep(0.2)

    def _admin(self) -> Admin:
        tls = TlsSettings(ca=self._environment["KEYLANE_TLS_CA"])
        token = self._environment["KEYLANE_TOKEN"]
        return Admin(self._metaservers, tls=tls, token=token, wait_s=READY_S)

    def _actor(self, name: str, host: str, *command: str, **environment: str) -> Actor:
        wall = self._wall(host)
        if not wall.exists():
            wall.write_bytes(SECONDS.pack(0))
        log = self.folder / f"{name}.log"
        place = partial(inside, self.network.namespace(host))
        environment = self._environment | environment
        actor = Actor(name, ["--wall", str(wall), *command], log, place=place, **environment)
        self.actors[name] = actor
        return actor

    def _wall(self, host: str) -> Path:
        return self.folder / f"{host}.wall"

    def _program(self, kind: str, host: str) -> Actor:
        name = f"{kind}-{host}"
        record = ["--record", str(self._events(name))] if kind == "broker" else []
        config = self.folder / "made" / self.network.address(host) / "keylane.toml"
        folder = {"KEYLANE_BROKER_DATA": str(self.folder / f"data-{host}")}
        command = (*record, f"keylane.{kind}", "--config", str(config))
        return self._actor(name, host, *command, **(folder if kind == "broker" else {}))

    def _events(self, name: str) -> Path:
        return self.folder / f"{name}.events"

    def _consumer(self, host: str) -> Actor:
        name = f"consumer-{host}"
        given = [",".join(self._metaservers), SUBJECT, GROUP, str(TTL_MS), "4.0"]
        return self._actor(name, host, "proof.consumer", *given, str(self._events(name)))

    def _producer(self, host: str) -> Actor:
        """A producer of a new session; messages of an old one are settled or lost."""
        self._sessions += 1
        session = f"p{self._sessions}"
        given = [",".join(self._metaservers), SUBJECT, *self._load, session]
        record = str(self._events(session))
        return self._actor(f"producer-{host}", host, "proof.producer", *given, record)

    @staticmethod
    async def _start_all(actors: Sequence[Actor]) -> None:
        for actor in actors:
            actor.spawn()
        await asyncio.gather(*(actor.ready() for actor in actors))

    async def _create(self) -> None:
        async with self._admin() as admin:
            await wait_for_brokers(admin, 1 if self._has_copies else len(SERVERS))
        await self.meta.create_subject(
            CreateSubject(subject=SUBJECT, partitions=6, order_strategy=OrderStrategy.STRICT)
        )

    async def __aexit__(self, *_error: object) -> None:
        try:
            for kind in ("consumer", "producer", "broker", "metaserver"):
                actors = [self.actors[name] for name in self.actors if name.startswith(kind)]
                started = [actor for actor in actors if actor.process is not None]
                await asyncio.gather(*(actor.stop(seconds=5.0) for actor in started))
        finally:
            await self._closing.aclose()

    def netem(self) -> str:
        """What is to be said of the kernel."""
        if netem_is_here(self.network.namespace(WATCH)):
            return (
                "This kernel has netem; delays, losses and cuts are those of "
                "tests/support/hosts/wire.py."
            )
        return (
            "THIS KERNEL HAS NO NETEM: delays, losses and cuts between the hosts are made by"
            " tests/support/hosts/wire.py, which passes every frame on itself."
        )

    # ── what happens to the hosts ─────────────────────────────────────────────────────────────────
    def _programs(self, host: str) -> list[str]:
        return [name for name in self.actors if name.endswith(f"-{host}")]

    async def lose(self, host: str) -> None:
        """The host is gone at once: its programs and its link."""
        self.network.link(host, up=False)
        await asyncio.gather(*(self.actors[name].kill() for name in self._programs(host)))

    async def bring_back(self, host: str, *, wrong_s: int) -> None:
        """The host is there again, its clock wrong by these seconds."""
        self._wall(host).write_bytes(SECONDS.pack(wrong_s))
        self.network.link(host, up=True)
        actors = [self.actors[name] for name in self._programs(host)]
        if f"producer-{host}" in self.actors:
            actors.remove(self.actors[f"producer-{host}"])
            actors.append(self._producer(host))
        order = ("metaserver", "broker", "consumer", "producer")
        for kind in order:
            started = [actor for actor in actors if actor.name.startswith(kind)]
            if kind == "broker" and self._has_copies:  # it may follow, and listen nowhere
                for actor in started:
                    actor.spawn()
            else:
                await self._start_all(started)

    async def serving_host(self) -> str:
        """The host of the broker that serves, of one group with copies."""
        (address,) = await self._brokers()
        return next(host for host in SERVERS if address.startswith(self.network.address(host)))

    # ── the end ───────────────────────────────────────────────────────────────────────────────────
    async def drain(self, *, seconds: float = 90.0) -> bool:
        """Heal the wire and end the producers; return True once everything stored is acked."""
        self.network.rule()
        producers = [actor for name, actor in self.actors.items() if name.startswith("producer")]
        await asyncio.gather(*(actor.stop(seconds=seconds) for actor in producers))
        drained = False

        async def look() -> bool:
            nonlocal drained
            with contextlib.suppress(KeylaneError):  # a broker whose connections have just broken
                partitions = await hosted(self._network, await self._brokers())
                drained = bool(partitions) and not any(map(lag, partitions))
            return drained

        async with asyncio.timeout(seconds):
            while not await look():
                await asyncio.sleep(0.2)
        return drained

    async def _brokers(self) -> list[str]:
        """The addresses of the brokers that serve."""
        if self._has_copies:
            return [each["address"] for each in (await self.meta.health()).details["brokers"]]
        return [f"{self.network.address(host)}:{BROKER_PORT}" for host in SERVERS]

    async def judge(self) -> tuple[Findings, list[Event]]:
        """Drain, and check the history; every program must still run."""
        self._all_are_there([*self.actors])
        try:
            await self.drain()
        finally:
            self._all_are_there([name for name in self.actors if "producer" not in name])
        timed: list[Timed] = list(noted_grants.read_grants(self.execute))
        for path in sorted(self.folder.glob("*.events")):
            timed += starts_placed(read_events(path), ())
        log = await stored_log(self._network, await self._brokers(), self.stamps_ns)
        events = one_history(timed, log)
        return check_history(events), events

    def _all_are_there(self, names: Sequence[str]) -> None:
        ended = [self.actors[name] for name in names if not self.actors[name].running]
        assert not ended, "\n".join(actor.log_tail() for actor in ended)

    async def settled_more(self, count: int) -> None:
        """Wait until the producers and consumers have gone on: their records have grown."""
        before = self._written()
        await eventually(lambda: self._written() >= before + count, what="progress")

    def _written(self) -> int:
        return sum(os.path.getsize(path) for path in self.folder.glob("*.events"))
