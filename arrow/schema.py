"""The columns that a reader of ranges yields, in Arrow's words.  Pure.

    subject     string               as asked for
    partition   int                  physical partition: its id
    offset      long                 index in the partition, without gaps
    key         binary               order key; empty when the message was sent without one
    value       binary
    timestamp   timestamp            sent, by the sender's calendar, UTC
    properties  map<string, string>  empty when the message has none; a value of bytes comes as base64

Source: Kafka's names, so that a job moves over by a change of format and options.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from .columns import TYPES

_ARROW: dict[str, pa.DataType] = {
    "subject": pa.string(),
    "partition": pa.int32(),
    **TYPES,
}
COLUMNS = tuple(_ARROW)
PARTITION_MAX = 2**31 - 1


def arrow_schema(columns: Sequence[str] = COLUMNS) -> pa.Schema:
    """The Arrow schema of these columns, in this order."""
    return pa.schema([pa.field(name, _ARROW[name]) for name in columns])
