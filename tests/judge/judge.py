"""A second opinion on a run: compares the segments of all brokers with what the clients wrote down.

    python judge.py FOLDER        FOLDER has one data folder per broker, *.events of producers and consumers, and
                                  *.orders: SQLite databases of users with outboxes

Imports nothing of the product: all that it knows is in docs/FORMATS.md and below. Prints one JSON
object; exit status 1 if anything is wrong.

An .events file is a sequence of u32 length (little-endian) and msgpack `[boot clock in ns, kind,
[field, …]]`:

    0 Sent      value, key, producer session, number in it, strict
    1 Settled   value, "stored" | "not done" | "unknown", partition, offset, reordered, twice
    2 Started   group, session, partition, offset, value, token, …          a handler began
    3 Ended     group, partition, offset, token, session                    a handler returned
    4 Dropped   session, partition, offset                                  it raised; of a batch, all its messages
    7 to 9                                                                  calls on leases and fences, see leases.py

Of an .orders database only the user's own table is read: `orders (value, order_key, number)` has a
row for each committed transaction, which added that message to the outbox; the numbers of a key
rise in the order of the commits.

What is judged
    committed means stored   what a committed transaction added to an outbox is in the segments, once; nothing else is
    acked means stored       what a producer was told as stored is in the segments, at that place, once
    nothing from nowhere     what is stored was sent, with that key, and not told as not done
    order in the log         of a producer session and key, numbers rise along the offsets and the lineage of partitions
    handled means awaited    what a group's log has as acked was handled to its end, or is parked; what is parked no longer
                             was handled, because operators of a run that is judged skip nothing
    order of handling        of a key, no first handler starts before the one before it has ended; parked and redriven
                             messages too, but not what was set aside without its key. No owner of a partition handles
                             a message after a later one of its key
    failure policies         of groups that have one, see policies.py: nothing is set aside that need not be
    drained                  at the end every group has acked all there is
    removed means read       what is not stored any more was handled by every group that handled anything
    leases and fences        the calls on each could have been made one at a time (linearizability)
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from leases import Calls
from policies import Owners, Promise, read_promises, set_aside_alone
from segments import Group, Partition, read_folder

EXAMPLES_MAX = 20
Place = tuple[int, int]
"""Partition id and offset."""


class Sending(NamedTuple):
    """A message as its producer sent it."""

    key: bytes
    session: str
    number: int
    strict: bool


class Settlement(NamedTuple):
    """What the producer was told."""

    outcome: str
    place: Place
    reordered: bool


@dataclass(slots=True)
class Handling:
    """When the handlers of one message of one group began first, and ended first; boot clock."""

    started_ns: int | None = None
    ended_ns: int | None = None


@dataclass(slots=True)
class Clients:
    """What producers and consumers wrote down."""

    sendings: dict[bytes, Sending] = field(default_factory=dict)
    settlements: dict[bytes, Settlement] = field(default_factory=dict)
    handlings: defaultdict[str, defaultdict[Place, Handling]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Handling))
    )
    """By group, then by place."""
    committed: set[bytes] = field(default_factory=set)
    """Values that transactions added to outboxes."""

    def read_orders(self, path: Path) -> None:
        """Take the orders of one database."""
        with closing(sqlite3.connect(path)) as connection:
            orders = connection.execute("SELECT value, order_key, number FROM orders").fetchall()
        for value, key, number in orders:
            self.sendings[value] = Sending(key, path.stem, number, strict=True)
            self.committed.add(value)

    def note(self, at_ns: int, kind: int, fields: list[Any]) -> None:
        """Take one event."""
        if kind == 0:
            value, key, session, number, strict = fields
            self.sendings[value] = Sending(key, session, number, strict)
        elif kind == 1:
            value, outcome, partition_id, offset, reordered, *_ = fields
            self.settlements[value] = Settlement(outcome, (partition_id, offset), reordered)
        elif kind == 2:
            handling = self.handlings[fields[0]][fields[2], fields[3]]
            if handling.started_ns is None or at_ns < handling.started_ns:
                handling.started_ns = at_ns
        elif kind == 3:
            handling = self.handlings[fields[0]][fields[1], fields[2]]
            if handling.ended_ns is None or at_ns < handling.ended_ns:
                handling.ended_ns = at_ns


class Findings:
    """Counts by kind, and some examples."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: list[str] = []

    def note(self, kind: str, text: str) -> None:
        """One more of a kind."""
        self.counts[kind] += 1
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(f"{kind}: {text}")


def read_events(path: Path) -> Iterator[tuple[int, int, list[Any]]]:
    """The whole events of a file; a program that was killed may have left a part of one."""
    decode = msgspec.msgpack.Decoder(tuple[int, int, list[Any]]).decode
    data = path.read_bytes()
    at = 0
    while at + 4 <= len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if end > len(data):
            return
        yield decode(data[at + 4 : end])
        at = end


def judge(
    partitions: Mapping[int, Partition],
    clients: Clients,
    owners: Owners,
    promises: Mapping[str, Promise],
    *,
    drained: bool = True,
) -> Findings:
    """Everything that is wrong; see the module's text."""
    findings = Findings()
    for group_name in promises:
        clients.handlings[group_name]  # a group that handled nothing is judged as well
    places = _places(partitions, clients, findings)
    for value in clients.committed - places.keys():
        findings.note("lost", f"{value!r} was committed and is nowhere")
    _judge_receipts(places, partitions, clients, findings)
    lanes = _lanes(places, clients)
    before = _lineage(partitions)
    for lane in lanes.values():
        _judge_log_order(lane, before, findings)
    for group_name, handlings in clients.handlings.items():
        promise = promises.get(group_name, Promise())
        if promise.is_ordered:
            alone = set_aside_alone(partitions, group_name)
            for lane in lanes.values():
                in_order = [entry for entry in lane if entry[1] not in alone]
                passed = partial(owners.is_given_up, group_name, promise)
                _judge_handling_order(group_name, in_order, handlings, passed, findings)
        parked = _parked(partitions, group_name)
        for partition in partitions.values():
            if promise.subject not in {"", partition.subject}:
                continue
            group = partition.groups.get(group_name, Group())
            _judge_group(partition, group_name, group, handlings, parked, findings, drained=drained)
    return findings


def _parked(partitions: Mapping[int, Partition], group_name: str) -> set[Place]:
    """What the group has set aside at the end; of a partition whose children have all of it, what
    these say.
    """
    parked: set[Place] = set()
    for partition in partitions.values():
        group = partition.groups.get(group_name, Group())
        children = [
            child.groups.get(group_name, Group())
            for child in partitions.values()
            if partition.partition_id in child.parents
        ]
        taken_over = all(partition.partition_id in child.adopted for child in children)
        if not (group.frozen and children and taken_over):
            parked |= group.parked.keys()
    return parked


def _places(
    partitions: Mapping[int, Partition], clients: Clients, findings: Findings
) -> dict[bytes, list[Place]]:
    """Where each value is stored; what is stored was sent so."""
    places: defaultdict[bytes, list[Place]] = defaultdict(list)
    for partition in partitions.values():
        for offset, message in partition.messages.items():
            place = (partition.partition_id, offset)
            sending = clients.sendings.get(message.value)
            if sending is None or sending.key != message.key:
                findings.note("phantom", f"{message.value!r} at {place} was not sent so")
                continue
            settlement = clients.settlements.get(message.value)
            if settlement is not None and settlement.outcome in {"not done", "withdrawn"}:
                findings.note("phantom", f"{message.value!r} at {place}, told as not done")
            places[message.value].append(place)
    return dict(places)


def _judge_receipts(
    places: Mapping[bytes, list[Place]],
    partitions: Mapping[int, Partition],
    clients: Clients,
    findings: Findings,
) -> None:
    for value, sending in clients.sendings.items():
        stored = places.get(value, [])
        settlement = clients.settlements.get(value)
        if sending.strict and len(stored) > 1:
            findings.note("duplicate", f"{value!r} at {stored}")
        if settlement is None or settlement.outcome != "stored":
            continue
        partition_id, offset = settlement.place
        partition = partitions.get(partition_id)
        if partition is None or offset >= (partition.next_offset or 0):
            findings.note("lost", f"{value!r} was acked at {settlement.place}, which is nowhere")
        elif 0 <= offset < partition.first_offset:
            _judge_removed(value, settlement.place, clients, findings)
        elif offset >= 0 and settlement.place not in stored:
            findings.note("lost", f"{value!r} was acked at {settlement.place}, stored at {stored}")
        elif not stored:
            findings.note("lost", f"{value!r} was acked and is nowhere")


def _judge_removed(value: bytes, place: Place, clients: Clients, findings: Findings) -> None:
    for group_name, handlings in clients.handlings.items():
        if place not in handlings or handlings[place].ended_ns is None:
            findings.note("removed unread", f"{value!r} at {place}, by group {group_name}")


def _lanes(
    places: Mapping[bytes, list[Place]], clients: Clients
) -> dict[tuple[str, bytes], list[tuple[int, Place]]]:
    """By producer session and key: (number, place) of what has a promised order, in the order of
    the numbers.
    """
    lanes: defaultdict[tuple[str, bytes], list[tuple[int, Place]]] = defaultdict(list)
    for value, stored in places.items():
        sending = clients.sendings[value]
        settlement = clients.settlements.get(value)
        told_in_order = settlement is not None and settlement.outcome == "stored"
        told_in_order = told_in_order and settlement is not None and not settlement.reordered
        if sending.key and (sending.strict or told_in_order):
            lanes[sending.session, sending.key].append((sending.number, min(stored)))
    for lane in lanes.values():
        lane.sort()
    return dict(lanes)


def _lineage(partitions: Mapping[int, Partition]) -> Any:
    """`before(partition id)`: the ids of all that it continues, directly or not."""

    @cache
    def before(partition_id: int) -> frozenset[int]:
        partition = partitions.get(partition_id)
        parents = partition.parents if partition is not None else []
        return frozenset(parents).union(*(before(parent) for parent in parents))

    return before


def _judge_log_order(lane: list[tuple[int, Place]], before: Any, findings: Findings) -> None:
    for (number, place), (next_number, next_place) in pairwise(lane):
        in_order = (
            place[1] < next_place[1]
            if place[0] == next_place[0]
            else place[0] in before(next_place[0])
        )
        if not in_order:
            findings.note(
                "inversion", f"number {number} at {place}, number {next_number} at {next_place}"
            )


def _judge_handling_order(
    group_name: str,
    lane: list[tuple[int, Place]],
    handlings: Mapping[Place, Handling],
    may_be_passed: Callable[[Place, int], bool],
    findings: Findings,
) -> None:
    nothing = Handling()
    for (_, place), (_, next_place) in pairwise(lane):
        ended_ns = handlings.get(place, nothing).ended_ns
        started_ns = handlings.get(next_place, nothing).started_ns
        if started_ns is None or (ended_ns is not None and ended_ns <= started_ns):
            continue
        if not may_be_passed(place, started_ns):
            findings.note(
                "handled too early", f"{next_place} in group {group_name}, before {place} had ended"
            )


def _judge_group(
    partition: Partition,
    group_name: str,
    group: Group,
    handlings: Mapping[Place, Handling],
    parked: set[Place],
    findings: Findings,
    *,
    drained: bool,
) -> None:
    next_offset = partition.next_offset or 0
    if group.cursor > next_offset:
        findings.note("cursor", f"{group_name} at {group.cursor} of {partition.partition_id}")
    if drained and group.cursor < next_offset:
        findings.note(
            "not handled",
            f"{group_name} is at {group.cursor} of {next_offset} in {partition.partition_id}",
        )
    if group.reset:
        return
    nothing = Handling()
    for offset in _acked(partition, group):
        place = (partition.partition_id, offset)
        if handlings.get(place, nothing).ended_ns is None and place not in parked:
            findings.note("acked unhandled", f"{place} in group {group_name}")


def _acked(partition: Partition, group: Group) -> Iterator[int]:
    yield from range(partition.first_offset, group.cursor)
    for start, end in group.ranges:
        yield from range(start, end)


def judge_folder(folder: Path, *, drained: bool = True) -> dict[str, Any]:
    """The verdict on a folder of data folders and .events files, as what JSON can carry."""
    partitions: dict[int, Partition] = {}
    clients, calls, owners = Clients(), Calls(), Owners()
    promises = read_promises(folder)
    problems: list[str] = []
    for broker in sorted(path.parent for path in folder.glob("*/log")):
        hosted, wrong = read_folder(broker)
        problems += wrong
        problems += [f"partition {both} at two brokers" for both in partitions.keys() & hosted]
        partitions |= hosted
    for path in sorted(folder.glob("*.events")):
        for at_ns, kind, fields in read_events(path):
            clients.note(at_ns, kind, fields)
            calls.note(path.stem, at_ns, kind, fields)
            owners.note(at_ns, kind, fields)
    for path in sorted(folder.glob("*.orders")):
        clients.read_orders(path)
    findings = judge(partitions, clients, owners, promises, drained=drained)
    for problem in problems:
        findings.note("damage", problem)
    for kind_of_harm, text in chain(calls.judge(), owners.judge(partitions, promises)):
        findings.note(kind_of_harm, text)
    return {
        "partitions": len(partitions),
        "stored": sum(len(partition.messages) for partition in partitions.values()),
        "acked": _count(
            settlement.outcome == "stored" for settlement in clients.settlements.values()
        ),
        "handled": sum(
            _count(handling.ended_ns is not None for handling in handlings.values())
            for handlings in clients.handlings.values()
        ),
        "parked": sum(len(_parked(partitions, name)) for name in clients.handlings),
        "interrupted": dict(sorted(owners.interrupted().items())),
        "set_aside": {
            name: sum(
                len(group.alone | group.by_key)
                for group in (partition.groups.get(name) for partition in partitions.values())
                if group is not None
            )
            for name in sorted(clients.handlings)
        },
        "findings": dict(sorted(findings.counts.items())),
        "examples": findings.examples,
    }


def _count(flags: Iterable[bool]) -> int:
    return sum(flags)


def main() -> int:
    """Judge the folder that the command line names."""
    verdict = judge_folder(Path(sys.argv[1]))
    print(json.dumps(verdict))
    return int(bool(verdict["findings"]))


if __name__ == "__main__":
    sys.exit(main())
