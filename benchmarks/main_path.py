"""Measures the main path: acked sends, handled messages, both at once, a single send, an outbox;
prints JSON.

`--rounds N` (5), `--count N` (1,000,000 messages a round), `--quick` (one round of a tenth).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from machine import machine, peak_mb

from keylane.protocol.control import CreateSubject
from keylane.protocol.errors import UnavailableError
from keylane.protocol.routing import OrderStrategy
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork

ROLES = str(Path(__file__).with_name("roles.py"))


class BenchCluster:
    """
    A metaserver and a broker, each a process of its own.

    Args:
        python: the interpreter whose keylane they run.
    """

    def __init__(self, folder: Path, stack: ExitStack, *, python: str = sys.executable) -> None:
        self._stack = stack
        self._python = python
        self.meta_process, self.meta = self._start(
            "keylane.metaserver", "--data", str(folder / "meta"), "--port", "0"
        )
        self.broker_process, self.broker_address = self._start(
            "keylane.broker",
            "--group",
            "g1",
            "--data",
            str(folder / "broker"),
            "--meta",
            self.meta,
            "--port",
            "0",
        )

    def _start(self, module: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [self._python, "-m", module, *arguments], stdout=subprocess.PIPE, text=True
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)
        return process, line_of(process)["address"]

    def create(self, subject: str, partitions: int = 4) -> None:
        """Create a subject."""

        async def create() -> None:
            network = HttpNetwork()
            body = CreateSubject(
                subject=subject, partitions=partitions, order_strategy=OrderStrategy.STRICT
            )
            try:
                for _ in range(100):
                    try:
                        await MetaClient(network, [self.meta]).create_subject(body)
                    except UnavailableError:
                        await asyncio.sleep(0.05)
                    else:
                        return
                raise AssertionError("the broker did not report itself")
            finally:
                await network.close()

        asyncio.run(create())

    def role(self, role: str, subject: str, count: int) -> subprocess.Popen[str]:
        """Start a measured process."""
        return subprocess.Popen(
            [self._python, ROLES, role, self.meta, subject, str(count)],
            stdout=subprocess.PIPE,
            text=True,
        )


def line_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next JSON line that a process prints."""
    output: IO[str] | None = process.stdout
    assert output is not None
    line = output.readline()
    if not line:
        raise SystemExit(f"a measured process ended with status {process.wait()}")
    figures: dict[str, Any] = json.loads(line)
    return figures


def round_of(cluster: BenchCluster, number: int, count: int) -> dict[str, float]:
    """Run one round of all figures."""
    figures: dict[str, float] = {}
    apart, both = f"apart-{number}", f"both-{number}"
    cluster.create(apart)
    cluster.create(both)

    sender = cluster.role("send", apart, count)
    sent = line_of(sender)
    sender.wait()
    figures["sent_per_second"] = count / sent["seconds"]
    figures["producer_peak_mb"] = sent["peak_mb"]

    consumer = cluster.role("consume", apart, count + 1)
    line_of(consumer)
    handled = line_of(consumer)
    consumer.wait()
    figures["handled_per_second"] = count / handled["seconds"]
    figures["consumer_peak_mb"] = handled["peak_mb"]

    consumer = cluster.role("consume", both, count + 1)
    line_of(consumer)
    sender = cluster.role("send", both, count)
    sent, handled = line_of(sender), line_of(consumer)
    sender.wait()
    consumer.wait()
    figures["both_per_second"] = count / (handled["ended"] - sent["started"])

    sender = cluster.role("single", apart, 500)
    single = line_of(sender)
    sender.wait()
    figures["single_send_p50_ms"] = single["p50_ms"]
    figures["single_send_p99_ms"] = single["p99_ms"]
    figures["fdatasync_p50_ms"] = single["fdatasync_p50_ms"]
    rows = max(10_000, count // 10)
    outbox = cluster.role("outbox", apart, rows)
    figures["outbox_rows_per_second"] = rows / line_of(outbox)["seconds"]
    outbox.wait()
    figures["broker_peak_mb"] = peak_mb(cluster.broker_process.pid)
    return figures


def main() -> None:
    """Run the rounds and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rounds, count = (1, options.count // 10) if options.quick else (options.rounds, options.count)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cluster = BenchCluster(Path(folder), stack)
        figures = []
        for number in range(rounds):
            figures.append(round_of(cluster, number, count))
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    medians = {
        key: round(statistics.median(figure[key] for figure in figures), 3) for key in figures[0]
    }
    print(json.dumps({"machine": machine(), "rounds": rounds, "count": count, **medians}, indent=2))


if __name__ == "__main__":
    main()
