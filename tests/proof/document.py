"""docs/PROOF.md out of docs/proof.jsonl: runs, their versions, their findings. Pure but for the
paths.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = DOCS / "PROOF.md"
SHARES = DOCS / "proof.jsonl"

SIMULATED = ("simulation", "features", "followed", "followed_features")
"""The parts of a share that are seeds."""

TITLE = "# What was proven, and how\n"
HEAD = """
## How to read it

`make proof` writes this page out of `docs/proof.jsonl`; it is not edited by hand.
Each row is one share that was really run; a version with `+` had changes that were not committed yet.
Each table has the shares of the newest version that it was run on, and so do the five lines above; a line below the table
sums up those of earlier versions. Faults that a share found, and how they were mended, are in the log of commits.
`make proof SEEDS=2000 FIRST=4000 FEATURES=0 FOLLOWED=0 FOLLOWED_FEATURES=0 LIMIT=0 KILLS=0 CYCLES=0` runs one share of the simulation alone; `SEEDS=0` leaves it out.
`make proof RANDOM=2000 FEATURES=0 FOLLOWED=0 FOLLOWED_FEATURES=0 LIMIT=0 KILLS=0 CYCLES=0` draws the seeds at random from [10^6, 10^9); the row has the number of the drawing,
with which `DRAWING=` gives the same seeds again, and the digest of their list.

One checker (`checker/`) judges the simulation, the runs of real processes and the demo.
It looks for: lost, phantom, duplicate, inversion, skip, nonmonotonic, stale effect, late start, duplicate token,
two grants, starvation, silent loss.
"""
SIMULATION = """
## Simulation

The programs' own code in virtual time: network (delay, loss, doubled and late calls, one-way cuts, resets, replies lost
after their effect), clocks (offset, drift of 5 %, jumps of an hour), pauses, crashes and restarts of every program, power
losses with torn and lost writes, stalled, failing and full disks; sends, resizes, splits, merges, moves, evacuations,
joins and leaves; in most seeds, users who open an object again, copy it with a fork, give it generators that repeat, send
from two tasks, cancel any waiting call, flush instead of awaiting futures, wrap handlers, raise odd errors, go on after a
cancellation, run until a signal, redeploy, share a group, use what is open from another thread with an event loop of its
own, and have keys that fail for ever; in one seed of eight, silent brokers given up, the progress of consumer groups set
anew, old messages removed; in one of sixteen, a disk lost for good whose loss an operator accepts; in another one of
sixteen, a broker that dies around the creation of a second subject and stays away until that is open.
Then everything is healed and has to drain. `make sim SEED=k` replays one seed.

| date | version | seeds | faults | events | violations | seconds |
| --- | --- | --- | --- | --- | --- | --- |
"""
FEATURES = """
## Features at work

The same programs and faults, in seeds from 2 * 10^9 on; each seed has one of these beside a usual subject:

* a subject and its consumer group deleted and created anew under the same names, with programs that were frozen meanwhile:
  nothing sent to the deleted one is in the new one, no progress is taken over, no partition id is used again, and no broker
  has a partition of the deleted one at the end;
* a static subject given more queues: each queue keeps its number, its logic offsets and its first half;
* messages for a later delivery, some of them canceled: each accepted one comes once, not before its time, a canceled one
  never;
* tables of rows sent by producers that resizes and closes interrupt: the order of each key, and what the call says of them;
* first messages of a subject that is not created yet, by three producers at once: it is one subject;
* two programs with one outbox, frozen in turn, so that each wakes up when the other has taken over: the order of the commits.

The judges read what was sent and told, the disks, and what handlers saw; the database only for the ids of groups and routes.
`make sim WORLD=features SEEDS=100` runs some.

| date | version | seeds | faults | events | violations | seconds |
| --- | --- | --- | --- | --- | --- | --- |
"""
FOLLOWED = """
## Followed

The usual stories once more, in seeds from 3 * 10^9 on, with one to three readers that follow the subject (`Reader`) and at times
a broadcast consumer: they begin at the beginning, at a time or at the end, want one key or all, are slow or give up waiting
and ask again, are killed, frozen, cut off, closed, and opened again at the positions that they kept, or at none.
Their judge reads what was sent and told and the disks at the end, and no lineage: of each key the order, nothing twice but
what was given behind the kept positions, everything that is owed and was on no lost disk. What retention has taken a reader may miss
only if it was told so: when it was opened, or by a broker or a metaserver while it read.
`make sim WORLD=followed SEEDS=100` runs some.

| date | version | seeds | faults | events | violations | seconds |
| --- | --- | --- | --- | --- | --- | --- |
"""
FOLLOWED_FEATURES = """
## Followed features

The stories of features, in seeds from 4 * 10^9 on, with such followers of the subject of the feature: of three seeds one is cut
over, one is deleted and created anew, the third has each feature in turn.
Across a publication a message comes once, as itself or as the row that was made of it, in the order of its key; a reader
that is opened with the positions of before goes on behind them. Of a subject and a later one of its name no reader gives both.
`make sim WORLD=followed_features SEEDS=100` runs some.

| date | version | seeds | faults | events | violations | seconds |
| --- | --- | --- | --- | --- | --- | --- |
"""
PROCESSES = """
## Real processes

A metaserver, two brokers, three consumers and a producer on loopback, 10,000 keys, a ttl of one second: consumers
stopped inside a handler for 1 to 10 ttl, every program killed, the ways between consumers, brokers and the metaserver cut
in one direction or both, calendars an hour off, of all programs or of one, while the subject goes from 2 to 4, 8, 3 and back to 2 partitions.
Two control runs, with the broker's look at tokens and with the drain rule taken out, have to show harm.
When all programs have ended, a judge that imports nothing of the product (`tests/judge/`) reads the brokers' segments by
docs/FORMATS.md and compares them with what the clients wrote down; its column has acked, handled, and what it found wrong.
It reads what groups have parked, too: a parked message may be acked without having been handled, but no later message of
its key may pass it, and what is parked no longer must have been handled.

A handler begins with its first line, the worker's look at its lease comes just before. A process that the test stops
between the two wakes up late without a fault of its own; that is counted as "stopped at a first line", and
`tests/crash/test_troubled_processes.py` brings it about. A first line behind the lease's end without such a stop is
a late start, unless it came within two milliseconds of a look that was in time: the margin of a lease is longer.
In rows without that count stops were not told apart: such a stop is a late start there, and two grants with it.

| date | version | cycles | faults | messages | events | stale effects | late starts | inversions | other | stopped at a first line | judge: acked, handled, wrong | control: stale effects | control: skips | seconds |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
MUTANTS = """
## Mutants

Bugs put in on purpose, one at a time; the seeds go on until one catches it.

| date | version | mutants | caught | seeds at most | seconds |
| --- | --- | --- | --- | --- | --- |
"""
KILLS = """
## Kill points

A real broker killed at every point of its work on the disk, each time that it gets there, with both indexes; its index
work killed likewise; stops at any moment: all of `tests/crash/`. `make test` has a sample of it, `make kills` runs it alone.
A row of "all" has also what else `make test` leaves out: seeds that found a fault once, stores cut at every byte;
`make proof KILLS=crash SEEDS=0 FEATURES=0 FOLLOWED=0 FOLLOWED_FEATURES=0 LIMIT=0 CYCLES=0` runs `tests/crash/` without these.

| date | version | folders of tests | tests | failed | seconds |
| --- | --- | --- | --- | --- | --- |
"""
EACH = """
The latest hunt:

| mutant | caught by seed | as |
| --- | --- | --- |
"""


def document(shares: str) -> str:
    """The whole page."""
    read = [json.loads(line) for line in shares.splitlines()]
    text = TITLE + _summary(read) + HEAD
    machines = sorted({share["machine"] for share in read})
    text += f"\nMachine: {'; '.join(machines)}.\n"
    for title, name, row, earlier in (
        (SIMULATION, "simulation", _simulated, _simulated_earlier),
        (FEATURES, "features", _simulated, _simulated_earlier),
        (FOLLOWED, "followed", _simulated, _simulated_earlier),
        (FOLLOWED_FEATURES, "followed_features", _simulated, _simulated_earlier),
        (PROCESSES, "processes", _performed, _performed_earlier),
        (KILLS, "kills", _killed, _killed_earlier),
        (MUTANTS, "mutants", _hunted, _hunted_earlier),
    ):
        newest, before = _by_version(read, name)
        text += title + "".join(
            _row(share["date"], share["version"], *row(share[name]), share[name]["seconds"])
            for share in newest
        )
        if before:
            versions = len({share["version"] for share in before})
            told = earlier([share[name] for share in before])
            text += f"\nOn {_counted(versions, 'earlier version')}: {told}.\n"
        if name == "processes" and newest:
            faults = ", ".join(f"{kind} {n}" for kind, n in newest[-1][name]["faults"].items())
            text += f"\nFaults of the latest run: {faults}.\n"
        if name == "mutants" and newest:
            text += EACH + "".join(
                _row(mutant["mutant"], _seed(mutant), mutant["by"].replace("|", "/"))
                for mutant in newest[-1][name]["found"]
            )
    return text


def _by_version(
    read: list[dict[str, Any]], name: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The shares with a part: those of the newest version that it was run on, and those of earlier
    ones.
    """
    having = [share for share in read if name in share]
    last = having[-1]["version"] if having else ""
    newest = [share for share in having if share["version"] == last]
    return newest, [share for share in having if share["version"] != last]


def _parts(read: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The parts of the newest version that they were run on."""
    return [share[name] for share in _by_version(read, name)[0]]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the newest shares of each part."""

    seeds: int
    with_users: int
    drawn: int
    faults: int
    """Those of simulated runs and of runs of real programs."""
    bad: int
    """Simulated runs that ended with a fault."""
    messages: int
    """Those of runs of real programs."""
    violations: int
    """What the checker counted in runs of real programs."""
    acked: int
    """Acked messages that the second judge looked at."""
    found: int
    """What the second judge found wrong."""
    bugs: int
    caught: int

    @property
    def wrong(self) -> int:
        """What either judge found wrong in runs of real programs."""
        return self.violations + self.found


def totals_of(read: list[dict[str, Any]]) -> Totals:
    """Sum up the newest shares of each part."""
    sims = [part for name in SIMULATED for part in _parts(read, name)]
    runs = _parts(read, "processes")
    hunt = next((share["mutants"]["found"] for share in reversed(read) if "mutants" in share), [])
    judged = [run["judge"] for run in runs if run.get("judge")]
    return Totals(
        seeds=_sum(sims, "seeds"),
        with_users=_sum(sims, "with_users"),
        drawn=sum(sim["seeds"] for sim in sims if "drawing" in sim),
        faults=_sum(sims, "faults") + sum(sum(run["faults"].values()) for run in runs),
        bad=sum(len(sim["bad_seeds"]) for sim in sims),
        messages=_sum(runs, "messages"),
        violations=sum(sum(run["counts"].values()) for run in runs),
        acked=_sum(judged, "acked"),
        found=sum(sum(verdict["findings"].values()) for verdict in judged),
        bugs=len(hunt),
        caught=sum(mutant["caught"] for mutant in hunt),
    )


def _summary(read: list[dict[str, Any]]) -> str:
    """The page in five lines."""
    totals = totals_of(read)
    before = [share[name] for name in SIMULATED for share in _by_version(read, name)[1]]
    bad_before = sum(len(sim["bad_seeds"]) for sim in before)
    lines = [
        (
            "**Promised**: a message that was acked is kept; messages of one key are handled in "
            "the order in which they "
            "were sent; no consumer handles what was granted to another."
        ),
        (
            f"**Done to break it**: {totals.faults:,} faults (programs killed, power cut, disks and "
            f"networks broken, clocks set "
            f"wrong) in {totals.seeds:,} simulated runs and in runs of real programs with "
            f"{totals.messages:,} messages; in {totals.with_users:,} of the "
            f"simulated ones users did what "
            "manuals warn of."
        ),
        (
            f"**Random**: {totals.drawn:,} of the simulated runs have seeds drawn from a thousand "
            f"million; the others have "
            "numbers that follow each other."
        ),
        (
            f"**Found**: {totals.bad:,} of the simulated runs ended with a fault, of the product or of "
            f"the simulation itself; "
            f"before, on earlier versions, {_sum(before, 'seeds'):,} runs had {bad_before:,}.\n"
            "   Each was repaired, and has been "
            "replayed by the tests since.\n   In the runs of real programs one judge counted "
            f"{totals.violations:,} violations, and another, which shares no code with the product and reads "
            f"the disks, "
            f"{totals.found:,} among "
            f"{totals.acked:,} acked messages."
        ),
        (
            f"**The judge, judged**: of {totals.bugs:,} faults built into the programs on purpose, "
            f"one at a time, "
            f"{totals.caught:,} were caught."
        ),
    ]
    return "".join(f"\n{number}. {line}" for number, line in enumerate(lines, 1)) + "\n"


def _sum(parts: list[dict[str, Any]], name: str) -> int:
    return sum(int(part.get(name, 0)) for part in parts)


def _row(*cells: object) -> str:
    shown = (f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells)
    return f"| {' | '.join(shown)} |\n"


def _seed(mutant: dict[str, Any]) -> str:
    return str(mutant["seed"]) if mutant["caught"] else f"not in {mutant['tried']} seeds"


def _simulated(part: dict[str, Any]) -> tuple[object, ...]:
    if "drawing" in part:
        which = f"drawing {part['drawing']}, digest {part['digest']}: {part['seeds']:,}"
        if part["seeds"] < part["drawn"]:
            which += f" of {part['drawn']:,}"
    else:
        end = part["first"] + part["seeds"]
        which = f"[{part['first']}, {end}): {part['seeds']:,}"
    return which, part["faults"], part["events"], part["violations"]


def _simulated_earlier(parts: list[dict[str, Any]]) -> str:
    bad = sum(len(part["bad_seeds"]) for part in parts)
    return f"{_sum(parts, 'seeds'):,} seeds, of which {bad:,} ended with a fault"


def _performed(part: dict[str, Any]) -> tuple[object, ...]:
    counts = dict(part["counts"])
    named = [counts.pop(name) for name in ("stale effect", "late start", "inversion")]
    faults = sum(part["faults"].values())
    controls = (part["control_stale_effects"], part["control_skips"])
    judge = part.get("judge")
    wrong = sum(judge["findings"].values()) if judge else 0
    judged = f"{judge['acked']:,}, {judge['handled']:,}, {wrong}" if judge else ""
    return (
        part["cycles"],
        faults,
        part["messages"],
        part["events"],
        *named,
        sum(counts.values()),
        part.get("frozen", ""),
        judged,
        *controls,
    )


def _performed_earlier(parts: list[dict[str, Any]]) -> str:
    faults = sum(sum(part["faults"].values()) for part in parts)
    wrong = sum(sum(part["counts"].values()) for part in parts)
    messages = _sum(parts, "messages")
    return (
        f"{_counted(len(parts), 'run')} with {messages:,} messages and {faults:,} faults, "
        f"{wrong:,} violations"
    )


def _killed(part: dict[str, Any]) -> tuple[object, ...]:
    return part["of"], part["tests"], part["failed"]


def _killed_earlier(parts: list[dict[str, Any]]) -> str:
    return f"{_counted(len(parts), 'run')}, {_sum(parts, 'failed'):,} failed tests"


def _hunted(part: dict[str, Any]) -> tuple[object, ...]:
    mutants = part["found"]
    return len(mutants), sum(mutant["caught"] for mutant in mutants), part["limit"]


def _hunted_earlier(parts: list[dict[str, Any]]) -> str:
    last = parts[-1]["found"]
    caught = sum(mutant["caught"] for mutant in last)
    return (
        f"{_counted(len(parts), 'hunt')}, the last of {len(last):,} mutants, of which {caught:,} "
        f"were caught"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
