"""The columns that a reader can return, with their Arrow types. Pure.

    subject            string               by default only if several subjects are read
    partition          int                  id of the physical partition
    offset             long                 index in the partition, without gaps
    key                binary               order key; empty when the message was sent without one
    value              binary
    timestamp          timestamp            time of sending by the sender's clock, UTC
    properties         map<string, string>  empty when the message has none; bytes are shown as
                                            base64

    queue              int                  number of the logic queue; it has a meaning only in
                                            static subjects
    logic_offset       long                 index in the logic queue: the partition's first index
                                            in it + offset
    logical_partition  int                  logical partition of the order key; null when the
                                            message was sent without one
    epoch              int                  depth of the partition in the lineage: 0 without
                                            parents, otherwise one more than theirs
    stored             timestamp            time of storing by the broker's clock, UTC
    producer           string               identity of the producer's session

The columns in the second block are returned only on request.

The names are Kafka's, so that a job can be migrated by changing only its format and options.
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
"""The default columns when reading several subjects."""
COLUMNS = COLUMNS_OF_SEVERAL[1:]
"""The default columns when reading one subject."""
PARTITION_MAX = 2**31 - 1


def arrow_schema(
    columns: Sequence[str] = COLUMNS, value_type: pa.DataType | None = None
) -> pa.Schema:
    """
    Return the Arrow schema of these columns, in this order.

    Args:
        value_type: the type of the column `value` if values are decoded; None for bytes.
    """
    types = _ARROW if value_type is None else {**_ARROW, "value": value_type}
    return pa.schema([pa.field(name, types[name]) for name in columns])
