"""The demo's run as a history for the checker: rows sent, logs read back, records of consumers, cursors seen.  Pure.

    source rows ──▶ log of each partition ──▶ records of each consumer by time, cursors seen at the brokers

A message goes by the number of its row; one stored or handled with another key or value goes by a number of its own.
Records are put in order by the boot-time clock of the one machine that everything runs on: a consumer writes each
before its ack, so the next owner's come after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import NamedTuple

from ...checker.events import Looked, Value
from ...checker.findings import Findings
from ...checker.judge import Judge

JUDGED_GROUP = "demo"
"""A history of the demo has one group, whatever its name."""
_PRODUCER = "demo"


@dataclass(frozen=True, slots=True)
class Source:
    """What was sent: row i has `keys[i]` (b"" for none) and a value with the digest `digests[i]`."""

    keys: Sequence[bytes]
    digests: Sequence[int]


@dataclass(frozen=True, slots=True)
class PartitionLog:
    """One partition as read back: entry i is the message at `first_offset + i`."""

    rows: Sequence[int]
    keys: Sequence[bytes]
    digests: Sequence[int]
    first_offset: int = 0


class Record(NamedTuple):
    """One message handled, as its consumer wrote it down."""

    order_key: bytes
    row: int
    partition_id: int
    offset: int
    token: int
    at_ms: int
    """Boot-time clock, milliseconds."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What a run came to."""

    findings: Findings
    stored: int
    """Rows of the source that the log holds."""
    handled: int
    """Rows of the source that at least one consumer handled."""
    redelivered: int
    """Records beyond the first of each message."""

    @property
    def lost(self) -> int:
        """Rows that are nowhere, and messages stored that no consumer handled."""
        return self.findings.counts["lost"] + self.findings.counts["starvation"]


def judge_run(
    source: Source,
    log: Mapping[int, PartitionLog],
    records: Mapping[str, Sequence[Record]],
    cursors: Sequence[Looked] = (),
) -> Judged:
    """
    Judge a finished run, in which no partition was changed and everything was handled.

    Args:
        source: what was sent, in order of sending.
        log: each partition by its id, read back whole.
        records: each consumer's records by its name, in the order it wrote them.
        cursors: looks at the cursors while it ran; those of one partition in the order of looking.
    """
    judge = Judge(partitions_fixed=True)
    for row, key in enumerate(source.keys):
        judge.log.sent(row, key, _PRODUCER, row, strict=True)
        judge.log.settled(row, "stored")
    stored = _read_log(judge, source, log)
    handled = bytearray(len(source.keys))
    taken = 0
    places: set[tuple[int, int]] = set()
    for partition_id in log:
        judge.progress(JUDGED_GROUP, partition_id)
    for record, name in merge(
        *(_by_time(lines, name) for name, lines in records.items()), key=_when
    ):
        value = _value(source, record.row, record.order_key)
        place = (record.partition_id, record.offset)
        judge.started(JUDGED_GROUP, name, *place, value, record.token)
        if judge.log.values.get(place) == value:
            judge.ended(JUDGED_GROUP, *place, record.token, name)
            taken += 1
            places.add(place)
            if type(value) is int and 0 <= value < len(handled):
                handled[value] = 1
    for look in cursors:
        judge.looked(*look)
    findings = judge.close(drained=True)
    return Judged(findings, stored, sum(handled), taken - len(places))


def _by_time(lines: Sequence[Record], name: str) -> list[tuple[Record, str]]:
    return sorted(((line, name) for line in lines), key=_when)


def _when(line: tuple[Record, str]) -> tuple[int, int]:
    """A consumer's own records stay in their order: of one millisecond, those of the older grant first."""
    return line[0].at_ms, line[0].token


def _read_log(judge: Judge, source: Source, log: Mapping[int, PartitionLog]) -> int:
    """The logs into the history; how many rows of the source they hold."""
    stored = bytearray(len(source.keys))
    for partition_id, part in log.items():
        for offset, (row, key, digest) in enumerate(
            zip(part.rows, part.keys, part.digests, strict=True), part.first_offset
        ):
            value = _value(source, row, key)
            if type(value) is int:
                stored[row] = 1
                if source.digests[row] != digest:
                    value = (row, key, digest)
            judge.log.stored(partition_id, offset, key, value)
    judge.log.close(drained=True)
    return sum(stored)


def _value(source: Source, row: int, key: bytes) -> Value:
    """What stands for a message: its row, if it is one of the source and has its key."""
    return row if 0 <= row < len(source.keys) and source.keys[row] == key else (row, key)
