"""`make sim SEEDS=n`, `make sim SEED=k`, `make sim MUTANTS=1`: runs seeds and mutants, ends with
one JSON line.

Every process runs with the same hash seed, so that a seed is the same run wherever it is run.
"""

from __future__ import annotations

import argparse
import builtins
import gc
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import cache
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.world import World

PROCESSOR_SECONDS_MAX = 60
"""For one seed, which takes less than one: more is a loop that never ends."""
NICE = 10
"""Seeds give way to programs in real time that run at the same time: other tests."""
MUTANT_SEEDS_MAX = 2_000
RANDOM_SEEDS = range(10**6, 10**9)
"""The range from which random seeds are drawn."""
FEATURES_FIRST = 2 * 10**9
"""Seeds from here on have a feature at work; see `features/world.py`."""
FOLLOWED_FIRST = 3 * 10**9
"""In seeds from here on readers follow the subject; see `following/world.py`."""
FOLLOWED_FEATURES_FIRST = 4 * 10**9
"""In seeds from here on readers follow the subject of a feature; see `following/features.py`."""
FIRSTS = {
    "usual": 0,
    "features": FEATURES_FIRST,
    "followed": FOLLOWED_FIRST,
    "followed_features": FOLLOWED_FEATURES_FIRST,
}
"""The first seed of each kind of world."""
SHARE = 5
"""Where all kinds of seeds are run, there is one of each further kind for this many usual ones."""
OUT_OF_DATE = ("TypeError", "AttributeError", "NameError", "ImportError")
"""Errors of a mutant whose target has changed: it has to be mended, it was not caught."""
NO_CATCH = tuple(
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and kind is not AssertionError
)
"""An exception of the language itself says that something broke, not what: the mutant's own code
may be at fault. A typed error of ours, and an assertion that says what should hold, name what they
found.
"""


class TooSlow(KeyboardInterrupt):
    """A seed took longer than the limit."""


def _too_slow(_number: int, _frame: object) -> None:
    raise TooSlow(f"a seed took more than {PROCESSOR_SECONDS_MAX} s of the processor")


@cache
def _freeze() -> None:
    """Exempt everything imported by now from garbage collection."""
    gc.collect()
    gc.freeze()


def run_one(seed: int) -> dict[str, Any]:
    """One seed in this process, as plain values."""
    from keylane.checker.findings import Findings
    from keylane.testing.machines.database import forget_database
    from sim.world import Outcome, run_seed

    _freeze()
    signal.signal(signal.SIGPROF, _too_slow)
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR_SECONDS_MAX)
    try:
        outcome = run_seed(seed, _kind_of(seed))
    except TooSlow as error:
        forget_database()
        outcome = Outcome(seed, Findings(), 0, 0, "", 0.0, problems=[str(error)])
    except BaseException:
        forget_database()
        raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return asdict(outcome) | {"violations": outcome.violations}


def _kind_of(seed: int) -> type[World]:
    """The kind of world of a seed."""
    from sim.features.world import FeatureWorld
    from sim.following.features import FollowedFeatureWorld
    from sim.following.world import FollowedWorld
    from sim.world import World

    if seed >= FOLLOWED_FEATURES_FIRST:
        return FollowedFeatureWorld
    if seed >= FOLLOWED_FIRST:
        return FollowedWorld
    return FeatureWorld if seed >= FEATURES_FIRST else World


def run_many(seeds: list[int]) -> list[dict[str, Any]]:
    return [run_one(seed) for seed in seeds]


def hunt(name: str, limit: int) -> dict[str, Any]:
    """Runs seeds with one mutant until it is caught: first the one that caught it before, then
    those of worlds that may show it.
    """
    from sim.mutants.bank import MUTANTS, seeds_for
    from sim.mutants.catches import CATCHES

    known = [CATCHES[name]] if name in CATCHES else []
    further = (seed for seed in seeds_for(name) if seed not in known)
    seeds = list(islice(chain(known, further), limit))
    unclear: list[str] = []
    with MUTANTS[name].applied():
        for tried, seed in enumerate(seeds, 1):
            try:
                outcome = run_one(seed)
            except Exception as error:  # noqa: BLE001 - a mutant may break anything, that is its nature
                said = f"{type(error).__name__}: {error}"
                outcome = {"problems": [said], "violations": 1, "findings": {"counts": {}}}
            broken = [problem for problem in outcome["problems"] if problem.startswith(OUT_OF_DATE)]
            if broken:
                return {
                    "mutant": name,
                    "seed": seed,
                    "tried": tried,
                    "caught": False,
                    "by": broken[0],
                }
            if any(_is_plain(problem) for problem in outcome["problems"]):
                unclear.append(outcome["problems"][0])
            elif outcome["violations"]:
                counts = outcome["findings"]["counts"]
                by = [kind for kind, count in counts.items() if count] or outcome["problems"][:1]
                return _caught(name, seed, tried, ", ".join(by))
    by = f"{len(unclear)} plain exceptions, as {unclear[0]}" if unclear else ""
    return {"mutant": name, "seed": None, "tried": len(seeds), "caught": False, "by": by}


def _is_plain(problem: str) -> bool:
    """Whether the problem is an exception that does not name a broken rule."""
    kind, _, said = problem.partition(":")
    return kind in NO_CATCH or (kind == "AssertionError" and not said.strip())


def _caught(name: str, seed: int, tried: int, by: str) -> dict[str, Any]:
    return {"mutant": name, "seed": seed, "tried": tried, "caught": True, "by": by[:100]}


def pool(workers: int) -> ProcessPoolExecutor:
    """Processes that all have the same hash seed."""
    os.environ["PYTHONHASHSEED"] = "0"
    return ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=os.nice,
        initargs=(NICE,),
    )


def seeds_of(world: str, first: int, count: int) -> list[int]:
    """
    Seeds to run.

    Args:
        world: a name of `FIRSTS` (where `first` counts from the kind's first seed on), or "all": of
            the other kinds a share besides.
    """
    if world != "all":
        begin = first if first >= FIRSTS[world] else FIRSTS[world] + first
        return list(range(begin, begin + count))
    number = first % 10**9  # there are no more in each kind
    return [
        *range(first, first + count),
        *(
            begin + each
            for begin in list(FIRSTS.values())[1:]
            for each in range(number, number + count // SHARE)
        ),
    ]


def _used(executor: Executor | None, workers: int) -> AbstractContextManager[Executor]:
    """The caller's processes, or some of its own, which end with their work."""
    return pool(workers) if executor is None else nullcontext(executor)


def outcomes_of(
    seeds: Sequence[int], workers: int, executor: Executor | None = None
) -> Iterator[dict[str, Any]]:
    """The outcomes of seeds, in the order in which they end."""
    share = max(1, min(20, len(seeds) // (4 * workers)))
    parts = [list(seeds[start : start + share]) for start in range(0, len(seeds), share)]
    with _used(executor, workers) as used:
        for done in as_completed([used.submit(run_many, part) for part in parts]):
            yield from done.result()


def draw_seeds(drawing: int, count: int) -> list[int]:
    """`count` seeds out of `RANDOM_SEEDS`, rising; the drawing's number decides which."""
    return sorted(random.Random(drawing).sample(RANDOM_SEEDS, count))


def hunts(
    names: list[str], limit: int, workers: int, executor: Executor | None = None
) -> Iterator[dict[str, Any]]:
    """The results of mutants, in the order in which they end."""
    with _used(executor, workers) as used:
        for done in as_completed([used.submit(hunt, name, limit) for name in names]):
            yield done.result()


def _tell(outcome: dict[str, Any]) -> None:
    counts = {kind: n for kind, n in outcome["findings"]["counts"].items() if n}
    print(
        f"seed {outcome['seed']}: {counts} {len(outcome['problems'])} problems; replay: make sim "
        f"SEED={outcome['seed']}"
    )
    for line in outcome["findings"]["examples"][:8] + outcome["problems"][:5]:
        print("   ", line)


def _fate(hunted: dict[str, Any]) -> str:
    if not hunted["caught"]:
        return f"NOT CAUGHT in {hunted['tried']} seeds {hunted['by']}"
    return f"caught by seed {hunted['seed']} ({hunted['tried']} tried): {hunted['by']}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=0, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--world", default="usual", choices=(*FIRSTS, "all"))
    parser.add_argument("--seed", type=int, help="only this one, with its trace")
    parser.add_argument("--mutants", default="", help="1 for all, or names with commas between")
    parser.add_argument("--limit", type=int, default=MUTANT_SEEDS_MAX, help="seeds for a mutant")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def main() -> int:
    args = _arguments()
    began = time.perf_counter()
    total = {"seeds": 0, "faults": 0, "events": 0, "violations": 0}
    seeds = seeds_of(args.world, args.first, args.seeds)
    if args.seed is not None:
        seeds = [args.seed]
    for outcome in outcomes_of(seeds, args.workers) if seeds else ():
        total["seeds"] += 1
        for name in ("faults", "events", "violations"):
            total[name] += outcome[name]
        if outcome["violations"]:
            _tell(outcome)
        if args.seed is not None:
            print(f"trace {outcome['trace']}, {outcome['virtual_s']:.1f} virtual seconds")
    names: list[str] = []
    if args.mutants:
        from sim.mutants.bank import hunted_mutants

        names = hunted_mutants() if args.mutants == "1" else args.mutants.split(",")
    caught = 0
    for hunted in hunts(names, args.limit, args.workers) if names else ():
        caught += hunted["caught"]
        print(f"mutant {hunted['mutant']}: {_fate(hunted)}", flush=True)
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps(total | {"mutants": len(names), "mutants_caught": caught, "seconds": seconds}))
    return int(bool(total["violations"]) or caught < len(names))


if __name__ == "__main__":
    sys.exit(main())
