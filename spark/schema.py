"""The columns a reader yields, in Arrow's words and in Spark's.  Pure.

    subject     string               as asked for
    partition   int                  physical partition: its id
    offset      long                 index in the partition, without gaps
    key         binary               order key; empty when the message was sent without one
    value       binary
    timestamp   timestamp            sent, by the sender's calendar, UTC
    properties  map<string, string>  empty when the message has none; a value of bytes comes as base64

Source: Kafka's names, so that a job moves over by a change of format and options.  Spark compares an
Arrow batch with its schema to the letter: order, types, nullability.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
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

from ..arrow.columns import TYPES

_ARROW: dict[str, pa.DataType] = {
    "subject": pa.string(),
    "partition": pa.int32(),
    **TYPES,
}
_SPARK: dict[str, DataType] = {
    "subject": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "key": BinaryType(),
    "value": BinaryType(),
    "timestamp": TimestampType(),
    "properties": MapType(StringType(), StringType()),
}
COLUMNS = tuple(_ARROW)
PARTITION_MAX = 2**31 - 1


def arrow_schema(columns: Sequence[str] = COLUMNS) -> pa.Schema:
    """The Arrow schema of these columns, in this order."""
    return pa.schema([pa.field(name, _ARROW[name]) for name in columns])


def spark_schema(columns: Sequence[str] = COLUMNS) -> StructType:
    """The Spark schema of these columns, in this order."""
    return StructType([StructField(name, _SPARK[name]) for name in columns])
