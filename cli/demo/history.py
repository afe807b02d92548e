"""Checks a run of the demo by passing the sent rows, the logs, the consumers' records and the
cursors to the checker. Pure.

    source rows ──▶ log of each partition ──▶ records of each consumer by time,
                                              cursors seen at the brokers

A message is identified by its row number, or by more of its content if its key or value differs
from that of the row. Records are ordered by the boot-time clock, which all processes share. A
consumer writes each record before its ack, so the records of the next owner are later.
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
"""Name of the consumer group in the demo's history."""
_PRODUCER = "demo"


@dataclass(frozen=True, slots=True)
class SentRows:
    """The rows that were sent. Row i has the key `keys[i]` (b"" for none) and a value with the
    digest `digests[i]`.
    """

    keys: Sequence[bytes]
    digests: Sequence[int]


@dataclass(frozen=True, slots=True)
class PartitionLog:
    """The messages of one partition. Entry i is the message at `first_offset + i`."""

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
    """When it was handled, in milliseconds since boot."""


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """The outcome of a run."""

    findings: Findings
    stored: int
    """Number of source rows in the log."""
    handled: int
    """Number of source rows that were handled at least once."""
    redelivered: int
    """Number of records beyond the first one for each message."""

    @property
    def lost(self) -> int:
        """Number of rows that were not stored plus the number of stored messages that were never
        handled.
        """
        return self.findings.counts["lost"] + self.findings.counts["starvation"]


def judge_run(
    source: SentRows,
    log: Mapping[int, PartitionLog],
    records: Mapping[str, Sequence[Record]],
    cursors: Sequence[Looked] = (),
) -> JudgedRun:
    """
    Judge a finished run, during which no partition was split, merged or moved.

    Args:
        source: the rows that were sent, in the order in which they were sent.
        log: all messages of each partition, by partition id.
        records: the records of each consumer, in the order in which they were written.
        cursors: cursors observed during the run, ordered by time within each partition.
    """
    judge = Judge(partitions_fixed=True)
    for row, key in enumerate(source.keys):
        judge.log.on_sent(row, key, _PRODUCER, row, strict=True)
        judge.log.on_settled(row, "stored")
    stored_count = _read_log(judge, source, log)
    handled = bytearray(len(source.keys))
    matching_records = 0
    slots: set[tuple[int, int]] = set()
    for partition_id in log:
        judge.get_progress(JUDGED_GROUP, partition_id)
    for record, name in merge(
        *(_sort_by_time(recorded, name) for name, recorded in records.items()), key=_time_and_token
    ):
        value = _message_value(source, record.row, record.order_key)
        slot = (record.partition_id, record.offset)
        judge.on_started(JUDGED_GROUP, name, *slot, value, record.token)
        if judge.log.values.get(slot) == value:
            judge.on_ended(JUDGED_GROUP, *slot, record.token, name)
            matching_records += 1
            slots.add(slot)
            if type(value) is int and 0 <= value < len(handled):
                handled[value] = 1
    for observation in cursors:
        judge.on_looked(*observation)
    findings = judge.close(drained=True)
    return JudgedRun(findings, stored_count, sum(handled), matching_records - len(slots))


def _sort_by_time(recorded: Sequence[Record], name: str) -> list[tuple[Record, str]]:
    return sorted(((entry, name) for entry in recorded), key=_time_and_token)


def _time_and_token(entry: tuple[Record, str]) -> tuple[int, int]:
    """Return the sort key: within the same millisecond, records of the older lease come first."""
    return entry[0].at_ms, entry[0].token


def _read_log(judge: Judge, source: SentRows, log: Mapping[int, PartitionLog]) -> int:
    """Add the logs to the history and return the number of source rows in them."""
    stored_count = bytearray(len(source.keys))
    for partition_id, partition_log in log.items():
        for offset, (row, key, digest) in enumerate(
            zip(partition_log.rows, partition_log.keys, partition_log.digests, strict=True),
            partition_log.first_offset,
        ):
            value = _message_value(source, row, key)
            if type(value) is int:
                stored_count[row] = 1
                if source.digests[row] != digest:
                    value = (row, key, digest)
            judge.log.on_stored(partition_id, offset, key, value)
    judge.log.close(drained=True)
    return sum(stored_count)


def _message_value(source: SentRows, row: int, key: bytes) -> Value:
    """Identify a message by its row if the source row has its key, and otherwise by row and key."""
    return row if 0 <= row < len(source.keys) and source.keys[row] == key else (row, key)
