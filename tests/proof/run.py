"""`make proof`: seeds, mutants, kill points, killed consumers and the long story of real processes;
adds what was run to docs/PROOF.md.

Each call is a share: its results are a line of docs/proof.jsonl, out of which the document is
written anew.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from proof import readme
from proof.controls import run_without_drain_rule, run_without_fence
from proof.document import DOCUMENT, SHARES, SIMULATED, document
from proof.killed_consumers import count_harm, kill_consumers
from proof.second_opinion import second_opinion
from proof.stage import Stage
from proof.story import Story, StoryResult
from sim.mutants.bank import hunted_mutants
from sim.run import FIRSTS, MUTANT_SEEDS_MAX, draw_seeds, hunts, outcomes_of

CYCLE = (4, 8, 3, 2)
KEYS = 10_000
PER_SECOND = 500
PAUSE_TTLS_MAX = 10.0
CALENDAR_HOURS_MIN = 0.9
SEEDS_AT_ONCE = 1_000
TESTS = Path(__file__).parents[1]
WHOLE = ("crash", "sim", "property", "spark", "integration", "unit")
"""Folders of which `make test` runs a sample."""


def simulate(seeds: Sequence[int], workers: int, *, seconds: float) -> dict[str, Any]:
    """Run seeds without mutants; none is begun after `seconds`."""
    total = {"seeds": 0, "faults": 0, "events": 0, "violations": 0, "with_users": 0}
    habits: Counter[str] = Counter()
    bad = []
    began = time.monotonic()
    for start in range(0, len(seeds), SEEDS_AT_ONCE):
        if time.monotonic() - began > seconds:
            break
        for outcome in outcomes_of(seeds[start : start + SEEDS_AT_ONCE], workers):
            total["seeds"] += 1
            for name in ("faults", "events", "violations"):
                total[name] += outcome[name]
            total["with_users"] += bool(outcome["habits"])
            habits.update(outcome["habits"])
            if outcome["violations"]:
                bad.append(outcome["seed"])
                said = f"{outcome['findings']} {outcome['problems']}"
                print(f"seed {outcome['seed']}: {said}", flush=True)
    return total | {"bad_seeds": sorted(bad), "habits": dict(sorted(habits.items()))}


def simulate_drawn(count: int, drawing: int, workers: int, *, seconds: float) -> dict[str, Any]:
    """
    Seeds drawn at random. The drawing's number is written down, from which `draw_seeds` gives them
    again, and the digest of their list.
    """
    seeds = draw_seeds(drawing, count)
    drawn = {"drawing": drawing, "drawn": count, "digest": digest(seeds)}
    print(f"{count} seeds of drawing {drawing}, digest {drawn['digest']}", flush=True)
    return simulate(seeds, workers, seconds=seconds) | drawn


def digest(seeds: Sequence[int]) -> str:
    """Of a list of seeds."""
    return hashlib.blake2b(",".join(map(str, seeds)).encode(), digest_size=8).hexdigest()


def hunt_mutants(limit: int, workers: int) -> dict[str, Any]:
    """Every mutant that seeds catch, until one does."""
    mutants = sorted(hunts(hunted_mutants(), limit, workers), key=lambda mutant: mutant["mutant"])
    for mutant in mutants:
        if not mutant["caught"]:
            print(f"mutant {mutant['mutant']} is not caught in {mutant['tried']} seeds", flush=True)
    return {"limit": limit, "found": mutants}


async def perform(cycles: int, seed: int) -> StoryResult:
    """2 → 4 → 8 → 3 → 2 partitions, `cycles` times, under load and under every fault."""
    with tempfile.TemporaryDirectory() as folder:
        async with Stage(Path(folder), keys=KEYS, per_second=PER_SECOND) as stage:
            story = Story(stage, random.Random(seed), pause_ttls_max=PAUSE_TTLS_MAX)
            await story.run(CYCLE * cycles, faults_each=3, gap_s=0.5)
            told = await story.told()
            assert not story.never_struck, story.never_struck
            assert stage.calendar_hours > CALENDAR_HOURS_MIN, "the calendars were to be wrong"
        told.verdict = second_opinion(Path(folder))
        if told.findings.total or told.verdict["findings"]:
            kept = shutil.copytree(folder, tempfile.mkdtemp(prefix="proof-"), dirs_exist_ok=True)
            print(f"all that was written is in {kept}", flush=True)
        return told


async def control(name: str) -> int:
    """How many violations a run without one of the rules shows."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_without_fence if name == "stale effect" else run_without_drain_rule
        return (await run(Path(folder))).counts[name]


def run_processes(cycles: int, seed: int) -> dict[str, Any]:
    """The long story, and the two control runs."""
    told = asyncio.run(perform(cycles, seed))
    for line in [*told.findings.examples, *told.verdict.pop("examples")]:
        print(line, flush=True)
    return {
        "cycles": cycles,
        "seed": seed,
        "keys": KEYS,
        "messages": told.messages,
        "events": sum(told.events.values()),
        "faults": dict(sorted(told.faults.items())),
        "counts": told.findings.counts,
        "frozen": told.events["Frozen"],
        "judge": told.verdict,
        "control_stale_effects": asyncio.run(control("stale effect")),
        "control_skips": asyncio.run(control("skip")),
    }


def kill_members(kills: int, seed: int) -> dict[str, Any]:
    """Kill this many consumers of each group, and see that the judge finds two bugs."""
    with tempfile.TemporaryDirectory() as folder:
        told = asyncio.run(kill_consumers(Path(folder), kills, seed=seed))
        for line in told["judge"].pop("examples"):
            print(line, flush=True)
        if told["judge"]["findings"]:
            kept = shutil.copytree(folder, tempfile.mkdtemp(prefix="proof-"), dirs_exist_ok=True)
            print(f"all that was written is in {kept}", flush=True)
    controls = {}
    for name, mutant, kind in (
        ("control_losses", "acked_when_handed_out", "acked unhandled"),
        ("control_inversions", "lanes_ignore_keys", "handled too early"),
    ):
        with tempfile.TemporaryDirectory() as folder:
            controls[name] = asyncio.run(count_harm(Path(folder), mutant, kind))
    return {"kills": kills, "seed": seed} | told | controls


def kill_everywhere(workers: int, folders: Sequence[str]) -> dict[str, Any]:
    """Every test of `tests/crash`, and of the other folders those that `make test` leaves out."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        split = ["--numprocesses", str(workers), "--dist", "load", f"--junit-xml={report}"]
        chosen = ["--whole", "-m", "crash or whole", *(str(TESTS / name) for name in folders)]
        command = [sys.executable, "-m", "pytest", *split, *chosen]
        status = subprocess.run(command, cwd=TESTS.parent, check=False).returncode
        if status not in {0, 1}:  # 1: tests failed
            sys.exit(
                f"pytest ended with status {status}: what was run is no proof, and is not noted"
            )
        suite = ET.parse(report).getroot()[0]
    tests, failed = int(suite.get("tests", 0)), [suite.get(name) for name in ("errors", "failures")]
    return {
        "of": "all" if folders == WHOLE else ", ".join(folders),
        "tests": tests,
        "failed": sum(int(count or 0) for count in failed),
    }


def version() -> str:
    """The commit, and whether more than this document was changed since."""
    ask = ["git", "log", "-1", "--format=%h"]
    commit = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    ask = ["git", "status", "--porcelain", "--", ":!docs/PROOF.md", ":!docs/proof.jsonl"]
    changed = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
    return (commit or "unknown") + ("+" if changed else "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make proof", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--random", type=int, default=0, help="seeds drawn at random, instead")
    parser.add_argument("--features", type=int, default=4_000, help="seeds with a feature at work")
    parser.add_argument("--followed", type=int, default=2_000, help="seeds with followers")
    parser.add_argument(
        "--followed-features", type=int, default=1_000, help="seeds with followers of a feature"
    )
    parser.add_argument("--drawing", type=int, help="the number of an earlier drawing")
    parser.add_argument("--limit", type=int, default=MUTANT_SEEDS_MAX, help="seeds for a mutant")
    parser.add_argument("--cycles", type=int, default=20, help="of resizes of real processes")
    parser.add_argument("--killed-consumers", type=int, default=500, help="of each consumer group")
    parser.add_argument(
        "--kills",
        choices=("0", "1", "crash"),
        default="1",
        help="0: not the kill points; crash: those of tests/crash alone",
    )
    parser.add_argument(
        "--story", type=int, default=1, help="the seed of the story and of the killed consumers"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no seeds after these")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    share: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "version": version(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}",
    }
    folders = ("crash",) if args.kills == "crash" else WHOLE
    parts: dict[str, tuple[bool, Callable[[], dict[str, Any]]]] = {
        "simulation": (bool(args.seeds or args.random), _simulation(args)),
        "features": (bool(args.features), _further(args, "features", args.features)),
        "followed": (bool(args.followed), _further(args, "followed", args.followed)),
        "followed_features": (
            bool(args.followed_features),
            _further(args, "followed_features", args.followed_features),
        ),
        "mutants": (bool(args.limit), lambda: hunt_mutants(args.limit, args.workers)),
        "kills": (args.kills != "0", lambda: kill_everywhere(2 * args.workers, folders)),
        "processes": (bool(args.cycles), lambda: run_processes(args.cycles, args.story)),
        "consumers": (
            bool(args.killed_consumers),
            lambda: kill_members(args.killed_consumers, args.story),
        ),
    }
    for name, (wanted, run) in parts.items():
        if wanted:
            began = time.monotonic()
            share[name] = run() | {"seconds": round(time.monotonic() - began)}
    with SHARES.open("a", encoding="utf-8") as file:
        file.write(json.dumps(share) + "\n")
    DOCUMENT.write_text(document(SHARES.read_text(encoding="utf-8")), encoding="utf-8")
    readme.main()
    return _tell(share)


def _simulation(args: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    """Run the seeds that were asked for: consecutive or drawn."""
    if args.random:
        drawing = secrets.randbits(48) if args.drawing is None else args.drawing
        return partial(simulate_drawn, args.random, drawing, args.workers, seconds=args.seconds)
    seeds = range(args.first, args.first + args.seeds)
    run = partial(simulate, seeds, args.workers, seconds=args.seconds)
    return lambda: run() | {"first": args.first}


def _further(args: argparse.Namespace, world: str, count: int) -> Callable[[], dict[str, Any]]:
    """Run seeds of another kind of world than the usual one, with numbers from `first` on."""
    first = FIRSTS[world] + args.first
    seeds = range(first, first + count)
    run = partial(simulate, seeds, args.workers, seconds=args.seconds)
    return lambda: run() | {"first": first}


def _tell(share: dict[str, Any]) -> int:
    """The last line, as of `make sim`; the exit status."""
    sims = [share.get(name, {}) for name in SIMULATED]
    process, consumers = share.get("processes", {}), share.get("consumers", {})
    mutants = share.get("mutants", {}).get("found", [])
    caught = sum(mutant["caught"] for mutant in mutants)
    harmless = sum(
        not part[name]
        for part in (process, consumers)
        for name in part
        if name.startswith("control")
    )
    names = ("seeds", "faults", "events", "violations")
    line = {name: sum(sim.get(name, 0) for sim in sims) for name in names}
    judged = [part.get("judge", {}).get("findings", {}) for part in (process, consumers)]
    line["violations"] += share.get("kills", {}).get("failed", 0)
    line["violations"] += sum(
        share.get("consumers", {}).get("judge", {}).get("findings", {}).values()
    )
    line["violations"] += sum(process.get("counts", {}).values()) + harmless
    line["violations"] += sum(sum(findings.values()) for findings in judged)
    seconds = sum(share[name]["seconds"] for name in share if isinstance(share[name], dict))
    print(
        json.dumps(line | {"mutants": len(mutants), "mutants_caught": caught, "seconds": seconds})
    )
    return int(bool(line["violations"]) or caught < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
