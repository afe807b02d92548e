"""keylane: a metaserver and a broker; the client is what a reader of README.md writes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from peers.durability import Durability
from peers.systems.base import FIRST, KEYS, Client, Handling, Ready, System, first_line_of

IN_FLIGHT = 20_000
"""Receipts that a sending loop has not awaited yet."""
GROUP = "peers"
FOLDERS = 3


class Keylane(System):
    """The defaults."""

    title = "keylane"
    client = "peers.systems.keylane:KeylaneClient"
    durability = Durability.FSYNCED
    promise = "written and fsynced, by group commit; a batch that is sent again is stored once"
    settings = "none; the loop is that of `asyncio.run`"
    sends_per_second = 400_000
    senders = ("each", "all", "arrow")
    handlers = ("each", "batch", "arrow")
    broker_options: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def missing_text(cls, home: Path) -> str:
        del home  # it runs the keylane that measures
        return ""

    @classmethod
    def versions(cls, home: Path) -> dict[str, str]:
        del home
        commit = first_line_of(
            "git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"
        )
        return {
            "keylane": f"{version('keylane')} ({commit})",
            "Python": sys.version.split()[0],
        }

    def start(self, folder: Path) -> None:
        meta = self._server(folder, "keylane.metaserver", "--data", str(folder / "meta"))
        self._server(
            folder,
            "keylane.broker",
            *("--group", "g1", "--data", str(folder / "broker"), "--meta", meta),
            *self.broker_options,
        )
        self.where = {"meta": meta}
        asyncio.run(self._wait_for_broker())

    def _server(self, folder: Path, module: str, *arguments: str) -> str:
        """Start a server, and return its address."""
        log = folder / f"{module}.log"
        self.spawn(log, sys.executable, "-P", "-m", module, *arguments, "--port", "0")
        address = ""

        def read_ready_line() -> bool:
            nonlocal address
            for line in log.read_text().split("\n")[:-1]:
                if line.startswith("{") and "address" in (ready_line := json.loads(line)):
                    address = ready_line["address"]
            return bool(address)

        self.wait_until(read_ready_line, module)
        return address

    async def _wait_for_broker(self) -> None:
        from keylane import Admin
        from keylane.cli.connection import wait_for_brokers

        async with Admin(self.where["meta"]) as admin:
            await wait_for_brokers(admin, 1)

    def create(self, topics: Sequence[str], partitions: int) -> None:
        from keylane import Admin

        async def create() -> None:
            async with Admin(self.where["meta"]) as admin:
                for topic in topics:
                    await admin.create_subject(topic, partitions=partitions)

        asyncio.run(create())


class KeylaneUvloop(Keylane):
    """With uvloop in the clients; servers have it always."""

    title = "keylane, uvloop"
    settings = "uvloop in the clients"
    loop = "uvloop"


class KeylaneCopies(Keylane):
    """Acks wait for two copies of the broker's folder."""

    title = "keylane, three data folders"
    promise = "written and fsynced by the broker and by two copies of its folder"
    settings = (
        "two followers, `failover = true`, and "
        "`keylane broker copies g1 --wanted 3 --allow-one-machine`"
    )
    sends_per_second = 200_000
    senders = ("each", "all")
    handlers = ("each",)
    broker_options: ClassVar[tuple[str, ...]] = ("--failover", "true")

    def start(self, folder: Path) -> None:
        super().start(folder)
        for number in range(1, FOLDERS):
            self.spawn(
                folder / f"follower-{number}.log",
                *(sys.executable, "-P", "-m", "keylane.broker", "--follow", "true"),
                *("--group", "g1", "--data", str(folder / f"copy-{number}")),
                *("--meta", self.where["meta"], "--port", "0"),
                *self.broker_options,
            )
        asyncio.run(self._wait_for_copies())

    def leader(self, topic: str) -> int:
        del topic  # the only broker
        return self._children[1].pid

    async def _wait_for_copies(self) -> None:
        from keylane import Admin

        async with asyncio.timeout(60), Admin(self.where["meta"]) as admin:
            await admin.set_copies("g1", FOLDERS, may_share_machine=True)
            while len((await admin.copies("g1")).members) < FOLDERS - 1:
                await asyncio.sleep(0.1)


class KeylaneClient(Client):
    """Sends, and handles messages, in one of three ways; awaits every receipt, or the call that
    ends when all are stored.
    """

    library = "keylane:Consumer"

    async def open_producer(self) -> None:
        from keylane import Producer

        self._producer = await Producer(self.where["meta"]).__aenter__()
        await self._producer.send(self.topic, FIRST, key=KEYS[0])
        self._receipts: deque[Any] = deque()
        if self.sender == "arrow":
            await self._send_arrow(FIRST, 1)  # loads the library

    async def send_all(self, value: bytes, count: int) -> None:
        if self.sender == "all":
            pairs = ((KEYS[number % 10_000], value) for number in range(count))
            assert await self._producer.send_all(self.topic, pairs) == count
            return
        if self.sender == "arrow":
            await self._send_arrow(value, count)
            return
        send, topic, receipts = self._producer.send, self.topic, self._receipts
        for number in range(count):
            receipts.append(send(topic, value, key=KEYS[number % 10_000]))
            if len(receipts) >= IN_FLIGHT:
                await receipts.popleft()
        await self.drain()

    async def _send_arrow(self, value: bytes, count: int) -> None:
        """Record batches of 10,000 rows, a message of each key."""
        import pyarrow as pa

        rows = pa.record_batch({"key": KEYS, "value": [value] * len(KEYS)})
        starts = range(0, count, len(KEYS))
        batches = (rows.slice(0, min(len(KEYS), count - start)) for start in starts)
        reader = pa.RecordBatchReader.from_batches(rows.schema, batches)
        receipt = await self._producer.send_arrow(self.topic, reader, value="value", key="key")
        assert receipt.stored == count

    async def send(self, key: bytes, value: bytes) -> None:
        await self._producer.send(self.topic, value, key=key)

    async def post(self, key: bytes, value: bytes) -> None:
        self._receipts.append(self._producer.send(self.topic, value, key=key))

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        while self._receipts and self._receipts[0].done():
            await self._receipts.popleft()

    async def drain(self) -> None:
        while self._receipts:
            await self._receipts.popleft()

    async def close_producer(self) -> None:
        await self._producer.close()

    async def consume(self, handle: Handling, ready: Ready) -> None:
        if self.handler == "arrow":
            await self._consume_arrow(handle, ready)
            return
        from keylane import Consumer, Message

        done, take = asyncio.Event(), handle.message

        async def handle_message(message: Message) -> None:
            take(message.key, message.value)
            if handle.remaining <= 0:
                done.set()

        async def handle_batch(messages: list[Message]) -> None:
            for message in messages:
                take(message.key, message.value)
            if handle.remaining <= 0:
                done.set()

        handler = (
            {"batch_handler": handle_batch}
            if self.handler == "batch"
            else {"handler": handle_message}
        )
        group = f"{GROUP}-{self.handler}"
        async with Consumer(self.where["meta"], subject=self.topic, group=group, **handler):
            ready()
            await done.wait()

    async def _consume_arrow(self, handle: Handling, ready: Ready) -> None:
        """By column: the lengths of all keys and values of a batch are added up."""
        import pyarrow.compute as pc

        from keylane import Consumer

        meta, group = self.where["meta"], f"{GROUP}-arrow"
        async with Consumer(meta, subject=self.topic, group=group) as consumer:
            ready()
            async for batch in consumer.batches():
                for name in ("key", "value"):
                    column = batch.record_batch.column(name)
                    assert pc.sum(pc.binary_length(column)).as_py(), name
                handle.count(len(batch))
                await batch.ack()
                if handle.remaining <= 0:
                    break

    async def open_consumer(self, topic: str) -> Callable[[], Any]:
        from keylane import Consumer, Message

        async def handle(message: Message) -> None:
            raise AssertionError(f"a message that was not sent: {message}")

        consumer = Consumer(self.where["meta"], subject=topic, group=GROUP, handler=handle)
        await consumer.__aenter__()
        return consumer.close
