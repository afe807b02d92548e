"""Two metaservers on PostgreSQL, two brokers, old and new clients; each program of the version that
the test names.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any, Self

from sqlalchemy import make_url

from keylane import Admin
from keylane.checker.events import Event, Sent, Settled
from keylane.checker.findings import Findings
from keylane.checker.judge import check_history
from keylane.cli.connection import wait_for_brokers
from keylane.protocol.routing import OrderStrategy
from keylane.rpc.http_network import HttpNetwork
from proof.actor import READY_S, Actor
from proof.cluster_history import hosted, lag, stored_log
from proof.recording import Timed, one_history, read_events, starts_placed
from proof.stage import GROUP, SUBJECT
from support.cluster import eventually
from support.ports import free_port
from support.postgres import Postgres
from support.releases import Releases
from support.sql import noted_grants

TTL_MS = 4_000
TESTS = Path(__file__).parents[1]
TAKEOVER = "ready to take over"


class UpgradeStage:
    """Programs by name: m0, m1, b0, b1, and clients."""

    def __init__(self, folder: Path, releases: Releases, postgres: Postgres) -> None:
        self.folder = folder
        self.actors: dict[str, Actor] = {}
        self._releases = releases
        self._postgres = postgres
        self._url = postgres.url()
        self._closing = contextlib.AsyncExitStack()
        self._ports = {name: free_port() for name in ("m0", "m1", "b0", "b1")}
        self.meta = [f"127.0.0.1:{self._ports[name]}" for name in ("m0", "m1")]

    async def __aenter__(self) -> Self:
        return self

    async def open(self, old: str, new: str) -> None:
        """Servers of the old version; clients of both."""
        for name in ("m0", "m1", "b0", "b1"):
            await self.start(name, old)
        for statement in (noted_grants.TABLE, noted_grants.FUNCTION, noted_grants.TRIGGER):
            self.execute(statement)
        self.admin = await self._closing.enter_async_context(Admin(self.meta, wait_s=READY_S))
        await wait_for_brokers(self.admin, 2)
        await self.admin.create_subject(SUBJECT, partitions=4, order_strategy=OrderStrategy.STRICT)
        for name, version in (("old", old), ("new", new)):
            await self.start_client(f"consumer-{name}", version)
            await self.start_client(f"producer-{name}", version)

    async def __aexit__(self, *_error: object) -> None:
        try:
            for kind in ("c", "p", "b", "m"):
                actors = [self.actors[name] for name in self.actors if name.startswith(kind)]
                started = [actor for actor in actors if actor.process is not None]
                await asyncio.gather(*(actor.stop(seconds=5.0) for actor in started))
        finally:
            await self._closing.aclose()

    def execute(self, statement: str) -> list[Any]:
        """Run a statement on the metaservers' database."""
        return self._postgres.execute(statement, database=make_url(self._url).database or "")

    def server(self, name: str, version: str, *more: str) -> Actor:
        """A server that is not started yet."""
        place = ["--port", str(self._ports[name]), "--data", str(self.folder / name)]
        if name.startswith("m"):
            given = ["keylane.metaserver", *place, "--database-url", self._url]
        else:
            record = ["--record", str(self.folder / f"{name}.events")]
            group = ["--group", f"g{name[1:]}", "--meta", ",".join(self.meta)]
            given = [*record, "keylane.broker", *place, *group]
        return self._actor(name, version, *given, *more)

    def _actor(self, name: str, version: str, *command: str) -> Actor:
        paths = [str(self._releases.path(version)), str(TESTS)]
        log = self.folder / f"{name}-{version}.log"
        return Actor(name, list(command), log, anew=True, PYTHONPATH=os.pathsep.join(paths))

    async def start(self, name: str, version: str) -> None:
        self.actors[name] = self.server(name, version)
        await self.actors[name].start()

    async def start_client(self, name: str, version: str) -> None:
        record = str(self.folder / f"{name}.events")
        if name.startswith("c"):
            given = ["proof.consumer", self.meta_text, SUBJECT, GROUP, str(TTL_MS), "4.0", record]
        else:
            given = ["proof.producer", self.meta_text, SUBJECT, "200", "100", name, record]
        self.actors[name] = self._actor(name, version, *given)
        await self.actors[name].start()

    @property
    def meta_text(self) -> str:
        return ",".join(self.meta)

    async def upgrade(self, name: str, version: str) -> None:
        """
        Replace a server by one of another version.

        A broker is taken over: the new one is loaded before the old one is stopped.
        """
        old = self.actors[name]
        if name.startswith("m"):
            await old.stop()
            await self.start(name, version)
            return
        new = self.server(name, version, "--takeover-ms", "60000")
        log = self.folder / f"{name}-{version}.log"
        new.spawn()
        await eventually(lambda: log.exists() and TAKEOVER in log.read_text(), what="the new one")
        self.actors[name] = new
        await old.stop()
        await new.ready()

    async def judge(self) -> tuple[Findings, list[Event]]:
        """End the producers, drain, and check the history."""
        ended = [name for name in self.actors if not self.actors[name].running]
        assert not ended, self.actors[ended[0]].log_tail()
        producers = [actor for name, actor in self.actors.items() if name.startswith("p")]
        await asyncio.gather(*(actor.stop(seconds=90.0) for actor in producers))
        network = HttpNetwork()
        brokers = [f"127.0.0.1:{self._ports[name]}" for name in ("b0", "b1")]
        async with asyncio.timeout(90):
            while any(map(lag, await hosted(network, brokers))):
                await asyncio.sleep(0.1)
        timed: list[Timed] = list(noted_grants.read_grants(self.execute))
        for path in sorted(self.folder.glob("*.events")):
            timed += starts_placed(read_events(path), ())
        events = one_history(timed, await stored_log(network, brokers, []))
        await network.close()
        return check_history(events), events

    def waits_ms(self, began_ns: int, ended_ns: int) -> list[float]:
        """How long each message that was sent in this time waited for its receipt, the shortest
        first.
        """
        waits = []
        for path in self.folder.glob("producer-*.events"):
            sent: dict[bytes, int] = {}
            for at_ns, event in read_events(path):
                if isinstance(event, Sent) and began_ns <= at_ns < ended_ns:
                    sent[event.value] = at_ns
                elif isinstance(event, Settled) and event.value in sent:
                    waits.append((at_ns - sent[event.value]) / 1e6)
        return sorted(waits)
