"""A digest of a table's rows and types, which does not depend on its batches and buffers. Pure."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash


def table_digest(table: pa.Table) -> str:
    """Return the digest of the columns' names, types and values, as 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    for name in table.column_names:
        digest.update(f"{name}:{table.schema.field(name).type};{table.num_rows};".encode())
        _add(digest, table.column(name).combine_chunks())
    return digest.hexdigest()


def _add(digest: xxhash.xxh3_128, column: pa.Array | pa.ChunkedArray) -> None:
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    kind = column.type
    digest.update(np.packbits(_booleans(column.is_null())).tobytes())
    if pa.types.is_dictionary(kind):
        _add(digest, column.dictionary_decode())
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        _add_bytes(digest, column)
    elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        _add_bytes(digest, column.cast(pa.large_binary()).cast(pa.binary()))
    elif pa.types.is_struct(kind):
        for part in column.flatten():
            _add(digest, part)
    elif pa.types.is_map(kind):
        _add(digest, pc.list_value_length(column.cast(pa.list_(_entry(kind)))))
        _add(digest, column.cast(pa.list_(_entry(kind))).flatten())
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _add(digest, pc.list_value_length(column))
        _add(digest, column.flatten())
    elif pa.types.is_boolean(kind):
        digest.update(np.packbits(_booleans(column.fill_null(False))).tobytes())
    elif pa.types.is_null(kind):
        pass
    elif pa.types.is_decimal(kind):
        _add_bytes(digest, column.cast(pa.string()))
    else:
        _add_fixed(digest, column)


def _entry(kind: pa.MapType) -> pa.DataType:
    return pa.struct([pa.field("key", kind.key_type, nullable=False), kind.item_field])


def _booleans(column: pa.Array) -> np.ndarray:
    values: np.ndarray = column.to_numpy(zero_copy_only=False)
    return values.astype(bool)


def _add_bytes(digest: xxhash.xxh3_128, column: pa.Array) -> None:
    full = column.cast(pa.binary()).fill_null(b"")
    lengths = pc.binary_length(full)
    digest.update(lengths.to_numpy(zero_copy_only=False).astype("<i8").tobytes())
    ends = np.frombuffer(full.buffers()[1], "<i4")[full.offset : full.offset + len(full) + 1]
    if len(full) and ends[-1] > ends[0]:
        digest.update(memoryview(full.buffers()[2])[int(ends[0]) : int(ends[-1])])


def _add_fixed(digest: xxhash.xxh3_128, column: pa.Array) -> None:
    """Add the bytes of numbers and times; a null counts as 0."""
    width = column.type.bit_width // 8
    plain = column.view(pa.binary(width)) if column.null_count == 0 else None
    if plain is None:
        numbers = column.cast(pa.float64()) if pa.types.is_floating(column.type) else column
        if pa.types.is_temporal(column.type):
            numbers = column.view(pa.int64() if width == 8 else pa.int32())
        digest.update(numbers.fill_null(0).to_numpy(zero_copy_only=False).tobytes())
        return
    start = plain.offset * width
    digest.update(memoryview(plain.buffers()[1])[start : start + len(plain) * width])
