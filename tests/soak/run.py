"""`make soak`: everything at once for hours, at a load that leaves room beside it; prints JSON.

clients, copies, changes, kills ──▶ records ──▶ lost, out of order
memory, descriptors, disk of each process, each 30 s ──▶ flat or not
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from soak.clients import GROUPS
from soak.flatness import GROWTH_MAX, trends
from soak.records import judge, read_acked, read_handled
from soak.stage import SoakProgram, SoakStage
from support.postgres import Postgres, running_postgres

SAMPLE_S = 30.0
ACT_S = 12.0
WATCH_S = 10.0
DRAIN_S = 300.0
FAULTS = ("lost", "out_of_order", "not_drained", "dead", "growing", "tracebacks")
"""Each of these has to be empty, or 0."""
NAMED = 10
"""Messages of a kind that are named."""
ROWS = "SELECT relname, n_live_tup FROM pg_stat_user_tables WHERE n_live_tup > 0"


async def soak(
    folder: Path, postgres: Postgres, seconds: float, *, seed: int, act_s: float
) -> dict[str, Any]:
    """
    Run it, and return what is printed.

    Args:
        act_s: from the end of one thing that happens to the beginning of the next.
    """
    rng = random.Random(seed)
    begun_s = time.monotonic()
    over = asyncio.Event()
    rows: dict[str, list[int]] = {}

    def log(text: str) -> None:
        print(f"{time.monotonic() - begun_s:7.0f} s  {text}", file=sys.stderr, flush=True)

    async def repeat(work: Callable[[], Awaitable[None]], rest_s: float) -> None:
        """Do something again and again until it is over."""
        while not over.is_set():
            await work()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), rest_s * rng.uniform(0.9, 1.1))

    async with SoakStage(folder, postgres.url(), rng) as stage:
        log(f"all programs run; the folder is {folder}")

        async def happen() -> None:
            log(await stage.happen())

        async def sample() -> None:
            at_s = time.monotonic() - begun_s
            await asyncio.to_thread(stage.sample, at_s)
            with (folder / "samples.jsonl").open("a") as file:
                for program in stage.programs:
                    if program.samples and program.samples[-1].at_s == at_s:
                        line = {"program": program.name, **program.samples[-1]._asdict()}
                        file.write(json.dumps(line) + "\n")
            for name, count in await asyncio.to_thread(postgres.execute, ROWS, database="test_1"):
                rows.setdefault(name, []).append(count)

        works = {happen: act_s, stage.watch: WATCH_S, sample: SAMPLE_S}
        tasks = [asyncio.create_task(repeat(work, rest_s)) for work, rest_s in works.items()]
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        over.set()
        await asyncio.gather(*tasks)
        elapsed_s = time.monotonic() - begun_s
        log("ending the producers")
        left = await stage.drain(DRAIN_S)
        stage.note_dead()
    return {
        "seconds": round(elapsed_s),
        "seed": seed,
        "cores": round(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) / elapsed_s, 3),
        **_judged(folder),
        "not_drained": left,
        "happened": dict(sorted(stage.counts.items())),
        "dead": sorted(stage.dead),
        "tracebacks": stage.count_tracebacks(),
        **_used(stage.lasting),
        "rows": {name: [counts[len(counts) // 2], counts[-1]] for name, counts in rows.items()},
    }


def _judged(folder: Path) -> dict[str, Any]:
    """What the records of the clients say."""
    acked = list(read_acked(folder.glob("*.acked")))
    verdicts = {
        group: judge(acked, read_handled(folder.glob(f"*.{group}.handled"))) for group in GROUPS
    }
    return {
        "acked": len(acked),
        "lost": sum(len(verdict.lost) for verdict in verdicts.values()),
        "out_of_order": sum(len(verdict.out_of_order) for verdict in verdicts.values()),
        "groups": {
            group: {
                "handled": verdict.handled,
                "handled_again": verdict.handled_again,
                "lost": verdict.lost[:NAMED],
                "out_of_order": verdict.out_of_order[:NAMED],
            }
            for group, verdict in verdicts.items()
        },
    }


def _used(programs: Iterable[SoakProgram]) -> dict[str, Any]:
    """What the programs have used over the second half, and what has grown."""
    found = {program.name: trends(program.samples) for program in programs}
    return {
        "growth_max": GROWTH_MAX,
        "growing": [
            f"{program}: {name}"
            for program, figures in found.items()
            for name, figure in figures.items()
            if figure is not None and not figure.is_flat
        ],
        "usage": {
            program: {
                name: figure
                and {
                    "level": round(figure.level),
                    "growth_per_hour": round(figure.growth_per_hour, 4),
                }
                for name, figure in figures.items()
            }
            for program, figures in found.items()
        },
    }


def main() -> int:
    """Run a soak and print what it showed; return 1 if something was lost, out of order or left,
    or if something has grown.
    """
    parser = argparse.ArgumentParser(description="Run everything at once, and look what grows.")
    parser.add_argument("--seconds", type=float, default=7_200.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="kept, with logs and samples")
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = asked.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        postgres = stack.enter_context(running_postgres())
        found = asyncio.run(soak(folder, postgres, asked.seconds, seed=asked.seed, act_s=ACT_S))
    print(json.dumps(found, indent=2))
    return 1 if any(found[name] for name in FAULTS) else 0


if __name__ == "__main__":
    sys.exit(main())
