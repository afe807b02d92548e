"""Measures what keeping the order costs: hand-over, fail-over, resize, a large join, heartbeats;
prints JSON.

    handover_p99_ms       from the last message of the old owner to the first of the new one
    failover_p99_ms       from the kill of an owner to the first message of the new one
    resize_moved_p99_ms   a partition is split under load: send to handled, of its keys
    resize_other_p99_ratio   the same of other keys, against the second before: medians
    steady_p99_ratio      noise: the worst second before a split against their median
    join_900_s            ten consumers join at once: until all of 900 partitions are pulled
    heartbeat_core_share  of the metaserver with SQLite, for 1,000 consumers that beat

`--quick`: fewer rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import uvloop
from machine import machine
from main_path import BenchCluster, line_of

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject, Heartbeat, Join
from keylane.protocol.errors import UnavailableError
from keylane.protocol.operations import OperationKind, OperationState, OperationView, Reshape
from keylane.protocol.routing import OrderStrategy, logical_partition
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork

TTL_MS = 2_000
KEYS = [b"key-%d" % number for number in range(200)]
SENT_AT_ONCE = 20
"""Few, so that the time between sends does not count as a pause."""
SESSIONS = 1_000
JOIN_PARTITIONS = 900
STEADY_SECONDS = 1.0
DONE_SECONDS_MAX = 30
SAMPLE_SECONDS = 10.0


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    ordered = sorted(values)
    assert ordered, "nothing was measured"
    return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


class Traffic:
    """A steady stream of about 4,000 messages a second, with their owners and latencies."""

    def __init__(self, meta: str, subject: str) -> None:
        self.meta = meta
        self.subject = subject
        self.latencies: list[tuple[bytes, float, float]] = []
        """(key, time of sending, seconds until it was handled) of each handled message."""
        self.sent: list[float] = []
        """Time of sending of each message."""
        self.owners: dict[int, list[tuple[int, float, float]]] = {}
        """Partition id → (token, time of its first message, time of its last message) of each
        owner.
        """

    async def handle(self, message: Message) -> None:
        now = time.monotonic()
        sent_at = float(message.value)
        self.latencies.append((message.key, sent_at, now - sent_at))
        spans = self.owners.setdefault(message.partition_id, [])
        if spans and spans[-1][0] == message.fencing_token:
            spans[-1] = (message.fencing_token, spans[-1][1], now)
        else:
            spans.append((message.fencing_token, now, now))

    async def send(self, producer: Producer) -> None:
        while True:
            for start in range(0, len(KEYS), SENT_AT_ONCE):
                for key in KEYS[start : start + SENT_AT_ONCE]:
                    now = b"%.6f" % time.monotonic()
                    producer.send(self.subject, now, key=key)
                    self.sent.append(float(now))
                await asyncio.sleep(SENT_AT_ONCE / 4_000)

    def consumer(self, *, ttl_ms: int = 10_000) -> Consumer:
        """Add a member to the group."""
        return Consumer(
            self.meta,
            subject=self.subject,
            group="bench",
            handler=self.handle,
            settings=ConsumerSettings(ttl_ms=ttl_ms),
        )

    def changes_ms(self, since_s: float, until: float) -> list[float]:
        """Milliseconds from an owner's last message to the next owner's first, of changes in this
        time.
        """
        return [
            (after[1] - before[2]) * 1_000
            for spans in self.owners.values()
            for before, after in itertools.pairwise(spans)
            if since_s <= after[1] < until
        ]


async def create(meta: MetaClient, subject: str, partitions: int) -> None:
    """Create a strict subject."""
    body = CreateSubject(
        subject=subject, partitions=partitions, order_strategy=OrderStrategy.STRICT
    )
    while True:
        try:
            await meta.create_subject(body)
        except UnavailableError:
            await asyncio.sleep(0.05)
        else:
            return


async def done(meta: MetaClient, subject: str) -> OperationView:
    """Wait until the subject's last operation is done."""
    async with asyncio.timeout(DONE_SECONDS_MAX):
        while True:
            (view, *_) = (await meta.call(endpoints.OPERATIONS, subject=subject)).operations
            if view.state is OperationState.DONE:
                return view
            await asyncio.sleep(0.1)


async def handover(cluster: BenchCluster, meta: MetaClient, rounds: int) -> list[float]:
    """Return the duration of each hand-over in ms while consumers join and leave."""
    await create(meta, "handover", 16)
    traffic = Traffic(cluster.meta, "handover")
    changes: list[float] = []
    async with (
        Producer(cluster.meta, order_strategy="strict") as producer,
        traffic.consumer(),
        traffic.consumer(),
    ):
        sending = asyncio.create_task(traffic.send(producer))
        await asyncio.sleep(STEADY_SECONDS)
        since = time.monotonic()
        for _ in range(rounds):
            async with traffic.consumer():
                await asyncio.sleep(STEADY_SECONDS)
            await asyncio.sleep(STEADY_SECONDS)
        changes = traffic.changes_ms(since, time.monotonic())
        sending.cancel()
    return changes


async def failover(cluster: BenchCluster, meta: MetaClient, rounds: int) -> list[float]:
    """Kill a consumer process, and return for each of its partitions the ms until it is handled
    again.
    """
    await create(meta, "failover", 16)
    traffic = Traffic(cluster.meta, "failover")
    delays: list[float] = []
    async with (
        Producer(cluster.meta, order_strategy="strict") as producer,
        traffic.consumer(ttl_ms=TTL_MS) as successor,
    ):
        sending = asyncio.create_task(traffic.send(producer))
        for _ in range(rounds):
            victim = subprocess.Popen(
                [sys.executable, __file__, "--victim", cluster.meta],
                stdout=subprocess.PIPE,
                text=True,
            )
            await asyncio.to_thread(line_of, victim)
            await asyncio.sleep(STEADY_SECONDS)
            left = 16 - len(successor.assignment)
            killed = time.monotonic()
            victim.kill()
            victim.wait()
            await asyncio.sleep(TTL_MS / 1_000 + 2)
            # Messages that the victim handled are not known here, so the time counts from the kill.
            takeover_times = [
                (spans[-1][1] - killed) * 1_000
                for spans in traffic.owners.values()
                if spans[-1][1] > killed
            ]
            assert len(takeover_times) == left > 0, "not all were taken over"
            delays += takeover_times
        sending.cancel()
    return delays


async def be_victim(meta: str) -> None:
    """Run a consumer until the process is killed."""
    async with Consumer(
        meta,
        subject="failover",
        group="bench",
        handler=Traffic(meta, "failover").handle,
        settings=ConsumerSettings(ttl_ms=TTL_MS),
    ) as consumer:
        print(json.dumps({"ready": True}), flush=True)
        await consumer.wait()


async def resize(
    cluster: BenchCluster, meta: MetaClient, rounds: int
) -> tuple[list[float], list[list[float]], list[list[float]]]:
    """
    One of four partitions is split and merged again; latencies in ms.

    Returns:
        Of moved keys; of the others, by resize; of all in the second before, by resize.
    """
    await create(meta, "resize", 4)
    traffic = Traffic(cluster.meta, "resize")
    moved: list[float] = []
    others: list[list[float]] = []
    before: list[list[float]] = []
    async with (
        Producer(cluster.meta, order_strategy="strict") as producer,
        traffic.consumer(),
        traffic.consumer(),
    ):
        sending = asyncio.create_task(traffic.send(producer))
        await asyncio.sleep(STEADY_SECONDS)
        ids = [
            (await meta.call(endpoints.SUBJECT, subject="resize"))
            .route.open_partitions()[0]
            .partition_id
        ]
        for number in range(2 * rounds):
            since = time.monotonic()
            await asyncio.sleep(STEADY_SECONDS)
            begun = time.monotonic()
            kind = OperationKind.MERGE if number % 2 else OperationKind.SPLIT
            ask = Reshape(kind=kind, partition_ids=tuple(ids))
            (view,) = (await meta.call(endpoints.RESHAPE, ask)).operations
            await asyncio.sleep(STEADY_SECONDS)
            view = await done(meta, "resize")
            ids = [child.partition_id for child in view.children]
            await asyncio.sleep(STEADY_SECONDS)
            until = begun + STEADY_SECONDS
            handled = sum(sent_at < until for _, sent_at, _ in traffic.latencies)
            assert handled == sum(sent_at < until for sent_at in traffic.sent), "some took too long"
            before.append([])
            others.append([])
            for key, sent_at, seconds in traffic.latencies:
                if since <= sent_at < begun:
                    before[-1].append(seconds * 1_000)
                elif begun <= sent_at < until:
                    here = logical_partition(key) < 256
                    (moved if here else others[-1]).append(seconds * 1_000)
            traffic.latencies = [latency for latency in traffic.latencies if latency[1] >= until]
            traffic.sent = [sent_at for sent_at in traffic.sent if sent_at >= until]
        sending.cancel()
    return moved, others, before


async def join(cluster: BenchCluster, meta: MetaClient) -> float:
    """Return the seconds until each of 900 partitions is pulled after ten consumers join a group
    at once.
    """
    await create(meta, "join", JOIN_PARTITIONS)
    traffic = Traffic(cluster.meta, "join")
    consumers = [traffic.consumer(ttl_ms=30_000) for _ in range(10)]
    async with AsyncExitStack() as stack:
        started_at = time.monotonic()
        await asyncio.gather(*(stack.enter_async_context(consumer) for consumer in consumers))
        while True:
            assignments = [
                assignment for consumer in consumers for assignment in consumer.assignment
            ]
            pulling = {
                assigned.partition_id
                for assigned in assignments
                if assigned.waiting_for == "messages"
            }
            if len(pulling) == len(assignments) == JOIN_PARTITIONS:
                return time.monotonic() - started_at
            await asyncio.sleep(0.01)


async def heartbeats(cluster: BenchCluster, network: HttpNetwork, meta: MetaClient) -> float:
    """Return the share of a core that a metaserver takes for 1,000 consumers, 1,024 partitions."""
    await create(meta, "beats", 1_024)
    client = MetaClient(network, [cluster.meta], timeout_ms=30_000)

    async def beat(session: str, wait_ms: int) -> None:
        version = -1
        while True:
            body = Heartbeat(session=session, known_version=version, wait_ms=wait_ms)
            version = (await client.call(endpoints.HEARTBEAT, body)).version

    tasks = []
    concurrency = asyncio.Semaphore(50)

    async def begin() -> None:
        session = secrets.token_hex(16)
        async with concurrency:
            joined = await client.call(
                endpoints.JOIN, Join(subject="beats", group="bench", session=session)
            )
        tasks.append(asyncio.create_task(beat(session, joined.heartbeat_ms)))

    await asyncio.gather(*(begin() for _ in range(SESSIONS)))
    await asyncio.sleep(SAMPLE_SECONDS)
    started_at, used_s = time.monotonic(), cpu_seconds(cluster.meta_process.pid)
    await asyncio.sleep(SAMPLE_SECONDS)
    share = (cpu_seconds(cluster.meta_process.pid) - used_s) / (time.monotonic() - started_at)
    for task in tasks:
        assert not task.done(), task
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return share


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(cluster: BenchCluster, rounds: int) -> dict[str, float]:
    """Measure all figures, one after another."""
    network = HttpNetwork()
    meta = MetaClient(network, [cluster.meta], timeout_ms=30_000)

    def say(what: str, *values: float) -> None:
        print(what, *(round(value, 3) for value in values), file=sys.stderr, flush=True)

    try:
        say("hand-over, then what was found and the next")
        changes = await handover(cluster, meta, rounds)
        say("fail-over", p99(changes))
        failover_delays = await failover(cluster, meta, max(1, rounds // 3))
        say("resize", p99(failover_delays))
        moved_ms, others, before = await resize(cluster, meta, rounds)
        others_ms, before_ms = (
            [p99(values) for values in others],
            [p99(values) for values in before],
        )
        steady_ms = statistics.median(before_ms)
        say("join", p99(moved_ms), statistics.median(others_ms), steady_ms)
        join_s = await join(cluster, meta)
        say("heartbeats", join_s)
        share = await heartbeats(cluster, network, meta)
    finally:
        await network.close()
    return {
        "handovers": len(changes),
        "handover_p99_ms": p99(changes),
        "handover_max_ms": max(changes),
        "failovers": len(failover_delays),
        "failover_p99_ms": p99(failover_delays),
        "ttl_ms": TTL_MS,
        "resize_moved_p99_ms": p99(moved_ms),
        "resize_other_p99_ratio": statistics.median(others_ms) / steady_ms,
        "steady_p99_ratio": max(before_ms) / steady_ms,
        "join_900_s": join_s,
        "heartbeat_core_share": share,
    }


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--victim", metavar="META", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.victim:
            runner.run(be_victim(options.victim))
            return
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            cluster = BenchCluster(Path(folder), stack)
            figures = runner.run(measure(cluster, 2 if options.quick else 10))
    rounded = {key: round(value, 3) for key, value in figures.items()}
    print(json.dumps({"machine": machine(), **rounded}, indent=2))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
