"""Checks the columns of a DataFrame to be written, and their Spark types. Pure."""

from __future__ import annotations

from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from ...protocol.errors import Reason, RowsError

_BYTES = (BinaryType, StringType)
_NUMBERS = (IntegerType, LongType)
_TEXTS = "map<string,string>"
WRITTEN_COLUMNS: dict[str, tuple[type[DataType], ...]] = {
    "key": _BYTES,
    "value": _BYTES,
    "properties": (MapType,),
    "timestamp": (TimestampType,),
}
"""The columns that are stored, and their allowed types."""
SOURCE_COLUMNS = {
    "partition": _NUMBERS,
    "offset": _NUMBERS,
    "queue": _NUMBERS,
    "logic_offset": _NUMBERS,
    "subject": (StringType,),
    "logical_partition": _NUMBERS,
    "epoch": _NUMBERS,
    "stored": (TimestampType,),
    "producer": _BYTES,
}
"""The columns that tell where a row was read, and their allowed types. They are not stored."""


def check_columns(schema: StructType) -> None:
    """
    Check the columns of a write.

    Raises:
        RowsError: columns are unknown, missing or of the wrong type; the error lists all of them.
    """
    problems = []
    if "value" not in schema.names:
        problems.append("there is no column value")
    for each in schema.fields:
        expected = WRITTEN_COLUMNS.get(each.name) or SOURCE_COLUMNS.get(each.name)
        if expected is None:
            lowercase = each.name.lower()
            is_known = lowercase in WRITTEN_COLUMNS or lowercase in SOURCE_COLUMNS
            suggestion = f"; did you mean {lowercase}?" if is_known else ""
            problems.append(f"{each.name} is not a column of a message{suggestion}")
        elif not isinstance(each.dataType, expected) or not _has_text_entries(each.dataType):
            names = " or ".join(_TEXTS if kind is MapType else kind.typeName() for kind in expected)
            problems.append(f"{each.name} is {each.dataType.simpleString()}, not {names}")
    if problems:
        raise RowsError(
            Reason.ROWS_INVALID,
            f"{'; '.join(problems)}. A row has value (binary or string), and optionally key "
            "(binary or string), properties (map<string,string>) and timestamp",
        )


def _has_text_entries(kind: DataType) -> bool:
    if not isinstance(kind, MapType):
        return True
    return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
