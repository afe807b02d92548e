"""Measures what TLS and access control cost beside a cluster without them, in the same run; prints
JSON.

Ratios are of the time without to the time with. `..._cpu_ratio` is the same of the processor time
of client, broker and metaserver together: on a machine whose cores are busy it is the ratio of
rates, and other programs disturb it less. Runs that are compared are next to each other, and which
of them is first changes with each round.

`--rounds N` (5), `--count N` (1,000,000 messages a round), `--quick` (one round of a tenth),
`--upgrade` (a rolling upgrade too, two minutes).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from bare_stream import bare_us_per_mb
from machine import machine
from main_path import BenchCluster, line_of

from keylane import Admin, Producer, TlsSettings
from keylane.broker.access.judge import CapabilityJudge
from keylane.cli.connection import wait_for_brokers
from keylane.errors import AccessDeniedError, CapabilityEndedError, UnauthenticatedError
from keylane.protocol.access.capability import CAPABILITY_MS, AccessNews, Capability
from keylane.protocol.clock import SystemClock
from keylane.rpc.access.signing import OwnKey

ROLES = Path(__file__).parent.parent
UPGRADE = ROLES.parent / "tests/crash/test_rolling_upgrade.py"
HOST = "127.0.0.1"
CONNECTS = 50
CHECKS = 20_000
SEND_EVERY_S = 0.02
WARM = 20_000
"""Messages of the first, unmeasured run at each cluster: it loads what is loaded at the first
use.
"""
TICKS = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class SecuredCluster:
    """A metaserver and a broker as `keylane cluster init` sets them up, with TLS and access
    control, on loopback.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._stack = stack
        self.meta = f"{HOST}:{free_port()}"
        command = [
            *(sys.executable, "-m", "keylane.cli", "cluster", "init", str(folder / "made")),
            *("--data", str(folder / "data"), "--host", HOST, "--output", "json"),
            *("--meta-port", self.meta.rpartition(":")[2], "--broker-port", str(free_port())),
        ]
        created = subprocess.run(command, capture_output=True, text=True, check=True)
        ready_line = json.loads(created.stdout)
        self.token: str = ready_line["admin_token"]
        self.tls = TlsSettings(ca=ready_line["ca"])
        token_file = folder / "admin.token"
        token_file.touch(mode=0o600)
        token_file.write_text(self.token)
        self.environment = {
            "KEYLANE_TLS_CA": ready_line["ca"],
            "KEYLANE_TOKEN_FILE": str(token_file),
        }
        self.folder = folder / "made" / HOST
        config = self.folder / "keylane.toml"
        self.pids: list[int] = []
        for program in ("metaserver", "broker"):
            process = subprocess.Popen(
                [sys.executable, "-m", f"keylane.{program}", "--config", str(config)],
                stdout=subprocess.PIPE,
                text=True,
            )
            self._stack.callback(process.wait)
            self._stack.callback(process.terminate)
            self.pids.append(process.pid)
            line_of(process)

    def admin(self) -> Admin:
        """Return a client that uses the first token."""
        return Admin(self.meta, tls=self.tls, token=self.token)

    def create(self, subject: str) -> None:
        """Create a subject of four partitions."""

        async def create() -> None:
            async with self.admin() as admin:
                await wait_for_brokers(admin, 1)
                await admin.create_subject(subject, partitions=4)

        asyncio.run(create())


def role(
    script: str, name: str, meta: str, subject: str, count: int, **environment: str
) -> dict[str, Any]:
    """Return the figures of a measured client."""
    process = subprocess.Popen(
        [sys.executable, str(ROLES / script), name, meta, subject, str(count)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    figures = line_of(process)
    while figures == {"ready": True}:
        figures = line_of(process)
    process.wait()
    return figures


async def connect_ms(cluster: SecuredCluster) -> list[float]:
    """Return the times from creating a producer to its first ack over TLS, each with new
    connections, in ms.
    """
    times_ms = []
    for _ in range(CONNECTS):
        started_at = time.perf_counter()
        async with Producer(cluster.meta, tls=cluster.tls, token=cluster.token) as producer:
            await producer.send("connects", b"1", key=b"a")
            times_ms.append((time.perf_counter() - started_at) * 1000)
    return times_ms


async def revoked_s(cluster: SecuredCluster) -> float:
    """Return the seconds from revoking a token until the broker refuses its sender's messages."""
    async with cluster.admin() as admin:
        created = await admin.create_token("shop")
        await admin.grant("shop", "produce", subject="revoked")
        async with Producer(cluster.meta, tls=cluster.tls, token=created.token) as producer:
            await producer.send("revoked", b"1", key=b"a")
            started_at = time.monotonic()
            await admin.revoke_token(created.view.token_id)
            while True:
                try:
                    await producer.send("revoked", b"1", key=b"a")
                except (UnauthenticatedError, CapabilityEndedError, AccessDeniedError):
                    return time.monotonic() - started_at
                await asyncio.sleep(SEND_EVERY_S)


async def capability_us() -> dict[str, float]:
    """Return the time a broker takes to accept a capability: a known one, and one whose signature
    it verifies.
    """
    key = OwnKey()
    clock = SystemClock()
    news = AccessNews(cluster="c", now_ms=1, keys={key.key_id: key.public})

    async def silent() -> AccessNews:
        return news

    judge = CapabilityJudge(clock, silent)
    judge.update_news(news)
    texts = [
        key.sign(Capability("c", key.key_id, f"shop-{number}", 5, 1 + CAPABILITY_MS, ()))
        for number in range(1_000)
    ]
    started_at = time.perf_counter()
    for text in texts:
        await judge.identify(text)
    verified_us = time.perf_counter() - started_at
    started_at = time.perf_counter()
    for _ in range(CHECKS):
        await judge.identify(texts[-1])
    known_us = time.perf_counter() - started_at
    return {
        "capability_check_us": known_us / CHECKS * 1e6,
        "capability_verify_us": verified_us / len(texts) * 1e6,
    }


def used_s(pids: Sequence[int]) -> float:
    """Return the processor time of processes, in seconds."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


class Side:
    """One of the two clusters, and how its clients reach it."""

    def __init__(
        self,
        cluster: BenchCluster | SecuredCluster,
        pids: Sequence[int],
        environment: dict[str, str],
    ) -> None:
        self.cluster = cluster
        self._pids = pids
        self._environment = environment

    def run(self, script: str, name: str, subject: str, count: int) -> dict[str, float]:
        """Return the figures of a measured client; `used_s` is the processor time of the client
        and the servers.
        """
        before_s = used_s(self._pids)
        figures = role(script, name, self.cluster.meta, subject, count, **self._environment)
        figures["used_s"] = figures["cpu_seconds"] + used_s(self._pids) - before_s
        return figures


def upgrade_pauses_ms() -> dict[str, float]:
    """Return how long messages wait during an upgrade under load, as the test of rolling upgrades
    records it.
    """
    names = ("upgrade_pause_p99_ms", "upgrade_pause_longest_ms")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # The newer kind of report has no properties.
        options = ["-q", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, str(UPGRADE)]
        subprocess.run(command, check=True, stdout=sys.stderr, cwd=UPGRADE.parents[2])
        recorded = {
            each.get("name"): each.get("value", "") for each in ET.parse(report).iter("property")
        }
    return {name: float(recorded[name]) for name in names}


def warm(side: Side) -> None:
    """Run the roles once without measuring, as a warm-up."""
    side.cluster.create("warm")
    side.run("client_roles.py", "send", "warm", WARM)
    side.run("consumer_roles.py", "handled", "warm", WARM + 1)


def round_of(plain: Side, secured: Side, number: int, count: int) -> dict[str, float]:
    """Run one round of all figures."""
    assert isinstance(plain.cluster, BenchCluster)
    assert isinstance(secured.cluster, SecuredCluster)
    order = 1 if number % 2 else -1
    name = f"sent-{number}"
    for side in (plain, secured):
        side.cluster.create(name)
    sends = {
        "plain": lambda: plain.run("client_roles.py", "send", name, count),
        "tls": lambda: secured.run("client_roles.py", "send", name, count),
    }
    sent = {key: sends[key]() for key in list(sends)[::order]}
    sides = {"plain": plain, "tls": secured}
    handled = {
        key: sides[key].run("consumer_roles.py", "handled", name, count + 1)
        for key in list(sides)[::order]
    }

    def ratio(runs: dict[str, dict[str, float]], key: str, figure: str) -> float:
        return runs["plain"][figure] / runs[key][figure]

    return {
        "send_per_second": count / sent["plain"]["seconds"],
        "tls_send_per_second": count / sent["tls"]["seconds"],
        "tls_cost_ratio": ratio(sent, "tls", "seconds"),
        "tls_cost_cpu_ratio": ratio(sent, "tls", "used_s"),
        "handled_per_second": count / handled["plain"]["seconds"],
        "tls_handled_per_second": count / handled["tls"]["seconds"],
        "tls_handled_ratio": ratio(handled, "tls", "seconds"),
        "tls_handled_cpu_ratio": ratio(handled, "tls", "used_s"),
        "connect_p50_ms": statistics.median(asyncio.run(connect_ms(secured.cluster))),
        "revoked_within_s": asyncio.run(revoked_s(secured.cluster)),
        **asyncio.run(capability_us()),
        **bare_us_per_mb(secured.cluster.folder),
    }


def main() -> None:
    """Run the rounds and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--upgrade", action="store_true")
    options = parser.parse_args()
    rounds, count = (1, options.count // 10) if options.quick else (options.rounds, options.count)
    with tempfile.TemporaryDirectory(dir=".") as folder, ExitStack() as stack:
        home = Path(folder).resolve()
        open_cluster = BenchCluster(home, stack)
        pids = [open_cluster.meta_process.pid, open_cluster.broker_process.pid]
        plain = Side(open_cluster, pids, {})
        secured_cluster = SecuredCluster(home, stack)
        secured = Side(secured_cluster, secured_cluster.pids, secured_cluster.environment)
        for subject in ("connects", "revoked"):
            secured_cluster.create(subject)
        for side in (plain, secured):
            warm(side)
        figures = []
        for number in range(rounds):
            figures.append(round_of(plain, secured, number, count))
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    medians = {
        key: round(statistics.median(figure[key] for figure in figures), 3) for key in figures[0]
    }
    result: dict[str, Any] = {"machine": machine(), "rounds": rounds, "count": count}
    if options.upgrade:
        medians |= upgrade_pauses_ms()
    print(json.dumps(result | medians, indent=2))


if __name__ == "__main__":
    main()
