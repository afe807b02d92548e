"""The columns of `arrow/schema.py` in Spark's words.  Pure.

Source: Spark compares an Arrow batch with its schema to the letter: order, types, nullability.
"""

from __future__ import annotations

from collections.abc import Sequence

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
