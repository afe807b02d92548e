"""Sends rows of Arrow data as messages: checks, hashes, groups and encodes them by column, without
a Python object for each row.

    source ─▶ blocks of rows ─hash─▶ partition of each row ─stable sort─▶ batches of each executor

Rows of a key keep their order, because blocks are queued one after another and the sort is stable.
Rows with a halted key, or without an open partition, are sent one by one, as `send` would send
them.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]  # ships no types

from ...arrow.column_hash import hash_column
from ...protocol.batch import BYTES_PER_MESSAGE, join_columns
from ...protocol.errors import (
    Fate,
    InvalidRequestError,
    KeylaneError,
    MessageTooLargeError,
    Reason,
    TableError,
)
from ...protocol.limits import KEY_BYTES_MAX, LOGICAL_PARTITIONS
from ...protocol.message import Receipt, TableReceipt
from ...protocol.text import counted
from ...rpc.race import shield
from ..executor import Executor
from ..outgoing_batch import OutgoingBatch
from ..send_future import BatchFuture, SendFuture
from ..sender import SubjectSender
from ..settings import ProducerSettings
from .column_batch import ColumnBatch

BLOCK_ROWS = 32_768
"""The maximum number of rows that are hashed and sorted without yielding to other tasks; this takes
a few milliseconds.
"""
BLOCK_BYTES = 8 << 20
ROWS_NAMED = 100
"""The maximum number of rows listed in an error."""
EMPTY_KEY = "an empty text as its key: null means no key"
I64: TypeAlias = npt.NDArray[np.int64]


class Column:
    """A column of byte strings: row i is `blob[edges[i]:edges[i + 1]]`."""

    def __init__(self, array: Any) -> None:
        """Create a column from `array`, which has the type binary, string, large_binary or
        large_string.
        """
        self.nulls: npt.NDArray[np.intp] | None = None
        """The indexes of null rows; their bytes are b""."""
        self._holds_text = is_text(array.type)
        if array.null_count:
            self.nulls = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
            array = array.cast(pa.large_binary()).fill_null(b"")
        self._array = array
        _, edges, blob = array.buffers()
        large = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
        column_type = np.dtype(np.int64 if large else np.int32)
        edges = np.frombuffer(
            edges, column_type, len(array) + 1, column_type.itemsize * array.offset
        )
        self.edges: I64 = edges.astype(np.int64, copy=False)
        self.blob = np.frombuffer(blob, np.uint8) if blob is not None else np.empty(0, np.uint8)
        self.lengths: I64 = np.diff(self.edges)

    @property
    def empty_texts(self) -> npt.NDArray[np.intp]:
        """The indexes of rows with an empty text. As a key it is refused, like that of one
        message; null and empty bytes mean no key.
        """
        if not self._holds_text or self.lengths.all():
            return np.empty(0, np.intp)
        empty = self.lengths == 0
        if self.nulls is not None:
            empty[self.nulls] = False
        return np.flatnonzero(empty)

    def take(self, rows: I64) -> Column:
        """Return a column with these rows, in this order."""
        # `pa.array(rows)` would import pandas if it is installed, costing a quarter of a second
        # and 47 MB.
        indices = pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(rows)])
        return Column(self._array.take(indices))

    def get_bytes(self, start: int, end: int) -> memoryview:
        """Return the bytes of the rows `[start, end)`."""
        return self.blob[self.edges[start] : self.edges[end]].data

    def row(self, index: int) -> bytes:
        """Return the bytes of a row."""
        return bytes(self.get_bytes(index, index + 1))


def is_text(column_type: Any) -> bool:
    """Return True for the types of text whose buffers a `Column` uses."""
    return bool(pa.types.is_string(column_type) or pa.types.is_large_string(column_type))


class StreamFailedError(Exception):
    """Raised when reading a stream of record batches fails; the original exception is its cause."""


class ArrowSource:
    """
    Arrow data, split into blocks of a key column and a value column.

    Raises:
        InvalidRequestError: the source is not Arrow data, or a column is missing or holds neither
            bytes nor text.
    """

    def __init__(self, source: Any, *, key: str | None, value: str) -> None:
        self.in_memory = not isinstance(source, pa.RecordBatchReader)
        self._problems: dict[int, str] = {}
        """The problems found while converting Python objects to Arrow, by row number."""
        if self.in_memory:
            names = (value,) if key is None else (value, key)
            source = _to_table(source, names, self._problems)
        self._source = source
        self._key = None if key is None else _column_index(self._source.schema, key)
        self._value = _column_index(self._source.schema, value)

    def iter_blocks(self) -> Iterator[Block]:
        """Yield the blocks of an in-memory source. This may be called repeatedly."""
        row = 0
        for batch in self._source.to_batches():
            for block in self._split_batch(batch):
                if self._problems:
                    block.add_problems(self._problems, row)
                yield block
                row += len(block)

    async def stream_blocks(self) -> AsyncIterator[list[Block]]:
        """
        Yield the blocks of each record batch. The stream is read in a thread, because reading may
        block.

        Raises:
            StreamFailedError: the source raised an exception.
        """
        try:
            batches = iter(self._source)
            while (batch := await _read_next(batches)) is not None:
                yield list(self._split_batch(batch))
        except Exception as error:
            raise StreamFailedError from error

    def _split_batch(self, batch: Any) -> Iterator[Block]:
        columns = [_decode_views(batch.column(self._value))]
        if self._key is not None:
            columns.append(_decode_views(batch.column(self._key)))
        rows = len(batch)
        size = sum(column.nbytes for column in columns)
        step = max(1, min(BLOCK_ROWS, rows * BLOCK_BYTES // max(1, size)))
        for start in range(0, rows, step):
            values, *keys = (_build_column(column[start : start + step]) for column in columns)
            yield Block(keys[0] if keys else None, values)


async def _read_next(batches: Iterator[Any]) -> Any:
    """Return the next record batch, or None at the end. It is read in a thread, unless the main
    thread has ended, because Python starts no threads after that.
    """
    if not threading.main_thread().is_alive():
        return next(batches, None)
    return await asyncio.to_thread(next, batches, None)


class Block:
    """A group of rows: their values, and their keys or None."""

    def __init__(self, keys: Column | None, values: Column) -> None:
        self.keys = keys
        self.values = values
        self._problems: dict[int, str] = {}

    def add_problems(self, problems: dict[int, str], first_row: int) -> None:
        """Store the problems of the block's rows; `first_row` is the number of its first row."""
        self._problems = {
            row - first_row: problems[row]
            for row in range(first_row, first_row + len(self))
            if row in problems
        }

    def __len__(self) -> int:
        return len(self.values.lengths)

    def find_unsendable_rows(self, limit_bytes: int) -> dict[int, str]:
        """Return the indexes of rows that cannot be sent, with the reasons. A null value cannot be
        sent; a null key means that the row has no key.
        """
        values, keys = self.values, self.keys
        sizes = values.lengths if keys is None else values.lengths + keys.lengths
        reasons: dict[int, str] = {}
        if int(sizes.max(initial=0)) > limit_bytes:
            for row in np.flatnonzero(sizes > limit_bytes).tolist():
                reasons[row] = f"{sizes[row]} bytes, over {limit_bytes}"
        if keys is not None and int(keys.lengths.max(initial=0)) > KEY_BYTES_MAX:
            for row in np.flatnonzero(keys.lengths > KEY_BYTES_MAX).tolist():
                reasons[row] = f"a key of {keys.lengths[row]} bytes, over {KEY_BYTES_MAX}"
        if keys is not None:
            reasons |= dict.fromkeys(keys.empty_texts.tolist(), EMPTY_KEY)
        if values.nulls is not None:
            reasons |= dict.fromkeys(values.nulls.tolist(), "no value")
        return reasons | self._problems

    @cached_property
    def cumulative_sizes(self) -> I64:
        """Return the cumulative sizes of the rows in a batch, in bytes. There is one entry more
        than there are rows; the first is 0 or the offset of the first row.
        """
        edges = self.values.edges if self.keys is None else self.values.edges + self.keys.edges
        return edges + BYTES_PER_MESSAGE * np.arange(len(edges))

    def take(self, rows: I64) -> Block:
        """Return a block with these rows, in this order."""
        return Block(None if self.keys is None else self.keys.take(rows), self.values.take(rows))

    def encode_body(self, start: int, end: int, sent_at_ns: int) -> bytes:
        """Return the rows `[start, end)` as the body of a batch."""
        count = end - start
        keys = self.keys
        return join_columns(
            sent_at_ns.to_bytes(8, "little") * count,
            bytes(4 * count) if keys is None else keys.lengths[start:end].astype("<u4").tobytes(),
            self.values.lengths[start:end].astype("<u4").tobytes(),
            () if keys is None else (keys.get_bytes(start, end),),
            (self.values.get_bytes(start, end),),
            count=count,
        )


def _to_table(source: Any, names: tuple[str, ...], problems: dict[int, str]) -> Any:
    """Convert a source to a table, and record the rows whose values are neither bytes nor text in
    `problems`.
    """
    if isinstance(source, pa.Table):
        return source
    if isinstance(source, pa.RecordBatch):
        return pa.Table.from_batches([source])
    if not hasattr(source, "__arrow_c_stream__") and not hasattr(source, "__arrow_c_array__"):
        raise InvalidRequestError(
            "send_arrow takes a pyarrow Table, RecordBatch or RecordBatchReader, or an object with "
            "__arrow_c_stream__ "
            f"(as of polars, pandas and DuckDB), not {type(source).__name__}"
        )
    try:
        _refuse_object_columns(source, names)
        return pa.table(source)
    except (pa.ArrowException, TypeError, ValueError) as error:
        # Some column, perhaps one that is not needed, contains Python objects that Arrow does not
        # accept; pandas allows this.
        try:
            columns = {name: source[name] for name in names}
            if any(getattr(column, "ndim", 1) != 1 for column in columns.values()):
                raise KeyError  # two columns have this name
            objects = {name: list(column) for name, column in columns.items()}
        except (KeyError, TypeError, IndexError, AttributeError):
            raise InvalidRequestError(f"Arrow does not accept this data: {error!s:.300}") from error
    return pa.table(
        {
            name: _convert_objects(column, problems, is_key=name in names[1:])
            for name, column in objects.items()
        }
    )


def _refuse_object_columns(source: Any, names: tuple[str, ...]) -> None:
    """Raise TypeError for a polars frame with a column of Python objects, which polars would export
    as memory addresses.
    """
    schema = getattr(source, "schema", None)
    if isinstance(schema, Mapping) and any(str(schema.get(name)) == "Object" for name in names):
        raise TypeError("a column of Python objects")


def _convert_objects(column: list[Any], problems: dict[int, str], *, is_key: bool) -> Any:
    values: list[bytes | None] = []
    for row, value in enumerate(column):
        data: object = value
        if isinstance(value, str):
            if is_key and not value:
                problems[row] = EMPTY_KEY
            try:
                data = value.encode()
            except UnicodeEncodeError as error:
                data = None
                problems[row] = f"{value!r:.40} is not valid UTF-8: {error.reason}"
        elif not isinstance(value, bytes) and not _is_missing(value):
            problems[row] = f"{value!r:.40} is neither bytes nor text"
        values.append(data if isinstance(data, bytes) else None)
    return pa.array(values, pa.large_binary())


def _is_missing(value: object) -> bool:
    """Return True for None and for its equivalents in pandas: NaN, NaT, NA."""
    try:
        return value is None or bool(value != value)  # noqa: PLR0124 - NaN and NaT
    except (TypeError, ValueError):  # NA and arrays have no truth value here
        return type(value).__name__ == "NAType"


def _column_index(schema: Any, name: str) -> int:
    """Return the index of a column, which must contain bytes or text."""
    index = int(schema.get_field_index(name)) if isinstance(name, str) else -1
    if index < 0:
        available = ", ".join(schema.names)
        raise InvalidRequestError(
            f"the table must have exactly one column {name!r:.60}; it has {available:.300}"
        )
    column_type = schema.field(index).type
    if pa.types.is_dictionary(column_type):
        column_type = column_type.value_type
    if not any(is_bytes(column_type) for is_bytes in _IS_BYTES_OR_TEXT):
        raise InvalidRequestError(
            f"column {name!r:.60} holds {column_type}, not bytes or text: cast it first"
        )
    return index


_IS_BYTES_OR_TEXT = (
    *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view),
    *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
    pa.types.is_fixed_size_binary,
)

_HAS_EDGES = (
    *(pa.types.is_binary, pa.types.is_large_binary),
    *(pa.types.is_string, pa.types.is_large_string),
)
"""Tests for the types whose buffers `Column` uses directly."""


def _decode_views(array: Any) -> Any:
    """Replace views with bytes: pyarrow 24 crashes when it measures them, and Arrow does not decode
    those in a dictionary column, the form in which Polars stores categories.
    """
    column_type = array.type
    if _is_view(column_type):
        return _cast(array)
    if pa.types.is_dictionary(column_type) and _is_view(column_type.value_type):
        return pa.DictionaryArray.from_arrays(array.indices, _cast(array.dictionary))
    return array


def _is_view(column_type: Any) -> bool:
    return bool(pa.types.is_string_view(column_type) or pa.types.is_binary_view(column_type))


def _build_column(array: Any) -> Column:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return Column(array if any(has_type(array.type) for has_type in _HAS_EDGES) else _cast(array))


def _cast(array: Any) -> Any:
    """Return a column of views, or of bytes of a fixed width, with edges."""
    is_view_of_text = pa.types.is_string_view(array.type)
    return array.cast(pa.large_string() if is_view_of_text else pa.large_binary())


class TableSender:
    """
    Sends the rows of one source, and counts their outcomes.

    Args:
        sender: the subject's sender. When it stops, because the subject was deleted or the producer
            closed, the remaining rows are given up, and are never sent to a new subject of the same
            name.
        send: queues one message, given its value and key.
        drain: waits for room in the producer's queue.
        draw_bits: returns the given number of random bits, which choose the partition of rows
            without a key.
    """

    def __init__(
        self,
        *,
        sender: SubjectSender,
        send: Callable[[bytes, bytes], SendFuture],
        drain: Callable[[], Awaitable[None]],
        draw_bits: Callable[[int], int],
        now_ns: Callable[[], int],
        settings: ProducerSettings,
    ) -> None:
        self._sender = sender
        self._send = send
        self._drain = drain
        self._draw_bits = draw_bits
        self._now_ns = now_ns
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._rows_read = 0
        """The number of rows read so far."""
        self._batches: deque[tuple[OutgoingBatch, I64]] = deque()
        """The unsettled batches, with the numbers of their rows."""
        self._messages: deque[tuple[SendFuture, int]] = deque()
        """The unsettled messages that were sent one by one, with their row numbers."""
        self._stored = 0
        self._unsendable_rows: dict[int, str] = {}
        self._given_up_rows: dict[int, KeylaneError] = {}
        self._partial = False

    async def send(self, source: ArrowSource, *, partial: bool) -> TableReceipt:
        """
        Send all rows, and wait until they are stored.

        Raises:
            TableError: a row cannot be sent and `partial` is False, in which case no row of an
                in-memory source is sent, and no row of that record batch or a later one of a
                stream; a stream raised an exception after earlier rows were sent; or rows were
                given up.
        """
        self._partial = partial
        failure: BaseException | None = None
        await self._sender.wait_for_route()  # the route has the size limit
        if source.in_memory:
            if not partial:
                await self._check_blocks(source.iter_blocks())
            for block in source.iter_blocks():
                await self._send_block(block)
        else:
            try:
                async for record_batch in source.stream_blocks():
                    if not partial:
                        await self._check_blocks(record_batch)
                    for block in record_batch:
                        await self._send_block(block)
            except StreamFailedError as error:
                failure = error.__cause__
        await self._settle(wait_for_all=True)
        if failure is not None:
            raise self._source_error(failure)
        if self._given_up_rows:
            raise self._given_up_error()
        return TableReceipt(self._stored, self._unsendable_rows)

    async def _check_blocks(self, blocks: Iterable[Block]) -> None:
        """Raise TableError if a row of the next blocks cannot be sent."""
        row = self._rows_read
        limit_bytes = self._sender.message_bytes_max
        reasons: dict[int, str] = {}
        for block in blocks:
            reasons |= {
                row + index: reason
                for index, reason in block.find_unsendable_rows(limit_bytes).items()
            }
            row += len(block)
            await asyncio.sleep(0)  # other tasks run between blocks
        if reasons:
            first_row, reason = min(reasons.items())
            raise TableError(
                Reason.ROWS_REFUSED,
                f"{counted(len(reasons), 'row', 'rows')} cannot be sent, the first is "
                f"row {first_row}: {reason}; "
                f"{counted(self._rows_read, 'row', 'rows')} before that were sent",
                rows=sorted(reasons)[:ROWS_NAMED],
                sent=self._rows_read,
            )

    async def _send_block(self, block: Block) -> None:
        rows = np.arange(self._rows_read, self._rows_read + len(block))
        self._rows_read += len(block)
        await asyncio.sleep(0)
        sender = self._sender
        try:
            await self._drain()
            await self._settle(wait_for_all=False)
            sender.raise_if_stopped()
        except KeylaneError as error:  # earlier rows may be stored
            self._given_up_rows |= dict.fromkeys(rows.tolist(), error)
            return
        reasons = block.find_unsendable_rows(sender.message_bytes_max)
        if reasons:
            for index in sorted(reasons):
                self._record_unsendable(int(rows[index]), reasons[index])
            sendable_indexes = np.delete(np.arange(len(block)), list(reasons))
            block, rows = block.take(sendable_indexes), rows[sendable_indexes]
        if sender.careful:
            await self._send_by_row(block, rows)
            return
        routing = _RowExecutors(sender, self._draw_bits(10))
        order, bounds = routing.group_rows(block.keys, len(block))
        if order is not None:
            block, rows = block.take(order), rows[order]
        unrouted_range: tuple[int, int] | None = None
        for executor, (start, end) in zip(routing.executors, pairwise(bounds), strict=True):
            if executor is None:
                unrouted_range = start, end
            else:
                self._queue_rows(sender, executor, block, rows, start, end)
        if unrouted_range is not None:
            indexes = np.arange(*unrouted_range)
            await self._send_by_row(block.take(indexes), rows[indexes])

    def _record_unsendable(self, row: int, reason: str) -> None:
        """Record a row that cannot be sent. Without `partial`, this happens only if the subject's
        limit was lowered after the check, and the row is then given up.
        """
        if self._partial:
            self._unsendable_rows[row] = reason
        else:
            self._given_up_rows[row] = MessageTooLargeError(f"row {row}: {reason}")

    def _queue_rows(
        self,
        sender: SubjectSender,
        executor: Executor,
        block: Block,
        rows: I64,
        start: int,
        end: int,
    ) -> None:
        """Queue the rows `[start, end)` of a block in batches at an executor."""
        settings = self._settings
        sizes = block.cumulative_sizes
        now_ns = self._now_ns()
        while start < end:
            batch_end = (
                int(np.searchsorted(sizes, sizes[start] + settings.batch_bytes, "right")) - 1
            )
            batch_end = max(start + 1, min(batch_end, start + settings.batch_count, end))
            body = block.encode_body(start, batch_end, now_ns)
            batch = ColumnBatch(self._loop, body, batch_end - start, now_ns)
            if settings.delivery_timeout_ms:
                for index in range(len(batch)):
                    sender.annotate(
                        batch, index, reordered=False, timeout_ms=settings.delivery_timeout_ms
                    )
            executor.queue_batch(batch)
            self._batches.append((batch, rows[start:batch_end]))
            start = batch_end

    async def _send_by_row(self, block: Block, rows: I64) -> None:
        for index, row in enumerate(rows.tolist()):
            key = b"" if block.keys is None else block.keys.row(index)
            try:
                await self._drain()
                self._sender.raise_if_stopped()
                self._messages.append((self._send(block.values.row(index), key), row))
            except KeylaneError as error:  # a halted key, a lowered limit, or a stopped sender
                self._given_up_rows[row] = error

    async def _settle(self, *, wait_for_all: bool) -> None:
        """Count the outcomes of the oldest batches and messages that are settled. With
        `wait_for_all`, wait for all of them.
        """
        while self._batches and (wait_for_all or self._batches[0][0].is_notified):
            batch, rows = self._batches.popleft()
            await shield(batch.future)
            if type(batch.outcome) is Receipt and batch.marks is None:
                self._stored += len(rows)
                continue
            for index, row in enumerate(rows.tolist()):
                await self._count_outcome(BatchFuture(batch, index), row)
        while self._messages and (wait_for_all or self._messages[0][0].done()):
            await self._count_outcome(*self._messages.popleft())

    async def _count_outcome(self, future: SendFuture, row: int) -> None:
        try:
            await future
        except KeylaneError as error:
            self._given_up_rows[row] = error
        else:
            self._stored += 1

    @property
    def _unknown_count(self) -> int:
        """How many of the given-up rows may be stored."""
        return sum(error.fate is Fate.UNKNOWN for error in self._given_up_rows.values())

    def _source_error(self, failure: BaseException) -> TableError:
        """Return the error for a source that raised `failure`."""
        unknown = self._unknown_count
        given_up_text = f", {len(self._given_up_rows)} were given up" if self._given_up_rows else ""
        left_out_text = (
            f", {len(self._unsendable_rows)} were left out" if self._unsendable_rows else ""
        )
        error = TableError(
            Reason.ROWS_UNFINISHED,
            f"the source failed after {counted(self._rows_read, 'row')}, of which "
            f"{self._stored} are stored{given_up_text}{left_out_text}: {failure!r:.200}",
            sent=self._rows_read,
            stored=self._stored,
            rows=sorted(self._given_up_rows | self._unsendable_rows)[:ROWS_NAMED],
            messages=len(self._given_up_rows),
            unknown=unknown,
        )
        error.fate = Fate.UNKNOWN if unknown else Fate.NOT_DONE
        error.__cause__ = failure
        return error

    def _given_up_error(self) -> TableError:
        """Return the error for rows that were given up."""
        unknown = self._unknown_count
        row, first_error = min(self._given_up_rows.items())
        subject = counted(len(self._given_up_rows), "row was", "rows were")
        error = TableError(
            Reason.ROWS_GIVEN_UP,
            f"{subject} given up, {unknown} of them may be stored; {self._stored} are stored; "
            f"the first, row {row}: {first_error.message}",
            rows=sorted(self._given_up_rows)[:ROWS_NAMED],
            messages=len(self._given_up_rows),
            unknown=unknown,
            stored=self._stored,
        )
        error.fate = Fate.UNKNOWN if unknown else Fate.NOT_DONE
        error.__cause__ = first_error
        return error


class _RowExecutors:
    """A snapshot of the executors of a subject's logical partitions."""

    def __init__(self, sender: SubjectSender, keyless_logical_id: int) -> None:
        self.executors: list[Executor | None] = []
        indices: dict[Executor | None, int] = {}
        for executor in sender.table:
            if executor not in indices:
                indices[executor] = len(self.executors)
                self.executors.append(executor)
        keyless_executor = sender.keyless_table[keyless_logical_id]
        if keyless_executor not in indices:
            indices[keyless_executor] = len(self.executors)
            self.executors.append(keyless_executor)
        self._index_by_logical = np.fromiter(
            (indices[executor] for executor in sender.table), np.uint16
        )
        self._keyless_index = indices[keyless_executor]

    def group_rows(
        self, keys: Column | None, rows: int
    ) -> tuple[npt.NDArray[np.intp] | None, list[int]]:
        """
        Group a block's rows by executor.

        Returns:
            The permutation of the rows, or None if they need not be reordered; and the bounds of
            each executor's rows, with one entry more than there are executors.
        """
        count = len(self.executors)
        if keys is None:
            return None, [0] * (self._keyless_index + 1) + [rows] * (count - self._keyless_index)
        if count == 1:
            return None, [0, rows]
        logical_ids = hash_column(keys.blob, keys.edges) & np.uint64(LOGICAL_PARTITIONS - 1)
        indices = self._index_by_logical[logical_ids]
        indices[keys.lengths == 0] = self._keyless_index
        bounds = np.cumsum(np.bincount(indices, minlength=count))
        return np.argsort(indices, kind="stable"), [0, *bounds.tolist()]
