"""The second half of `make bench-copies`: how long a producer has no ack when a copy takes the
place of its broker.

A metaserver, three hosts of a broker group with `failover`, and a producer that sends single
messages one after another are processes on loopback. In each round one thing happens to the broker,
and the longest time in which the producer had no ack is its figure; then the host is started again,
and the round ends when both copies are in the set.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path

from copy_roles import timed_send
from main_path import line_of

from keylane import Admin, Consumer, Producer
from keylane.errors import KeylaneError

GROUP = "g1"
SUBJECT = "orders"
COPIES = 2
TTL_MS = 3_000
HEARTBEAT_MS = 500
SET_LIMIT_S = 120.0
SETTLED_S = 1.0
"""How long the producer sends between two rounds."""
POLL_S = 0.05


class Host:
    """A host of the broker group: a folder, and the program on it."""

    def __init__(self, meta: str, folder: Path, stack: ExitStack) -> None:
        self._command = [
            *(sys.executable, "-m", "keylane.broker", "--group", GROUP, "--data", str(folder)),
            *("--meta", meta, "--port", "0", "--failover", "true"),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.folder = folder
        stack.callback(self.end, signal.SIGKILL)

    def start(self, *, follows: bool) -> None:
        """Start the program; `follows` says what an empty folder becomes."""
        more = ("--follow", "true") if follows else ()
        self._process = subprocess.Popen([*self._command, *more], stdout=subprocess.DEVNULL)

    def signal(self, number: int) -> None:
        """Send a signal to the program."""
        assert self._process is not None
        self._process.send_signal(number)

    def end(self, number: int) -> None:
        """Send a signal that ends the program, and wait for that."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait()

    @property
    def is_copy(self) -> bool:
        """True if the folder is a copy now."""
        return (self.folder / "copy.json").exists()


class FailoverCluster:
    """The cluster that is measured, and what its clients were told."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._meta_command = [
            *(sys.executable, "-m", "keylane.metaserver", "--data", str(home / "meta")),
            *("--broker-ttl-ms", str(TTL_MS), "--broker-heartbeat-ms", str(HEARTBEAT_MS)),
        ]
        self._meta_process = self._start_meta("0")
        self.meta: str = line_of(self._meta_process)["address"]
        stack.callback(self._stop_meta)
        self.hosts = [Host(self.meta, home / f"host-{each}", stack) for each in range(1 + COPIES)]
        self.errors: list[str] = []
        self.acks: list[float] = []
        """When each ack came, by the monotonic clock, in seconds."""

    def _start_meta(self, port: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._meta_command, "--port", port], stdout=subprocess.PIPE, text=True
        )

    def _stop_meta(self) -> None:
        self._meta_process.terminate()
        self._meta_process.wait()

    def restart_meta(self) -> None:
        """Stop the metaserver and start it on its port again."""
        self._stop_meta()
        self._meta_process = self._start_meta(self.meta.rpartition(":")[2])
        line_of(self._meta_process)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the hosts, a producer and a consumer."""
        self.hosts[0].start(follows=False)
        async with Admin(self.meta) as admin:
            while not (await admin.list_brokers()).brokers:
                await asyncio.sleep(POLL_S)
            await admin.create_subject(SUBJECT, partitions=4)
            await admin.set_copies(GROUP, 1 + COPIES, may_share_machine=True)
        for host in self.hosts[1:]:
            host.start(follows=True)
        clients = [asyncio.create_task(self._send()), asyncio.create_task(self._consume())]
        await self.settle()
        try:
            yield
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def _send(self) -> None:
        number = 0
        async with Producer(self.meta) as producer:
            while True:
                try:
                    await timed_send(producer, SUBJECT, number)
                except KeylaneError as error:
                    self.errors.append(repr(error))
                else:
                    self.acks.append(time.monotonic())
                number += 1

    async def _consume(self) -> None:
        async with Consumer(self.meta, subject=SUBJECT, group="billing") as consumer:
            while True:
                try:
                    async for message in consumer:
                        await message.ack()
                except KeylaneError as error:
                    self.errors.append(repr(error))

    async def settle(self) -> None:
        """Wait until acks wait for all copies, and some time more."""
        until = time.monotonic() + SET_LIMIT_S
        async with Admin(self.meta) as admin:
            while len((await admin.copies(GROUP)).members) < COPIES:
                if time.monotonic() > until:
                    raise SystemExit(f"the copies are not in the set after {SET_LIMIT_S:.0f} s")
                await asyncio.sleep(POLL_S)
        await asyncio.sleep(SETTLED_S)

    @property
    def broker(self) -> Host:
        """The host that serves."""
        return next(host for host in self.hosts if not host.is_copy)

    async def gap_ms(self, act: Callable[[], object]) -> float:
        """Return the longest time without an ack from just before `act` until all is well again."""
        first = len(self.acks) - 1
        await asyncio.to_thread(act)
        began = time.monotonic()
        while self.acks[-1] < began + SETTLED_S:
            await asyncio.sleep(POLL_S)
        acks = self.acks[first:]
        return max(later - sooner for sooner, later in pairwise(acks)) * 1_000

    async def kill(self) -> float:
        """Kill the broker."""
        broker = self.broker
        gap_ms = await self.gap_ms(lambda: broker.end(signal.SIGKILL))
        broker.start(follows=True)
        return gap_ms

    async def hang(self) -> float:
        """Let the broker hang: it neither answers nor ends its connections."""
        broker = self.broker
        gap_ms = await self.gap_ms(lambda: broker.signal(signal.SIGSTOP))
        broker.signal(signal.SIGCONT)
        return gap_ms

    async def hand_over(self) -> float:
        """Let the broker hand over."""

        def ask() -> None:
            command = [sys.executable, "-m", "keylane.cli", "broker", "hand-over", GROUP]
            subprocess.run([*command, "--meta", self.meta], check=True, stdout=subprocess.DEVNULL)

        return await self.gap_ms(ask)

    async def stop(self) -> float:
        """Stop the broker with SIGTERM."""
        broker = self.broker
        gap_ms = await self.gap_ms(lambda: broker.end(signal.SIGTERM))
        broker.start(follows=True)
        return gap_ms

    async def restart_all(self) -> None:
        """Restart every program, the broker last."""
        await asyncio.to_thread(self.restart_meta)
        for host in sorted(self.hosts, key=lambda host: not host.is_copy):
            await self.settle()
            await asyncio.to_thread(host.end, signal.SIGTERM)
            host.start(follows=True)
        await self.settle()


def p99_ms(gaps_ms: list[float]) -> float:
    """Return the 99th percentile, which is the longest of fewer than 100."""
    return round(sorted(gaps_ms)[int(len(gaps_ms) * 0.99)], 1)


def failover_figures(home: Path, rounds: int) -> dict[str, float]:
    """Run so many rounds of each kind, and a restart of all programs for every fourth of them."""

    async def run(cluster: FailoverCluster) -> dict[str, float]:
        figures: dict[str, float] = {"failover_ttl_ms": TTL_MS}
        async with cluster.running():
            kinds = {
                "handover": cluster.hand_over,
                "stop": cluster.stop,
                "rolling": None,
                "failover_killed": cluster.kill,
                "failover_cut": cluster.hang,
            }
            for name, strike in kinds.items():
                before = len(cluster.errors)
                if strike is None:
                    for _ in range(max(1, rounds // 4)):
                        await cluster.restart_all()
                    figures["rolling_restart_errors"] = len(cluster.errors) - before
                    continue
                gaps_ms = []
                for number in range(rounds):
                    gaps_ms.append(await strike())
                    await cluster.settle()
                    print(f"{name}: round {number + 1} of {rounds}", file=sys.stderr)
                figures[f"{name}_p50_ms"] = round(sorted(gaps_ms)[len(gaps_ms) // 2], 1)
                figures[f"{name}_p99_ms"] = p99_ms(gaps_ms)
                figures[f"{name}_errors"] = len(cluster.errors) - before
        return figures

    with ExitStack() as stack:
        return asyncio.run(run(FailoverCluster(home, stack)))
