"""Measures how fast a cluster says why nothing arrives.

why_p99_ms        p99 of `Admin.why`: ten causes made on purpose, 20 times each, two questions
                  at a time, while messages are sent and consumed; in half of the questions one
                  of three brokers stands still
why_p50_ms        the same, p50
why_asked         how many questions that were
why_right_first   how many answers named the right cause first
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from support.cluster import Cluster
from support.made_causes import CAUSES, Asked, ask_about, under_load

TIMES = 20


def measure(*, quick: bool) -> dict[str, Any]:
    """Make each cause, ask why, and compare."""

    async def measure(cluster: Cluster) -> list[Asked]:
        asked: list[Asked] = []
        async with under_load(cluster):
            for name in CAUSES:
                found = await ask_about(cluster, name, 2 if quick else TIMES)
                asked += found
                slowest = max(each.took_ms for each in found)
                print(f"{name}: the slowest answer took {slowest:.0f} ms", file=sys.stderr)
        return asked

    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), brokers=3) as cluster:
        asked = asyncio.run(measure(cluster))
    for each in asked:
        if not each.is_right:
            print(f"wrong: {each}", file=sys.stderr)
    times_ms = sorted(each.took_ms for each in asked)
    return {
        "why_p99_ms": round(times_ms[-1 - len(times_ms) // 100], 1),
        "why_p50_ms": round(statistics.median(times_ms), 1),
        "why_asked": len(asked),
        "why_right_first": sum(each.is_right for each in asked),
    }
