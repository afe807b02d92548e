"""The validated options of a reader. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from ..protocol.ids import Subject
from .connection_security import PLAIN, ConnectionSecurity
from .schema import COLUMNS

BATCH_ROWS_DEFAULT = 16_384
"""The default number of rows per batch. Above 10,000 rows, the overhead of a batch is negligible;
see docs/PERFORMANCE.md.
"""


class Edge(enum.StrEnum):
    """The first stored offset, or the offset after the last one."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class StoredAt:
    """
    The first offset that the broker stored at or after a time, or LATEST if there is none.

    If a parent that is also read has such messages, this means EARLIEST, because they precede all
    messages of this partition.
    """

    at_ms: int
    """The time in milliseconds since 1970."""


@dataclass(frozen=True, slots=True)
class CursorOf:
    """A consumer group's durable cursor: the group has acked all earlier messages."""

    group: str


Point = Edge | StoredAt | CursorOf | int
"""A point in a partition; an int is an offset."""


@dataclass(frozen=True, slots=True)
class ReadBound:
    """A point in each partition."""

    point: Point
    """The point for partitions that are not in `by_partition`."""
    by_partition: Mapping[int, Point] = field(default_factory=dict)
    """Points by partition id."""
    manifest: str = ""
    """The folder of the backfill that a stream continues, or "" if there is none. Partitions that
    are not in its manifest were opened later or removed earlier.
    """

    def at(self, partition_id: int) -> Point:
        """Return the point in the given partition."""
        return self.by_partition.get(partition_id, self.point)


EARLIEST = ReadBound(Edge.EARLIEST)
LATEST = ReadBound(Edge.LATEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """The validated options of a read."""

    meta: tuple[str, ...]
    subjects: tuple[Subject, ...]
    partitions: frozenset[int] | None = None
    """The ids of the partitions to read; None reads all that have data."""
    keys: frozenset[bytes] | None = None
    """The order keys whose messages are read; None reads all messages."""
    start: ReadBound = EARLIEST
    end: ReadBound = LATEST
    fail_on_data_loss: bool = True
    """Whether rows that retention has removed raise an error; otherwise they are skipped with a
    warning.
    """
    ordered: bool = False
    """Whether one task reads a partition and all its descendants, parents first."""
    min_partitions: int | None = None
    """The minimum number of tasks: large ranges are split until there are enough, as far as there
    are rows. None splits no range.
    """
    task_bytes: int | None = None
    """The approximate number of bytes that a task reads; larger ranges are split. None splits no
    range.
    """
    retry_s: float = 60
    """The time in seconds for which planning retries unreachable brokers."""
    columns: tuple[str, ...] = COLUMNS
    batch_rows: int = BATCH_ROWS_DEFAULT
    bytes_per_second: int | None = None
    """The maximum number of bytes per second that a reader or a Spark task receives; None for no
    limit.
    """
    json_schema: str | pa.Schema | None = None
    """The schema of JSON values, as DDL text or an Arrow schema; the column `value` is then a
    struct of its fields.
    """
    bad_values: str = "fail"
    """What to do with a value that does not fit `json_schema`: "fail" raises an error, "null"
    returns null.
    """
    from_copies: bool = False
    """Whether copies of brokers' data folders are read, and brokers only for what they lack."""
    gc_freeze: bool = True
    security: ConnectionSecurity = PLAIN
    """TLS and token of every connection, on the driver and in tasks."""
    max_rows_per_trigger: int | None = None
    """The maximum number of rows in a batch of a stream; None for no limit."""

    commit_group: str | None = None
    """The consumer group whose cursors follow the commits of a stream; None moves no cursor."""

    def groups(self) -> list[str]:
        """Return the consumer groups whose cursors are used as bounds."""
        points = [
            point
            for bound in (self.start, self.end)
            for point in (bound.point, *bound.by_partition.values())
        ]
        return sorted({point.group for point in points if isinstance(point, CursorOf)})
