"""Rows of two outputs matched by place and key: the same differences as comparing row by row."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.errors import Reason
from keylane.protocol.reprocess.manifest import JobPiece
from keylane.spark.reprocess.compared_rows import (
    ComparedRows,
    compared_rows,
    differing_keys,
    select_pieces,
)
from keylane.spark.reprocess.messages import PROPERTIES
from support.raising import raises

Row = tuple[int, int, bytes, bytes]
"""Source partition, source offset, key, value."""
ROW = st.tuples(
    st.integers(1, 2), st.integers(0, 4), st.sampled_from([b"", b"a", b"bb"]), st.binary(max_size=1)
)


def side(rows: list[Row], *, order: tuple[str, ...] = ("replay", "n"), **more) -> ComparedRows:
    made = [
        {
            "key": key,
            "value": value,
            "properties": [
                *((name, "x") for name in order),
                ("keylane.source", f"{source}/{offset}"),
            ],
        }
        for source, offset, key, value in rows
    ]
    schema = pa.schema([("key", pa.binary()), ("value", pa.binary()), ("properties", PROPERTIES)])
    batch = pa.RecordBatch.from_pylist(made, schema)
    return compared_rows(batch, is_source=False, planned_us=None, where="out", **more)


def by_hand(old: list[Row], new: list[Row]) -> dict[tuple[int, bytes], tuple[int, int]]:
    """(source partition, key) → first offset, rows that differ."""
    matches: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for place in {row[:3] for row in (*old, *new)}:
        left, right = ([row[3] for row in rows if row[:3] == place] for rows in (old, new))
        if place[2] == b"":  # matched as sets
            same = sum(min(left.count(value), right.count(value)) for value in set(left))
            # What is left over of both sides stands side by side.
            unlike = max(len(left), len(right)) - same
        else:
            pairs = zip(left, right, strict=False)
            unlike = max(len(left), len(right)) - sum(a == b for a, b in pairs)
        matches[place[0], place[2]] += [place[1]] * unlike
    return {place: (min(offsets), len(offsets)) for place, offsets in matches.items() if offsets}


@settings(deadline=None)
@given(st.lists(ROW, max_size=12), st.lists(ROW, max_size=12), st.booleans())
def test_differences_are_those_of_a_comparison_row_by_row(old, new, changed):
    """Of rows without a key at one place the count is exact when one side has one row at most."""
    new = new if changed else [*old]
    places = [row[:3] for rows in (old, new) for row in rows if row[2] == b""]
    keyless_once = len(places) == len(set(places))
    matches = differing_keys(side(old), side(new, order=("n", "replay")))
    names = {side([(1, 0, key, b"")]).key[0]: key for key in (b"", b"a", b"bb")}
    got = {
        (source, names[key]): (first, rows)
        for source, key, first, rows in zip(
            matches.source.tolist(),
            matches.key,
            matches.first_offset.tolist(),
            matches.rows.tolist(),
            strict=True,
        )
    }
    expected = by_hand(old, new)
    assert got.keys() == expected.keys()
    assert all(got[place][0] == expected[place][0] for place in got)
    for place, (_, count) in got.items():
        if place[1] != b"" or keyless_once:
            assert count == expected[place][1]
    assert changed or not got


def test_row_differs_by_value_property_or_time_and_not_by_what_the_job_adds():
    time = pa.timestamp("us", "UTC")

    def one(value: bytes = b"v", properties=(), micros: int = 7, replay: str = "a") -> ComparedRows:
        added = [("replay", replay), ("keylane.source", "3/5")]
        columns = {
            "key": pa.array([b"k"]),
            "value": pa.array([value]),
            "timestamp": pa.array([micros], time),
            "properties": pa.array([[*properties, *added]], PROPERTIES),
        }
        batch = pa.RecordBatch.from_pydict(columns)
        return compared_rows(batch, is_source=False, planned_us=100, where="out")

    def count(old: ComparedRows, new: ComparedRows) -> int:
        return int(differing_keys(old, new).rows.sum())

    assert count(one(), one(replay="b")) == 0
    assert count(one(), one(micros=100)) == 0, "the function gave no time"
    for other in (one(b"w"), one(properties=[("n", "1")]), one(micros=8)):
        matches = differing_keys(one(), other)
        assert (matches.source.tolist(), matches.first_offset.tolist()) == ([3], [5])
        assert matches.rows.tolist() == [1]
    assert count(one(properties=[("n", "1")]), one(properties=[("n", "2")])) == 1


def test_messages_are_their_own_places_and_others_have_to_say_theirs():
    batch = pa.RecordBatch.from_pydict({"partition": [4], "offset": [9], "value": pa.array([b"v"])})
    rows = compared_rows(batch, is_source=True, planned_us=None, where="orders")
    assert (rows.source.tolist(), rows.offset.tolist()) == ([4], [9])
    with raises(
        Reason.OUTPUTS_DIFFER, match=r"orders: a row has no usable property keylane\.source"
    ):
        compared_rows(batch, is_source=False, planned_us=None, where="orders")


def test_rows_of_other_pieces_are_left_out():
    rows = side([(1, offset, b"a", b"") for offset in range(6)] + [(2, 0, b"a", b"")])

    def piece(partition_id: int, start: int, end: int) -> JobPiece:
        return JobPiece(partition_id=partition_id, start=start, end=end, rows=1, digest="", file="")

    chosen = select_pieces(rows, [piece(1, 4, 5), piece(1, 0, 2)])
    assert np.column_stack([chosen.source, chosen.offset]).tolist() == [[1, 0], [1, 1], [1, 4]]
    assert len(select_pieces(rows, [piece(3, 0, 9)])) == 0
