"""Control runs: a rule is taken out of the running programs, and the same checker has to find the
harm.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from keylane.checker.findings import Findings
from proof.stage import Stage

TTL_MS = 1_000
PAUSES_MAX = 8


async def run_without_fence(folder: Path) -> Findings:
    """Brokers that let every token through, and consumers that are stopped until others have their
    partitions.
    """
    bugs = {"broker": "no_token_check"}
    rng = random.Random(1)
    async with Stage(folder, keys=100, per_second=300, ttl_ms=TTL_MS, bugs=bugs) as stage:
        for _ in range(PAUSES_MAX):
            await stage.pause_in_handler(2.5 * TTL_MS / 1000, busy=set(), rng=rng)
            await asyncio.sleep(0.5)
            findings, _ = await stage.look()
            if findings.counts["stale effect"]:
                break
        return findings


async def run_without_drain_rule(folder: Path) -> Findings:
    """A metaserver that grants children at once, while their parents have a backlog."""
    bugs = {"metaserver": "no_drain_rule"}
    load = {"keys": 20, "per_second": 600, "handler_ms": 50.0}
    async with Stage(folder, ttl_ms=TTL_MS, bugs=bugs, **load) as stage:  # type: ignore[arg-type]
        for partitions in (4, 8, 3):
            await asyncio.sleep(1.5)
            await stage.resize(partitions)
            await asyncio.sleep(1.0)
            findings, _ = await stage.look()
            if findings.counts["skip"]:
                break
        return findings
