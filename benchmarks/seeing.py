"""Measures what it costs to see what a cluster does, and how fast it says so; prints JSON.

The figures are those of `seeing_side/`. `--only NAME`: the figures of one part alone, more than
once if need be; `--quick`: fewer rounds; `--before DIR`: the costs of metrics also with the servers
of another checkout, DIR/.venv/bin/python.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import machine
from seeing_side import console, metrics_cost, otel_cost, why

COUNT, ROUNDS = 500_000, 5


def measure_metrics(*, quick: bool, before: Path | None) -> dict[str, Any]:
    """Return what metrics cost."""
    rounds, count = (1, COUNT // 5) if quick else (ROUNDS, COUNT)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        return metrics_cost.measure(
            Path(folder).resolve(), rounds=rounds, count=count, before=before
        )


def measure_console(*, quick: bool, before: Path | None) -> dict[str, Any]:
    """Return how fast the console is, in Chromium; `quick`: of a tenth of the cluster."""
    part = 10 if quick else 1
    with tempfile.TemporaryDirectory(dir=".") as folder:
        return console.measure(
            Path(folder).resolve(),
            partitions=console.PARTITIONS // part,
            consumers=console.CONSUMERS // part,
        )


FIGURES: dict[str, Callable[..., dict[str, Any]]] = {
    "why": lambda *, quick, before: why.measure(quick=quick),
    "metrics": measure_metrics,
    "otel": lambda *, quick, before: otel_cost.measure(quick=quick),
    "console": measure_console,
}


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=FIGURES, action="append")
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for name in options.only or FIGURES:
        figures |= FIGURES[name](quick=options.quick, before=options.before)
    print(json.dumps({"machine": machine(), **figures}, indent=1))
    return int(figures.get("why_right_first") != figures.get("why_asked"))


if __name__ == "__main__":
    sys.exit(main())
