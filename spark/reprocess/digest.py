"""Computes a digest of a table's rows and types that does not depend on how the table is divided
into batches. Pure.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash


def table_digest(table: pa.Table) -> str:
    """Return a digest of the names, types and values of the columns, as 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    for name in table.column_names:
        digest.update(f"{name}:{table.schema.field(name).type};{table.num_rows};".encode())
        _update(digest, table.column(name).combine_chunks())
    return digest.hexdigest()


def _update(digest: xxhash.xxh3_128, column: pa.Array | pa.ChunkedArray) -> None:
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    arrow_type = column.type
    digest.update(np.packbits(_booleans(column.is_null())).tobytes())
    if pa.types.is_dictionary(arrow_type):
        _update(digest, column.dictionary_decode())
    elif pa.types.is_string(arrow_type) or pa.types.is_binary(arrow_type):
        _update_binary(digest, column)
    elif pa.types.is_large_string(arrow_type) or pa.types.is_large_binary(arrow_type):
        _update_binary(digest, column.cast(pa.large_binary()).cast(pa.binary()))
    elif pa.types.is_struct(arrow_type):
        for part in column.flatten():
            _update(digest, part)
    elif pa.types.is_map(arrow_type):
        _update(digest, pc.list_value_length(column.cast(pa.list_(_entry_type(arrow_type)))))
        _update(digest, column.cast(pa.list_(_entry_type(arrow_type))).flatten())
    elif pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        _update(digest, pc.list_value_length(column))
        _update(digest, column.flatten())
    elif pa.types.is_boolean(arrow_type):
        digest.update(np.packbits(_booleans(column.fill_null(False))).tobytes())
    elif pa.types.is_null(arrow_type):
        pass
    elif pa.types.is_decimal(arrow_type):
        _update_binary(digest, column.cast(pa.string()))
    else:
        _update_fixed_width(digest, column)


def _entry_type(arrow_type: pa.MapType) -> pa.DataType:
    return pa.struct([pa.field("key", arrow_type.key_type, nullable=False), arrow_type.item_field])


def _booleans(column: pa.Array) -> np.ndarray:
    values: np.ndarray = column.to_numpy(zero_copy_only=False)
    return values.astype(bool)


def _update_binary(digest: xxhash.xxh3_128, column: pa.Array) -> None:
    filled = column.cast(pa.binary()).fill_null(b"")
    lengths = pc.binary_length(filled)
    digest.update(lengths.to_numpy(zero_copy_only=False).astype("<i8").tobytes())
    ends = np.frombuffer(filled.buffers()[1], "<i4")[
        filled.offset : filled.offset + len(filled) + 1
    ]
    if len(filled) and ends[-1] > ends[0]:
        digest.update(memoryview(filled.buffers()[2])[int(ends[0]) : int(ends[-1])])


def _update_fixed_width(digest: xxhash.xxh3_128, column: pa.Array) -> None:
    """Update the digest with the bytes of numbers or times. A null counts as 0."""
    width = column.type.bit_width // 8
    raw = column.view(pa.binary(width)) if column.null_count == 0 else None
    if raw is None:
        numbers = column.cast(pa.float64()) if pa.types.is_floating(column.type) else column
        if pa.types.is_temporal(column.type):
            numbers = column.view(pa.int64() if width == 8 else pa.int32())
        digest.update(numbers.fill_null(0).to_numpy(zero_copy_only=False).tobytes())
        return
    start = raw.offset * width
    digest.update(memoryview(raw.buffers()[1])[start : start + len(raw) * width])
