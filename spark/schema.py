"""Maps the columns of `arrow/schema.py` to Spark types. Pure.

Spark requires Arrow batches to match its schema exactly, in order, types and nullability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from ..arrow.columns import TIME
from ..arrow.json_decoder import build_json_decoder
from ..arrow.schema import COLUMNS
from ..arrow.selection import ReadOptions

_SPARK_TYPES: dict[str, DataType] = {
    "subject": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "key": BinaryType(),
    "value": BinaryType(),
    "timestamp": TimestampType(),
    "properties": MapType(StringType(), StringType()),
    "queue": IntegerType(),
    "logic_offset": LongType(),
    "logical_partition": IntegerType(),
    "epoch": IntegerType(),
    "stored": TimestampType(),
    "producer": StringType(),
}


_READ_METADATA = "keylane.read"
"""The metadata key on the column `key` of a read that marks its rows as ordered."""


def spark_schema(
    columns: Sequence[str] = COLUMNS, value_type: pa.DataType | None = None
) -> StructType:
    """
    Return the Spark schema of these columns, in this order.

    Args:
        value_type: the type of decoded values; None if values are bytes.
    """
    types = (
        _SPARK_TYPES if value_type is None else {**_SPARK_TYPES, "value": _spark_type(value_type)}
    )
    metadata = {"key": {_READ_METADATA: True}}
    return StructType(
        [StructField(name, types[name], metadata=metadata.get(name)) for name in columns]
    )


def key_was_read(schema: StructType) -> bool:
    """
    Return True if the column `key` was read from a subject, no matter what was done to other
    columns.

    Spark keeps the metadata of a column through select, filter, join, groupBy and Parquet files,
    but drops it if the column is computed.
    """
    return any(
        each.name == "key" and bool(each.metadata.get(_READ_METADATA)) for each in schema.fields
    )


def read_schema(options: ReadOptions) -> StructType:
    """Return the Spark schema of a read with these options."""
    value_decoder = build_json_decoder(options)
    return spark_schema(options.columns, None if value_decoder is None else value_decoder.type)


def _spark_type(arrow_type: pa.DataType) -> DataType:
    """Return the Spark type for the Arrow type of a JSON field."""
    if pa.types.is_struct(arrow_type):
        return StructType(
            [StructField(field.name, _spark_type(field.type)) for field in arrow_type]
        )
    if pa.types.is_list(arrow_type):
        return ArrayType(_spark_type(arrow_type.value_type))
    return _JSON_TYPES[arrow_type]


_JSON_TYPES: dict[pa.DataType, DataType] = {
    pa.string(): StringType(),
    pa.bool_(): BooleanType(),
    pa.int8(): ByteType(),
    pa.int16(): ShortType(),
    pa.int32(): IntegerType(),
    pa.int64(): LongType(),
    pa.float32(): FloatType(),
    pa.float64(): DoubleType(),
    TIME: TimestampType(),
}


_OPTIONS_METADATA = "keylane.options"
"""The metadata key on the first column under which the options of a table are stored."""


def embed_options(schema: StructType, options: Mapping[str, str]) -> StructType:
    """
    Return the schema with the options of a table in its metadata.

    For a table created with CREATE TABLE … USING keylane, a catalog stores the schema, which is all
    that Spark passes to a Python data source when the table is read.
    """
    first, *other_fields = schema.fields
    metadata = {**first.metadata, _OPTIONS_METADATA: dict(options)}
    with_metadata = StructField(first.name, first.dataType, metadata=metadata)
    return StructType([with_metadata, *other_fields])


def embedded_options(schema: StructType) -> dict[str, str]:
    """Return the options that `embed_options` stored in the schema, or an empty dict if there are
    none.
    """
    return dict(schema.fields[0].metadata.get(_OPTIONS_METADATA, {})) if schema.fields else {}
