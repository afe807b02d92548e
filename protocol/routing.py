"""Maps an order key to its partition: hash, ranges, route table. Pure.

    order key ──xxh3_64 % 1024──▶ logical partition ──range──▶ logic queue ──▶ OPEN partition
                                                                                ──▶ broker

Invariants
    For every k in 1..1024, the ranges of `split_ranges(k)` cover [0, 1024) without gaps or
    overlaps, and their sizes differ by at most one.
    A route has exactly one OPEN partition for each logical partition. A lower version never
    replaces a higher one.

QMQ rounds 1024/k, which leaves gaps or fails for most k. i*1024//k is exact.
"""

from __future__ import annotations

import enum
import itertools

import msgspec
import xxhash

from .errors import InvalidRequestError
from .ids import (
    BrokerGroup,
    LogicalPartition,
    PartitionId,
    PartitionName,
    QueueNumber,
    RouteVersion,
    Subject,
)
from .limits import LOGICAL_PARTITIONS, MESSAGE_BYTES_MAX, PARTITIONS_MAX


class OrderStrategy(enum.StrEnum):
    """
    How producers treat keyed messages while their partition does not respond. This is a setting of
    the subject.

    STRICT, the default, waits. BEST_TRIED sends them to another partition after a few seconds, and
    marks their receipts as reordered. Messages without a key have no order: under both strategies
    they go to a partition that responds.
    """

    STRICT = "strict"
    BEST_TRIED = "best_tried"


class ConsumeStrategy(enum.StrEnum):
    """
    How a consumer group divides messages among its consumers. This is a setting of the group, fixed
    by its first consumer.

    EXCLUSIVE: each partition has one consumer, and the order is kept. SHARED: every consumer
    receives messages from every partition, without any order.
    """

    EXCLUSIVE = "exclusive"
    SHARED = "shared"


class PartitionState(enum.StrEnum):
    """The state of a partition. PLANNED: only the metaserver knows it. OPEN: it accepts appends.
    SEALED: it is read-only. EXPIRED: its data is gone.
    """

    PLANNED = "planned"
    OPEN = "open"
    SEALED = "sealed"
    EXPIRED = "expired"


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """A physical partition, as seen by clients. Its range, name, broker group and parents never
    change.
    """

    partition_id: PartitionId
    name: PartitionName
    queue: QueueNumber
    range_start: int
    range_end: int
    broker_group: BrokerGroup
    state: PartitionState
    parents: tuple[PartitionId, ...] = ()
    address: str | None = None
    """The host:port of the broker; None while it is unavailable."""
    logic_start: int = 0
    """The logic offset of the partition's offset 0, in a static subject. It is computed from the
    parents' ends once they are sealed. Brokers do not know it.
    """


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The route of a subject: its partitions that still have data, with a version."""

    subject: Subject
    version: RouteVersion
    order_strategy: OrderStrategy
    partitions: tuple[Partition, ...]
    static: bool = False
    """True if the subject has logic queues. A keyed message then never leaves its own queue, under
    either order strategy.
    """
    subject_id: int = 0
    """The id that distinguishes the subject from an earlier or later one with the same name; 0 if
    not reported.
    """
    message_bytes_max: int = MESSAGE_BYTES_MAX
    """The maximum total size of the key, value and properties of one message in its open
    partitions, in bytes.
    """

    @property
    def may_reroute_keys(self) -> bool:
        """True if a keyed message may go to another partition than its own. Its receipt is then
        marked as reordered.
        """
        return self.order_strategy is OrderStrategy.BEST_TRIED and not self.static

    def open_partitions(self) -> tuple[Partition, ...]:
        """Return the OPEN partitions, ordered by range."""
        still_open = [each for each in self.partitions if each.state is PartitionState.OPEN]
        return tuple(sorted(still_open, key=lambda partition: partition.range_start))


def logical_partition(order_key: bytes) -> LogicalPartition:
    """Return the logical partition of a key, `xxh3_64(order_key) % 1024`, which never changes."""
    return LogicalPartition(xxhash.xxh3_64_intdigest(order_key) % LOGICAL_PARTITIONS)


def split_ranges(count: int) -> list[tuple[int, int]]:
    """
    Split the logical partitions into `count` half-open ranges whose sizes differ by at most one.

    Raises:
        InvalidRequestError: `count` is outside 1..1024.
    """
    if not 1 <= count <= PARTITIONS_MAX:
        raise InvalidRequestError(
            f"a subject has 1 to {PARTITIONS_MAX} partitions, not {count}", partitions=count
        )
    edges = [index * LOGICAL_PARTITIONS // count for index in range(count + 1)]
    return list(itertools.pairwise(edges))


def route_table(route: Route) -> list[Partition]:
    """
    Return the OPEN partition of each logical partition, as a list of 1024 items.

    Raises:
        InvalidRequestError: a logical partition has no OPEN partition or more than one, or a range
            is outside [0, 1024).
    """
    table: list[Partition | None] = [None] * LOGICAL_PARTITIONS
    for partition in route.open_partitions():
        if not 0 <= partition.range_start < partition.range_end <= LOGICAL_PARTITIONS:
            raise InvalidRequestError(
                f"not a range of logical partitions: "
                f"[{partition.range_start}, {partition.range_end})",
                partition_id=partition.partition_id,
            )
        for index in range(partition.range_start, partition.range_end):
            if table[index] is not None:
                raise InvalidRequestError(f"logical partition {index} has two open partitions")
            table[index] = partition
    complete = [partition for partition in table if partition is not None]
    if len(complete) != LOGICAL_PARTITIONS:
        raise InvalidRequestError(f"logical partition {table.index(None)} has no open partition")
    return complete
