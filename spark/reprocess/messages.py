"""Checks the rows of a job and turns them into messages that name the job and their source. Pure.

    rows: value, key, properties, timestamp, offset
      ─▶ messages with the properties replay=<job>, keylane.source=<partition>/<offset>

The source is used to carry consumer groups over to the new messages (`carrying.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...arrow.columns import TIME
from ...protocol.errors import JobError, Reason
from ...protocol.reprocess.manifest import SOURCE, JobPiece

REPLAY = "replay"
"""The property or Parquet column that names the job in each row."""
MESSAGE_COLUMNS = ("key", "value", "properties", "timestamp")
SOURCE_COLUMNS = ("partition", "offset", REPLAY)
PROPERTIES = pa.map_(pa.string(), pa.string())


def to_messages(rows: pa.Table, *, job: str, piece: JobPiece) -> pa.Table:
    """
    Return the columns to store, with properties that name the job and the source of each row.

    They replace properties with the same names, which describe the job's input. Rows without a
    column `offset`, such as summaries, only get the property that names the job.

    Raises:
        JobError: a column is not part of a message or has the wrong type, or there are no values.
    """
    names = rows.column_names
    where = f"[{piece.start}, {piece.end}) of partition {piece.partition_id}"
    details = {"job": job, "partition_id": piece.partition_id, "start": piece.start}
    unknown = [name for name in names if name not in (*MESSAGE_COLUMNS, *SOURCE_COLUMNS)]
    if unknown or "value" not in names:
        problem = f"a column {unknown[0]}" if unknown else "no column value"
        raise JobError(
            Reason.JOB_FAILED,
            f"job {job} at {where} gave {problem}: messages have {', '.join(MESSAGE_COLUMNS)}",
            **details,
        )
    sources = None
    try:
        columns = {
            name: _to_message_type(name, _combine_chunks(rows.column(name)))
            for name in MESSAGE_COLUMNS
            if name in names
        }
        if "offset" in names:
            offsets = _combine_chunks(rows.column("offset")).cast(pa.int64()).cast(pa.string())
            sources = pc.binary_join_element_wise(str(piece.partition_id), offsets, "/")
        columns["properties"] = add_properties(
            _remove_entries(columns.get("properties"), (REPLAY, SOURCE)),
            {
                REPLAY: pa.repeat(pa.scalar(job, pa.string()), rows.num_rows),
                **({} if sources is None else {SOURCE: sources}),
            },
        )
    except pa.ArrowException as error:
        raise JobError(Reason.JOB_FAILED, f"job {job} at {where}: {error}", **details) from error
    return pa.table(columns)


def _remove_entries(properties: Any, names: Sequence[str]) -> Any:
    """Return a map array without the entries that have these names. Raises pa.ArrowException if it
    does not map strings to strings.
    """
    if properties is None:
        return None
    entries = flatten_entries(properties, len(properties))
    is_kept = pc.invert(pc.is_in(entries.keys, pa.array(names))).to_numpy(zero_copy_only=False)
    if is_kept.all():
        return properties
    kept_before = np.concatenate([[0], np.cumsum(is_kept)]).astype(np.int32)
    kept_indexes = pa.array(np.flatnonzero(is_kept))
    return pa.MapArray.from_arrays(
        pa.array(kept_before[entries.offsets]),
        entries.keys.take(kept_indexes),
        entries.values.take(kept_indexes),
    )


def add_properties(properties: Any, new_entries: dict[str, Any]) -> Any:
    """
    Append entries to each row of a map array, without a Python object per row.

    Args:
        properties: an array of maps from string to string; None if no row has entries.
        new_entries: the values to append to each row, by key.

    Raises:
        pa.ArrowException: the given array does not map strings to strings.
    """
    count = len(next(iter(new_entries.values())))
    entries = flatten_entries(properties, count)
    entry_count = len(entries.keys)
    lengths = np.diff(entries.offsets)
    ends = entries.offsets[1:] + len(new_entries) * np.arange(1, count + 1)
    # For each entry of the result, its index in the given entries followed by the values of each
    # new property for all rows.
    source_indexes = np.empty(entry_count + len(new_entries) * count, np.int64)
    source_indexes[
        np.arange(entry_count) + len(new_entries) * np.repeat(np.arange(count), lengths)
    ] = np.arange(entry_count)
    keys, values = [entries.keys], [entries.values]
    for entry_index, (key, texts) in enumerate(new_entries.items()):
        source_indexes[ends - len(new_entries) + entry_index] = (
            entry_count + entry_index * count + np.arange(count)
        )
        keys.append(pa.repeat(pa.scalar(key, pa.string()), count))
        values.append(texts)
    indexes = pa.array(source_indexes)
    starts = pa.array(np.concatenate([[0], ends]).astype(np.int32))
    return pa.MapArray.from_arrays(
        starts, pa.concat_arrays(keys).take(indexes), pa.concat_arrays(values).take(indexes)
    )


class MapEntries(NamedTuple):
    """The concatenated entries of a map array, and the offsets of each row's entries."""

    keys: Any
    values: Any
    offsets: Any


def flatten_entries(properties: Any, count: int) -> MapEntries:
    """
    Return the entries of a column of properties.

    Args:
        properties: an array of maps from string to string; None if no row has entries. count: the
            number of rows.

    Raises:
        pa.ArrowException: the given array does not map strings to strings.
    """
    if properties is None:
        empty = pa.array([], pa.string())
        return MapEntries(empty, empty, np.zeros(count + 1, np.int64))
    lists = properties.cast(PROPERTIES).cast(pa.list_(_ENTRY))
    lengths = pc.list_value_length(lists).fill_null(0)
    offsets = np.concatenate([[0], np.cumsum(lengths.to_numpy(zero_copy_only=False))])
    entries = lists.flatten()
    return MapEntries(entries.field(0), entries.field(1), offsets.astype(np.int64))


_ENTRY = pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.string())])


def _to_message_type(name: str, column: Any) -> Any:
    """
    Convert a column to the type that messages are written with.

    Raises:
        pa.ArrowException: the type of the column cannot be converted.
    """
    if name == "properties":
        return column
    try:
        if name != "timestamp":
            return _to_binary(column)
        # Nanoseconds are truncated, as in the reader; a time in a coarser unit may overflow.
        is_nanoseconds = pa.types.is_timestamp(column.type) and column.type.unit == "ns"
        return column.cast(TIME, safe=not is_nanoseconds)
    except pa.ArrowException as error:
        raise pa.ArrowInvalid(f"column {name}: {error}") from error


def _to_binary(column: Any) -> Any:
    if pa.types.is_dictionary(column.type):  # Arrow cannot decode a dictionary of views
        texts = _to_binary(column.dictionary)
        column = pa.DictionaryArray.from_arrays(column.indices, texts).dictionary_decode()
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    return column.cast(pa.large_binary())


def _combine_chunks(column: pa.ChunkedArray) -> Any:
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        return (
            pa.concat_arrays(combined.chunks)
            if combined.num_chunks
            else pa.array([], combined.type)
        )
    return combined
