"""The runs that the pictures show: real processes on loopback, killed and stopped, and what
their clients saw. Times are seconds since the first message.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer

KEYS = ("ben", "dot", "eve", "gil", "ida", "kim", "mia", "ned")
EACH_S = 0.5
"""Seconds between two messages of a key."""
SENDING_S = 8.0
HANDLING_S = 0.15
TTL_MS = 1_200
KILL_CONSUMER_S, RESIZE_S, KILL_BROKER_S = 2.4, 3.0, 5.6
WORLDS = ("orders", "plain")
"""The subject of keylane, and one whose program adds partitions in the usual way: it takes the
hash of the key modulo their number.
"""


@dataclass(slots=True)
class Journey:
    """One message: its number within its key, and the times and places it passed."""

    key: str
    number: int
    sent_s: float
    stored_s: float = 0.0
    partition: int = 0
    handled: list[tuple[float, str]] = field(default_factory=list)
    """When a handler was called with it, and the consumer; more than one after a crash."""


@dataclass(slots=True)
class Run:
    """What happened: `journeys` by subject, and `moments`, each with its caption."""

    journeys: dict[str, list[Journey]]
    moments: list[tuple[float, str]]
    partitions: dict[str, list[tuple[int, float, float]]]
    """By subject, each partition with the time it was opened and the time it was sealed."""


class Cluster:
    """A metaserver, two brokers and two consumers, each a process of its own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        _, self.meta = self._server(
            "keylane.metaserver", "--data", str(folder / "meta"), "--port", "0"
        )
        self.brokers = [self._broker(name, "0") for name in ("b1", "b2")]
        self.consumers: list[subprocess.Popen[str]] = []

    def _started(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def _server(self, module: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
        process = self._started("-m", module, *arguments)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())["address"]

    def _broker(self, name: str, port: str) -> tuple[subprocess.Popen[str], str]:
        data = str(self.folder / name)
        return self._server(
            "keylane.broker", "--group", name, "--data", data, "--meta", self.meta, "--port", port
        )

    def start_consumers(self) -> None:
        """Start both, and wait until each one runs."""
        for name in ("c1", "c2"):
            process = self._started(__file__, self.meta, name, str(self.folder / f"{name}.jsonl"))
            assert process.stdout is not None
            process.stdout.readline()
            self.consumers.append(process)

    async def restart_broker(self, number: int, after_s: float) -> None:
        """Kill a broker, and start it again after some seconds."""
        process, address = self.brokers[number]
        process.kill()
        await asyncio.to_thread(process.wait)
        await asyncio.sleep(after_s)
        port = address.rpartition(":")[2]
        self.brokers[number] = await asyncio.to_thread(self._broker, f"b{number + 1}", port)

    def handled(self) -> list[dict[str, Any]]:
        """Return what the handlers wrote down."""
        return [
            json.loads(line)
            for file in sorted(self.folder.glob("c?.jsonl"))
            for line in file.read_text().splitlines()
        ]


def queue_of(key: str, count: int) -> int:
    """Return the queue of a key as a log does it that takes the hash modulo their number."""
    return xxhash.xxh32_intdigest(key.encode()) % count


async def take_run(folder: Path, stack: ExitStack) -> Run:
    """Run the story once; it takes some 15 seconds."""
    cluster = Cluster(folder, stack)
    moments: list[tuple[float, str]] = []
    journeys: dict[str, list[Journey]] = {world: [] for world in WORLDS}
    async with Admin(cluster.meta) as admin, Producer(cluster.meta) as producer:
        while sum(row.available for row in (await admin.list_brokers()).brokers) < 2:  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.1)
        await admin.create_subject("orders", partitions=4)
        await admin.create_subject("plain", partitions=6, static=True)
        opened = {
            world: [(each, 0.0) for each in await partitions_of(admin, world)] for world in WORLDS
        }
        await asyncio.to_thread(cluster.start_consumers)
        await asyncio.sleep(1)
        began = time.monotonic()
        queues = 4

        def now() -> float:
            return time.monotonic() - began

        async def send(world: str, journey: Journey) -> None:
            value = f"{journey.number}".encode()
            queue = queue_of(journey.key, queues) if world == "plain" else None
            receipt = await producer.send(world, value, key=journey.key.encode(), queue=queue)
            journey.stored_s, journey.partition = now(), receipt.partition_id

        async def tell(at_s: float, caption: str) -> None:
            await asyncio.sleep(at_s - now())
            moments.append((now(), caption))

        async def break_things() -> None:
            nonlocal queues
            await tell(KILL_CONSUMER_S, "kill -9 a consumer")
            cluster.consumers[0].kill()
            await tell(RESIZE_S, "keylane subject resize orders --partitions 6")
            queues = 6
            resized = await admin.resize("orders", 6)
            await admin.wait(resized)
            opened["orders"] += [(each, now()) for each in await partitions_of(admin, "orders")]
            opened["plain"][4:] = [(each, now()) for each, _ in opened["plain"][4:]]
            await tell(KILL_BROKER_S, "kill -9 a broker")
            await cluster.restart_broker(0, after_s=0.8)
            moments.append((now(), "the broker is back"))

        breaking = asyncio.create_task(break_things())
        sends: list[asyncio.Task[None]] = []
        number = 0
        while now() < SENDING_S:
            number += 1
            for key in KEYS:
                for world in WORLDS:
                    journey = Journey(key, number, now())
                    journeys[world].append(journey)
                    sends.append(asyncio.create_task(send(world, journey)))
                await asyncio.sleep(EACH_S / len(KEYS))
        await asyncio.gather(breaking, *sends)
        await _until_handled(cluster, sum(map(len, journeys.values())))
    _note_handled(cluster, journeys, began)
    partitions = {world: _spans(opened[world], rows) for world, rows in journeys.items()}
    return Run(journeys, sorted(moments), partitions)


async def partitions_of(admin: Admin, subject: str) -> list[int]:
    """Return the ids of the open partitions, by their ranges of the hash."""
    view = await admin.describe_subject(subject)
    return [int(each.partition_id) for each in view.partitions if each.state == "open"]


async def _until_handled(cluster: Cluster, count: int) -> None:
    async with asyncio.timeout(60):
        while len({(row["s"], row["k"], row["n"]) for row in cluster.handled()}) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


def _note_handled(cluster: Cluster, journeys: dict[str, list[Journey]], began: float) -> None:
    by_message = {
        (world, journey.key, journey.number): journey
        for world, rows in journeys.items()
        for journey in rows
    }
    for row in sorted(cluster.handled(), key=lambda row: row["at"]):
        journey = by_message[row["s"], row["k"], row["n"]]
        journey.handled.append((row["at"] - began, row["c"]))


def _spans(opened: list[tuple[int, float]], rows: list[Journey]) -> list[tuple[int, float, float]]:
    """Return each partition with the time it was opened and the time of its last handled message;
    one that is open to the end has the time of the last message of all.
    """
    ends = {partition: 0.0 for partition, _ in opened}
    for journey in rows:
        ends[journey.partition] = max(ends[journey.partition], journey.handled[-1][0])
    last, newest = max(ends.values()), max(at for _, at in opened)
    sealed = {part for part, at in opened if at < newest and len(opened) > 6}
    return [(part, at, ends[part] if part in sealed else last) for part, at in opened]


def out_of_order(rows: list[Journey]) -> set[tuple[str, int]]:
    """Return the messages that were first handled after a later one of their key."""
    late: set[tuple[str, int]] = set()
    newest: dict[str, int] = {}
    for journey in sorted(rows, key=lambda journey: journey.handled[0][0]):
        if journey.number < newest.get(journey.key, 0):
            late.add((journey.key, journey.number))
        newest[journey.key] = max(journey.number, newest.get(journey.key, 0))
    return late


async def consume(meta: str, name: str, file: Path) -> None:
    """Handle both subjects until the process is ended, and write down each call."""
    with file.open("a", buffering=1) as lines:

        async def handle(message: Message) -> None:
            row = {"at": time.monotonic(), "c": name, "s": message.subject}
            row |= {"k": message.key.decode(), "n": int(message.value)}
            lines.write(json.dumps(row) + "\n")
            await asyncio.sleep(HANDLING_S)

        settings = ConsumerSettings(ttl_ms=TTL_MS, name=name)
        consumer = Consumer(meta, settings=settings, ack="each")
        for world in WORLDS:
            consumer.on(world, group="billing")(handle)
        running = asyncio.create_task(consumer.run())
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await running


if __name__ == "__main__":
    asyncio.run(consume(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
