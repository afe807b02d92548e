"""Measures small traffic: steady rates from `send` to a handler, groups, a single send, idle
consumers; prints JSON.

`--rates 500,5000`, `--groups 1,5`, `--seconds N` (6) of each rate, `--rounds N` (3), `--uvloop`
(clients run on asyncio's own loop), `--idle N` (0) consumers for `--seconds`. Processor time is
user and system time of all threads of a process, in µs a message, and a group; another tree is
measured with `PYTHONPATH` of the folder that has it as `keylane`, and of `benchmarks`. A group is
sent after the one before was handled, so that its figures depend little on other work of the
machine: a steady rate on a busy machine makes larger batches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import uvloop
from machine import machine
from main_path import BenchCluster, line_of
from roles import KEYS, VALUE

from keylane import Consumer, Message, Producer

TICK_S = 0.001
"""Messages that are due are sent once in this time."""
WARM_S = 1.0
"""Of each steady rate's beginning nothing is measured."""
SINGLE_SENDS = 500
GROUPS = 1_000


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a running process, over all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def switches(pid: int) -> int:
    """Return the number of voluntary context switches of a running process."""
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        text = status.read_text()
        count += int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return count


async def steady(meta: str, subject: str, rate: int, seconds: float) -> dict[str, float]:
    """Send `rate` messages a second, each with the time of its send in its value."""
    async with Producer(meta) as producer:
        await producer.send(subject, VALUE, key=KEYS[0])
        used = hops = 0.0
        began, sent, count = time.monotonic(), 0, int(rate * (seconds + WARM_S))
        while sent < count:
            now = time.monotonic()
            if not used and now - began >= WARM_S:
                print(json.dumps({"ready": True}), flush=True)
                used, hops = cpu_seconds(os.getpid()), switches(os.getpid())
            due = min(count, int((now - began) * rate))
            while sent < due:
                value = time.monotonic_ns().to_bytes(8) + VALUE[8:]
                producer.send(subject, value, key=KEYS[sent % 10_000])
                sent += 1
            await asyncio.sleep(TICK_S)
        used, hops = cpu_seconds(os.getpid()) - used, switches(os.getpid()) - hops
        print(json.dumps({"cpu_s": used, "switches": hops}), flush=True)
        await producer.flush()
    return {}


async def stamped(meta: str, subject: str, rate: int, seconds: float) -> dict[str, float]:
    """Handle what `steady` sends."""
    times: list[float] = []
    count = int(rate * (seconds + WARM_S)) + 1
    done = asyncio.Event()

    async def handle(message: Message) -> None:
        times.append((time.monotonic_ns() - int.from_bytes(message.value[:8])) / 1e6)
        if len(times) == count:
            done.set()

    async with Consumer(meta, subject=subject, group="steady", handler=handle):
        print(json.dumps({"ready": True}), flush=True)
        await done.wait()
    kept = sorted(times[int(rate * WARM_S) + 1 :])
    return {"p50_ms": kept[len(kept) // 2], "p99_ms": kept[len(kept) * 99 // 100]}


async def grouped(meta: str, subject: str, size: int, _seconds: float) -> dict[str, float]:
    """Send groups of messages, each after the one before was handled here."""
    handled, left = asyncio.Event(), 0

    async def handle(_message: Message) -> None:
        nonlocal left
        left -= 1
        if not left:
            handled.set()

    took: list[float] = []
    async with (
        Producer(meta) as producer,
        Consumer(meta, subject=subject, group="grouped", handler=handle),
    ):
        for number in range(GROUPS + 100):
            if number == 100:
                print(json.dumps({"ready": True}), flush=True)
                used = cpu_seconds(os.getpid())
            began = time.perf_counter()
            handled.clear()
            left = size
            for index in range(size):
                producer.send(subject, VALUE, key=KEYS[(number * size + index) % 10_000])
            await handled.wait()
            took.append((time.perf_counter() - began) * 1000)
        used = cpu_seconds(os.getpid()) - used
        return {"client_cpu_us": used / GROUPS * 1e6, "p50_ms": statistics.median(took[100:])}


async def single(meta: str, subject: str, _rate: int, _seconds: float) -> dict[str, float]:
    """Send messages one at a time, each after the ack of the one before."""
    took = []
    async with Producer(meta) as producer:
        for index in range(SINGLE_SENDS + 100):
            began = time.perf_counter()
            await producer.send(subject, VALUE, key=KEYS[index])
            took.append((time.perf_counter() - began) * 1000)
    kept = sorted(took[100:])
    return {"p50_ms": statistics.median(kept), "p99_ms": kept[len(kept) * 99 // 100]}


async def idle(meta: str, subject: str, count: int, seconds: float) -> dict[str, float]:
    """Open `count` consumers, each of a group of its own, of a subject to which nothing is sent."""

    async def handle(_message: Message) -> None: ...

    async with AsyncExitStack() as stack:
        for number in range(count):
            consumer = Consumer(meta, subject=subject, group=f"idle-{number}", handler=handle)
            await stack.enter_async_context(consumer)
        await asyncio.sleep(2)
        print(json.dumps({"ready": True}), flush=True)
        used = cpu_seconds(os.getpid())
        await asyncio.sleep(seconds)
        return {"cpu_s": cpu_seconds(os.getpid()) - used}


class Take:
    """A cluster, and the processes that are measured on it."""

    def __init__(self, cluster: BenchCluster, options: argparse.Namespace) -> None:
        self._cluster = cluster
        self._options = options
        self._number = 0

    def subject(self) -> str:
        """Create a subject, and return its name."""
        self._number += 1
        self._cluster.create(f"small-{self._number}")
        return f"small-{self._number}"

    def role(self, name: str, subject: str, number: int) -> subprocess.Popen[str]:
        """Start a measured process."""
        arguments = [name, self._cluster.meta, subject, str(number), str(self._options.seconds)]
        command = [sys.executable, __file__, "--role", *arguments]
        return subprocess.Popen(
            [*command, *(["--uvloop"] if self._options.uvloop else [])],
            stdout=subprocess.PIPE,
            text=True,
        )

    def steady(self, rate: int) -> dict[str, float]:
        """Return the figures of a steady rate."""
        subject = self.subject()
        consumer = self.role("stamped", subject, rate)
        line_of(consumer)
        time.sleep(0.5)
        producer = self.role("steady", subject, rate)
        line_of(producer)
        pids = {"broker": self._cluster.broker_process.pid, "consumer": consumer.pid}
        before = {name: (cpu_seconds(pid), switches(pid)) for name, pid in pids.items()}
        sent = line_of(producer)
        after = {name: (cpu_seconds(pid), switches(pid)) for name, pid in pids.items()}
        used = {name: after[name][0] - before[name][0] for name in pids} | {
            "producer": sent["cpu_s"]
        }
        hops = {name: after[name][1] - before[name][1] for name in pids} | {
            "producer": sent["switches"]
        }
        messages = rate * self._options.seconds
        took = line_of(consumer)
        for process in (producer, consumer):
            process.wait()
        figures = {f"{rate}_{name}_cpu_us": used[name] / messages * 1e6 for name in used}
        figures |= {f"{rate}_cpu_us": sum(used.values()) / messages * 1e6}
        figures |= {f"{rate}_{name}_switches": hops[name] / messages for name in hops}
        return figures | {f"{rate}_{key}": value for key, value in took.items()}

    def grouped(self, size: int) -> dict[str, float]:
        """Return the figures of groups of messages; the client is both producer and consumer."""
        process = self.role("grouped", self.subject(), size)
        line_of(process)
        pid = self._cluster.broker_process.pid
        used, hops = cpu_seconds(pid), switches(pid)
        took = line_of(process) | {
            "broker_cpu_us": (cpu_seconds(pid) - used) / GROUPS * 1e6,
            "broker_switches": (switches(pid) - hops) / GROUPS,
        }
        process.wait()
        return {f"group_of_{size}_{key}": value for key, value in took.items()}

    def single(self) -> dict[str, float]:
        """Return the figures of single sends."""
        process = self.role("single", self.subject(), 0)
        took = line_of(process)
        process.wait()
        return {f"single_{key}": value for key, value in took.items()}

    def idle(self, count: int) -> dict[str, float]:
        """Return the share of a core that idle consumers and the servers take."""
        process = self.role("idle", self.subject(), count)
        line_of(process)
        pids = {
            "broker": self._cluster.broker_process.pid,
            "metaserver": self._cluster.meta_process.pid,
        }
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        used = {"consumers": line_of(process)["cpu_s"]}
        used |= {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
        process.wait()
        return {f"idle_{name}_core": used[name] / self._options.seconds for name in used}


def run_role(options: argparse.Namespace) -> None:
    """Run one measured process."""
    role, meta, subject, number, seconds = options.role
    body = {
        "steady": steady,
        "stamped": stamped,
        "grouped": grouped,
        "single": single,
        "idle": idle,
    }[role]
    factory = uvloop.new_event_loop if options.uvloop else None
    with asyncio.Runner(loop_factory=factory) as runner:
        result = runner.run(body(meta, subject, int(number), float(seconds)))
    print(json.dumps(result), flush=True)


def main() -> None:
    """Run the rounds and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="500,5000")
    parser.add_argument("--groups", default="1,5")
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle", type=int, default=0)
    parser.add_argument("--uvloop", action="store_true")
    parser.add_argument("--role", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        run_role(options)
        return
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=".") as folder, ExitStack() as stack:
        take = Take(BenchCluster(Path(folder), stack), options)
        for _ in range(options.rounds):
            taken = take.single()
            for rate in filter(None, options.rates.split(",")):
                taken |= take.steady(int(rate))
            for size in filter(None, options.groups.split(",")):
                taken |= take.grouped(int(size))
            if options.idle:
                taken |= take.idle(options.idle)
            figures.append(taken)
    medians = {
        key: round(statistics.median(taken[key] for taken in figures), 3) for key in figures[0]
    }
    print(json.dumps({"machine": machine(), "rounds": options.rounds} | medians, indent=2))


if __name__ == "__main__":
    main()
