"""Judges the demo's run with the checker, from rows sent, logs, records of consumers and cursors.
Pure.

    source rows ──▶ log of each partition ──▶ records of each consumer by time,
                                              cursors seen at the brokers

The value of a message is the number of its row; a message with another key or value gets a value of
its own. Records are ordered by the boot-time clock, which all processes share: a consumer writes a
record before its ack, so the records of the next owner are later.
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
"""The group in a history of the demo."""
_PRODUCER = "demo"


@dataclass(frozen=True, slots=True)
class SentRows:
    """The rows that were sent: row i has `keys[i]` (b"" for none) and a value with the digest
    `digests[i]`.
    """

    keys: Sequence[bytes]
    digests: Sequence[int]


@dataclass(frozen=True, slots=True)
class PartitionLog:
    """The messages of one partition: entry i is the message at `first_offset + i`."""

    rows: Sequence[int]
    keys: Sequence[bytes]
    digests: Sequence[int]
    first_offset: int = 0


class Record(NamedTuple):
    """A handled message, recorded by its consumer."""

    order_key: bytes
    row: int
    partition_id: int
    offset: int
    token: int
    at_ms: int
    """The time by the boot-time clock, in milliseconds."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The outcome of a run."""

    findings: Findings
    stored: int
    """Number of rows of the source in the log."""
    handled: int
    """Number of rows of the source that at least one consumer handled."""
    redelivered: int
    """Number of records beyond the first of each message."""

    @property
    def lost(self) -> int:
        """The number of rows that are not stored, and of stored messages that nobody handled."""
        return self.findings.counts["lost"] + self.findings.counts["starvation"]


def judge_run(
    source: SentRows,
    log: Mapping[int, PartitionLog],
    records: Mapping[str, Sequence[Record]],
    cursors: Sequence[Looked] = (),
) -> Judged:
    """
    Judge a finished run, in which no partition was changed and everything was handled.

    Args:
        source: the rows that were sent, in order of sending.
        log: all messages of each partition, by its id.
        records: the records of each consumer, in the order of writing.
        cursors: cursors seen during the run; those of one partition are in order of time.
    """
    judge = Judge(partitions_fixed=True)
    for row, key in enumerate(source.keys):
        judge.log.sent(row, key, _PRODUCER, row, strict=True)
        judge.log.settled(row, "stored")
    stored = _read_log(judge, source, log)
    handled = bytearray(len(source.keys))
    taken = 0
    slots: set[tuple[int, int]] = set()
    for partition_id in log:
        judge.progress(JUDGED_GROUP, partition_id)
    for record, name in merge(
        *(_by_time(lines, name) for name, lines in records.items()), key=_when
    ):
        value = _value(source, record.row, record.order_key)
        slot = (record.partition_id, record.offset)
        judge.started(JUDGED_GROUP, name, *slot, value, record.token)
        if judge.log.values.get(slot) == value:
            judge.ended(JUDGED_GROUP, *slot, record.token, name)
            taken += 1
            slots.add(slot)
            if type(value) is int and 0 <= value < len(handled):
                handled[value] = 1
    for look in cursors:
        judge.looked(*look)
    findings = judge.close(drained=True)
    return Judged(findings, stored, sum(handled), taken - len(slots))


def _by_time(lines: Sequence[Record], name: str) -> list[tuple[Record, str]]:
    return sorted(((line, name) for line in lines), key=_when)


def _when(line: tuple[Record, str]) -> tuple[int, int]:
    """Return the time and the token of a record; within a millisecond, records of the older lease
    come first.
    """
    return line[0].at_ms, line[0].token


def _read_log(judge: Judge, source: SentRows, log: Mapping[int, PartitionLog]) -> int:
    """Add the logs to the history, and return the number of rows of the source in them."""
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


def _value(source: SentRows, row: int, key: bytes) -> Value:
    """Return the value that identifies a message: its row, if this row of the source has the
    key.
    """
    return row if 0 <= row < len(source.keys) and source.keys[row] == key else (row, key)
