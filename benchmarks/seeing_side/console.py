"""
Measures the console in a real browser: a subject of 1,000 partitions, which a resize has made, a
group of 200 consumers, and messages that come; prints JSON.

    console_first_paint_ms   from the navigation to the first contentful paint, of the overview and
                             of the pages of the subject and the group, in turns: the median; in a
                             tab that is open and keeps no file, of a metaserver that has shown a
                             page before
    console_first_byte_ms    the part of it until the answer begins to arrive: the median
    console_update_ms        from the arrival of an event to the frame that shows it, on the page of
                             the group: the median
    console_sample_ms        what the metaserver needs to sample that page, with 1,000 partitions:
                             how late what is shown is; the median
    console_memory_mb        memory of the metaserver's process with 20 open pages, less that before
                             anybody looked

The metaserver, the broker, the consumers and Chromium are processes on loopback. `--partitions N`
and `--consumers N` make it smaller.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tests"))
from main_path import BenchCluster

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.errors import GroupUnknownError
from support.browser import running_browser

SUBJECT = "orders"
GROUP = "billing"
PARTITIONS = 1_000
CONSUMERS = 200
PAGES = 20
ROUNDS = 7
PATHS = ("", f"/subjects/{SUBJECT}", f"/subjects/{SUBJECT}/groups/{GROUP}")
WATCH = """
window.updates = [];
const Given = EventSource;
window.EventSource = class extends Given {
  constructor(...parts) {
    super(...parts);
    this.addEventListener("message", () => {
      const at = performance.now();
      requestAnimationFrame(() => setTimeout(() => window.updates.push(performance.now() - at), 0));
    });
  }
};
"""
FIRST_BYTE = "performance.getEntriesByType('navigation')[0].responseStart"
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def memory_mb(pid: int) -> float:
    """Return the memory of a process that no other shares, in MB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kb = sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))
    return kb / 1024


async def consume(meta: str, count: int) -> None:
    """Run so many consumers of the group until the process is ended."""

    async def handle(_message: Message) -> None:
        await asyncio.sleep(0)

    consumers = [
        Consumer(
            meta,
            subject=SUBJECT,
            group=GROUP,
            handler=handle,
            settings=ConsumerSettings(name=f"host-{number // 20}:{number}"),
        )
        for number in range(count)
    ]
    await asyncio.gather(*(consumer.run() for consumer in consumers))


async def send(meta: str) -> None:
    """Send about a hundred messages a second until it is cancelled."""
    async with Producer(meta) as producer:
        number = 0
        while True:
            for _ in range(10):
                number += 1
                await producer.send(SUBJECT, b'{"order": %d}' % number, key=f"customer-{number}")
            await asyncio.sleep(0.1)


async def prepare(meta: str, partitions: int, consumers: int) -> None:
    """Resize the subject, and wait until every partition has an owner."""
    async with Admin(meta, wait_s=30) as admin:
        operation = await admin.resize(SUBJECT, partitions)
        async with asyncio.timeout(300):
            await admin.wait(operation)
            while True:
                with suppress(GroupUnknownError):  # it begins with the first consumer
                    described = await admin.describe_group(SUBJECT, GROUP)
                    owned = sum(each.owner is not None for each in described.partitions)
                    if described.sessions == consumers and owned >= partitions:
                        return
                await asyncio.sleep(1)


async def paints_ms(browser: Any, base: str) -> list[tuple[float, float]]:
    """Return for each opened page the times to the first byte and to the first contentful paint, in
    a tab that is open and keeps no file.
    """
    context = await browser.new_context()
    try:
        page = await context.new_page()
        session = await context.new_cdp_session(page)
        await session.send("Network.enable")
        await session.send("Network.setCacheDisabled", {"cacheDisabled": True})
        found = []
        for number in range(1 + ROUNDS * len(PATHS)):  # the first one loads the console
            await page.goto(base + PATHS[number % len(PATHS)])
            while (paint := await page.evaluate(FIRST_PAINT)) is None:
                await asyncio.sleep(0.02)
            found.append((float(await page.evaluate(FIRST_BYTE)), float(paint)))
            await asyncio.sleep(1.5)
        return found[1:]
    finally:
        await context.close()


async def updates_ms(browser: Any, url: str, *, count: int = 15) -> list[float]:
    """Return how long a page takes to show each of so many events."""
    context = await browser.new_context()
    try:
        page = await context.new_page()
        await page.add_init_script(WATCH)
        await page.goto(url)
        async with asyncio.timeout(120):
            while len(found := await page.evaluate("window.updates")) < count:
                await asyncio.sleep(0.2)
        return [float(each) for each in found[1:]]
    finally:
        await context.close()


async def sample_ms(meta: str) -> float:
    """Return how long the calls take with which the page of the group is sampled."""
    took = []
    async with Admin(meta) as admin:
        for _ in range(ROUNDS):
            started = time.perf_counter()
            await admin.describe_group(SUBJECT, GROUP, within_s=1.0)
            took.append((time.perf_counter() - started) * 1000)
    return statistics.median(took)


async def look(cluster: BenchCluster, *, partitions: int, consumers: int) -> dict[str, float]:
    """Measure a cluster whose consumers run."""
    await prepare(cluster.meta, partitions, consumers)
    pid = cluster.meta_process.pid
    async with AsyncExitStack() as stack:
        sender = asyncio.create_task(send(cluster.meta))
        stack.callback(sender.cancel)
        browser = await stack.enter_async_context(running_browser())
        await asyncio.sleep(5)
        before = memory_mb(pid)
        base = f"http://{cluster.meta}/console"
        first_bytes, paints = zip(*await paints_ms(browser, base), strict=True)
        updates = await updates_ms(browser, base + PATHS[2])
        sampled = await sample_ms(cluster.meta)
        contexts = [await browser.new_context() for _ in range(PAGES)]
        for number, context in enumerate(contexts):
            page = await context.new_page()
            path = PATHS[number % len(PATHS)]
            await page.goto(f"{base}{path}?page={number}")
        await asyncio.sleep(15)
        return {
            "console_first_paint_ms": round(statistics.median(paints), 1),
            "console_first_paint_worst_ms": round(max(paints), 1),
            "console_first_byte_ms": round(statistics.median(first_bytes), 1),
            "console_update_ms": round(statistics.median(updates), 1),
            "console_update_worst_ms": round(max(updates), 1),
            "console_sample_ms": round(sampled, 1),
            "console_memory_mb": round(memory_mb(pid) - before, 1),
        }


def measure(
    folder: Path, *, partitions: int = PARTITIONS, consumers: int = CONSUMERS
) -> dict[str, float]:
    """Measure the console of a cluster in this folder."""
    with ExitStack() as stack:
        cluster = BenchCluster(folder, stack)
        cluster.create(SUBJECT)
        group = subprocess.Popen(
            [sys.executable, __file__, "--run-consumers", cluster.meta, str(consumers)],
            stderr=subprocess.DEVNULL,
        )
        stack.callback(group.wait)
        stack.callback(group.kill)
        return asyncio.run(look(cluster, partitions=partitions, consumers=consumers))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=PARTITIONS)
    parser.add_argument("--consumers", type=int, default=CONSUMERS)
    parser.add_argument("--run-consumers", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_consumers:
        meta, count = arguments.run_consumers
        asyncio.run(consume(meta, int(count)))
        return
    with tempfile.TemporaryDirectory(dir=".") as folder:
        found = measure(
            Path(folder), partitions=arguments.partitions, consumers=arguments.consumers
        )
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
