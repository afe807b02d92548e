"""The columns that a reader of ranges yields, in Arrow's words.  Pure.

    subject            string               by default only of several subjects
    partition          int                  physical partition: its id
    offset             long                 index in the partition, without gaps
    key                binary               order key; empty when the message was sent without one
    value              binary
    timestamp          timestamp            sent, by the sender's calendar, UTC
    properties         map<string, string>  empty when the message has none; a value of bytes comes as base64

    queue              int                  logic queue: its number; it has a meaning in static subjects only
    logic_offset       long                 index in the logic queue: where the partition begins in it + offset
    logical_partition  int                  of the order key; null when the message was sent without one
    epoch              int                  depth of the partition in the lineage: 0 without parents, else one more than theirs
    stored             timestamp            stored, by the broker's calendar, UTC
    producer           string               identity of the producer's session

The columns of the second block are yielded on request.

Source: Kafka's names, so that a job moves over by a change of format and options.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

_TIME = pa.timestamp("us", tz="UTC")
_ARROW: dict[str, pa.DataType] = {
    "subject": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "key": pa.binary(),
    "value": pa.binary(),
    "timestamp": _TIME,
    "properties": pa.map_(pa.string(), pa.string()),
    "queue": pa.int32(),
    "logic_offset": pa.int64(),
    "logical_partition": pa.int32(),
    "epoch": pa.int32(),
    "stored": _TIME,
    "producer": pa.string(),
}
EVERY_COLUMN = tuple(_ARROW)
COLUMNS_OF_SEVERAL = EVERY_COLUMN[:7]
"""The columns of several subjects, where none are asked for."""
COLUMNS = COLUMNS_OF_SEVERAL[1:]
"""The columns of one subject, where none are asked for."""
PARTITION_MAX = 2**31 - 1


def arrow_schema(columns: Sequence[str] = COLUMNS) -> pa.Schema:
    """The Arrow schema of these columns, in this order."""
    return pa.schema([pa.field(name, _ARROW[name]) for name in columns])
