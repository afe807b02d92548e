"""The image of a partition: its whole state in few bytes, for snapshots, STATE records, cold partitions.  Pure.

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
     hidden]                                        msgpack; later fields come last

A group's row ends with [[offset, tries], …] and the image of what it has parked, if there are any, and behind them, if there
are any, [[offset, crashes], …] of begun suspects.  `removed_unread` is written only if it is not 0, or these are.  The array
ends behind the last of `static`, `producers_all`, `body_crcs`, `groups_told`, `forgotten`, `message_bytes_max`, `holds` and
`hidden` that is not its default.  `producers_before` and `producers_all` are written in parts only:
a partition with many producers has several STATE records, each with some of the producers.  `body_crcs` are the
checksums of the remembered batches, by producer in the order of `producers`.

Invariants
    `partition_of(image_of(p))` is `p` as after a restart: without pull locks, which are in memory only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from ...protocol.control import HostPartition, Retention
from ...protocol.errors import CorruptLogError
from ...protocol.offsets import AckedOffsets
from ...protocol.routing import OrderStrategy, Partition, PartitionState
from .appends import CRC_UNKNOWN, Producers, ProducerState, StoredBatch
from .parked import Parked
from .partition import Group, HostedPartition, Lost
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


class _StaticImage(_Image, frozen=True, array_like=True):
    """A later field; it is written only if it is not its default, so that other images keep their bytes."""

    static: bool = False


class _PartImage(_StaticImage, frozen=True, array_like=True):
    producers_before: int = 0
    producers_all: int = 0


class _SummedImage(_PartImage, frozen=True, array_like=True):
    """The checksums are beside the producers and not within them, so that an earlier broker can read the image."""

    body_crcs: list[list[int]] = []


class _ToldImage(_SummedImage, frozen=True, array_like=True):
    groups_told: bool = False


class _ForgottenImage(_ToldImage, frozen=True, array_like=True):
    forgotten: list[tuple[str, int]] = []


class _LimitedImage(_ForgottenImage, frozen=True, array_like=True):
    message_bytes_max: int = 0


class _HeldImage(_LimitedImage, frozen=True, array_like=True):
    holds: list[HoldBody] = []


class _HiddenImage(_HeldImage, frozen=True, array_like=True):
    hidden: str = ""


class Part(NamedTuple):
    """The share of a partition's producers in an image: those after the first `before`, of `total`."""

    before: int
    total: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_HiddenImage).decode
_strings: dict[str, str] = {}
"""Names of subjects and broker groups, each as one object: many partitions share few names."""
STRINGS_MAX = 10_000


def image_of(hosted: HostedPartition) -> bytes:
    """The partition as bytes."""
    groups = [_group_image(group) for group in hosted.groups.values()]
    return _image(hosted, list(hosted.producers.items()), groups)


def images_of_parts(hosted: HostedPartition, *, together: int) -> Iterator[bytes]:
    """Images of the partition without its consumer groups, each with at most `together` producers, in their order."""
    producers = iter(hosted.producers.items())
    count = len(hosted.producers)
    for before in range(0, max(count, 1), together):
        yield _image(hosted, list(islice(producers, together)), [], Part(before, count))


def _image(
    hosted: HostedPartition,
    producers: list[tuple[int, ProducerState]],
    groups: list[tuple[Any, ...]],
    part: Part | None = None,
) -> bytes:
    facts, partition = hosted.facts, hosted.facts.partition
    return _encode(
        _kind(hosted, producers, part)(
            subject=facts.subject,
            name=partition.name,
            queue=partition.queue,
            range_start=partition.range_start,
            range_end=partition.range_end,
            broker_group=partition.broker_group,
            parents=partition.parents,
            first_offset=hosted.first_offset,
            next_offset=hosted.next_offset,
            appended_at_ms=hosted.appended_at_ms,
            sealed=hosted.sealed,
            producers=[
                (
                    number,
                    state.epoch,
                    state.next_sequence,
                    [
                        (batch.sequence, batch.message_count, batch.base_offset)
                        for batch in state.latest
                    ],
                )
                for number, state in producers
            ],
            groups=groups,
            lost=list(hosted.lost),
            fences_lost=hosted.fences_lost,
            order_strategy=facts.order_strategy,
            partitions_wanted=facts.partitions_wanted,
            retention=facts.retention,
        )
    )


def _kind(
    hosted: HostedPartition, producers: list[tuple[int, ProducerState]], part: Part | None
) -> Callable[..., _Image]:
    """The shortest image type that has every field which is not its default; its last fields are filled in."""
    static = hosted.facts.static
    before, total = part or (0, 0)
    limit, holds = hosted.facts.message_bytes_max, list(hosted.holds.values())
    hidden = hosted.facts.hidden
    told = hosted.groups_told or bool(hosted.forgotten or limit or holds or hidden)
    if not producers and part is None and not told:
        return partial(_StaticImage, static=True) if static else _Image
    as_part = partial(_PartImage, static=static, producers_before=before, producers_all=total)
    if not producers and not told:
        return as_part
    body_crcs = [[batch.body_crc for batch in state.latest] for _, state in producers]
    if hosted.forgotten or limit or holds or hidden:
        forgotten = partial(
            _ForgottenImage,
            **as_part.keywords,
            body_crcs=body_crcs,
            groups_told=hosted.groups_told,
            forgotten=list(hosted.forgotten.items()),
        )
        if not limit and not holds and not hidden:
            return forgotten
        limited = partial(_LimitedImage, **forgotten.keywords, message_bytes_max=limit)
        if not holds and not hidden:
            return limited
        held = partial(_HeldImage, **limited.keywords, holds=holds)
        return partial(_HiddenImage, **held.keywords, hidden=hidden) if hidden else held
    if hosted.groups_told:
        return partial(_ToldImage, **as_part.keywords, body_crcs=body_crcs, groups_told=True)
    return partial(_SummedImage, **as_part.keywords, body_crcs=body_crcs)


def _group_image(group: Group) -> tuple[Any, ...]:
    lock, acked = group.lock, group.acked
    row = (group.name, lock.fence, lock.session, acked.cursor, acked.ranges)
    parked = b"" if group.parked is None else group.parked.image()
    attempts = [pair for pair in group.attempts.items() if pair[0] not in acked]
    begun = group.suspects.left(acked)
    if begun:
        return (*row, group.removed_unread, attempts, parked, begun)
    if parked or attempts:
        return (*row, group.removed_unread, attempts, parked)
    return (*row, group.removed_unread) if group.removed_unread else row


def partition_of(partition_id: int, image: bytes | memoryview) -> HostedPartition:
    """
    The partition of an image.

    Raises:
        CorruptLogError: `image` is not an image.
    """
    return part_of(partition_id, image)[0]


def part_of(partition_id: int, image: bytes | memoryview) -> tuple[HostedPartition, Part]:
    """
    The partition of an image, and its share of the producers.

    Raises:
        CorruptLogError: `image` is not an image.
    """
    try:
        decoded = _decode(image)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptLogError(
            f"the state of partition {partition_id} is unreadable: {error}",
            partition_id=partition_id,
        ) from error
    facts = HostPartition(
        subject=_shared(decoded.subject),
        partition=Partition(
            partition_id=partition_id,  # type: ignore[arg-type]
            name=decoded.name,  # type: ignore[arg-type]
            queue=decoded.queue,  # type: ignore[arg-type]
            range_start=decoded.range_start,
            range_end=decoded.range_end,
            broker_group=_shared(decoded.broker_group),  # type: ignore[arg-type]
            state=PartitionState.OPEN,
            parents=decoded.parents,  # type: ignore[arg-type]
        ),
        order_strategy=decoded.order_strategy,
        partitions_wanted=decoded.partitions_wanted,
        retention=decoded.retention,
        static=decoded.static,
        message_bytes_max=decoded.message_bytes_max,
        hidden=_shared(decoded.hidden),
    )
    partition = HostedPartition(facts)
    partition.first_offset = decoded.first_offset
    partition.next_offset = partition.readable_offset = decoded.next_offset
    partition.appended_at_ms = decoded.appended_at_ms
    partition.sealed = partition.ended = decoded.sealed
    partition.fences_lost = decoded.fences_lost
    partition.producers = _producers(decoded)
    for row in decoded.groups:
        name = _shared(row.name)
        partition.groups[name] = _group_of(partition_id, name, row)
    partition.groups_told = decoded.groups_told
    partition.forgotten = dict(decoded.forgotten)
    partition.holds = {hold.job: hold for hold in decoded.holds}
    partition.lost = tuple(Lost(*row) for row in decoded.lost)
    return partition, Part(
        decoded.producers_before, max(decoded.producers_all, len(partition.producers))
    )


def _group_of(partition_id: int, name: str, row: _GroupImage) -> Group:
    group = Group(name)
    group.lock.fence = group.durable_fence = row.fence
    group.lock.session = row.session
    group.acked = AckedOffsets(row.cursor, row.ranges)
    group.durable_cursor, group.durable_ranges = row.cursor, row.ranges
    group.removed_unread = row.removed_unread
    group.attempts, group.suspects.begun = dict(row.attempts), dict(row.begun)
    if row.parked:
        group.parked = _parked_of(partition_id, row.parked)
        # A broker of before keeps no tokens of adoptions: none is above the fence, and what a parent parks behind a later
        # reset has tokens above it.
        unknown = sorted(group.parked.adopted.difference(group.parked.adopted_under))
        group.parked.adopted_under |= dict.fromkeys(unknown if row.fence else (), row.fence)
    group.kept = True
    return group


def _parked_of(partition_id: int, image: bytes) -> Parked:
    try:
        return Parked.of_image(partition_id, image)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptLogError(
            f"what a group has parked on partition {partition_id} is unreadable: {error}",
            partition_id=partition_id,
        ) from error


def _batches(latest: list[tuple[int, int, int]], crcs: list[int]) -> tuple[StoredBatch, ...]:
    if len(crcs) != len(latest):
        crcs = [CRC_UNKNOWN] * len(latest)  # the image is older than the checksums in it
    return tuple(StoredBatch(*batch, crc) for batch, crc in zip(latest, crcs, strict=True))


def _shared(text: str) -> str:
    if len(_strings) >= STRINGS_MAX:
        _strings.clear()
    return _strings.setdefault(text, text)


def _producers(decoded: _SummedImage) -> Producers:
    crcs = iter(decoded.body_crcs)
    return Producers(
        {
            number: ProducerState(epoch, following, _batches(latest, next(crcs, [])))
            for number, epoch, following, latest in decoded.producers
        }
    )
