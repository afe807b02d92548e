"""Columns of a write: what is refused, and how it is said."""

from __future__ import annotations

import pytest
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from keylane.protocol.errors import Reason
from keylane.spark.writing.schema import check_columns
from support.raising import raises


def schema(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def test_columns_of_a_message_and_of_its_source_are_taken():
    texts = MapType(StringType(), StringType())
    check_columns(schema(value=StringType(), key=BinaryType(), properties=texts))
    check_columns(schema(value=StringType(), partition=IntegerType()))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"Value": StringType()}, "Value is not a column of a message; did you mean value?"),
        ({"value": StringType(), "EPOCH": IntegerType()}, "did you mean epoch?"),
        ({"value": StringType(), "more": StringType()}, "more is not a column of a message. "),
        (
            {"value": StringType(), "properties": MapType(StringType(), IntegerType())},
            "properties is map<string,int>, not map<string,string>. ",
        ),
        ({"value": IntegerType()}, "value is int, not binary or string. "),
    ],
)
def test_refusal_of_columns_says_what_is_wanted(columns: dict[str, DataType], said: str):
    with raises(Reason.ROWS_INVALID) as caught:
        check_columns(schema(**columns))
    assert said in caught.value.message
