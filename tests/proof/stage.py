"""Real programs under watch: started, stopped in the middle of a handler, killed, cut off; and what
they did.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from keylane.checker.events import Event, Stored
from keylane.checker.findings import Findings
from keylane.checker.judge import check_history
from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject, PartitionStatus
from keylane.protocol.errors import KeylaneError, Reason
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.routing import OrderStrategy
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork
from proof.actor import READY_S, Actor
from proof.forwarder import Forwarder
from proof.recording import (
    HandlerTail,
    Timed,
    boot_ns,
    one_history,
    read_events,
    read_grants,
    starts_placed,
)
from support.cluster import done_operation, read_partition
from support.ports import free_port

SUBJECT, GROUP = "orders", "audit"
META_SETTINGS = """
operation_lease_ms = 1000
broker_heartbeat_ms = 200
broker_ttl_ms = 1500
"""
SECONDS = struct.Struct("<q")


class Stage:
    """
    One metaserver, two brokers, consumers of one group, a producer; every way but the producer's
    can be cut.

    `bugs` puts a mutant into the programs of a kind: "metaserver", "broker".
    """

    def __init__(
        self,
        folder: Path,
        *,
        keys: int,
        per_second: int,
        partitions: int = 2,
        consumers: int = 3,
        ttl_ms: int = 1_000,
        handler_ms: float = 4.0,
        bugs: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.ttl_s = ttl_ms / 1000
        self._keys = keys
        self._per_second = per_second
        self._partitions = partitions
        self._bugs = bugs or {}
        self._settings = [str(ttl_ms), str(handler_ms)]
        self.ways: dict[tuple[str, str], Forwarder] = {}
        self.consumers = [f"c{number}" for number in range(consumers)]
        self._tails = {name: HandlerTail(folder / f"{name}.events") for name in self.consumers}
        self.brokers = ["b0", "b1"]
        self.actors: dict[str, Actor] = {}
        self.sessions = 0
        self.stamps_ns: list[int] = []
        """When the messages were sent, by the calendars of their producers."""
        self.networks = contextlib.AsyncExitStack()
        self._addresses = {name: f"127.0.0.1:{free_port()}" for name in ("m", "b0", "b1")}

    @property
    def calendar_hours(self) -> float:
        """How far apart the calendars were, by the messages' own times."""
        return (max(self.stamps_ns) - min(self.stamps_ns)) / 3_600e9

    # ── the cast ──────────────────────────────────────────────────────────────────────────────────
    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _open(self) -> None:
        network = HttpNetwork()
        self.networks.push_async_callback(network.close)
        self.network = network
        self.meta = MetaClient(network, [self._addresses["m"]])
        (self.folder / "meta.toml").write_text(META_SETTINGS)
        await self._start_meta()
        for name in self.brokers:
            await self._start_broker(name)
        await self._create()
        await asyncio.gather(*(self._start_consumer(name) for name in self.consumers))
        await self.start_producer()

    async def _start(self, name: str, *command: str) -> None:
        log = self.folder / f"{name}.log"
        wall = self.folder / f"{name}.wall"
        if not wall.exists():
            wall.write_bytes(SECONDS.pack(0))
        self.actors[name] = Actor(name, ["--wall", str(wall), *command], log)
        await self.actors[name].start()

    async def _way(self, source: str, target: str) -> str:
        forwarder = await Forwarder(self._addresses[target]).start()
        self.networks.push_async_callback(forwarder.close)
        self.ways[source, target] = forwarder
        return forwarder.address

    async def _detour(self, source: str) -> list[str]:
        there = {self._addresses[name]: await self._way(source, name) for name in self.brokers}
        return ["--detour", json.dumps(there)]

    def _bug(self, kind: str) -> list[str]:
        return ["--mutant", self._bugs[kind]] if kind in self._bugs else []

    def _port(self, name: str) -> str:
        return self._addresses[name].rsplit(":", 1)[1]

    async def _start_meta(self) -> None:
        watched = ["--grants", *self._bug("metaserver"), *await self._detour("m")]
        config = ["--config", str(self.folder / "meta.toml"), "--port", self._port("m")]
        data = ["--data", str(self.folder / "meta")]
        await self._start("m", *watched, "keylane.metaserver", *config, *data)

    async def _start_broker(self, name: str) -> None:
        record = ["--record", str(self.folder / f"{name}.events"), *self._bug("broker")]
        where = ["--data", str(self.folder / name), "--port", self._port(name)]
        meta = ["--meta", await self._way(name, "m"), "--group", f"g{name[1:]}"]
        await self._start(name, *record, "keylane.broker", *where, *meta)

    async def _start_consumer(self, name: str) -> None:
        meta = await self._way(name, "m")
        record = str(self.folder / f"{name}.events")
        arguments = [meta, SUBJECT, GROUP, *self._settings, record]
        await self._start(name, *await self._detour(name), "proof.consumer", *arguments)

    async def start_producer(self) -> None:
        """Start the producer under a new session; messages of the old session are settled or
        lost.
        """
        self.sessions += 1
        session = f"p{self.sessions}"
        load = [str(self._keys), str(self._per_second), session]
        record = str(self.folder / f"{session}.events")
        await self._start("p", "proof.producer", self._addresses["m"], SUBJECT, *load, record)

    async def _create(self) -> None:
        ask = CreateSubject(
            subject=SUBJECT, partitions=self._partitions, order_strategy=OrderStrategy.STRICT
        )
        async with asyncio.timeout(READY_S):
            while True:
                health = (await self.meta.health()).details
                if sum(bool(broker["available"]) for broker in health["brokers"]) == len(
                    self.brokers
                ):
                    with contextlib.suppress(
                        Reason.NOT_ENOUGH_BROKERS
                    ):  # silent again: a busy machine
                        await self.meta.create_subject(ask)
                        return
                await asyncio.sleep(0.05)

    async def __aexit__(self, *_error: object) -> None:
        for forwarder in self.ways.values():
            forwarder.heal(reset=True)
        order = [*self.consumers, "p", *self.brokers, "m"]
        for name in order:
            if name in self.actors:
                await self.actors[name].stop(seconds=5.0)
        await self.networks.aclose()

    # ── what happens to them ──────────────────────────────────────────────────────────────────────
    async def pause_in_handler(self, seconds: float, busy: set[str], rng: random.Random) -> None:
        """
        Stop a consumer that is inside a handler, as a frozen machine does, and resume it.

        `busy` are those that something else happens to; the one stopped is among them meanwhile.
        """
        for name in itertools.cycle(rng.sample(self.consumers, len(self.consumers))):
            if name not in busy and await self._stopped_in_handler(self.actors[name]):
                break
            await asyncio.sleep(0.02)
        busy.add(name)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.actors[name].signal(signal.SIGCONT)
            busy.discard(name)

    async def freeze_at_start(self, name: str, seconds: float) -> None:
        """Stop a consumer between its look at the lease and a handler's first line, and resume
        it.
        """
        actor = self.actors[name]
        going_ns = boot_ns()
        actor.signal(signal.SIGUSR1)
        async with asyncio.timeout(READY_S):
            while True:
                looked_ns = boot_ns()
                if actor.stopped:
                    break
                going_ns = looked_ns
                await asyncio.sleep(0.01)
        actor.note_stop(going_ns)
        await asyncio.sleep(seconds)
        actor.signal(signal.SIGCONT)

    async def _stopped_in_handler(self, actor: Actor) -> bool:
        actor.signal(signal.SIGSTOP)
        time.sleep(0.002)  # by then SIGSTOP has taken effect, and the write under way is done
        if self.in_handler(actor.name):
            return True
        actor.signal(signal.SIGCONT)
        return False

    def in_handler(self, name: str) -> set[tuple[int, int]]:
        """The (partition, offset) of each handler that runs, by the consumer's record."""
        return self._tails[name].poll()

    async def crash(self, name: str, *, down_s: float = 0.0) -> None:
        """Kill a program with SIGKILL, and start it again later on its folder and port."""
        actor = self.actors[name]
        await actor.kill()
        if name in self._tails:
            self._tails[name].forget()
        await asyncio.sleep(down_s)
        if name == "p":
            await self.start_producer()
        else:
            await actor.start()

    async def cut(
        self, source: str, target: str, seconds: float, *, up: bool, down: bool, reset: bool
    ) -> None:
        """Cut the way from one program to another, in one direction or both, for a while."""
        way = self.ways[source, target]
        way.cut(up=up, down=down)
        await asyncio.sleep(seconds)
        way.heal(reset=reset)

    def set_calendar(self, seconds: int, names: Iterable[str] | None = None) -> None:
        """The wall clock of these programs, or of every one, jumps to so far from the right
        time.
        """
        for name in self.actors if names is None else names:
            with (self.folder / f"{name}.wall").open("r+b") as file:
                file.write(SECONDS.pack(seconds))

    async def resize(self, partitions: int) -> None:
        """Change the number of partitions, and wait until that is done; programs may fail
        meanwhile.
        """
        ask = Reshape(kind=OperationKind.RESIZE, subject=SUBJECT, partitions=partitions)
        async with asyncio.timeout(120):
            while True:
                try:
                    (view,) = (await self.meta.call(endpoints.RESHAPE, ask)).operations
                    break
                except KeylaneError:  # no metaserver, no broker, or an operation under way
                    await asyncio.sleep(0.1)
        await done_operation(self.meta, view, seconds=120)

    # ── the end ───────────────────────────────────────────────────────────────────────────────────
    async def drain(self, *, seconds: float = 120.0) -> bool:
        """Open all ways and end the producer; return True once everything stored is acked."""
        for forwarder in self.ways.values():
            forwarder.heal()
        async with asyncio.timeout(seconds):
            await self.actors["p"].stop(seconds=seconds)
        try:
            async with asyncio.timeout(seconds):
                while any(_lag(status) for status in await self._hosted()):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            return False
        return True

    async def _hosted(self) -> list[PartitionStatus]:
        hosted = []
        for name in self.brokers:
            client = BrokerClient(self.network, self._addresses[name])
            hosted += (await client.partitions()).partitions
            await client.close()
        return hosted

    async def _log(self) -> list[Stored]:
        stored = []
        for name in self.brokers:
            client = BrokerClient(self.network, self._addresses[name])
            for status in (await client.partitions()).partitions:
                messages = await read_partition(client, SUBJECT, status.partition_id)
                self.stamps_ns += [message.sent_at_ns for message in messages]
                stored += [
                    Stored(status.partition_id, message.offset, message.key, message.value)
                    for message in messages
                ]
            await client.close()
        return stored

    async def history(self) -> list[Event]:
        """The events of all programs, and the log at the end."""
        log = await self._log()
        timed: list[Timed] = list(read_grants(self.folder / "meta" / "meta.db"))
        for path in sorted(self.folder.glob("*.events")):
            actor = self.actors.get(path.stem)
            timed += starts_placed(read_events(path), () if actor is None else actor.stops)
        return one_history(timed, log)

    def _all_are_there(self, *names: str) -> None:
        ended = [self.actors[name] for name in names if not self.actors[name].running]
        assert not ended, "\n".join(actor.last_words() for actor in ended)

    async def look(self) -> tuple[Findings, list[Event]]:
        """Check the history so far, during the run."""
        events = await self.history()
        return check_history(events, drained=False), events

    async def judge(self) -> tuple[Findings, list[Event]]:
        """Drain, and check the history; every program that the test did not end must still run."""
        self._all_are_there("p", *self.brokers, "m", *self.consumers)
        try:
            drained = await self.drain()
        finally:  # a broker that is gone cannot be asked either
            self._all_are_there(*self.brokers, "m", *self.consumers)
        events = await self.history()
        findings = check_history(events)
        if not drained and not findings.total:
            findings.note("starvation", "not everything stored was acked in time")
        return findings, events


def _lag(status: PartitionStatus) -> int:
    (cursor,) = [group.cursor for group in status.groups if group.group == GROUP] or [0]
    return status.next_offset - cursor
