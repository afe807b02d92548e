"""Measures what copies of a data folder cost; prints JSON.

    ack_cost_ms, ack_cost_2_ms   p50 of a single send of 400 bytes with one copy that its ack waits
                                 for, and with two, minus the p50 without; may be below 0 where the
                                 disk takes longer to sync one file than several at once
    sync_p50_ms, sync_2_p50_ms, sync_3_p50_ms
                                 what the bare disk takes to sync one file, and two and three at
                                 once, 500 bytes each with a pause of 1 ms after them, in turns
                                 with the single sends
    sent_ratio, sent_1k_ratio    messages a second of a producer that sends as fast as it can, with
                                 one copy by without: of 100 bytes, and of 1 KiB
    both_ratio                   the same of a producer and a consumer at once, 100 bytes
    follower_cpu_ratio           processor time of the follower by that of its broker, during the
                                 sends of 100 bytes with one copy
    fill_mb_s                    MB a second (2^20 bytes) with which a new follower fills from a log
                                 until it is complete; nothing else is sent
    live_p99_ratio               p99 of single sends while a follower fills, by that of the seconds
                                 before
    alone_p50_ratio              with --before: p50 of a single send without copies, by that of the
                                 other checkout
    alone_cpu_ratio              with --before: the same of the broker's processor time, in single
                                 sends and in those as fast as it can

    handover_p50_ms, _p99_ms     time without an ack of a producer of single messages, when its
                                 broker hands over on command; `_p99_ms` is the longest of rounds
    stop_p50_ms, _p99_ms         the same when the broker is stopped with SIGTERM
    failover_killed_p99_ms       the same when it is killed
    failover_cut_p99_ms          the same when it hangs, and its connections stay; broker_ttl_ms is
                                 `failover_ttl_ms`
    handover_errors and so on    errors that the producer and a consumer have seen meanwhile
    rolling_restart_errors       the same while all programs are restarted, one by one

Metaserver, broker, followers and clients are processes on loopback, their folders on one disk, in
the working folder. Each variant has a cluster of its own, which is idle while another is measured;
which is first changes with each round. Ratios and differences are of one round, figures are medians
of rounds. The log that a follower fills from was just written, so that it is in the page cache.
Where the set of copies is not as wanted, or changes during a measured part, the run fails.

`--only copies` or `--only failover` (20 rounds of each kind) measures one half.
`--rounds N` (5), `--count N` (1,000,000 messages of 100 bytes a round, and a fifth of 1 KiB),
`--quick` (one round of a tenth), `--before DIR` (the variant without copies also with the keylane
of another checkout, DIR/.venv/bin/python).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from failovers import failover_figures
from machine import machine
from main_path import BenchCluster, line_of

from keylane import Admin
from keylane.protocol.copies import CopySet

HERE = Path(__file__).parent
GROUP = "g1"
SINGLE_SENDS = 200
SINGLE_TURNS = 5
"""How often in a round each variant has its turn with single sends: what a sync of the disk takes
changes within seconds.
"""
WARM = 20_000
"""Messages of the first, unmeasured run at each cluster."""
FILLED_KIB = 300 << 10
"""How many messages of 1 KiB the log has from which a follower fills."""
QUIET_S = 5.0
"""How long single sends are measured before a follower fills."""
FAILOVERS = 20
"""How often each thing happens to a broker whose place a copy takes."""
SET_LIMIT_S = 60.0
FILL_LIMIT_S = 300.0
POLL_S = 0.005
SYNC_PAUSE_S = 0.001
TICKS = os.sysconf("SC_CLK_TCK")
MB = 1 << 20


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the figures that a client prints before it ends."""
    figures = line_of(process)
    process.wait()
    return figures


def used_s(process: subprocess.Popen[Any]) -> float:
    """Return the user and system time of a running process, in seconds."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Follower:
    """A process that keeps a copy of a broker's data folder."""

    def __init__(self, meta: str, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "keylane.broker", "--follow", "true", "--group", GROUP),
                *("--data", str(folder), "--meta", meta),
            ],
            stdout=subprocess.DEVNULL,
        )
        stack.callback(self.stop)

    def stop(self) -> None:
        """Stop it, unless that was done."""
        self.process.terminate()
        self.process.wait()

    def check_running(self) -> None:
        """End the run if the follower has ended."""
        if self.process.poll() is not None:
            raise SystemExit(f"a follower ended with status {self.process.returncode}")

    def complete_at(self) -> int | None:
        """Return the position from which the copy is complete; None if it has not begun."""
        try:
            copy = json.loads((self._folder / "copy.json").read_bytes())
        except FileNotFoundError:
            return None
        return int(copy["complete_at"])

    def end(self) -> int:
        """Return the position at which the copy ends."""
        segments = sorted((self._folder / "log").glob("*.log"))
        return int(segments[-1].stem) + segments[-1].stat().st_size if segments else 0


class Fill(NamedTuple):
    """How a new follower filled."""

    began: float
    """By the monotonic clock, in seconds, as `ended`."""
    ended: float
    size_mb: float

    @property
    def mb_s(self) -> float:
        """The MB that were filled in a second."""
        return self.size_mb / (self.ended - self.began)


class Variant:
    """
    A cluster whose acks wait for so many copies.

    Args:
        is_before: it runs the keylane of another checkout, which may know of no copies.
    """

    def __init__(
        self,
        name: str,
        home: Path,
        stack: ExitStack,
        *,
        copies: int = 0,
        python: str = sys.executable,
        is_before: bool = False,
    ) -> None:
        self.name = name
        self._copies = copies
        self._python = python
        self._is_before = is_before
        self._folder = home / name
        self.cluster = BenchCluster(self._folder, stack, python=python)
        self.cluster.create("warm")
        self.followers = [
            Follower(self.cluster.meta, self._folder / f"copy-{number}", stack)
            for number in range(1, copies + 1)
        ]
        if copies:
            asyncio.run(self._set_copies())
        self.run("warm-up", "send", "warm", WARM)

    async def _set_copies(self) -> None:
        """Let acks wait for the followers; returns when all are in the set."""
        async with Admin(self.cluster.meta) as admin:
            stored = await admin.set_copies(GROUP, self._copies + 1, may_share_machine=True)
            until = time.monotonic() + SET_LIMIT_S
            while len(stored.members) < self._copies:
                for follower in self.followers:
                    follower.check_running()
                if time.monotonic() > until:
                    raise SystemExit(
                        f"acks of variant {self.name} wait for {len(stored.members)} of "
                        f"{self._copies} copies after {SET_LIMIT_S:.0f} s"
                    )
                await asyncio.sleep(0.05)
                stored = await admin.copies(GROUP)

    def _copy_set(self) -> CopySet:
        async def read() -> CopySet:
            async with Admin(self.cluster.meta) as admin:
                return await admin.copies(GROUP)

        return asyncio.run(read())

    @contextmanager
    def unchanged(self, part: str) -> Iterator[None]:
        """End the run if acks do not wait for exactly the wanted copies during all of a part."""
        if self._is_before:
            yield
            return
        before = self._copy_set()
        if len(before.members) != self._copies:
            raise SystemExit(
                f"acks of variant {self.name} wait for {len(before.members)} copies before part "
                f"{part}, not for {self._copies}"
            )
        yield
        for follower in self.followers:
            follower.check_running()
        after = self._copy_set()
        if after.version != before.version:  # it rises with each change
            raise SystemExit(
                f"the copies that acks of variant {self.name} wait for have changed during part "
                f"{part}: {len(before.members)} at version {before.version}, then "
                f"{len(after.members)} at version {after.version}; the machine may be too slow for "
                "copy_lag_ms"
            )

    def run(self, part: str, role: str, subject: str, count: int) -> dict[str, float]:
        """Return the figures of a producer, with the processor times of broker and followers
        meanwhile, in seconds.
        """
        with self.unchanged(part):
            broker = self.cluster.broker_process
            broker_s = used_s(broker)
            follower_s = sum(used_s(follower.process) for follower in self.followers)
            with self.client(role, subject, count) as process:
                figures = result_of(process)
            figures["broker_s"] = used_s(broker) - broker_s
            followers_s = sum(used_s(follower.process) for follower in self.followers)
            figures["follower_s"] = followers_s - follower_s
        return figures

    @contextmanager
    def client(
        self, role: str, subject: str, count: int, script: str = "copy_roles.py"
    ) -> Iterator[subprocess.Popen[str]]:
        """Start a measured client of this cluster; one that has not ended is killed at the end."""
        command = [self._python, str(HERE / script), role, self.cluster.meta, subject, str(count)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()

    def both_per_s(self, part: str, subject: str, count: int) -> float:
        """Return the messages a second that a producer sends and a consumer handles at once."""
        with (
            self.unchanged(part),
            self.client("handled", subject, count + 1, "consumer_roles.py") as consumer,
        ):
            line_of(consumer)
            with self.client("send", subject, count) as producer:
                sent = result_of(producer)
            took_s: float = result_of(consumer)["ended"] - sent["started"]
        return count / took_s

    def fill(self, name: str) -> Fill:
        """Let a new follower fill until it is complete, and remove it."""
        folder = self._folder / name
        with ExitStack() as stack:
            follower = Follower(self.cluster.meta, folder, stack)
            until = time.monotonic() + FILL_LIMIT_S
            while (complete_at := follower.complete_at()) is None:
                wait_for(follower, until)
            began = time.monotonic()
            while follower.end() < complete_at:
                wait_for(follower, until)
            ended = time.monotonic()
        shutil.rmtree(folder)
        return Fill(began, ended, complete_at / MB)


def wait_for(follower: Follower, until: float) -> None:
    """Wait a moment for a follower; ends the run if it has ended, or is not complete in time."""
    follower.check_running()
    if time.monotonic() > until:
        raise SystemExit(
            f"a new follower is at position {follower.end()} after {FILL_LIMIT_S:.0f} s, and "
            f"complete at {follower.complete_at()}"
        )
    time.sleep(POLL_S)


def turned(variants: list[Variant], turn: int) -> list[Variant]:
    """Return the variants in the order of a turn: each is first in its own."""
    first = turn % len(variants)
    return variants[first:] + variants[:first]


def sync_p50_ms(home: Path, files: int, count: int) -> float:
    """Return the median time in which the disk syncs so many files at once."""

    def sync(descriptor: int) -> None:
        os.write(descriptor, bytes(500))
        os.fdatasync(descriptor)

    times_ms = []
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(files))
        probes = [stack.enter_context(tempfile.TemporaryFile(dir=home)) for _ in range(files)]
        descriptors = [probe.fileno() for probe in probes]
        for _ in range(count):
            began = time.perf_counter()
            list(pool.map(sync, descriptors))
            times_ms.append((time.perf_counter() - began) * 1_000)
            time.sleep(SYNC_PAUSE_S)
    return statistics.median(times_ms)


def single_figures(
    variants: list[Variant], home: Path, number: int, count: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the p50 of single sends by variant, and of the disk's syncs by `sync-` and the number
    of files, in ms; and the broker's processor time by variant, in seconds.
    """
    subject, sends = f"single-{number}", min(SINGLE_SENDS, max(20, count // 5_000))
    for variant in variants:
        variant.cluster.create(subject)
    runs: dict[str, list[dict[str, float]]] = {variant.name: [] for variant in variants}
    syncs_ms: dict[int, list[float]] = {1: [], 2: [], 3: []}
    for turn in range(SINGLE_TURNS):
        for variant in turned(variants, turn):
            runs[variant.name].append(variant.run("single", "single", subject, sends))
        for files, times_ms in syncs_ms.items():
            times_ms.append(sync_p50_ms(home, files, sends))
    p50_ms = {name: statistics.median(run["p50_ms"] for run in runs[name]) for name in runs}
    p50_ms |= {f"sync-{files}": statistics.median(each) for files, each in syncs_ms.items()}
    return p50_ms, {name: sum(run["broker_s"] for run in runs[name]) for name in runs}


def round_of(variants: dict[str, Variant], home: Path, number: int, count: int) -> dict[str, float]:
    """Run one round of what is sent and handled with and without copies."""
    in_turn = turned(list(variants.values()), number)
    p50_ms, cpu_s = single_figures(in_turn, home, number, count)
    sent: dict[str, dict[str, float]] = {"send": {}, "send-1k": {}}
    follower_cpu_ratio = 0.0
    for part, messages in (("send", count), ("send-1k", count // 5)):
        for variant in in_turn:
            if variant.name == "two":
                continue
            variant.cluster.create(f"{part}-{number}")
            run = variant.run(part, part, f"{part}-{number}", messages)
            sent[part][variant.name] = messages / run["seconds"]
            cpu_s[variant.name] += run["broker_s"]
            if (part, variant.name) == ("send", "one"):
                follower_cpu_ratio = run["follower_s"] / run["broker_s"]
    both = {}
    for variant in in_turn:
        if variant.name in {"none", "one"}:
            variant.cluster.create(f"both-{number}")
            both[variant.name] = variant.both_per_s("both", f"both-{number}", count)

    hundred, kib = sent.values()
    figures = {
        "single_p50_ms": p50_ms["none"],
        "single_one_copy_p50_ms": p50_ms["one"],
        "single_two_copies_p50_ms": p50_ms["two"],
        "ack_cost_ms": p50_ms["one"] - p50_ms["none"],
        "ack_cost_2_ms": p50_ms["two"] - p50_ms["none"],
        "sync_p50_ms": p50_ms["sync-1"],
        "sync_2_p50_ms": p50_ms["sync-2"],
        "sync_3_p50_ms": p50_ms["sync-3"],
        "sent_per_s": hundred["none"],
        "sent_one_copy_per_s": hundred["one"],
        "sent_ratio": hundred["one"] / hundred["none"],
        "sent_1k_per_s": kib["none"],
        "sent_1k_one_copy_per_s": kib["one"],
        "sent_1k_ratio": kib["one"] / kib["none"],
        "both_per_s": both["none"],
        "both_one_copy_per_s": both["one"],
        "both_ratio": both["one"] / both["none"],
        "follower_cpu_ratio": follower_cpu_ratio,
    }
    if "before" in variants:
        figures |= {
            "before_single_p50_ms": p50_ms["before"],
            "alone_p50_ratio": p50_ms["none"] / p50_ms["before"],
            "alone_cpu_ratio": cpu_s["none"] / cpu_s["before"],
        }
    return figures


def p99_ms(times_ms: list[float]) -> float:
    """Return the 99th percentile of times."""
    return sorted(times_ms)[len(times_ms) * 99 // 100]


def fill_round_of(variant: Variant, number: int, quiet_s: float) -> dict[str, float]:
    """Run one round of a new follower's filling: alone, and beside single sends."""
    with variant.unchanged("fill"):
        fill = variant.fill(f"copy-{number}")
    with variant.unchanged("fill beside sends"), variant.client("steady", "filled", 0) as process:
        line_of(process)
        ready_at = time.monotonic()
        time.sleep(quiet_s)
        quiet_until = time.monotonic()
        live_fill = variant.fill(f"live-copy-{number}")
        assert process.stdin is not None
        process.stdin.close()
        sends = result_of(process)["sends"]
    quiet_ms = [took_ms for began, took_ms in sends if ready_at <= began < quiet_until]
    live_ms = [took_ms for began, took_ms in sends if live_fill.began <= began < live_fill.ended]
    if not live_ms:
        raise SystemExit("no message was sent while the follower filled: its log is too short")
    return {
        "fill_mb": fill.size_mb,
        "fill_mb_s": fill.mb_s,
        "fill_beside_sends_mb_s": live_fill.mb_s,
        "quiet_p99_ms": p99_ms(quiet_ms),
        "live_p99_ms": p99_ms(live_ms),
        "live_p99_ratio": p99_ms(live_ms) / p99_ms(quiet_ms),
        "live_sends": len(live_ms),
    }


def python_of(checkout: Path) -> str:
    """Return the interpreter of another checkout; ends the run if its keylane is not there."""
    python = checkout.resolve() / ".venv/bin/python"
    command = [str(python), "-c", "import keylane; print(keylane.__file__)"]
    if not python.exists():
        raise SystemExit(f"there is no {python}")
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(imported).resolve().is_relative_to(checkout.resolve()):
        raise SystemExit(f"{python} imports {imported}, which is not of {checkout}")
    return str(python)


def file_system(folder: Path) -> str:
    """Return the kind of file system that a folder is on."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [(point, kind) for _, point, kind, *_ in mounts if folder.is_relative_to(point)]
    return max(above, key=lambda mount: len(mount[0]))[1]


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the rounds."""
    return {key: round(statistics.median(each[key] for each in rounds), 3) for key in rounds[0]}


def sent_figures(home: Path, rounds: int, count: int, before: str) -> dict[str, float]:
    """Run the rounds of what is sent and handled; `before` is another interpreter, or empty."""
    with ExitStack() as stack:
        variants = {"none": Variant("none", home, stack)}
        if before:
            variants["before"] = Variant("before", home, stack, python=before, is_before=True)
        for copies, name in ((1, "one"), (2, "two")):
            variants[name] = Variant(name, home, stack, copies=copies)
        figures = []
        for number in range(rounds):
            figures.append(round_of(variants, home, number, count))
            print(f"sends: round {number + 1} of {rounds}", file=sys.stderr)
    return medians(figures)


def fill_figures(home: Path, rounds: int, messages: int, quiet_s: float) -> dict[str, float]:
    """Run the rounds of filling from a log of so many messages of 1 KiB."""
    with ExitStack() as stack:
        variant = Variant("filled", home, stack)
        variant.cluster.create("filled")
        variant.run("log to fill from", "send-1k", "filled", messages)
        figures = []
        for number in range(rounds):
            figures.append(fill_round_of(variant, number, quiet_s))
            print(f"fills: round {number + 1} of {rounds}", file=sys.stderr)
    return medians(figures)


def main() -> None:
    """Run the rounds and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--only", choices=("copies", "failover"))
    options = parser.parse_args()
    rounds, count = (1, options.count // 10) if options.quick else (options.rounds, options.count)
    failovers = 2 if options.quick else max(FAILOVERS, rounds)
    part = 0.1 if options.quick else 1.0
    before = python_of(options.before) if options.before else ""
    result: dict[str, Any] = {"machine": machine(), "rounds": rounds, "count": count, "disks": 1}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        home = Path(folder).resolve()
        result["file_system"] = file_system(home)
        if options.only != "failover":
            result |= sent_figures(home, rounds, count, before)
            result |= fill_figures(home, rounds, int(FILLED_KIB * part), QUIET_S * part)
        if options.only != "copies":
            result |= {"failover_rounds": failovers} | failover_figures(home, failovers)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
