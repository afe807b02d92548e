"""Reads the commit log of a broker's data folder as docs/FORMATS.md describes it. Imports nothing
of the product.

    folder/log/{base position, 20 digits}.log ─▶ records ─▶ Partition: messages by offset, lineage,
        seal, groups

Every difference from the description is a Problem: a wrong checksum, a gap between positions or
offsets, a message behind the seal, a fence that falls.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import crc32c
import lz4.block
import msgspec

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

HEADER = struct.Struct("<4sIIBBBBII QQQ qqq QIIQ")
assert HEADER.size == 96
MAGIC = b"BKL1"
LENGTH_MAX = 1_118_208
MESSAGES, PARTITION, SEAL, FENCE, CURSOR, STATE = 1, 2, 3, 4, 5, 6
PARKED = 10
PARK, UNPARK, FREE, ADOPT, FREEZE, CLEAR, LOOSE, BURY = 1, 2, 3, 5, 6, 7, 11, 12
"""Changes in a record of kind PARKED."""
ZSTD, LZ4 = 1, 2
PACKED_RATIO_MAX = 64
RESET_SESSIONS = {"=reset", "=reset*"}

decode_msgpack = msgspec.msgpack.decode


class Message(NamedTuple):
    """A message as stored."""

    key: bytes
    value: bytes


@dataclass(slots=True)
class Group:
    """What the log says of one consumer group of a partition."""

    fence: int = 0
    cursor: int = 0
    ranges: list[list[int]] = field(default_factory=list)
    """Acked `[start, end)` above the cursor."""
    reset: bool = False
    """An operator has set the cursor; what was acked before is no measure any more."""
    parked: dict[tuple[int, int], bytes | int | None] = field(default_factory=dict)
    """(partition that has the message, offset) → the key under which it is set aside now; None: a
    dead letter; a number: it waits for retry.
    """
    alone: set[tuple[int, int]] = field(default_factory=set)
    """What was ever set aside without its key: later messages of its key do not wait for it."""
    by_key: set[tuple[int, int]] = field(default_factory=set)
    """What was ever set aside with its key."""
    failed: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    """Type of the failure, and tries, with which a message was first set aside."""
    adopted: set[int] = field(default_factory=set)
    """Parents whose parked messages are here now."""
    frozen: bool = False
    """The children have what is parked here, or take it over now."""


@dataclass(slots=True)
class Partition:
    """What the log says of one partition."""

    partition_id: int
    parents: list[int] = field(default_factory=list)
    subject: str = ""
    messages: dict[int, Message] = field(default_factory=dict)
    next_offset: int | None = None
    """None before the first record that tells an offset."""
    sealed_at: int | None = None
    groups: dict[str, Group] = field(default_factory=dict)

    @property
    def first_offset(self) -> int:
        """The first message still stored; `next_offset` if there is none."""
        return min(self.messages, default=self.next_offset or 0)


class Record(NamedTuple):
    """One record of a segment."""

    position: int
    kind: int
    partition_id: int
    base_offset: int
    count: int
    compression: int
    body: bytes


class DamageError(Exception):
    """A folder that is not as FORMATS.md says."""


def read_records(folder: Path) -> Iterator[Record]:
    """
    The records of all segments, in the order of their positions; an unfinished end of the last
    segment is left out.

    Raises:
        DamageError: a record before the end does not hold.
    """
    paths = sorted(folder.glob("log/*.log"))
    for path in paths:
        data = path.read_bytes()
        base = int(path.stem)
        at = 0
        while at < len(data):
            record, size = _record(data, at, base, path)
            if record is None:
                if path is not paths[-1]:
                    raise DamageError(f"{path.name}: no whole record at {at}")
                return
            yield record
            at += size


def _record(data: bytes, at: int, base: int, path: Path) -> tuple[Record | None, int]:
    if len(data) - at < HEADER.size:
        return None, 0
    (
        magic,
        header_crc,
        length,
        version,
        kind,
        compression,
        _flags,
        body_crc,
        count,
        partition_id,
        base_offset,
        position,
        *_rest,
    ) = HEADER.unpack_from(data, at)
    whole = magic == MAGIC and header_crc == crc32c.crc32c(data[at + 8 : at + HEADER.size])
    if not whole or not HEADER.size <= length <= LENGTH_MAX or at + length > len(data):
        if MAGIC in data[at + 1 :]:
            raise DamageError(f"{path.name}: no whole record at {at}, and records behind it")
        return None, 0
    body = data[at + HEADER.size : at + length]
    compressions = (0, ZSTD, LZ4) if kind == MESSAGES else (0,)
    if version != 1 or compression not in compressions or not kind >= MESSAGES:
        raise DamageError(
            f"{path.name}: version {version}, compression {compression}, kind {kind} at {at}"
        )
    if position != base + at:
        raise DamageError(f"{path.name}: a record of position {position} at {base + at}")
    if crc32c.crc32c(body) != body_crc:
        if at + length == len(data):
            return None, 0
        raise DamageError(f"{path.name}: the body at {at} has another checksum")
    return Record(position, kind, partition_id, base_offset, count, compression, body), length


def read_messages(record: Record) -> Iterator[Message]:
    """The messages of a record of kind MESSAGES; their lengths add up to the body exactly."""
    count, body = record.count, record.body
    columns = struct.Struct(f"<{count}q{count}I{count}I{count}I")
    if count < 1 or len(body) < columns.size:
        raise DamageError(f"position {record.position}: no columns of {count} messages")
    lengths = columns.unpack_from(body)
    keys, values, properties = (lengths[count * n : count * (n + 1)] for n in (1, 2, 3))
    size = sum(keys) + sum(values) + sum(properties)
    if record.compression:
        body = body[: columns.size] + _unpacked(record, body[columns.size :], columns.size, size)
    if columns.size + size != len(body):
        raise DamageError(f"position {record.position}: the lengths are not those of the body")
    key_at = columns.size
    value_at = key_at + sum(keys)
    for key_bytes, value_bytes in zip(keys, values, strict=True):
        yield Message(body[key_at : key_at + key_bytes], body[value_at : value_at + value_bytes])
        key_at += key_bytes
        value_at += value_bytes


def _unpacked(record: Record, packed: bytes, columns_bytes: int, size: int) -> bytes:
    """The keys, values and properties of a packed record, `size` bytes by its lengths."""
    unpacked_bytes = columns_bytes + size
    if HEADER.size + unpacked_bytes > LENGTH_MAX or unpacked_bytes > PACKED_RATIO_MAX * len(
        record.body
    ):
        raise DamageError(f"position {record.position}: it unpacks to {unpacked_bytes} bytes")
    try:
        if record.compression == ZSTD:
            if zstd.get_frame_info(packed).decompressed_size != size:
                raise DamageError(f"position {record.position}: the frame has another size")
            frame = zstd.ZstdDecompressor()
            unpacked = frame.decompress(packed, size)
            if not frame.eof or frame.unused_data:
                raise DamageError(f"position {record.position}: it is not one frame")
            return unpacked
        return lz4.block.decompress(packed, uncompressed_size=size)
    except (zstd.ZstdError, lz4.block.LZ4BlockError) as error:
        raise DamageError(f"position {record.position}: it does not unpack: {error}") from error


def read_folder(folder: Path) -> tuple[dict[int, Partition], list[str]]:
    """The partitions of a data folder by id, and what the log says that cannot be."""
    partitions: dict[int, Partition] = {}
    problems: list[str] = []
    try:
        for record in read_records(folder):
            partition = partitions.setdefault(record.partition_id, Partition(record.partition_id))
            problem = _fold(partition, record)
            if problem:
                problems.append(
                    f"{folder.name}: partition {record.partition_id}, "
                    f"position {record.position}: {problem}"
                )
    except DamageError as error:
        problems.append(f"{folder.name}: {error}")
    return partitions, problems


def _fold(partition: Partition, record: Record) -> str:
    """Add a record to what is known of its partition; what is wrong with it, or ""."""
    if record.kind == MESSAGES:
        return _fold_messages(partition, record)
    if record.kind == PARTITION:
        told = decode_msgpack(record.body)
        partition.subject = told["subject"]
        partition.parents = list(told["partition"].get("parents", ()))
    elif record.kind == SEAL:
        if record.base_offset != (partition.next_offset or 0):
            return f"a seal at {record.base_offset}, and messages up to {partition.next_offset}"
        partition.sealed_at = record.base_offset
    elif record.kind == FENCE:
        group_name, token, session, *_ = decode_msgpack(record.body)
        group = partition.groups.setdefault(group_name, Group())
        if token < group.fence:
            return f"the fence of {group_name} falls from {group.fence} to {token}"
        group.fence = token
        group.reset = group.reset or session in RESET_SESSIONS
    elif record.kind == CURSOR:
        group_name, _token, cursor, ranges, *_ = decode_msgpack(record.body)
        group = partition.groups.setdefault(group_name, Group())
        if cursor < group.cursor and not group.reset:
            return f"the cursor of {group_name} falls from {group.cursor} to {cursor}"
        group.cursor, group.ranges = cursor, ranges
    elif record.kind == STATE:
        return _fold_state(partition, record)
    elif record.kind == PARKED:
        group_name, _token, _at_ms, changes, *_ = decode_msgpack(record.body)
        group = partition.groups.setdefault(group_name, Group())
        problems = [_fold_change(partition, group, *change) for change in changes]
        return "; ".join(filter(None, problems))
    return ""


def _fold_change(partition: Partition, group: Group, number: int, *told: Any) -> str:
    """Add a change of what a group has parked."""
    if number in {PARK, BURY}:
        key, ranges, failure, *_ = told
        _park(group, key, [(partition.partition_id, start, end) for start, end in ranges])
        if failure is not None:
            kind, _text, _consumer, _at_ms, tries = failure
            for start, end in ranges[:1]:
                for offset in range(start, end if _is_loose(key) else start + 1):
                    group.failed.setdefault((partition.partition_id, offset), (kind, tries))
    elif number == LOOSE:
        _key, to, source, ranges, *_ = told
        _park(group, to, [(source, start, end) for start, end in ranges])
    elif number == UNPARK:
        key, source, ranges = told
        for start, end in ranges:
            for offset in range(start, end):
                group.parked.pop((source, offset), None)
    elif number == FREE:
        left = sum(key == told[0] for key in group.parked.values())
        if left:
            return f"the key {told[0]!r} is freed, and {left} messages of it are parked"
    elif number == ADOPT:
        parent, keys, last, *_ = told
        for key, _state, _since_ms, _failure, rows, *_ in keys:
            _park(group, key, rows)
        if last and parent:
            group.adopted.add(parent)
    elif number == FREEZE:
        group.frozen = True
    elif number == CLEAR:
        group.parked.clear()
    return ""


def _is_loose(key: bytes | int | None) -> bool:
    """Return True of a dead letter, of what waits for retry, and of messages without a key."""
    return not isinstance(key, bytes) or not key


def _park(group: Group, key: bytes | int | None, rows: Iterable[tuple[int, int, int]]) -> None:
    ever = group.alone if _is_loose(key) else group.by_key
    for source, start, end in rows:
        for offset in range(start, end):
            group.parked[source, offset] = key
            ever.add((source, offset))


def _fold_messages(partition: Partition, record: Record) -> str:
    problem = ""
    if partition.sealed_at is not None:
        problem = f"messages at {record.base_offset} behind the seal at {partition.sealed_at}"
    elif partition.next_offset not in {None, record.base_offset}:
        problem = f"messages at {record.base_offset}, expected at {partition.next_offset}"
    for offset, message in enumerate(read_messages(record), record.base_offset):
        partition.messages[offset] = message
    partition.next_offset = record.base_offset + record.count
    return problem


def _fold_state(partition: Partition, record: Record) -> str:
    image: list[Any] = decode_msgpack(record.body)
    subject, parents, next_offset, sealed = image[0], image[6], image[8], image[10]
    if partition.next_offset not in {None, next_offset}:
        return f"a state of next offset {next_offset}, expected {partition.next_offset}"
    partition.subject, partition.parents, partition.next_offset = subject, parents, next_offset
    if sealed:
        partition.sealed_at = next_offset
    return ""
