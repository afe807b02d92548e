"""Measures keylane beside its peers, in interleaved turns with the same work; prints a table,
writes JSON and docs.

`--systems copied` measures those of several servers; their figures are a section of the page.
`--home DIR` has what `make peers-home` brought: jars of Kafka in `server/`, `bin/nats-server`,
clients in `clients/`. `--json FILE` keeps the result, after each turn, and `--write-docs` makes
docs/PEERS.md and its plot from it, without a run if there is no `--home`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from machine import machine
from peers.figures import OURS, Best, medians_of, ratios_of, spreads_of
from peers.page import PLOT, durabilities_of, kept_runs, missing_lines, page_of, table_of
from peers.plot import svg_of
from peers.systems.base import System
from peers.turn import COPIED_TAKES, QUICK, TAKES, Sizes, turn_of

SYSTEMS = {
    OURS: "peers.systems.keylane:Keylane",
    "kafka": "peers.systems.kafka:Kafka",
    "kafka-fsync": "peers.systems.kafka:KafkaFsync",
    "rabbitmq": "peers.systems.rabbitmq:RabbitStreams",
    "nats-fsync": "peers.systems.nats:NatsFsync",
    "redis-fsync": "peers.systems.redis:RedisFsync",
    "nats": "peers.systems.nats:Nats",
    "redis": "peers.systems.redis:Redis",
    "keylane-uvloop": "peers.systems.keylane:KeylaneUvloop",
    "keylane-copies": "peers.systems.keylane:KeylaneCopies",
    "kafka-replicated": "peers.systems.kafka:KafkaReplicated",
    "rabbitmq-quorum": "peers.systems.rabbitmq_quorum:RabbitQuorum",
    "nats-replicated": "peers.systems.nats:NatsReplicated",
}
COPIED = ("keylane-copies", "kafka-replicated", "rabbitmq-quorum", "nats-replicated")
"""Those whose acks promise that several servers have a message; they are measured in a run of their
own.
"""
USUAL = ("keylane", "kafka", "kafka-fsync", "rabbitmq", "nats-fsync", "redis-fsync")
ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "docs" / "peers.jsonl"
"""The last run of each kind of machine, a line each."""
COPIED_RUNS = ROOT / "docs" / "peers_copied.jsonl"
"""The same of the systems with copies."""


def class_of(name: str) -> type[System]:
    """Return the system with this name."""
    module, _, kind = SYSTEMS[name].partition(":")
    system: type[System] = getattr(importlib.import_module(module), kind)
    return system


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--home", type=lambda text: Path(text).resolve(), help="where the peers are"
    )
    parser.add_argument("--systems", default=",".join(USUAL), help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--takes", default=",".join(TAKES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small takes")
    parser.add_argument(
        "--data", help="where servers keep their data; the system's temporary folder"
    )
    parser.add_argument("--json", type=Path, help="the file of the result")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args()
    if options.systems == "copied":
        options.systems = ",".join(COPIED)
    options.systems, options.takes = options.systems.split(","), options.takes.split(",")
    for kind, given, known in (
        ("system", options.systems, SYSTEMS),
        ("take", options.takes, (*TAKES, *COPIED_TAKES)),
    ):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"no {kind} {', '.join(unknown)}; there are {', '.join(known)}")
    if options.home is None and not (options.write_docs and options.json):
        parser.error("--home DIR, or --json FILE --write-docs")
    return options


def shown_best(best: Best) -> dict[str, Any]:
    """Return the result as JSON."""
    return {**asdict(best), "ratio": round(best.ratio, 3)}


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Holds the result of all rounds."""
    began_at = time.monotonic()
    missing = {
        name: why for name in options.systems if (why := class_of(name).missing_text(options.home))
    }
    for line in missing_lines(missing):
        print(line, file=sys.stderr, flush=True)
    sys.path.append(str(options.home / "clients"))  # topics are made here
    names = [name for name in options.systems if name not in missing]
    if not names:
        raise SystemExit(
            "none of these systems is on this machine; `make peers-home DIR=DIR` brings them"
        )
    systems = {}
    for name in names:
        kind = class_of(name)
        systems[name] = {
            "title": kind.title,
            "durability": int(kind.durability),
            "promise": kind.promise,
            "settings": kind.settings,
            "versions": kind.versions(options.home),
        }
    result: dict[str, Any] = {
        "machine": machine(),
        "run": {
            "began": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            "rounds": options.rounds,
            "quick": options.quick,
            "takes": options.takes,
            "load_before": os.getloadavg()[0],
        },
        "systems": systems,
        "missing": missing,
        "failed": {},
    }
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    sizes = QUICK if options.quick else Sizes()
    for number in range(options.rounds):
        for name in names:
            started_at = time.monotonic()
            system = class_of(name)(options.home)
            figures, failed = turn_of(system, tuple(options.takes), sizes, options.data)
            turns[name].append(figures)
            if failed:
                result["failed"].setdefault(name, {}).update(failed)
            took_s = time.monotonic() - started_at
            verdict = f"FAILED {failed}" if failed else "ok"
            print(
                f"round {number + 1} of {options.rounds}, {name}: {verdict}, {took_s:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            result["run"]["seconds"] = round(time.monotonic() - began_at)
            medians = medians_of(turns)
            ratios = ratios_of(medians, durabilities_of(result))
            result["medians"] = medians
            result["spreads"] = spreads_of(turns)
            result["ratios"] = {
                figure: {against: shown_best(best) for against, best in bests.items()}
                for figure, bests in ratios.items()
            }
            result["turns"] = turns
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> None:
    """Measure, print the table, and write the requested files."""
    options = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped
    result = measured(options) if options.home else json.loads(options.json.read_text())
    print(table_of(result))
    for line in missing_lines(result["missing"]):
        print(line)
    if options.write_docs:
        is_copied = set(result["systems"]) <= set(COPIED)
        keep(COPIED_RUNS if is_copied else RUNS, result)
        runs = runs_of(RUNS)
        (ROOT / "docs" / "PEERS.md").write_text(page_of(runs, runs_of(COPIED_RUNS)))
        (ROOT / "docs" / PLOT).write_text(svg_of(runs[-1]))


def runs_of(file: Path) -> list[dict[str, Any]]:
    """Return the runs that a file has; none if there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def keep(file: Path, result: dict[str, Any]) -> None:
    """Put a run in the place of that of the same kind of machine."""
    runs = kept_runs(runs_of(file), result)
    file.write_text("".join(f"{json.dumps(run)}\n" for run in runs))


if __name__ == "__main__":
    main()
