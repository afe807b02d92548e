"""docs/PEERS.md and the printed table, from the result of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from peers.durability import Durability
from peers.figures import (
    FIGURES,
    OURS,
    Against,
    Best,
    Figure,
    best_of,
    has_full_rate,
    is_reached,
    peers_to_compare,
    ratios_of,
    value_of,
)

PLOT = "peers.svg"
NOT_TAKEN = "–"
QUIET_LOAD = 0.5
HEAD = """\
# Beside others

keylane and other systems, in turns in one run, with the same work on the same machine.
`make bench-peers` measures; `--write-docs` keeps the last run of each kind of machine in [peers.jsonl](peers.jsonl) and writes this page and its plot from them, so no figure is typed by hand.
What decides a comparison of a Python client with one in C is how fast the machine runs Python, so each run says how long an addition in a loop takes.

"""
COPIED_OURS = "keylane-copies"
SAME_KIND = 1.5
"""Two machines are of one kind if their times of an addition in a loop differ by less than this."""
WORK = """\
## The work

Values of 100 bytes unless a row says otherwise, 10,000 keys in turn, 4 partitions; servers, producer and consumer are processes of their own, on loopback, with data on the machine's disk.
A round gives each system a turn with fresh servers, warmed before; rounds interleave the systems, and figures are medians over rounds.
Every ack of a send is awaited; `send_all` and Arrow return once all messages are stored.
Every message is an object whose key and value are touched; of Arrow batches the columns are touched. Every consumer keeps its place.
keylane's client is what a reader of the README writes: the loop of `asyncio.run`, and settings as they are.

| take | what |
| --- | --- |
| `send` | first send to last ack; keylane's in three ways: every receipt awaited, `send_all` of pairs, Arrow batches |
| `handle` | a backlog, first message to last; keylane's in three ways: a coroutine a message, a batch handler, Arrow |
| `both` | first send to last message handled, at once |
| `single` | a message at a time, send to ack |
| `steady` | 5,000 and 500 messages a second, send to handler; the first two seconds are not counted. Processor time is that of servers, producer and consumer, all threads and the kernel included |
| `kib` | values of 1 KiB |
| `partitions` | 64 partitions, by the rates of 4 in the same turn |
| `producers` | 4 producers together, by one in the same turn |
| `failover` | a message at a time, send to ack, while the server that leads is killed; the longest time without an ack. Only of systems with copies |
| `start` | 50 consumers of a process, each of its own topic and group, opened one after the other until each has its partitions; the client's library is loaded before, which has a row of its own |

Peak memory is that of a process since the take began: the producer's in `send`, the consumer's in `handle`, the servers' in any take.

## What differs, and cannot be made alike

* Where a system's messages have no key (NATS, RabbitMQ streams) the key stands before the value in the body: the cheapest way, in their favour.
* Order: keylane keeps the order of a key while 16 handlers run at once; Kafka, RabbitMQ and Redis are read in a plain loop, in the order of the partition; NATS may deliver again out of order.
* Acks of messages: NATS acks each message, Redis each batch read, keylane each message in ranges every few milliseconds, Kafka and RabbitMQ commit a position every 50 ms.
* Repeats: keylane and Kafka store a batch that is sent again once; RabbitMQ does with a named publisher and NATS with message ids, which are not used here; Redis does not.
* Leases: keylane and Kafka share the partitions of a group among its consumers; what a consumer of keylane acks after its lease ended is refused. RabbitMQ's, NATS' and Redis' consumers here are single.

## Measure it yourself

    make peers-home DIR=build/peers     # Debian's Redis and RabbitMQ, Kafka by Maven, NATS by Go, clients by pip
    make bench-peers ARGS="--home build/peers --json build/peers.json"
    make bench-peers ARGS="--json build/peers.json --write-docs"
    make bench-peers ARGS="--home build/peers --systems copied --takes send,single,both,kib,failover --json build/copied.json --write-docs"

`--systems`, `--takes`, `--rounds` and `--quick` choose; a peer that is not there is named, and left out.
Processor time is the figure that a busy machine changes least; rates are comparable within a run only.
"""
LACKS = """\
Beside figures, and true of any run: where a server is lost for good, Kafka, RabbitMQ and NATS choose another leader by themselves; of keylane, a [copy](do/warm-spare.md) of the broker's data takes its place if you run copies with `failover`, and otherwise an operator decides.
They and Redis have clients in many languages, and years of use by many; keylane's client is Python's.
"""
COPIED = """\
## With copies on several servers

The same work, with acks that promise that several servers have a message. All of them run on this one machine, and its one disk and two cores do the work of three: a cluster of three hosts is faster, each system by a factor of its own.
"""


def format_value(value: float, unit: str = "") -> str:
    """Format a figure with about three digits."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}{f' {unit}' if unit and unit != 'a second' else ''}"


def durabilities_of(result: Mapping[str, Any]) -> dict[str, Durability]:
    """System → what its ack promises."""
    return {name: Durability(about["durability"]) for name, about in result["systems"].items()}


def cell_of(name: str, system: str, figures: Mapping[str, float]) -> str:
    """Return the table cell of a system's figure, with its actual rate if that is below the
    requested one.
    """
    taken = name if system.startswith(OURS) else FIGURES[name].peer or name
    if taken not in figures:
        return NOT_TAKEN
    text = format_value(figures[taken])
    if not has_full_rate(name, figures):
        text += f" (at {figures['_'.join([*name.split('_')[:2], 'rate'])]:,.0f}/s)"
    return text


def _aim_of(figure: Figure) -> str:
    if figure.aim is None:
        return ""
    sign = "≤" if figure.lower and figure.against is Against.ITSELF else "≥"
    which = {Against.ANY: "any", Against.SAME: "as durable", Against.ITSELF: "itself"}
    unit = f" {figure.unit}" if figure.unit and figure.against is Against.ITSELF else ""
    return f"{sign} {figure.aim:g}{unit} ({which[figure.against]})"


def _best(best: Best | None) -> str:
    return NOT_TAKEN if best is None else f"{best.ratio:.2f} ({best.peer})"


def table_of(result: Mapping[str, Any]) -> str:
    """Every figure of every system, a row each, with ratios."""
    medians = result["medians"]
    systems = list(result["systems"])
    ratios = ratios_of(medians, durabilities_of(result))
    head = [
        "what",
        *systems,
        "by the best, same or weaker durability",
        "by the best as durable",
        "reach",
    ]
    rows = [head, ["---"] * len(head)]
    for name, figure in FIGURES.items():
        cells = [cell_of(name, system, medians[system]) for system in systems]
        if all(name not in medians[system] for system in systems):
            continue
        bests = ratios.get(name, {})
        missed = is_reached(name, medians, ratios) is False
        rows.append(
            [
                f"{figure.what}{f', {figure.unit}' if figure.unit else ''}",
                *cells,
                _best(bests.get(Against.ANY)),
                _best(bests.get(Against.SAME)),
                _aim_of(figure) + (": not reached" if missed else ""),
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def missing_lines(missing: Mapping[str, str]) -> list[str]:
    """Return a warning line for each system that was left out."""
    return [f"NOT MEASURED: {name}: {why}" for name, why in missing.items()]


def better_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield each figure in which a peer with the same or weaker durability is ahead, with those
    peers.
    """
    medians = result["medians"]
    peers = peers_to_compare(OURS, durabilities_of(result), Against.ANY) if OURS in medians else []
    for name, figure in FIGURES.items():
        ours = value_of(name, OURS, medians)
        if ours is None or not figure.compared:
            continue
        ratios = [(best_of(name, OURS, medians, [peer]), peer) for peer in peers]
        ahead = sorted((best.ratio, peer) for best, peer in ratios if best and best.ratio < 1)
        if ahead:
            who = ", ".join(f"{peer} {1 / ratio:.2f} times" for ratio, peer in ahead)
            unit = f" {figure.unit}" if figure.unit else ""
            yield f"* {figure.what} (keylane {format_value(ours)}{unit}): {who}"


def conditions_of(result: Mapping[str, Any]) -> str:
    """Where and when it was measured, in words."""
    machine, run = result["machine"], result["run"]
    sizes = "small takes (`--quick`)" if run["quick"] else "full takes"
    load = run["load_before"]
    quiet = "a quiet machine" if load < QUIET_LOAD else "a machine with other work"
    remark = ""
    if load >= QUIET_LOAD:
        remark = " Rates and times of such a run say little; processor times say more."
    rounds = f"{run['rounds']} round{'s' if run['rounds'] != 1 else ''}"
    return (
        f"{run['began']} UTC, {rounds}, {sizes}, on {quiet}, with a load of {load:.1f} before it."
        f"{remark}\n{machine['cores']} cores ({machine['cpu']}), {machine['memory_gb']} GB,"
        f" Linux {machine['kernel']}, Python {machine['python']} (an addition in a loop takes"
        f" {machine['python_loop_ns']:.0f} ns); {run['seconds'] / 60:.0f} minutes."
    )


def loop_ns(result: Mapping[str, Any]) -> float:
    """Return how long an addition in a loop takes on the machine of a run, in nanoseconds."""
    return float(result["machine"]["python_loop_ns"])


def kept_runs(
    runs: Sequence[Mapping[str, Any]], result: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Return the runs with `result` in place of that of the same kind of machine, the fastest
    machine first.
    """
    new_ns = loop_ns(result)
    others = [run for run in runs if not 1 / SAME_KIND < loop_ns(run) / new_ns < SAME_KIND]
    kept = {name: result[name] for name in KEPT}
    return sorted([*others, kept], key=loop_ns)


KEPT = ("machine", "run", "systems", "missing", "failed", "medians")
"""The parts of a run's result that the page needs."""


def behind_lines(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each figure in which peers with the same or weaker durability are ahead, with the
    machines on which they are.
    """
    if len(runs) == 1:
        yield from better_lines(runs[0])
        return
    lines = [{line.split(" (keylane ")[0]: line for line in better_lines(run)} for run in runs]
    for what in dict.fromkeys(chain.from_iterable(lines)):
        for run, found in zip(runs, lines, strict=True):
            if what in found:
                yield f"{found[what]}; at {loop_ns(run):.0f} ns"


def _section_of(run: Mapping[str, Any]) -> list[str]:
    """Return the figures of one run."""
    left_out = [f"* {line}" for line in missing_lines(run["missing"])]
    failed = [
        f"* FAILED: {name}, {take}: {why}"
        for name, takes in run["failed"].items()
        for take, why in takes.items()
    ]
    return [
        f"### Where an addition takes {loop_ns(run):.0f} ns",
        "",
        conditions_of(run),
        *(["", *left_out] if left_out else []),
        *(["", *failed] if failed else []),
        "",
        table_of(run),
        "",
    ]


def _about(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield what each system of a run is, promises and was set to."""
    for name, system in run["systems"].items():
        versions = ", ".join(f"{what} {version}" for what, version in system["versions"].items())
        ack = Durability(system["durability"]).shown
        yield f"* `{name}`: {system['title']} ({ack}). Its ack promises: {system['promise']}."
        yield f"  Versions: {versions}."
        yield f"  Settings: {system['settings']}."


def copied_table(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rows of a table of systems with copies, with the ratio by the best peer."""
    medians = run["medians"]
    systems = list(run["systems"])
    peers = [system for system in systems if not system.startswith(OURS)]
    head = ["what", *systems, "by the best"]
    yield "| " + " | ".join(head) + " |"
    yield "| " + " | ".join("---" for _ in head) + " |"
    for name, figure in FIGURES.items():
        if all(name not in medians[system] for system in systems):
            continue
        cells = [cell_of(name, system, medians[system]) for system in systems]
        best = best_of(name, COPIED_OURS, medians, peers)
        unit = f", {figure.unit}" if figure.unit else ""
        yield "| " + " | ".join([f"{figure.what}{unit}", *cells, _best(best)]) + " |"


def copied_lines(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the section of the systems with copies."""
    if not runs:
        return
    yield COPIED
    for run in runs:
        yield f"### Three servers where an addition takes {loop_ns(run):.0f} ns"
        yield ""
        yield conditions_of(run)
        yield from (f"* {line}" for line in missing_lines(run["missing"]))
        yield ""
        yield from copied_table(run)
        yield ""
    yield from _about(runs[-1])
    yield ""


def page_of(
    runs: Sequence[Mapping[str, Any]], copied_runs: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return the whole page; the last run says which systems there are."""
    better = list(behind_lines(runs)) or ["In these runs no peer is ahead in any figure."]
    return "\n".join(
        [
            HEAD + f"![How far keylane is ahead of each peer]({PLOT})",
            "",
            f"The plot is of the machine on which an addition takes {loop_ns(runs[-1]):.0f} ns.",
            "",
            "## Figures",
            "",
            (
                "Ratios are keylane by the best peer, above 1 where keylane is ahead, whether more "
                "is better or less;"
                " the name in brackets is that peer's."
                f" {NOT_TAKEN}: not taken, or not compared. Peers have one way to send and one to "
                f"handle, which stand beside each of keylane's."
            ),
            (
                "A peer that could not keep up with a steady rate is shown at its own, and "
                "left out of the ratio."
            ),
            "",
            *(line for run in runs for line in _section_of(run)),
            "## What each ack promises",
            "",
            "For a server alone on its machine, with a disk.",
            "",
            *_about(runs[-1]),
            "",
            *copied_lines(copied_runs),
            "## Where they are better",
            "",
            *better,
            "",
            LACKS,
            WORK,
        ]
    )
