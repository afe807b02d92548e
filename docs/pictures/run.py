"""Runs the scenario that the pictures show, with real processes on loopback that get killed, and
records what their clients observe. Times are in seconds since the first message.
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
KEY_INTERVAL_S = 0.5
"""The number of seconds between two messages of a key."""
SENDING_S = 8.0
HANDLING_S = 0.15
TTL_MS = 1_200
KILL_CONSUMER_S, RESIZE_S, KILL_BROKER_S = 2.4, 3.0, 5.6
SUBJECTS = ("orders", "plain")
"""The subjects. `orders` uses order keys; for `plain`, the program picks the partition by the hash
of the key modulo the number of partitions.
"""


@dataclass(slots=True)
class Journey:
    """Records when a message was sent, stored and handled; messages are numbered per key."""

    key: str
    number: int
    sent_s: float
    stored_s: float = 0.0
    partition: int = 0
    handler_calls: list[tuple[float, str]] = field(default_factory=list)
    """The time and the consumer of each handler call; there may be several after a crash."""


@dataclass(slots=True)
class Run:
    """The result of a run: the `journeys` of each subject, and the `events` with their times and
    captions.
    """

    journeys: dict[str, list[Journey]]
    events: list[tuple[float, str]]
    partitions: dict[str, list[tuple[int, float, float]]]
    """The id, the opening time and the sealing time of each partition, by subject."""


class Cluster:
    """A metaserver, two brokers and two consumers, each in its own process."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        _, self.meta = self._start_server(
            "keylane.metaserver", "--data", str(folder / "meta"), "--port", "0"
        )
        self.brokers = [self._start_broker(name, "0") for name in ("b1", "b2")]
        self.consumers: list[subprocess.Popen[str]] = []

    def _start_process(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def _start_server(self, module: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
        process = self._start_process("-m", module, *arguments)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())["address"]

    def _start_broker(self, name: str, port: str) -> tuple[subprocess.Popen[str], str]:
        data = str(self.folder / name)
        return self._start_server(
            "keylane.broker", "--group", name, "--data", data, "--meta", self.meta, "--port", port
        )

    def start_consumers(self) -> None:
        """Start both consumers, and wait until they are running."""
        for name in ("c1", "c2"):
            process = self._start_process(
                __file__, self.meta, name, str(self.folder / f"{name}.jsonl")
            )
            assert process.stdout is not None
            process.stdout.readline()
            self.consumers.append(process)

    async def restart_broker(self, number: int, after_s: float) -> None:
        """Kill a broker, and restart it `after_s` seconds later."""
        process, address = self.brokers[number]
        process.kill()
        await asyncio.to_thread(process.wait)
        await asyncio.sleep(after_s)
        port = address.rpartition(":")[2]
        self.brokers[number] = await asyncio.to_thread(self._start_broker, f"b{number + 1}", port)

    def handler_calls(self) -> list[dict[str, Any]]:
        """Return the handler calls that the consumers have recorded."""
        return [
            json.loads(line)
            for file in sorted(self.folder.glob("c?.jsonl"))
            for line in file.read_text().splitlines()
        ]


def queue_of(key: str, count: int) -> int:
    """Return the queue of a key: the key's hash modulo the number of queues."""
    return xxhash.xxh32_intdigest(key.encode()) % count


async def run_scenario(folder: Path, stack: ExitStack) -> Run:
    """Run the scenario once, which takes about 15 seconds."""
    cluster = Cluster(folder, stack)
    events: list[tuple[float, str]] = []
    journeys: dict[str, list[Journey]] = {subject: [] for subject in SUBJECTS}
    async with Admin(cluster.meta) as admin, Producer(cluster.meta) as producer:
        await wait_until_available(admin, 2)
        await admin.create_subject("orders", partitions=4)
        await admin.create_subject("plain", partitions=6, static=True)
        opening_times = {
            subject: [(each, 0.0) for each in await partitions_of(admin, subject)]
            for subject in SUBJECTS
        }
        await asyncio.to_thread(cluster.start_consumers)
        await asyncio.sleep(1)
        started_at = time.monotonic()
        queues = 4

        def now() -> float:
            return time.monotonic() - started_at

        async def send(subject: str, journey: Journey) -> None:
            value = f"{journey.number}".encode()
            queue = queue_of(journey.key, queues) if subject == "plain" else None
            receipt = await producer.send(subject, value, key=journey.key.encode(), queue=queue)
            journey.stored_s = now()
            journey.partition = receipt.partition_id

        async def wait_and_caption(at_s: float, caption: str) -> None:
            await asyncio.sleep(at_s - now())
            events.append((now(), caption))

        async def inject_faults() -> None:
            nonlocal queues
            await wait_and_caption(KILL_CONSUMER_S, "kill -9 a consumer")
            cluster.consumers[0].kill()
            await wait_and_caption(RESIZE_S, "keylane subject resize orders --partitions 6")
            queues = 6
            resized = await admin.resize("orders", 6)
            await admin.wait(resized)
            opening_times["orders"] += [
                (each, now()) for each in await partitions_of(admin, "orders")
            ]
            opening_times["plain"][4:] = [(each, now()) for each, _ in opening_times["plain"][4:]]
            await wait_and_caption(KILL_BROKER_S, "kill -9 a broker")
            await cluster.restart_broker(0, after_s=0.8)
            events.append((now(), "the broker is back"))

        fault_task = asyncio.create_task(inject_faults())
        sends: list[asyncio.Task[None]] = []
        number = 0
        while now() < SENDING_S:
            number += 1
            for key in KEYS:
                for subject in SUBJECTS:
                    journey = Journey(key, number, now())
                    journeys[subject].append(journey)
                    sends.append(asyncio.create_task(send(subject, journey)))
                await asyncio.sleep(KEY_INTERVAL_S / len(KEYS))
        await asyncio.gather(fault_task, *sends)
        await _wait_until_handled(cluster, sum(map(len, journeys.values())))
    _record_handled(cluster, journeys, started_at)
    partitions = {
        subject: _partition_spans(opening_times[subject], rows)
        for subject, rows in journeys.items()
    }
    return Run(journeys, sorted(events), partitions)


async def partitions_of(admin: Admin, subject: str) -> list[int]:
    """Return the ids of a subject's open partitions."""
    view = await admin.describe_subject(subject)
    return [int(each.partition_id) for each in view.partitions if each.state == "open"]


async def wait_until_available(admin: Admin, count: int) -> None:
    """Wait until this many brokers are available."""
    async with asyncio.timeout(60):
        available = 0
        while available < count:
            await asyncio.sleep(0.1)
            listed_groups = await admin.list_brokers()
            available = sum(row.available for row in listed_groups.brokers)


async def _wait_until_handled(cluster: Cluster, count: int) -> None:
    async with asyncio.timeout(60):
        calls: set[tuple[str, str, int]] = set()
        while len(calls) < count:
            await asyncio.sleep(0.2)
            calls = {(row["s"], row["k"], row["n"]) for row in cluster.handler_calls()}


def _record_handled(
    cluster: Cluster, journeys: dict[str, list[Journey]], started_at: float
) -> None:
    by_message = {
        (subject, journey.key, journey.number): journey
        for subject, rows in journeys.items()
        for journey in rows
    }
    for row in sorted(cluster.handler_calls(), key=lambda row: row["at"]):
        journey = by_message[row["s"], row["k"], row["n"]]
        journey.handler_calls.append((row["at"] - started_at, row["c"]))


def _partition_spans(
    opened: list[tuple[int, float]], rows: list[Journey]
) -> list[tuple[int, float, float]]:
    """Return each partition with its opening time and the time of its last handled message. An open
    partition lasts until the last message of all.
    """
    ends = {partition: 0.0 for partition, _ in opened}
    for journey in rows:
        ends[journey.partition] = max(ends[journey.partition], journey.handler_calls[-1][0])
    last, newest = max(ends.values()), max(at for _, at in opened)
    sealed = {part for part, at in opened if at < newest and len(opened) > 6}
    return [(part, at, ends[part] if part in sealed else last) for part, at in opened]


def find_out_of_order(rows: list[Journey]) -> set[tuple[str, int]]:
    """Return the messages that were first handled after a later message of their key."""
    late: set[tuple[str, int]] = set()
    newest: dict[str, int] = {}
    for journey in sorted(rows, key=lambda journey: journey.handler_calls[0][0]):
        if journey.number < newest.get(journey.key, 0):
            late.add((journey.key, journey.number))
        newest[journey.key] = max(journey.number, newest.get(journey.key, 0))
    return late


async def consume(meta: str, name: str, file: Path) -> None:
    """Handle both subjects until the process is killed, and record each handler call."""
    with file.open("a", buffering=1) as lines:

        async def handle(message: Message) -> None:
            row = {"at": time.monotonic(), "c": name, "s": message.subject}
            row |= {"k": message.key.decode(), "n": int(message.value)}
            lines.write(json.dumps(row) + "\n")
            await asyncio.sleep(HANDLING_S)

        settings = ConsumerSettings(ttl_ms=TTL_MS, name=name)
        consumer = Consumer(meta, settings=settings, ack="each")
        for subject in SUBJECTS:
            consumer.on(subject, group="billing")(handle)
        running = asyncio.create_task(consumer.run())
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await running


if __name__ == "__main__":
    asyncio.run(consume(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
