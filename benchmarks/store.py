"""Measures the broker's store under both indexes, beside the raw disk in the same run; prints JSON.

`--quick` (a tenth of the sizes, under 3 minutes), `--index file|rocksdb` (both), `--only PART,…`.
Each part runs in a process of its own, on the disk of TMPDIR.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import machine

PARTS = str(Path(__file__).with_name("store_parts.py"))
MIB = 1 << 20


class Run:
    """Runs parts for one index, each in its own temporary folder."""

    def __init__(self, index: str, folder: Path, *, quick: bool) -> None:
        self._index = index
        self._folder = folder
        self._part = 10 if quick else 1
        self.results: dict[str, Any] = {}

    def part(self, name: str, folder: Path, **arguments: Any) -> dict[str, Any]:
        process = subprocess.run(
            [sys.executable, PARTS, name, str(folder), self._index, json.dumps(arguments)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return json.loads(process.stdout.splitlines()[-1])

    def in_folder(self, body: Callable[[Path], dict[str, Any]]) -> None:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            self.results |= body(folder)
        finally:
            shutil.rmtree(folder)

    # ── parts ─────────────────────────────────────────────────────────────────────────────────────
    def append(self, folder: Path) -> dict[str, Any]:
        return self.part("append", folder, count=8192 // self._part, rounds=3)

    def commits(self, folder: Path) -> dict[str, Any]:
        return self.part("commits", folder, count=100_000 // self._part, rounds=3)

    def reading(self, folder: Path) -> dict[str, Any]:
        part = self._part
        return self.part(
            "reading", folder, alone=8192 // part, rows=64 // part, partitions=1000, rounds=3
        )

    def many(self, folder: Path) -> dict[str, Any]:
        full = 1_000_000 if self._index == "rocksdb" else 10_000
        partitions = max(full // self._part, 10_000)
        window = 20_000 // self._part if self._index == "rocksdb" else 4_000
        rounds = 1 if self._index == "rocksdb" else 9
        filled = self.part("many", folder, partitions=partitions, window=window, rounds=rounds)
        folder /= "last"
        clean = self.part("restart", folder, partitions=partitions)
        crashed = self.part("restart", folder, partitions=partitions + 2)
        return {
            "million_partitions": partitions,
            "million_append_ratio": filled["append_ratio"],
            "million_early_appends_s": filled["early_appends_s"],
            "million_late_appends_s": filled["late_appends_s"],
            "million_fill_s": filled["fill_s"],
            "million_stop_s": filled["stop_s"],
            "million_restart_s": clean["restart_s"],
            "million_crash_restart_s": crashed["restart_s"],
            "million_rss_mb": max(filled["rss_mb"], clean["rss_mb"], crashed["rss_mb"]),
            "million_open_files": max(filled["open_files"], clean["open_files"]),
        }

    def crash(self, folder: Path) -> dict[str, Any]:
        size = 128 << 10
        self.part("fill", folder, count=16_384 // self._part, size=size, clean=False)
        measured = self.part("start", folder, size=size)
        return {
            "crash_start_vs_disk": measured["disk_s"] / measured["start_s"],
            "crash_start_s": measured["start_s"],
            "crash_start_disk_s": measured["disk_s"],
            "crash_start_log_mb": measured["log_mb"],
        }

    def clean(self, folder: Path) -> dict[str, Any]:
        size = 16 << 10
        self.part("fill", folder, count=131_072 // self._part, size=size, clean=True)
        measured = self.part("start", folder, size=size)
        return {"clean_start_s": measured["start_s"], "clean_start_log_mb": measured["log_mb"]}

    def lookup(self, folder: Path) -> dict[str, Any]:
        return self.part("lookup", folder, units=10_000_000 // self._part, lookups=20_000)


NAMES = ("append", "commits", "reading", "many", "crash", "clean", "lookup")


def rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--index", choices=("file", "rocksdb"))
    parser.add_argument("--only", default=",".join(NAMES))
    chosen = parser.parse_args()
    started = time.perf_counter()
    results: dict[str, Any] = {"machine": machine(), "quick": chosen.quick}
    with tempfile.TemporaryDirectory(prefix="keylane-store-") as folder:
        for index in [chosen.index] if chosen.index else ["file", "rocksdb"]:
            run = Run(index, Path(folder), quick=chosen.quick)
            for name in chosen.only.split(","):
                began = time.perf_counter()
                run.in_folder(getattr(run, name))
                print(f"{index} {name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
            results[index] = {key: rounded(value) for key, value in run.results.items()}
    results["seconds"] = round(time.perf_counter() - started)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
