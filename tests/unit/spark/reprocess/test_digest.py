"""Digests of tables: of rows and types, not of batches and buffers."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.spark.reprocess.digest import table_digest

TYPES = {
    "int": (pa.int32(), [1, None, 0]),
    "float": (pa.float64(), [0.5, None, -1.0]),
    "text": (pa.string(), ["a", None, ""]),
    "bytes": (pa.binary(), [b"a", None, b""]),
    "large": (pa.large_string(), ["a", None, ""]),
    "flag": (pa.bool_(), [True, None, False]),
    "time": (pa.timestamp("us", "UTC"), [datetime(2024, 1, 1, tzinfo=UTC), None, None]),
    "map": (pa.map_(pa.string(), pa.string()), [[("a", "b")], None, []]),
    "list": (pa.list_(pa.int64()), [[1, 2], None, []]),
    "struct": (pa.struct([("a", pa.int8())]), [{"a": 1}, None, {"a": None}]),
    "decimal": (pa.decimal128(9, 2), [Decimal("1.50"), None, Decimal(0)]),
    "dictionary": (pa.dictionary(pa.int8(), pa.string()), ["a", None, "b"]),
    "null": (pa.null(), [None, None, None]),
}


@pytest.mark.parametrize("name", TYPES)
def test_digest_is_of_the_rows_when_they_lie_in_other_batches(name):
    kind, values = TYPES[name]
    whole = pa.table({name: pa.array(values, kind)})
    parts = pa.concat_tables([whole.slice(0, 1), whole.slice(1)])
    assert table_digest(parts) == table_digest(whole)
    sliced = pa.concat_tables([whole, whole]).combine_chunks().slice(3)
    assert table_digest(sliced) == table_digest(whole)
    assert table_digest(whole.slice(1)) != table_digest(whole)
    if name != "null":
        turned = pa.table({name: pa.array(values[::-1], kind)})
        assert table_digest(turned) != table_digest(whole)


@given(st.lists(st.binary(max_size=3), max_size=6), st.lists(st.binary(max_size=3), max_size=6))
def test_tables_have_one_digest_exactly_when_they_are_equal(values, other):
    tables = [pa.table({"value": pa.array(rows, pa.binary())}) for rows in (values, other)]
    assert (table_digest(tables[0]) == table_digest(tables[1])) == (values == other)


def test_digest_has_names_and_types():
    assert table_digest(pa.table({"a": [1]})) != table_digest(pa.table({"b": [1]}))
    assert table_digest(pa.table({"a": pa.array([1], pa.int32())})) != table_digest(
        pa.table({"a": [1]})
    )
