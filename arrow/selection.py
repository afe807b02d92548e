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
"""The default number of rows of a batch: above 10,000, the cost of a batch is negligible; see
docs/PERFORMANCE.md.
"""


class Edge(enum.StrEnum):
    """The first stored offset, or the offset after the last one."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class StoredAt:
    """
    The first offset that the broker stored at or after a time, or LATEST if there is none.

    It means EARLIEST if a parent partition that is also read has such messages, because those
    precede all messages of this partition.
    """

    at_ms: int
    """Milliseconds since 1970."""


@dataclass(frozen=True, slots=True)
class CursorOf:
    """A consumer group's durable cursor: all earlier messages are acked."""

    group: str


Point = Edge | StoredAt | CursorOf | int
"""A point in a partition; an int is an offset."""


@dataclass(frozen=True, slots=True)
class ReadBound:
    """A point in each partition."""

    point: Point
    """The point in partitions that `by_partition` does not contain."""
    by_partition: Mapping[int, Point] = field(default_factory=dict)
    """Points by partition id."""
    manifest: str = ""
    """The folder of the backfill that a stream continues, or "". Partitions that it does not
    contain were opened later, or removed earlier.
    """

    def at(self, partition_id: int) -> Point:
        """Return the point in a partition."""
        return self.by_partition.get(partition_id, self.point)


EARLIEST = ReadBound(Edge.EARLIEST)
LATEST = ReadBound(Edge.LATEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """The validated options of a read."""

    meta: tuple[str, ...]
    subjects: tuple[Subject, ...]
    partitions: frozenset[int] | None = None
    """Ids of the partitions to read; None: all that have data."""
    keys: frozenset[bytes] | None = None
    """The order keys whose rows are read; None: all."""
    start: ReadBound = EARLIEST
    end: ReadBound = LATEST
    fail_on_data_loss: bool = True
    """False: rows that retention has removed are skipped with a warning."""
    ordered: bool = False
    """True: one task reads a partition and all its descendants, parents first."""
    min_partitions: int | None = None
    """Minimum number of tasks: large ranges are split until there are as many, if there are as many
    rows. None: no range is split.
    """
    task_bytes: int | None = None
    """Approximate number of bytes that a task reads: larger ranges are split. None: no range is
    split.
    """
    retry_s: float = 60
    """Seconds for which planning retries unreachable brokers."""
    columns: tuple[str, ...] = COLUMNS
    batch_rows: int = BATCH_ROWS_DEFAULT
    bytes_per_second: int | None = None
    """Limit of the bytes per second that one reader, or one Spark task, receives; None: no
    limit.
    """
    json_schema: str | pa.Schema | None = None
    """The schema of JSON values, as DDL text or an Arrow schema; the column `value` is then a
    struct of its fields.
    """
    bad_values: str = "fail"
    """What happens to a value that does not fit `json_schema`: "fail" raises an error, "null"
    returns null.
    """
    gc_freeze: bool = True
    security: ConnectionSecurity = PLAIN
    """TLS and token of every connection, on the driver and in tasks."""
    max_rows_per_trigger: int | None = None
    """Limit of the rows in a stream's batch; None: no limit."""

    commit_group: str | None = None
    """The consumer group whose cursors follow a stream's commits; None: no cursor is moved."""

    def groups(self) -> list[str]:
        """Return the consumer groups whose cursors are used as bounds."""
        points = [
            point
            for bound in (self.start, self.end)
            for point in (bound.point, *bound.by_partition.values())
        ]
        return sorted({point.group for point in points if isinstance(point, CursorOf)})
