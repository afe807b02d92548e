"""Where two outputs of a range differ, by key and first offset."""

from __future__ import annotations

import pyarrow as pa

from keylane.spark.reprocess.comparing import KeyDifference, find_differences


def rows(*values: tuple[int, bytes, bytes], replay: str = "a") -> pa.Table:
    columns = ("offset", "key", "value")
    table = pa.table({name: [row[number] for row in values] for number, name in enumerate(columns)})
    return table.append_column("replay", pa.array([replay] * len(values), pa.string()))


def test_equal_rows_have_no_difference_whatever_job_made_them():
    table = rows((1, b"k", b"x"), (2, b"l", b"y"))
    assert find_differences(3, table, rows((1, b"k", b"x"), (2, b"l", b"y"), replay="b")) == []


def test_each_key_is_named_with_its_first_offset_by_that_offset():
    old = rows((1, b"k", b"x"), (2, b"l", b"y"), (4, b"k", b"x"), (5, b"m", b"z"))
    new = rows((1, b"k", b"x"), (2, b"l", b"Y"), (4, b"k", b"X"), (4, b"k", b"X"), (6, b"n", b"z"))
    assert find_differences(3, old, new) == [
        KeyDifference(partition_id=3, key=b"l", first_offset=2, rows=1),
        KeyDifference(partition_id=3, key=b"k", first_offset=4, rows=2),
        KeyDifference(partition_id=3, key=b"m", first_offset=5, rows=1),
        KeyDifference(partition_id=3, key=b"n", first_offset=6, rows=1),
    ]


def test_rows_without_key_and_offset_are_compared_in_their_order():
    old, new = pa.table({"n": [1, 2, 3]}), pa.table({"n": [1, 2, 4]})
    assert find_differences(3, old, new) == [
        KeyDifference(partition_id=3, key=None, first_offset=None, rows=1)
    ]
