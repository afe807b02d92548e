"""Writes docs/PROOF.md from docs/proof.jsonl: runs, their versions, their findings. Pure except for
the paths.
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

`make proof` writes this page from `docs/proof.jsonl`; nobody edits it by hand.
Each row is one share, that is, one run that really took place. A version with `+` had changes that were not committed yet.
Each table shows the shares of the newest version that it was run on, and the five lines above count the same shares.
A line below the table sums up the shares of earlier versions. The commit log says which faults a share found, and how they were fixed.

To run one share of the simulation alone (`SEEDS=0` leaves the simulation out):

    make proof SEEDS=2000 FIRST=4000 FEATURES=0 FOLLOWED=0 FOLLOWED_FEATURES=0 LIMIT=0 KILLS=0 CYCLES=0 KILLED_CONSUMERS=0

To draw the seeds at random from [10^6, 10^9):

    make proof RANDOM=2000 FEATURES=0 FOLLOWED=0 FOLLOWED_FEATURES=0 LIMIT=0 KILLS=0 CYCLES=0 KILLED_CONSUMERS=0

The row then has the number of the drawing and a digest of its seeds. `DRAWING=` with that number draws the same seeds again.

One checker (`checker/`) judges the simulation, the runs of real processes, and the demo.
It looks for these violations: lost, phantom, duplicate, inversion, skip, nonmonotonic, stale effect, late start,
duplicate token, two grants, starvation, silent loss.
"""
SIMULATION = """
## Simulation

The programs' own code runs in virtual time, with these faults:

* the network delays, loses and doubles calls, delivers them late, cuts one direction, resets connections, and loses replies after their call took effect
* clocks have offsets, drift by 5 %, and jump by an hour
* every program is paused, crashed and restarted
* power fails, and writes are torn or lost; disks stall, fail and fill up

Meanwhile subjects get messages, are resized, split, merged, moved and evacuated, and consumers join and leave.

In most seeds, users do what manuals warn of. They reopen an object, copy it with a fork, and give it generators that repeat.
They send from two tasks, cancel any waiting call, and flush instead of awaiting futures.
They wrap handlers, raise odd errors, and continue after a cancellation. They run until a signal, redeploy, and share a group.
They use an open client from another thread with its own event loop, and have keys that fail forever.

In one seed of eight, silent brokers are given up, the progress of consumer groups is reset, and old messages are removed.
In one of sixteen, a disk is lost for good, and an operator accepts the loss.
In another one of sixteen, a broker dies while a second subject is created, and stays away until that subject is open.

Then every fault is repaired, and the cluster has to drain. `make sim SEED=k` replays one seed.

| date | version | seeds | faults | events | violations | seconds |
| --- | --- | --- | --- | --- | --- | --- |
"""
FEATURES = """
## Features at work

The same programs and faults, in seeds from 2 * 10^9 on. Each seed has one of these features beside a usual subject:

* A subject and its consumer group are deleted, and created again under the same names, while some programs are frozen.
  Nothing that was sent to the deleted subject is in the new one, no progress is taken over, and no partition id is reused.
  At the end no broker has a partition of the deleted subject.
* A static subject gets more queues: each queue keeps its number, its logic offsets and its first half.
* Messages are scheduled, and some of them canceled: each accepted message comes once, not before its time, and a canceled one never.
* Producers send tables of rows while resizes and closes interrupt them: each key keeps its order, and the call reports what happened to each row.
* Three producers send first messages to a subject that does not exist yet: it becomes one subject.
* Two programs with one outbox are frozen in turn, so each wakes up after the other has taken over: the order of the commits is kept.

The judges read what was sent, what the clients were told, the disks, and what handlers received; they read the database only for the ids of groups and routes.
`make sim WORLD=features SEEDS=100` runs some of these seeds.

| date | version | seeds | faults | events | violations | seconds |
| --- | --- | --- | --- | --- | --- | --- |
"""
FOLLOWED = """
## Followed

The usual stories again, in seeds from 3 * 10^9 on. One to three readers (`Reader`) follow the subject, and at times a broadcast consumer does too.
They start at the beginning, at a time, or at the end, and read one key or all keys.
They are slow, or they stop waiting and ask again. They are killed, frozen, cut off and closed.
They are reopened at the positions that they kept, or without positions.

Their judge reads what was sent, what the clients were told, and the disks at the end, but no lineage. It checks that

* the messages of each key come in order
* no message comes twice, unless it lies after the kept positions
* every message comes that the reader is owed and that was on no lost disk

A reader may miss messages that retention removed only if it was told so: when it was opened, or later by a broker or a metaserver.
`make sim WORLD=followed SEEDS=100` runs some of these seeds.

| date | version | seeds | faults | events | violations | seconds |
| --- | --- | --- | --- | --- | --- | --- |
"""
FOLLOWED_FEATURES = """
## Followed features

The stories of features, in seeds from 4 * 10^9 on, with the same kinds of followers on the subject of the feature.
Of three seeds, one cuts the subject over, one deletes it and creates it again, and the third has each feature in turn.
After a publication, each message comes once and in the order of its key: either the message itself, or the row that was made of it.
A reader that is reopened at kept positions continues after them. No reader returns messages both of a deleted subject and of a later one with the same name.
`make sim WORLD=followed_features SEEDS=100` runs some of these seeds.

| date | version | seeds | faults | events | violations | seconds |
| --- | --- | --- | --- | --- | --- | --- |
"""
PROCESSES = """
## Real processes

A metaserver, two brokers, three consumers and a producer run on loopback, with 10,000 keys and a ttl of one second.
Consumers are stopped inside a handler for 1 to 10 ttl, and every program is killed.
The network between consumers, brokers and the metaserver is cut in one direction or both.
Calendars are an hour off, those of all programs or of one.
Meanwhile the subject goes from 2 partitions to 4, 8, 3 and back to 2.

Two control runs have to show harm: one without the broker's check of tokens, and one without the drain rule.
When all programs have ended, a judge that imports nothing of the product (`tests/judge/`) reads the brokers' segments by
docs/FORMATS.md, and compares them with what the clients wrote down. Its column shows how many messages were acked and handled, and what was wrong.
The judge also reads what groups have parked. A parked message may be acked without having been handled, but no later message of
its key may pass it, and a message that is no longer parked must have been handled.

A handler starts with its first line, and the worker checks its lease just before that. A process that the test stops
between the two wakes up late, which is not its own fault. Such stops are counted as "stopped at a first line", and
`tests/crash/test_troubled_processes.py` causes them. A first line after the lease's end without such a stop is
a late start, unless the lease was checked in time and at most two milliseconds before: the margin of a lease is longer.
Rows without that count did not tell such stops apart: there, a stop counts as a late start, and leads to two grants.

| date | version | cycles | faults | messages | events | stale effects | late starts | inversions | other | stopped at a first line | judge: acked, handled, wrong | control: stale effects | control: skips | seconds |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
CONSUMERS = """
## Killed consumers

Eight consumer groups handle the messages of two subjects: for each failure policy an exclusive group and a shared one, each with two members and a ttl of two seconds.
A member is killed with SIGKILL up to 0.4 seconds after its first message, and started again at once, until each group has lost as many as the row says.
A kill counts only if the process still ran then, and had got a message.
Members handle messages one by one, in batches, in a loop, or in a loop that takes many; half of those of exclusive groups keep a name (`instance`).
Some messages fail at their first try, and some at every try, until an operator has mended them and has what was set aside handled again.
At the end every message has to be handled, and nothing may be left aside.

A handler writes down at once that it begins, and how it ends. The judge compares that with the brokers' segments, and knows what each policy promises:

* nothing is lost: what is acked was handled to its end
* in an exclusive group the messages of a key are handled in order, and no owner goes back behind what it has handled
* only messages that were given up may be passed by later ones of their key; a parked key is never passed
* nothing is set aside under `"block"`; elsewhere only what has failed often enough or has ended processes, and in the way of the policy

A handler that a kill has interrupted began and came to no end.
Two control runs with a few kills have to show harm: in one, members ack what they hand out; in the other, messages of a key do not wait for each other.
`tests/judge/test_policies.py` shows that the judge finds records that are broken on purpose.
This command kills 500 members of each group, and does nothing else:

    make proof KILLED_CONSUMERS=500 SEEDS=0 FEATURES=0 FOLLOWED=0 FOLLOWED_FEATURES=0 LIMIT=0 KILLS=0 CYCLES=0

| date | version | kills of each group | killed | handlers interrupted | messages | handled, in all groups | set aside | wrong | control: losses | control: inversions | seconds |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
MUTANTS = """
## Mutants

Bugs are put in on purpose, one at a time, and seeds are run until one of them catches the bug.
Those that hardly a seed shows are put into the tests of their rules, which have to fail (`tests/sim/test_rare_mutants.py`).

| date | version | mutants | caught | seeds at most | seconds |
| --- | --- | --- | --- | --- | --- |
"""
KILLS = """
## Kill points

A real broker is killed at every point of its work on the disk, each time that it gets there, with both indexes. Its index
work is killed in the same way, and it is stopped at arbitrary moments: these are all the tests of `tests/crash/`. `make test` runs a sample of them, and `make kills` runs them alone.
A row of "all" includes what else `make test` leaves out: seeds that found a fault once, and stores cut at every byte.
This command runs `tests/crash/` without these:

    make proof KILLS=crash SEEDS=0 FEATURES=0 FOLLOWED=0 FOLLOWED_FEATURES=0 LIMIT=0 CYCLES=0 KILLED_CONSUMERS=0

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
        (CONSUMERS, "consumers", _killed_members, _killed_members_earlier),
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
            summed = earlier([share[name] for share in before])
            text += f"\nOn {_counted(versions, 'earlier version')}: {summed}.\n"
        if name == "processes" and newest:
            faults = ", ".join(f"{kind} {n}" for kind, n in newest[-1][name]["faults"].items())
            text += f"\nFaults of the latest run: {faults}.\n"
        if name == "consumers" and newest:
            killed = newest[-1][name]["killed"]
            groups = ", ".join(f"{group} {killed[group]:,}" for group in sorted(killed))
            text += f"\nKills of the latest run: {groups}.\n"
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


def all_or_count(count: int, whole: int) -> str:
    """`all 239`, or only the number if it is smaller than the whole."""
    return f"all {count:,}" if count == whole else f"{count:,}"


def _summary(read: list[dict[str, Any]]) -> str:
    """The page in five lines."""
    totals = totals_of(read)
    before = [share[name] for name in SIMULATED for share in _by_version(read, name)[1]]
    bad_before = sum(len(sim["bad_seeds"]) for sim in before)
    lines = [
        (
            "**Promised**: an acked message is kept; messages of one key are handled in the order in "
            "which they were sent; no consumer handles messages that were granted to another."
        ),
        (
            f"**Done to break it**: {totals.faults:,} faults (programs killed, power cut, disks and "
            f"networks broken, clocks set wrong) in {totals.seeds:,} simulated runs and in runs of "
            f"real programs with {totals.messages:,} messages. In {totals.with_users:,} of the "
            "simulated runs users did what manuals warn of."
        ),
        (
            f"**Random**: {totals.drawn:,} of the simulated runs have seeds drawn from a thousand "
            "million; the others have consecutive seeds."
        ),
        (
            f"**Found**: {totals.bad:,} of the simulated runs ended with a fault, of the product or of "
            f"the simulation itself. On earlier versions {_sum(before, 'seeds'):,} runs had "
            f"{bad_before:,}.\n"
            "   Each was repaired, and the tests have replayed it since.\n"
            "   Two independent programs judge the runs of real programs. The checker counted "
            f"{totals.violations:,} violations. The other one, which shares no code with the product "
            f"and reads the disks, found {totals.found:,} errors among {totals.acked:,} acked messages."
        ),
        (
            f"**The tests, tested**: the code was broken on purpose in {totals.bugs:,} ways, one at a "
            f"time (mutants). The tests noticed {all_or_count(totals.caught, totals.bugs)} of them."
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


def _killed_members(part: dict[str, Any]) -> tuple[object, ...]:
    judge = part["judge"]
    return (
        part["kills"],
        sum(part["killed"].values()),
        sum(judge["interrupted"].values()),
        judge["stored"],
        judge["handled"],
        sum(judge["set_aside"].values()),
        sum(judge["findings"].values()),
        part["control_losses"],
        part["control_inversions"],
    )


def _killed_members_earlier(parts: list[dict[str, Any]]) -> str:
    killed = sum(sum(part["killed"].values()) for part in parts)
    wrong = sum(sum(part["judge"]["findings"].values()) for part in parts)
    return f"{_counted(len(parts), 'run')} with {killed:,} kills, {wrong:,} errors"


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
