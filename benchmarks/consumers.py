"""The consumers of `make bench-clients`, beside a bare path in the same run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from machine import peak_mb
from main_path import BenchCluster, line_of
from roles import VALUE

HERE = Path(__file__).parent
LANE_MESSAGES = 10_000
PACED_MESSAGES = 50_000
WAYS = ("handled", "batch-handled", "getmany", "iterated", "arrow")


def measured(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a measured process."""
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the last figures that a process prints before it ends."""
    figures = line_of(process)
    while figures == {"ready": True}:
        figures = line_of(process)
    process.wait()
    return figures


@contextmanager
def bare_server(file: Path) -> Iterator[str]:
    """Start a bare server that stores in a file, and return its address."""
    server = measured("bare_consume.py", "serve", str(file))
    try:
        yield line_of(server)["address"]
    finally:
        server.terminate()
        server.wait()
        file.unlink(missing_ok=True)


def bare(folder: Path, count: int) -> tuple[dict[str, Any], float]:
    """Return the figures of a bare consumer that starts after its bare sender has ended, and the
    seconds of a run with both at once.
    """
    size = str(len(VALUE))
    with bare_server(folder / "bare") as address:
        result_of(measured("bare.py", "send", address, str(count), size))
        alone = result_of(measured("bare_consume.py", "consume", address, str(count)))
    with bare_server(folder / "bare") as address:
        consumer = measured("bare_consume.py", "consume", address, str(count))
        line_of(consumer)
        sent = result_of(measured("bare.py", "send", address, str(count), size))
        both_s = result_of(consumer)["ended"] - sent["started"]
    return alone, both_s


def round_of(cluster: BenchCluster, folder: Path, number: int, count: int) -> dict[str, float]:
    """Run one round of all figures."""

    def role(name: str, subject: str, messages: int) -> dict[str, Any]:
        script = "client_roles.py" if name == "send" else "consumer_roles.py"
        return result_of(measured(script, name, cluster.meta, subject, str(messages)))

    subject, both, plain = f"consumed-{number}", f"both-{number}", f"plain-{number}"
    poisoned, lanes, paced, stuck = (
        f"{name}-{number}" for name in ("poisoned", "lanes", "paced", "stuck")
    )
    for name in (subject, both, plain, poisoned, paced, stuck):
        cluster.create(name)
    cluster.create(lanes, partitions=1)

    bare_alone, bare_both_s = bare(folder, count)
    role("send", subject, count)
    ways = {way: role(way, subject, count + 1) for way in WAYS}
    consumer = measured("consumer_roles.py", "handled", cluster.meta, both, str(count + 1))
    line_of(consumer)
    sent = role("send", both, count)
    both_s = result_of(consumer)["ended"] - sent["started"]

    healthy = count
    role("send", plain, healthy)
    role("poison", poisoned, healthy)
    without = role("healthy", plain, healthy)
    beside = role("healthy", poisoned, healthy)
    quiet = role("paced", paced, PACED_MESSAGES)
    hot = role("stuck", stuck, PACED_MESSAGES)
    seconds = {way: figures["seconds"] for way, figures in ways.items()}
    return {
        "bare_handled_per_second": count / bare_alone["seconds"],
        "bare_handled_cpu_us": bare_alone["cpu_seconds"] / count * 1e6,
        "handled_per_second": count / seconds["handled"],
        "handled_cpu_us": ways["handled"]["cpu_seconds"] / count * 1e6,
        "handled_vs_bare": bare_alone["seconds"] / seconds["handled"],
        "both_per_second": count / both_s,
        "both_vs_bare": bare_both_s / both_s,
        "batch_handled_vs_handled": seconds["handled"] / seconds["batch-handled"],
        "getmany_vs_handled": seconds["handled"] / seconds["getmany"],
        "iterated_vs_handled": seconds["handled"] / seconds["iterated"],
        "arrow_rows_per_second": count / seconds["arrow"],
        "arrow_rows_vs_handled": seconds["handled"] / seconds["arrow"],
        "consumer_peak_mb": ways["handled"]["peak_mb"],
        "lanes_s": role("lanes", lanes, LANE_MESSAGES)["seconds"],
        "poison_throughput_ratio": without["seconds"] / beside["seconds"],
        "end_to_end_p50_ms": quiet["p50_ms"],
        "end_to_end_p99_ms": quiet["p99_ms"],
        "hot_key_p99_ratio": hot["p99_ms"] / quiet["p99_ms"],
    }


def parked(folder: Path, count: int) -> dict[str, float]:
    """Measure by how much parking messages raises the peak memory of a new broker."""
    with ExitStack() as stack:
        cluster = BenchCluster(folder / "parked", stack)
        cluster.create("parked-all", partitions=1)
        result_of(measured("consumer_roles.py", "park-all", cluster.meta, "parked-all", "1000"))
        before_mb = peak_mb(cluster.broker_process.pid)
        cluster.create("parked", partitions=1)
        result_of(measured("consumer_roles.py", "park-all", cluster.meta, "parked", str(count)))
        growth_mb = peak_mb(cluster.broker_process.pid) - before_mb
    return {"parked_mb": growth_mb, "parked_count": count}
