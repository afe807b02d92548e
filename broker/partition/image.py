"""Encodes the whole state of a partition compactly, as an image for snapshots, STATE records and
cold partitions. Pure.

    [subject, name, queue, range_start, range_end, broker_group, parents,
     first_offset, next_offset, appended_at_ms, sealed,
     producers: [[id, epoch, next_sequence, [[sequence, count, base_offset], …]], …],
     groups: [[name, fence, session, cursor, [[start, end], …], removed_unread], …],
     lost: [[start, end, position], …], fences_lost,
     order_strategy, partitions_wanted, retention,
     static,
     producers_before, producers_all,
     body_crcs: [[crc, …], …],
     groups_told,
     forgotten: [[name, token], …],
     message_bytes_max,
     holds: [[job, from_offset, ttl_ms], …],
     hidden, cluster_id]                                        msgpack; later fields come last

A group's row ends with [[offset, tries], …] and the image of its parked messages, if there are any,
followed by [[offset, crashes], …] of begun suspects, if there are any, and by the milliseconds of
the owner's promise, if there is one. `removed_unread` is written if it is not 0 or if one of these
follows. From `static` on, the array ends after the last field
whose value is not the default. `producers_before` and `producers_all` are only used in parts: a
partition with many producers has several STATE records, each with some of the producers.
`body_crcs` are the checksums of the remembered batches, in the order of `producers`.

Invariants
    `decode_partition(encode_partition(p))` is `p` as it would be after a restart: without pull
    locks, which are only in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from ...protocol.control import HostPartition, Retention
from ...protocol.errors import CorruptLogError
from ...protocol.offsets import AckedOffsets
from ...protocol.routing import OrderStrategy, Partition, PartitionState
from .appends import Producers, ProducerState, StoredBatch
from .parked import Parked
from .partition import Group, HostedPartition, LostOffsets
from .records import HoldBody


class _GroupImage(msgspec.Struct, frozen=True, array_like=True):
    name: str
    fence: int
    session: str
    cursor: int
    ranges: list[tuple[int, int]]
    removed_unread: int = 0
    attempts: list[tuple[int, int]] = []
    parked: bytes = b""
    begun: list[tuple[int, int]] = []
    promise_ms: int = 0


class _Image(msgspec.Struct, frozen=True, array_like=True):
    subject: str
    name: str
    queue: int
    range_start: int
    range_end: int
    broker_group: str
    parents: tuple[int, ...]
    first_offset: int
    next_offset: int
    appended_at_ms: int
    sealed: bool
    producers: list[tuple[int, int, int, list[tuple[int, int, int]]]]
    groups: list[_GroupImage]
    lost: list[tuple[int, int, int]] = []
    fences_lost: bool = False
    order_strategy: OrderStrategy | None = None
    partitions_wanted: int = 0
    retention: Retention | None = None
    static: bool = False
    producers_before: int = 0
    producers_all: int = 0
    body_crcs: list[list[int]] = []
    groups_told: bool = False
    forgotten: list[tuple[str, int]] = []
    message_bytes_max: int = 0
    holds: list[HoldBody] = []
    hidden: str = ""
    cluster_id: str = ""


class ProducerRange(NamedTuple):
    """Identifies which of a partition's `total` producers an image contains: those that follow the
    first `before` ones.
    """

    before: int
    total: int


PART_FIELDS = 3
"""The number of optional fields that every part has, up to `producers_all`."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Image).decode
_interned: dict[str, str] = {}
"""Interned names of subjects and broker groups, because many partitions share a few names."""
INTERNED_MAX = 10_000


def encode_partition(hosted: HostedPartition) -> bytes:
    """Encode a partition with its groups and producers."""
    groups = [_encode_group(group) for group in hosted.groups.values()]
    return _encode_image(hosted, list(hosted.producers.items()), groups)


def encode_partition_parts(hosted: HostedPartition, *, producers_max: int) -> Iterator[bytes]:
    """Yield images of the partition without its groups, each with at most `producers_max`
    producers, in order.
    """
    producers = iter(hosted.producers.items())
    count = len(hosted.producers)
    for skipped_count in range(0, max(count, 1), producers_max):
        yield _encode_image(
            hosted, list(islice(producers, producers_max)), [], ProducerRange(skipped_count, count)
        )


def _encode_image(
    hosted: HostedPartition,
    producers: list[tuple[int, ProducerState]],
    groups: list[tuple[Any, ...]],
    producer_range: ProducerRange | None = None,
) -> bytes:
    facts, partition = hosted.facts, hosted.facts.partition
    skipped_count, total = producer_range or (0, 0)
    fields = [
        facts.subject,
        partition.name,
        partition.queue,
        partition.range_start,
        partition.range_end,
        partition.broker_group,
        partition.parents,
        hosted.first_offset,
        hosted.next_offset,
        hosted.appended_at_ms,
        hosted.sealed,
        [
            (
                producer_id,
                state.epoch,
                state.next_sequence,
                [
                    (batch.sequence, batch.message_count, batch.base_offset)
                    for batch in state.latest
                ],
            )
            for producer_id, state in producers
        ],
        groups,
        hosted.lost,
        hosted.fences_lost,
        facts.order_strategy,
        facts.partitions_wanted,
        facts.retention,
    ]
    optional = [
        facts.static,
        skipped_count,
        total,
        [[batch.body_crc for batch in state.latest] for _, state in producers],
        hosted.groups_told,
        list(hosted.forgotten.items()),
        facts.message_bytes_max,
        list(hosted.holds.values()),
        facts.hidden,
        facts.cluster_id,
    ]
    required_count = 0 if producer_range is None else PART_FIELDS
    while len(optional) > required_count and not optional[-1]:
        optional.pop()
    return _encode(fields + optional)


def _encode_group(group: Group) -> tuple[Any, ...]:
    lock, acked = group.lock, group.acked
    row = (group.name, lock.fence, lock.session, acked.cursor, acked.ranges)
    parked = b"" if group.parked is None else group.parked.image()
    attempts = [pair for pair in group.attempts.items() if pair[0] not in acked]
    begun = group.suspects.unacked(acked)
    if lock.promise_ms:
        return (*row, group.removed_unread, attempts, parked, begun, lock.promise_ms)
    if begun:
        return (*row, group.removed_unread, attempts, parked, begun)
    if parked or attempts:
        return (*row, group.removed_unread, attempts, parked)
    return (*row, group.removed_unread) if group.removed_unread else row


def decode_partition(partition_id: int, image: bytes | memoryview) -> HostedPartition:
    """
    Decode a partition.

    Raises:
        CorruptLogError: `image` is not a valid image.
    """
    return decode_partition_part(partition_id, image)[0]


def decode_partition_part(
    partition_id: int, image: bytes | memoryview
) -> tuple[HostedPartition, ProducerRange]:
    """
    Decode a partition, and the range of producers that the image contains.

    Raises:
        CorruptLogError: `image` is not a valid image.
    """
    try:
        decoded = _decode(image)
        producers = _decode_producers(decoded)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptLogError(
            f"the state of partition {partition_id} is unreadable: {error}",
            partition_id=partition_id,
        ) from error
    facts = HostPartition(
        subject=_intern(decoded.subject),
        partition=Partition(
            partition_id=partition_id,  # type: ignore[arg-type]
            name=decoded.name,  # type: ignore[arg-type]
            queue=decoded.queue,  # type: ignore[arg-type]
            range_start=decoded.range_start,
            range_end=decoded.range_end,
            broker_group=_intern(decoded.broker_group),  # type: ignore[arg-type]
            state=PartitionState.OPEN,
            parents=decoded.parents,  # type: ignore[arg-type]
        ),
        order_strategy=decoded.order_strategy,
        partitions_wanted=decoded.partitions_wanted,
        retention=decoded.retention,
        static=decoded.static,
        message_bytes_max=decoded.message_bytes_max,
        hidden=_intern(decoded.hidden),
        cluster_id=_intern(decoded.cluster_id),
    )
    partition = HostedPartition(facts)
    partition.first_offset = decoded.first_offset
    partition.next_offset = partition.readable_offset = decoded.next_offset
    partition.appended_at_ms = decoded.appended_at_ms
    partition.sealed = partition.ended = decoded.sealed
    partition.fences_lost = decoded.fences_lost
    partition.producers = producers
    for row in decoded.groups:
        name = _intern(row.name)
        partition.groups[name] = _decode_group(facts.partition, name, row)
    partition.groups_told = decoded.groups_told
    partition.forgotten = dict(decoded.forgotten)
    partition.holds = {hold.job: hold for hold in decoded.holds}
    partition.lost = tuple(LostOffsets(*row) for row in decoded.lost)
    return partition, ProducerRange(
        decoded.producers_before, max(decoded.producers_all, len(partition.producers))
    )


def _decode_group(partition: Partition, name: str, row: _GroupImage) -> Group:
    group = Group(name)
    group.lock.fence = group.durable_fence = row.fence
    group.lock.session = row.session
    group.lock.promise_ms = row.promise_ms
    group.acked = AckedOffsets(row.cursor, row.ranges)
    group.durable_cursor = row.cursor
    group.durable_ranges = row.ranges
    group.removed_unread = row.removed_unread
    group.attempts = dict(row.attempts)
    group.suspects.begun = dict(row.begun)
    if row.parked:
        group.parked = _decode_parked(partition, row.parked)
    group.is_durable = True
    return group


def _decode_parked(partition: Partition, image: bytes) -> Parked:
    partition_id = partition.partition_id
    try:
        return Parked.of_image(partition_id, image, (partition.range_start, partition.range_end))
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptLogError(
            f"what a group has parked on partition {partition_id} is unreadable: {error}",
            partition_id=partition_id,
        ) from error


def _intern(text: str) -> str:
    if len(_interned) >= INTERNED_MAX:
        _interned.clear()
    return _interned.setdefault(text, text)


def _decode_producers(decoded: _Image) -> Producers:
    """Decode the producers, or raise ValueError if a batch has no checksum."""
    rows = zip(decoded.producers, decoded.body_crcs, strict=True)
    return Producers(
        {
            producer_id: ProducerState(
                epoch,
                next_sequence,
                tuple(StoredBatch(*batch, crc) for batch, crc in zip(latest, crcs, strict=True)),
            )
            for (producer_id, epoch, next_sequence, latest), crcs in rows
        }
    )
