"""Measures what metrics cost: sends while servers are scraped beside sends while they are not, a
scrape of a broker with 1,000 partitions, and the same work with an earlier version.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from main_path import BenchCluster, line_of

from keylane import Admin, Consumer, Producer

SCRAPE_EVERY_S = 1.0
SCRAPES = 30
PARTITIONS, KEYS = 1_000, 20_000


def scrape_s(address: str) -> float:
    """Return how long one read of a server's metrics takes, in seconds."""
    started_at = time.perf_counter()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        answer.read()
    return time.perf_counter() - started_at


class Scraper:
    """Reads a server's metrics each second, as Prometheus does."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._is_ended.wait(SCRAPE_EVERY_S):
            scrape_s(self._address)

    def __enter__(self) -> Self:
        scrape_s(self._address)  # the first one loads a library
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_ended.set()
        self._thread.join()


def used_s(cluster: BenchCluster) -> float:
    """Return the processor time of the cluster's servers, and of all clients that have ended, in
    seconds.
    """
    ticks = 0
    for process in (cluster.broker_process, cluster.meta_process):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    clients = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ticks / os.sysconf("SC_CLK_TCK") + clients.ru_utime + clients.ru_stime


def run_s(cluster: BenchCluster, subject: str, count: int) -> tuple[float, float]:
    """Return how long `count` messages take to be sent, and then to be handled, in seconds."""
    cluster.create(subject)
    with cluster.role("send", subject, count) as sender:
        sent_s = line_of(sender)["seconds"]
    with cluster.role("consume", subject, count) as consumer:
        line_of(consumer)
        return sent_s, line_of(consumer)["seconds"]


def metrics_cost(cluster: BenchCluster, number: int, count: int) -> dict[str, float]:
    """Compare runs during scrapes with runs without, interleaved so that neither has an
    advantage.
    """
    sent_s: dict[bool, float] = {False: 0.0, True: 0.0}
    handled_s: dict[bool, float] = {False: 0.0, True: 0.0}
    for place, scraped in enumerate((False, True, True, False)):
        with ExitStack() as stack:
            if scraped:
                for address in (cluster.broker_address, cluster.meta):
                    stack.enter_context(Scraper(address))
            sent, handled = run_s(cluster, f"scraped-{number}-{place}", count)
        sent_s[scraped] += sent
        handled_s[scraped] += handled
    return {
        "metrics_cost_ratio": sent_s[False] / sent_s[True],
        "metrics_handled_ratio": handled_s[False] / handled_s[True],
    }


def before_cost(
    cluster: BenchCluster, before: BenchCluster, number: int, count: int
) -> dict[str, float]:
    """Compare the processor time of this version with that of an earlier one, in turns."""
    cpu_s = {cluster: 0.0, before: 0.0}
    for place, each in enumerate((before, cluster, cluster, before)):
        began_s = used_s(each)
        run_s(each, f"versions-{number}-{place}", count)
        cpu_s[each] += used_s(each) - began_s
    return {"before_cpu_ratio": cpu_s[before] / cpu_s[cluster]}


async def fill_partitions(cluster: BenchCluster) -> None:
    """Store messages in PARTITIONS partitions, and let a group ack some of them."""
    async with Admin(cluster.meta, wait_s=60) as admin:
        await admin.create_subject("wide", partitions=PARTITIONS)
    async with Producer(cluster.meta) as producer:
        for number in range(KEYS):
            producer.send("wide", b"value", key=b"%d" % number)
        await producer.flush()
    async with Consumer(cluster.meta, subject="wide", group="slow") as consumer:
        acked = 0
        async for message in consumer:
            await message.ack()
            acked += 1
            if acked == PARTITIONS:
                break


def scrape_1000_partitions(cluster: BenchCluster) -> dict[str, float]:
    """Measure scrapes of a broker whose partitions all have messages that a group lacks."""
    asyncio.run(fill_partitions(cluster))
    first_s = scrape_s(cluster.broker_address)
    times_s = [scrape_s(cluster.broker_address) for _ in range(SCRAPES)]
    return {
        "scrape_1000_partitions_first_ms": first_s * 1000,
        "scrape_1000_partitions_ms": statistics.median(times_s) * 1000,
    }


def measure(folder: Path, *, rounds: int, count: int, before: Path | None) -> dict[str, float]:
    """Return the medians of all figures. `before` is a checkout of an earlier version."""
    with ExitStack() as stack:
        cluster = BenchCluster(folder / "now", stack)
        earlier = None
        if before is not None:
            python = str(before / ".venv/bin/python")
            earlier = BenchCluster(folder / "before", stack, python=python)
        figures = []
        for number in range(rounds):
            each = metrics_cost(cluster, number, count)
            if earlier is not None:
                each |= before_cost(cluster, earlier, number, count)
            figures.append(each)
        medians = {key: statistics.median(figure[key] for figure in figures) for key in figures[0]}
        return medians | scrape_1000_partitions(cluster)
