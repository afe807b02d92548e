"""`keylane.arrow.read` returns a subject's messages as Arrow batches, for DuckDB, Polars, Ray and
pandas. Performs network I/O.

    reader = keylane.arrow.read("127.0.0.1:7000", "orders", columns=("key", "value", "timestamp"))
    duckdb.sql("SELECT key, count(*) FROM reader GROUP BY key")
    polars.from_arrow(keylane.arrow.read("127.0.0.1:7000", "orders"))  # a reader can be read once
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

import pyarrow as pa

from ..protocol.access.tokens import check_token
from ..protocol.address import parse_addresses
from ..protocol.clock import SystemClock
from ..protocol.errors import ConfigError, InvalidRequestError
from ..protocol.http.tls_settings import TlsSettings
from ..protocol.ids import Subject, check_name, check_offset
from ..protocol.reading.instants import parse_instant_ms
from .connection_security import ConnectionSecurity
from .json_decoder import build_json_decoder
from .planner import PlannedRange
from .process_loop import ProcessLoop
from .schema import COLUMNS, EVERY_COLUMN, arrow_schema
from .selection import (
    BATCH_ROWS_DEFAULT,
    CursorOf,
    Edge,
    Point,
    ReadBound,
    ReadOptions,
    StoredAt,
)
from .snapshot import take_snapshot_over
from .task_reader import read_task

Bound = str | datetime | timedelta | Mapping[int, int]
"""
Where reading begins or ends.

"earliest" and "latest" are the ends of the stored data, and "group:NAME" is the durable cursor of a
group. A datetime, an age such as "-1h" or a time such as "2024-05-31T12:00:00Z" stands for the
first message stored at or after that time. A mapping gives offsets by partition id; partitions that
are not in it are read completely.
"""
_GROUP = "group:"


def read(
    meta: str,
    subject: str,
    *,
    start: Bound = "earliest",
    end: Bound = "latest",
    partitions: Iterable[int] | None = None,
    keys: Iterable[bytes] | None = None,
    columns: Iterable[str] = COLUMNS,
    batch_rows: int = BATCH_ROWS_DEFAULT,
    bytes_per_second: int | None = None,
    schema: str | pa.Schema | None = None,
    bad_values: str = "fail",
    tls: TlsSettings | None = None,
    token: str | None = None,
) -> pa.RecordBatchReader:
    """
    Read the current content of a subject.

    The end is fixed by this call. The rows arrive while the reader is used, sorted by partition and
    offset. Reading takes no lock and moves no group's cursor. Up to two frames are prefetched until
    the reader is garbage-collected.

    Args:
        meta: "host:port" of a metaserver, or several separated by commas.
        start, end: see `Bound`.
        partitions: ids of the partitions to read; None reads all that have data.
        keys: read only messages with these order keys; None reads all messages.
        columns: the columns to return, in this order; `arrow/schema.py` describes them.
        batch_rows: approximate number of rows per batch.
        bytes_per_second: maximum rate of received bytes; None for no limit.
        schema: the schema of JSON values, for example "carrier STRING, delay INT", or an Arrow
            schema; `value` is then a struct.
        bad_values: what to do with a value that does not fit the schema: "fail" raises an error,
            "null" returns null.
        tls: TLS settings, with the certificate authority of the servers; None uses KEYLANE_TLS_CA
            from the environment, or no TLS.
        token: the token, for a cluster with access control; None reads it from the file named by
            KEYLANE_TOKEN_FILE, or from KEYLANE_TOKEN.

    Raises:
        ConfigError: an argument is invalid.
        RefusedError: the subject, a partition or a group does not exist.
        DataLossError: raised by the reader if rows of the range are no longer stored.
        UnreachableError: a server does not respond; also raised by the reader if a broker is
            unreachable for a minute.
        CodecError: raised by the reader if a value does not fit the schema.
    """
    options = ReadOptions(
        meta=tuple(parse_addresses(meta)),
        subjects=(Subject(check_name("subject", subject)),),
        partitions=None if partitions is None else _parse_partitions(partitions),
        keys=None if keys is None else frozenset(_parse_keys(keys)),
        start=_parse_bound("start", start, Edge.EARLIEST),
        end=_parse_bound("end", end, Edge.LATEST),
        columns=_parse_columns(columns),
        batch_rows=_check_positive("batch_rows", batch_rows),
        bytes_per_second=None
        if bytes_per_second is None
        else _check_positive("bytes_per_second", bytes_per_second),
        json_schema=schema,
        bad_values=bad_values,
        security=_connection_security(tls, token),
    )
    value_decoder = build_json_decoder(options)
    loop = ProcessLoop.current()
    ranges = loop.run(_plan_ranges(loop, options))
    read_schema = arrow_schema(
        options.columns, None if value_decoder is None else value_decoder.type
    )
    return pa.RecordBatchReader.from_batches(read_schema, read_task(options, ranges))


async def _plan_ranges(loop: ProcessLoop, options: ReadOptions) -> list[PlannedRange]:
    return await take_snapshot_over(loop.network(options.security), options)


def _connection_security(tls: TlsSettings | None, token: str | None) -> ConnectionSecurity:
    if tls is not None and not isinstance(tls, TlsSettings):
        raise ConfigError(f"tls must be a TlsSettings, not {tls!r:.40}")
    return ConnectionSecurity(tls=tls, token="" if token is None else check_token(token, "token="))


def _parse_bound(name: str, bound: Bound, default: Edge) -> ReadBound:
    if isinstance(bound, Mapping):
        for partition_id, offset in bound.items():
            if type(partition_id) is not int:
                raise ConfigError(f"{name}: {partition_id!r:.40} is not a partition id")
            check_offset(offset)
        return ReadBound(default, dict(bound))
    return ReadBound(_parse_point(name, bound))


def _parse_point(name: str, bound: str | datetime | timedelta) -> Point:
    if isinstance(bound, str) and bound.startswith(_GROUP):
        return CursorOf(check_name("consumer group", bound.removeprefix(_GROUP)))
    if isinstance(bound, str) and bound in set(Edge):
        return Edge(bound)
    alternatives = "'earliest', 'latest', 'group:NAME' or {partition id: offset}"
    if not isinstance(bound, str | datetime | timedelta):
        raise ConfigError(f"{name}: give an instant, {alternatives}, not {bound!r:.80}")
    try:
        return StoredAt(parse_instant_ms(bound, now_ms=SystemClock.wall_ms()))
    except InvalidRequestError as error:
        raise ConfigError(f"{name}: {error.message}; or give {alternatives}") from None


def _parse_partitions(partitions: Iterable[int]) -> frozenset[int]:
    ids = list(partitions) if isinstance(partitions, Iterable) else []
    if not isinstance(partitions, Iterable) or any(type(id_) is not int for id_ in ids):
        raise ConfigError(f"partitions: give a list of partition ids, not {partitions!r:.80}")
    return frozenset(ids)


def _parse_columns(columns: Iterable[str]) -> tuple[str, ...]:
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        raise ConfigError(f"columns: give a list of names, not {columns!r:.80}")
    names = tuple(columns)
    unknown = [name for name in names if name not in EVERY_COLUMN]
    if unknown or not names or len(set(names)) != len(names):
        problem = f"no column {unknown[0]!r:.80}" if unknown else "give at least one, and each once"
        raise ConfigError(f"columns: {problem}; there are {', '.join(EVERY_COLUMN)}")
    return names


def _parse_keys(keys: Iterable[bytes]) -> list[bytes]:
    items = list(keys) if isinstance(keys, Iterable) else [keys]
    if not all(isinstance(key, bytes) for key in items):
        raise ConfigError("keys: give a list of bytes")
    return items


def _check_positive(name: str, value: int) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name}: give a whole number above 0, not {value!r:.40}")
    return value
