"""Judges a finished run: what was sent against the log, the consumers' records and the cursors.  Pure.

    source rows ──▶ log of each partition ──▶ records of each consumer, cursors seen at the brokers

Anomalies, by name
    lost          a row that no partition stores, or that is stored and no consumer handled
    phantom       stored or handled, but never sent: unknown row, other key, other value, other place
    duplicate     a row stored twice
    inversion     two rows of one key stored in another order than they were sent, or in two partitions
    skip          an owner went past a message of a key that nobody before it had handled
    nonmonotonic  an owner handled a key's message again or an older one; a cursor or a token fell
    two holders   two consumers handled the same partition under the same fencing token
    stale ack     a cursor was moved by an owner that had been fenced

An *owner* is one fencing token on one partition.  Handling a message again under a higher token is no
anomaly: delivery is at least once, and `redelivered` counts it.

Stale acks are found in two ways, and both convict only the guilty:
  * A record written by token t later than the first record of a higher token on that partition: the higher one
    had raised the fence before it read anything, so an ack of that message came after the fence.  It was
    accepted if no higher token ever handled the message although the group finished the partition.
  * Two looks at the same cursor under the same token: all that it passed in between was handled under that
    token, save what had been acked above the cursor at the first look.
Both need instants of one clock: the boot-time clock of the one machine that everything runs on.

Source: the names follow Jepsen's Kafka workload and Maelstrom.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

EXAMPLES_MAX = 5
"""Examples kept of each anomaly: enough to start looking, never a flood."""


class Anomaly(enum.StrEnum):
    """What can be wrong with a run."""

    LOST = "lost"
    PHANTOM = "phantom"
    DUPLICATE = "duplicate"
    INVERSION = "inversion"
    SKIP = "skip"
    NONMONOTONIC = "nonmonotonic"
    TWO_HOLDERS = "two holders"
    STALE_ACK = "stale ack"


ORDER_ANOMALIES = (
    Anomaly.INVERSION,
    Anomaly.SKIP,
    Anomaly.NONMONOTONIC,
    Anomaly.TWO_HOLDERS,
)


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


class CursorSample(NamedTuple):
    """One look at a group's cursor at a broker; samples of one partition come in the order of looking."""

    partition_id: int
    token: int
    cursor: int
    acked_above: int
    run: int = 0
    """Which run of the broker answered.  What it shows may not be durable yet, so a crash may take a cursor
    back; nobody was told that those acks are safe."""


@dataclass(slots=True)
class Findings:
    """What `check_history` found; `examples` says where, a few of each kind."""

    stored: int = 0
    """Rows of the source that the log holds."""
    handled: int = 0
    """Rows of the source that at least one consumer handled."""
    redelivered: int = 0
    """Records beyond the first of each message."""
    counts: dict[Anomaly, int] = field(default_factory=lambda: dict.fromkeys(Anomaly, 0))
    examples: list[str] = field(default_factory=list)

    def note(self, anomaly: Anomaly, example: str, *, count: int = 1) -> None:
        """Count an anomaly and keep its example if there are few of its kind so far."""
        if self.counts[anomaly] < EXAMPLES_MAX:
            self.examples.append(f"{anomaly}: {example}")
        self.counts[anomaly] += count

    @property
    def order_violations(self) -> int:
        """Anomalies of order, all kinds together."""
        return sum(self.counts[anomaly] for anomaly in ORDER_ANOMALIES)

    @property
    def clean(self) -> bool:
        """True if there is no anomaly at all."""
        return not any(self.counts.values())


def check_history(
    source: Source,
    log: Mapping[int, PartitionLog],
    records: Mapping[str, Sequence[Record]],
    cursors: Sequence[CursorSample] = (),
) -> Findings:
    """
    Judge a finished run.

    Args:
        source: what was sent, in order of sending.
        log: each partition by its id, read back whole.
        records: each consumer's records by its name, in the order it wrote them.
        cursors: looks at the cursors while it ran.
    """
    found = Findings()
    places = _check_log(source, log, found)
    owners = _owners(records, found)
    times_handled = _check_owners(log, places, owners, found)
    handled_rows = bytearray(len(source.keys))
    for partition_id, times in times_handled.items():
        rows = log[partition_id].rows
        for index, count in enumerate(times):
            if count:
                found.redelivered += count - 1
                if 0 <= rows[index] < len(handled_rows):
                    handled_rows[rows[index]] = 1
            else:
                offset = log[partition_id].first_offset + index
                found.note(Anomaly.LOST, f"offset {offset} of partition {partition_id} not handled")
    found.handled = sum(handled_rows)
    _check_late_records(owners, found)
    _check_cursors(cursors, owners, found)
    return found


def _check_log(
    source: Source, log: Mapping[int, PartitionLog], found: Findings
) -> dict[int, list[int]]:
    """
    Log against source.

    Returns:
        For each partition and entry, which message of its key it is there, from 0; -1 without a key.
    """
    total = len(source.keys)
    stored = bytearray(total)
    home: dict[bytes, int] = {}
    places: dict[int, list[int]] = {}
    for partition_id, part in log.items():
        last: dict[bytes, tuple[int, int]] = {}
        place: list[int] = []
        for index, (row, key, digest) in enumerate(
            zip(part.rows, part.keys, part.digests, strict=True)
        ):
            known = 0 <= row < total
            if not known or source.keys[row] != key or source.digests[row] != digest:
                where = f"offset {part.first_offset + index} of partition {partition_id}"
                found.note(Anomaly.PHANTOM, f"{where} holds row {row}, which was not sent so")
            elif stored[row]:
                found.note(Anomaly.DUPLICATE, f"row {row} again in partition {partition_id}")
            if known:
                stored[row] = 1
            if not key:
                place.append(-1)
                continue
            before, nth = last.get(key, (-1, -1))
            if row < before:
                found.note(Anomaly.INVERSION, f"key {key!r}: row {row} stored after row {before}")
            if nth < 0 and home.setdefault(key, partition_id) != partition_id:
                text = f"key {key!r} is in partitions {home[key]} and {partition_id}"
                found.note(Anomaly.INVERSION, text)
            last[key] = (max(row, before), nth + 1)
            place.append(nth + 1)
        places[partition_id] = place
    found.stored = sum(stored)
    row = stored.find(0)
    while row >= 0:
        found.note(Anomaly.LOST, f"row {row} is in no partition")
        row = stored.find(0, row + 1)
    return places


_Owners = dict[int, dict[int, list[Record]]]
"""Partition id → fencing token, rising → its records in order of handling."""


def _owners(records: Mapping[str, Sequence[Record]], found: Findings) -> _Owners:
    owners: defaultdict[tuple[int, int], list[Record]] = defaultdict(list)
    holder: dict[tuple[int, int], str] = {}
    for name, lines in records.items():
        mine: defaultdict[tuple[int, int], list[Record]] = defaultdict(list)
        for record in lines:
            mine[record.partition_id, record.token].append(record)
        for owner, part in mine.items():
            other = holder.setdefault(owner, name)
            if other != name:
                text = f"{other} and {name} on partition {owner[0]} under token {owner[1]}"
                found.note(Anomaly.TWO_HOLDERS, text)
            owners[owner].extend(part)
    nested: _Owners = defaultdict(dict)
    for partition_id, token in sorted(owners):
        nested[partition_id][token] = owners[partition_id, token]
    return nested


def _check_owners(
    log: Mapping[int, PartitionLog], places: dict[int, list[int]], owners: _Owners, found: Findings
) -> dict[int, list[int]]:
    """
    Each owner's handling against the log.

    Returns:
        For each partition and entry, how often it was handled.
    """
    times = {partition_id: [0] * len(part.rows) for partition_id, part in log.items()}
    for partition_id, by_token in owners.items():
        part, place = log.get(partition_id), places.get(partition_id, [])
        if part is None:
            count = sum(map(len, by_token.values()))
            found.note(Anomaly.PHANTOM, f"no partition {partition_id} in the log", count=count)
            continue
        count_of = times[partition_id]
        furthest: dict[bytes, int] = {}
        for token, handled in by_token.items():
            _check_owner(partition_id, token, part, place, count_of, furthest, handled, found)
    return times


def _check_owner(  # noqa: PLR0917 - one inner loop over a million records, its state passed flat
    partition_id: int,
    token: int,
    part: PartitionLog,
    place: list[int],
    count_of: list[int],
    furthest: dict[bytes, int],
    handled: Sequence[Record],
    found: Findings,
) -> None:
    """One owner's records in order; `furthest` is how far each key came under lower tokens, and is moved on."""
    reached: dict[bytes, int] = {}
    rows, keys, first, end = part.rows, part.keys, part.first_offset, len(part.rows)
    for key, row, _partition, offset, _token, _at in handled:
        index = offset - first
        if not 0 <= index < end or rows[index] != row or keys[index] != key:
            text = f"row {row} handled at offset {offset} of partition {partition_id}"
            found.note(Anomaly.PHANTOM, f"{text}, where it is not")
            continue
        count_of[index] += 1
        if not key:
            continue
        nth = place[index]
        before = reached.get(key)
        if before is None:
            if nth > furthest.get(key, -1) + 1:
                text = f"key {key!r} on partition {partition_id}: token {token} began at {offset}"
                found.note(Anomaly.SKIP, f"{text}, past messages nobody handled")
        elif nth <= before:
            text = f"key {key!r} on partition {partition_id}: token {token} went back to {offset}"
            found.note(Anomaly.NONMONOTONIC, text)
            continue
        elif nth > before + 1:
            text = f"key {key!r} on partition {partition_id}: token {token} jumped to {offset}"
            found.note(Anomaly.SKIP, text)
        reached[key] = nth
    for key, nth in reached.items():
        if nth > furthest.get(key, -1):
            furthest[key] = nth


def _check_late_records(owners: _Owners, found: Findings) -> None:
    """Records written after the fence rose and never handled again: their acks were stale and were accepted."""
    for partition_id, by_token in owners.items():
        fenced_at_ms: int | None = None
        handled_above: set[int] = set()
        for token in sorted(by_token, reverse=True):
            handled = by_token[token]
            if fenced_at_ms is not None:
                for record in handled:
                    if record.at_ms > fenced_at_ms and record.offset not in handled_above:
                        text = (
                            f"offset {record.offset} of partition {partition_id} by token {token}"
                        )
                        found.note(Anomaly.STALE_ACK, f"{text}, after the fence had risen")
            began_at_ms = min(record.at_ms for record in handled)
            fenced_at_ms = began_at_ms if fenced_at_ms is None else min(fenced_at_ms, began_at_ms)
            handled_above.update(record.offset for record in handled)


def _check_cursors(cursors: Sequence[CursorSample], owners: _Owners, found: Findings) -> None:
    """Looks at the cursors: neither token nor cursor falls, and only the current owner moves the cursor."""
    seen: dict[int, CursorSample] = {}
    offsets: dict[tuple[int, int], set[int]] = {}
    for sample in cursors:
        before = seen.get(sample.partition_id)
        seen[sample.partition_id] = sample
        if before is None:
            continue
        fell = sample.cursor < before.cursor and sample.run == before.run
        if sample.token < before.token or fell:
            found.note(Anomaly.NONMONOTONIC, f"{sample} seen after {before}")
        elif sample.token == before.token and sample.cursor > before.cursor:
            owner = (sample.partition_id, sample.token)
            if owner not in offsets:
                handled = owners.get(sample.partition_id, {}).get(sample.token, ())
                offsets[owner] = {record.offset for record in handled}
            passed = set(range(before.cursor, sample.cursor))
            foreign = len(passed - offsets[owner]) - before.acked_above
            if foreign > 0:
                text = f"partition {sample.partition_id}: cursor went from {before.cursor}"
                text += f" to {sample.cursor} under token {sample.token}, which handled less"
                found.note(Anomaly.STALE_ACK, text, count=foreign)
