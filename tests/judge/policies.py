"""What a consumer group is promised by its failure policy, and what its members did under it.

A run whose groups have policies says so in FOLDER/groups.json: by group

    subject      the subject whose messages it handles
    is_ordered   messages of a key are handled in order: an exclusive group
    sets_aside   "nothing"; "keys": a message only with its key; "messages": only without its key
    tries        how often a message has to fail before it is set aside

A message that ended processes is set aside as "crashed", and need not have failed.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from segments import Group, Partition

Place = tuple[int, int]
"""Partition id and offset."""
STARTED, ENDED, DROPPED = 2, 3, 4
"""Kinds of events: a handler began, returned, or raised."""
CRASHED, CRASHES_MIN = "crashed", 2
"""The type of the failure of a message that ended processes, and how many at least."""


class Promise(NamedTuple):
    """What a group is promised; without a word of it, order alone."""

    subject: str = ""
    """"": every subject of the run."""
    is_ordered: bool = True
    sets_aside: str = "anything"
    tries: int = 0


def read_promises(folder: Path) -> dict[str, Promise]:
    """Read the promises of a run by group; none if it has no groups.json."""
    path = folder / "groups.json"
    told = json.loads(path.read_text()) if path.exists() else {}
    return {name: Promise(**promise) for name, promise in told.items()}


class HandlerStep(NamedTuple):
    """A handler of a message began, returned or raised."""

    kind: int
    offset: int
    token: int
    """0 if it raised."""


class Owners:
    """What each member of a group did with the messages of each partition, by its own record."""

    def __init__(self) -> None:
        self._groups: dict[str, str] = {}
        """By session."""
        self._steps: defaultdict[tuple[str, int], list[HandlerStep]] = defaultdict(list)
        """By session and partition id."""
        self._starts: defaultdict[tuple[str, Place], list[int]] = defaultdict(list)
        """By group and place: when handlers began."""
        self._failures: defaultdict[tuple[str, Place], list[int]] = defaultdict(list)
        """By group and place: when handlers raised."""

    def note(self, at_ns: int, kind: int, fields: list[Any]) -> None:
        """Take one event of a record, with its instant."""
        if kind == STARTED:
            group, session, partition_id, offset, _value, token, *_ = fields
            self._groups[session] = group
            self._starts[group, (partition_id, offset)].append(at_ns)
            self._steps[session, partition_id].append(HandlerStep(kind, offset, token))
        elif kind == ENDED:
            _group, partition_id, offset, token, session = fields
            self._steps[session, partition_id].append(HandlerStep(kind, offset, token))
        elif kind == DROPPED:
            session, partition_id, offset = fields
            self._steps[session, partition_id].append(HandlerStep(kind, offset, 0))
            self._failures[self._groups[session], (partition_id, offset)].append(at_ns)

    def is_given_up(self, name: str, promise: Promise, place: Place, at_ns: int) -> bool:
        """Return True if a message had failed so often by then that later ones of its key may pass
        it: its process may have been killed before the broker stored that it is set aside.
        """
        if promise.sets_aside != "messages":
            return False
        began = sum(begun_ns < at_ns for begun_ns in self._starts[name, place])
        failed = any(failed_ns < at_ns for failed_ns in self._failures[name, place])
        return failed and began >= promise.tries

    def interrupted(self) -> Counter[str]:
        """Return by group how many handlers began and came to no end: their process was killed."""
        counts: Counter[str] = Counter()
        for (session, _), steps in self._steps.items():
            running: Counter[int] = Counter()
            for step in steps:
                running[step.offset] = step.kind == STARTED
            counts[self._groups[session]] += running.total()
        return counts

    def judge(
        self, partitions: Mapping[int, Partition], promises: Mapping[str, Promise]
    ) -> Iterator[tuple[str, str]]:
        """Yield what is wrong, as kind and text."""
        for (session, partition_id), steps in self._steps.items():
            name = self._groups[session]
            if partition_id in partitions and promises.get(name, Promise()).is_ordered:
                alone = set_aside_alone(partitions, name)
                for offset in _backward(partitions[partition_id], steps, alone):
                    place = (partition_id, offset)
                    yield "handled backwards", f"{place} in group {name}, by session {session}"
        for name, promise in promises.items():
            for partition in partitions.values():
                group = partition.groups.get(name, Group())
                for kind, place in _wrongly_set_aside(group, promise):
                    yield kind, f"{place} in group {name}"
                for place, (kind, tries) in group.failed.items():
                    has_failed = bool(self._failures[name, place]) and tries >= promise.tries
                    if not (tries >= CRASHES_MIN if kind == CRASHED else has_failed):
                        yield "set aside too soon", f"{place} in group {name}: {kind}, {tries}"


def set_aside_alone(partitions: Mapping[int, Partition], name: str) -> set[Place]:
    """Return what a group has ever set aside without its key: nothing waits for it."""
    groups = (partition.groups.get(name, Group()) for partition in partitions.values())
    return set().union(*(group.alone for group in groups))


def _backward(partition: Partition, steps: list[HandlerStep], alone: set[Place]) -> Iterator[int]:
    """Yield what one owner handled after it, or a later message of its key, had been handled."""
    partition_id, token = partition.partition_id, 0
    handled: defaultdict[bytes, set[int]] = defaultdict(set)
    for step in steps:
        if step.kind == STARTED and step.token != token:
            token = step.token
            handled.clear()
        message = partition.messages.get(step.offset)
        if message is None or not message.key:
            continue
        done = handled[message.key]
        if step.kind == DROPPED:  # the batch that it was in has failed
            done.discard(step.offset)
        elif step.kind == ENDED:
            done.add(step.offset)
        elif max(done, default=-1) >= step.offset and (partition_id, step.offset) not in alone:
            yield step.offset


def _wrongly_set_aside(group: Group, promise: Promise) -> Iterator[tuple[str, Place]]:
    """Yield what a group has set aside in a way that is not its policy's."""
    if promise.sets_aside in {"nothing", "keys"}:
        yield from (("set aside alone", place) for place in sorted(group.alone))
    if promise.sets_aside in {"nothing", "messages"}:
        yield from (("set aside with its key", place) for place in sorted(group.by_key))
