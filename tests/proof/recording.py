"""Events of real processes: each writes its own to a file, with the instant; together they are one
history.

All processes of a machine read the same boot-time clock, so the order of the instants is the order
of events. One event is one `write`: a process that is killed leaves whole events only.
"""

from __future__ import annotations

import os
import sqlite3
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from keylane.checker.events import (
    Dropped,
    Ended,
    Event,
    Granted,
    LeaseReleased,
    LeasesReported,
    Sent,
    Served,
    Settled,
    Started,
    Stored,
)


class Frozen(NamedTuple):
    """
    A process was stopped between its look at the lease and the first line of the handler, past the
    lease's end.

    No look can be close enough for that: the broker's fence keeps what such a handler does from
    counting. No process writes it down: `starts_placed` finds it.
    """

    partition_id: int
    offset: int
    late_ms: float


class Calling(NamedTuple):
    """A consumer calls the metaserver: "join", "heartbeat", "release", "leave"; for the judge."""

    number: int
    """Of the call, in the file."""
    call: str
    session: str
    group: str
    partition_id: int
    token: int
    holding: tuple[tuple[int, int], ...] | None
    """Of a heartbeat: (partition id, token) of all that the session has."""


class Answered(NamedTuple):
    """The metaserver answered call `number`; for the judge."""

    number: int
    error: str
    """Name of the error; "" if it was done."""
    ttl_ms: int
    grants: tuple[tuple[int, int], ...]
    """(partition id, token)"""


KINDS: tuple[type[Any], ...] = (
    Sent,
    Settled,
    Started,
    Ended,
    Dropped,
    LeaseReleased,
    LeasesReported,
    Served,
    Calling,
    Answered,
)
"""The place of a kind is its number in the file, which `tests/judge/` knows too: new ones go
last.
"""
LENGTH_BYTES = 4
LOOK_AHEAD_NS = 2_000_000
"""The most between a worker's look at the lease and the handler's first line; the margin of a lease
is 50 ms or more.
"""
STOP_SLACK_NS = 2_000_000
"""How far from the instant that is noted a process may really have been stopped, or gone on."""
Timed = tuple[int, Event]
"""Nanoseconds of the boot clock, and what happened then."""
Stop = tuple[int, int]
"""Between these two instants of the boot clock a process was stopped, as by SIGSTOP."""


def boot_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Recorder:
    """Writes down what a process does, at the moment of doing."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._encode = msgspec.msgpack.Encoder().encode
        self._number = {kind: number for number, kind in enumerate(KINDS)}

    def __call__(self, event: Event, *, at_ns: int | None = None) -> None:
        """Write `event` down as of now, or of the instant `at_ns`."""
        at_ns = boot_ns() if at_ns is None else at_ns
        data = self._encode((at_ns, self._number[type(event)], tuple(event)))
        os.write(self._file, len(data).to_bytes(LENGTH_BYTES, "little") + data)


def read_events(path: Path) -> Iterator[Timed]:
    """The events that a recorder wrote."""
    return decode_events(path.read_bytes())


def decode_events(written: bytes) -> Iterator[Timed]:
    """Whole events, as they were written."""
    decode = msgspec.msgpack.Decoder(tuple[int, int, list[Any]], strict=False).decode
    data = memoryview(written)
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + LENGTH_BYTES], "little")
        at_ns, number, fields = decode(data[at + LENGTH_BYTES : at + LENGTH_BYTES + size])
        at += LENGTH_BYTES + size
        values = (_frozen(item) if type(item) is list else item for item in fields)
        yield at_ns, KINDS[number](*values)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if type(value) is list else value


GRANTS = "proof_grants"
"""The table that a metaserver under watch keeps beside its own, in the same transactions."""


def read_grants(database: Path) -> Iterator[Timed]:
    """What was granted, in the order of the transactions."""
    names = "at_ns, group_id, partition_id, token, session, holder, holder_left_ms"
    connection = sqlite3.connect(database)
    try:
        for at_ns, *fields in connection.execute(f"SELECT {names} FROM {GRANTS} ORDER BY rowid"):
            yield at_ns, Granted(*fields)
    finally:
        connection.close()


def starts_placed(timed: Iterable[Timed], stops: Sequence[Stop]) -> Iterator[Timed]:
    """
    The events of one consumer, with each handler's beginning at its place in time.

    Its record says of each the instant of its first line, and as `clock_ns` the worker's look at
    the lease. A handler begins with its first line. Only where the lease ended between the two it
    begins with the look: if that was a moment before, for which the lease's margin is there, or if
    its process was stopped in between; then it is `Frozen`. Anything else between the two is the
    product's own delay.
    """
    for first_line_ns, event in timed:
        if type(event) is not Started:
            yield first_line_ns, event
            continue
        look_ns, deadline_ns = event.clock_ns, event.deadline_ns
        at_once = first_line_ns - look_ns <= LOOK_AHEAD_NS
        frozen_there = any(
            stopped_ns - STOP_SLACK_NS <= first_line_ns and look_ns <= went_on_ns + STOP_SLACK_NS
            for stopped_ns, went_on_ns in stops
        )
        if not look_ns < deadline_ns <= first_line_ns or not (at_once or frozen_there):
            yield first_line_ns, event._replace(clock_ns=first_line_ns)
            continue
        yield look_ns, event
        if not at_once:
            late_ms = (first_line_ns - deadline_ns) / 1e6
            frozen: Any = Frozen(event.partition_id, event.offset, late_ms)
            yield first_line_ns, frozen


def one_history(timed: Iterable[Timed], log: Iterable[Stored]) -> list[Event]:
    """All events by their instants, those without an outcome settled as gone, the final log behind
    them.
    """
    judged = (
        timed_event for timed_event in timed if type(timed_event[1]) not in {Calling, Answered}
    )
    order = sorted(judged, key=lambda timed_event: timed_event[0])
    instants = [
        at_ns for at_ns, _ in order
    ]  # of these alone: `began` counts the events of the history
    events: list[Event] = []
    unsettled: dict[bytes, None] = {}
    for _, event in order:
        kind = type(event)
        if kind is Served:
            began = bisect_left(instants, event.began)  # type: ignore[union-attr]
            events.append(event._replace(began=began))
            continue
        if kind is Sent:
            unsettled[event.value] = None  # type: ignore[union-attr]
        elif kind is Settled:
            unsettled.pop(event.value, None)  # type: ignore[union-attr]
        events.append(event)
    events += [Settled(value, "gone") for value in unsettled]
    events += log
    return events


class HandlerTail:
    """Follows what a consumer writes down: which of its handlers have begun and not ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.running: set[tuple[int, int]] = set()
        """(partition, offset)"""

    def poll(self) -> set[tuple[int, int]]:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
            self._read += len(data)
            for _, event in decode_events(data):
                if type(event) is Started:
                    self.running.add((event.partition_id, event.offset))
                elif type(event) in {Ended, Dropped}:
                    self.running.discard((event.partition_id, event.offset))  # type: ignore[union-attr]
        return self.running

    def forget(self) -> None:
        """Forget the handlers of a process that was killed."""
        self.poll()
        self.running.clear()
