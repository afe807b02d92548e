"""Measures producers, and then consumers, beside a bare path in the same run; prints JSON.

`--rounds N` (5), `--count N` (1,000,000 messages a round), `--quick` (one round of a tenth),
`--only producers` or `--only consumers`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import consumers
from consumers import measured, result_of
from machine import machine
from main_path import BenchCluster, line_of
from roles import VALUE

SINGLE_SENDS = 300


def bare_send(folder: Path, count: int, value_bytes: int) -> dict[str, Any]:
    """Measure the bare path with its own server and file."""
    server = measured("bare.py", "serve", str(folder / "bare"))
    try:
        address = line_of(server)["address"]
        return result_of(measured("bare.py", "send", address, str(count), str(value_bytes)))
    finally:
        server.terminate()
        server.wait()
        (folder / "bare").unlink(missing_ok=True)


def round_of(cluster: BenchCluster, folder: Path, number: int, count: int) -> dict[str, float]:
    """Run one round of all figures."""

    def role(name: str, messages: int, script: str = "client_roles.py") -> dict[str, Any]:
        subject = f"{name}-{number}"
        cluster.create(subject)
        role_name = () if script == "effects.py" else (name,)
        return result_of(measured(script, *role_name, cluster.meta, subject, str(messages)))

    bare = bare_send(folder, count, len(VALUE))
    bare_large = bare_send(folder, count // 5, 1024)
    send = role("send", count)
    arrow = role("arrow", count)
    large = role("send-1k", count // 5)
    single = role("single", SINGLE_SENDS)
    outbox = role("outbox", count // 10, "roles.py")
    effects = role("effects", count // 10, "effects.py")
    large_mb = (count // 5) / 1024
    return {
        "bare_per_second": count / bare["seconds"],
        "bare_cpu_us": bare["cpu_seconds"] / count * 1e6,
        "send_per_second": count / send["seconds"],
        "send_vs_bare": bare["seconds"] / send["seconds"],
        "send_cpu_us": send["cpu_seconds"] / count * 1e6,
        "send_arrow_rows_per_second": count / arrow["seconds"],
        "send_arrow_vs_send": send["seconds"] / arrow["seconds"],
        "send_arrow_cpu_us": arrow["cpu_seconds"] / count * 1e6,
        "send_1k_mb_s": large_mb / large["seconds"],
        "disk_mb_s": large_mb / large["disk_seconds"],
        "send_1k_vs_disk": large["disk_seconds"] / large["seconds"],
        "send_1k_vs_bare": bare_large["seconds"] / large["seconds"],
        "outbox_rows_per_second": count // 10 / outbox["seconds"],
        "fenced_effects_per_second": count // 10 / effects["batch_seconds"],
        "fenced_single_effects_per_second": effects["single_count"] / effects["single_seconds"],
        "single_send_p50_ms": single["p50_ms"],
        "single_send_p99_ms": single["p99_ms"],
        "single_p99_vs_p50": single["p99_ms"] / single["p50_ms"],
    }


def dead_broker(cluster: BenchCluster) -> dict[str, float]:
    """Measure the memory of a producer whose broker is stopped."""
    cluster.create("dead")
    process = measured("client_roles.py", "dead", cluster.meta, "dead", str(10_000_000))
    line_of(process)
    os.kill(cluster.broker_process.pid, signal.SIGSTOP)
    try:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        figures = result_of(process)
    finally:
        os.kill(cluster.broker_process.pid, signal.SIGCONT)
    return {
        "producer_idle_mb": figures["idle_mb"],
        "producer_peak_mb": figures["peak_mb"],
        "producer_queued_mb": figures["peak_mb"] - figures["idle_mb"],
        "producer_limit_mb": figures["limit_mb"],
    }


def medians(figures: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the rounds."""
    return {
        key: round(statistics.median(figure[key] for figure in figures), 3) for key in figures[0]
    }


def main() -> None:
    """Run the rounds and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("producers", "consumers"))
    options = parser.parse_args()
    rounds, count = (1, options.count // 10) if options.quick else (options.rounds, options.count)
    halves = {"producers": round_of, "consumers": consumers.round_of}
    if options.only:
        halves = {options.only: halves[options.only]}
    result: dict[str, Any] = {"machine": machine(), "rounds": rounds, "count": count}
    for half, measure in halves.items():
        with tempfile.TemporaryDirectory(dir=".") as folder, ExitStack() as stack:
            cluster = BenchCluster(Path(folder), stack)
            figures = []
            for number in range(rounds):
                figures.append(measure(cluster, Path(folder), number, count))
                print(f"{half}: round {number + 1} of {rounds}", file=sys.stderr)
            last = (
                dead_broker(cluster)
                if half == "producers"
                else consumers.parked(Path(folder), count)
            )
            result[half] = medians(figures) | last
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
