"""The columns of `arrow/schema.py` in Spark's words.  Pure.

Source: Spark compares an Arrow batch with its schema to the letter: order, types, nullability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from ..arrow.schema import COLUMNS

_SPARK: dict[str, DataType] = {
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


def spark_schema(columns: Sequence[str] = COLUMNS) -> StructType:
    """The Spark schema of these columns, in this order."""
    return StructType([StructField(name, _SPARK[name]) for name in columns])


_OPTIONS = "keylane.options"
"""Metadata of the first column."""


def with_options(schema: StructType, options: Mapping[str, str]) -> StructType:
    """
    The schema with the options of a table in it.

    A catalog keeps the schema of a table that is made with CREATE TABLE … USING keylane, and Spark gives a Python data
    source nothing else of it when the table is read.
    """
    first, *rest = schema.fields
    kept = StructField(first.name, first.dataType, metadata={_OPTIONS: dict(options)})
    return StructType([kept, *rest])


def options_in(schema: StructType) -> dict[str, str]:
    """The options that `with_options` has put into the schema; none if it has not."""
    return dict(schema.fields[0].metadata.get(_OPTIONS, {})) if schema.fields else {}
