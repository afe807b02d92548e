"""What a reader of ranges is asked to read, checked.  Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from ..protocol.ids import Subject
from .schema import COLUMNS
from .secured import PLAIN, Secured

BATCH_ROWS_DEFAULT = 16_384
"""From 10,000 rows on, the cost of a batch itself no longer shows; see docs/PERFORMANCE.md."""


class Edge(enum.StrEnum):
    """The first offset that is stored, or the offset after the last."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class StoredAt:
    """
    The first offset that the broker stored at or after a time; LATEST if there is none.

    EARLIEST where a partition that is read and continued by this one has such messages: they come
    before all of its own.
    """

    at_ms: int
    """Milliseconds since 1970."""


@dataclass(frozen=True, slots=True)
class CursorOf:
    """The durable cursor of a consumer group: everything before it is acked."""

    group: str


Point = Edge | StoredAt | CursorOf | int
"""A place in a partition; an int is an offset."""


@dataclass(frozen=True, slots=True)
class ReadBound:
    """A point in each partition."""

    point: Point
    """In each partition that `by_partition` does not name."""
    by_partition: Mapping[int, Point] = field(default_factory=dict)
    """Partition id → point."""
    manifest: str = ""
    """Of a stream: the folder of the backfill whose ends these are.  What it does not name was
    opened later, or gone before.
    """

    def at(self, partition_id: int) -> Point:
        """The point in a partition."""
        return self.by_partition.get(partition_id, self.point)


EARLIEST = ReadBound(Edge.EARLIEST)
LATEST = ReadBound(Edge.LATEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What to read, checked."""

    meta: tuple[str, ...]
    subjects: tuple[Subject, ...]
    partitions: frozenset[int] | None = None
    """None: all that have data."""
    keys: frozenset[bytes] | None = None
    """None: all; else only rows of these order keys."""
    start: ReadBound = EARLIEST
    end: ReadBound = LATEST
    fail_on_data_loss: bool = True
    """False: a row that retention has removed is left out."""
    ordered: bool = False
    """True: one task reads all partitions that continue one another, parents first."""
    min_partitions: int | None = None
    """Large ranges are cut until there are at least these tasks, if there are as many rows; None:
    none is cut.
    """
    task_bytes: int | None = None
    """About the bytes that a task reads; larger ranges are cut.  None: none is cut."""
    retry_s: float = 60
    """How long planning asks brokers that are away."""
    columns: tuple[str, ...] = COLUMNS
    batch_rows: int = BATCH_ROWS_DEFAULT
    bytes_per_second: int | None = None
    """What one call of a reader, which is one task of Spark, receives at most; None: as fast as it
    goes.
    """
    json_schema: str | pa.Schema | None = None
    """A schema as DDL text or of Arrow: the value is JSON, and the column `value` a struct of these
    fields.
    """
    bad_values: str = "fail"
    """What a value that does not fit `json_schema` becomes: "fail", an error; "null", a null."""
    gc_freeze: bool = True
    secured: Secured = PLAIN
    """TLS and token of every connection, on the driver and in tasks."""
    max_rows_per_trigger: int | None = None
    """The most rows in a batch of a stream; None: no limit."""

    commit_group: str | None = None
    """A consumer group whose cursors follow what the sink of a stream has committed; None: no
    cursor moves.
    """

    def groups(self) -> list[str]:
        """The consumer groups whose cursors are bounds."""
        points = [
            point
            for bound in (self.start, self.end)
            for point in (bound.point, *bound.by_partition.values())
        ]
        return sorted({point.group for point in points if isinstance(point, CursorOf)})
