"""Rows of a job as messages: their properties, and what is refused."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.errors import Reason
from keylane.protocol.reprocess.manifest import JobPiece
from keylane.spark.reprocess.messages import PROPERTIES, add_properties, to_messages
from support.raising import raises

PIECE = JobPiece(partition_id=3, start=10, end=12, rows=2, digest="d", file="")
texts = st.text(max_size=4)


@settings(deadline=None)  # the first call of pyarrow loads pandas where it is installed
@given(
    st.lists(st.none() | st.dictionaries(texts, texts, max_size=3), max_size=8), st.integers(0, 3)
)
def test_each_row_has_its_properties_and_then_the_new_ones(rows, cut):
    """Also of a slice, whose buffers begin elsewhere."""
    given_rows = [None if row is None else list(row.items()) for row in rows]
    column = pa.array(given_rows, PROPERTIES)[cut:]
    new = [f"3/{number}" for number in range(len(column))]
    made = add_properties(
        column, {"a": pa.array(new, pa.string()), "b": pa.array(new, pa.string())}
    )
    assert made.to_pylist() == [
        [*(row or ()), ("a", text), ("b", text)]
        for row, text in zip(given_rows[cut:], new, strict=True)
    ]
    assert add_properties(None, {"a": pa.array(new, pa.string())}).to_pylist() == [
        [("a", text)] for text in new
    ]


def test_message_says_its_job_and_what_it_was_made_of():
    """Columns of the source are not stored; without offsets the job alone is said."""
    rows = pa.table(
        {"partition": [3, 3], "offset": [10, 11], "key": [b"k", b"l"], "value": [b"v", b"w"]}
    )
    made = to_messages(rows, job="clean", piece=PIECE)
    assert made.column_names == ["key", "value", "properties"]
    assert made["properties"].to_pylist() == [
        [("replay", "clean"), ("keylane.source", f"3/{offset}")] for offset in (10, 11)
    ]
    alone = to_messages(rows.select(["value"]), job="clean", piece=PIECE)
    assert alone["properties"].to_pylist() == [[("replay", "clean")]] * 2
    assert to_messages(rows.slice(0, 0), job="clean", piece=PIECE).num_rows == 0


@pytest.mark.parametrize("names", [["value", "properties", "offset"], ["value", "properties"]])
def test_row_made_of_rows_says_its_own_job_and_source(names):
    """What the message that was read says of itself is not true of its row, also of a function that
    leaves out the offset.
    """
    of_message = [
        ("a", "b"),
        ("keylane.source", "1/7"),
        ("replay", "earlier"),
        ("keylane.tags", "x"),
    ]
    rows = pa.table(
        {
            "offset": [10, 11, 12],
            "value": [b"v"] * 3,
            "properties": pa.array([None, of_message, [("c", "d")]], PROPERTIES),
        }
    )
    made = to_messages(rows.select(names), job="clean", piece=PIECE)["properties"].to_pylist()
    sources = [[("keylane.source", f"3/{at}")] if "offset" in names else [] for at in (10, 11, 12)]
    kept = [[], [("a", "b"), ("keylane.tags", "x")], [("c", "d")]]
    assert made == [
        [*own, ("replay", "clean"), *source] for own, source in zip(kept, sources, strict=True)
    ]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_texts_are_stored_as_they_are_whatever_their_layout_is(kind):
    """As of Polars and pandas, whose texts have other buffers; values of a dictionary, too."""
    texts = ["a", None, "b" * 30]
    column = pa.array(texts, kind)
    made = to_messages(
        pa.table({"value": column, "key": column.cast(pa.string()).dictionary_encode()}),
        job="clean",
        piece=PIECE,
    )
    assert made["value"].type == made["key"].type == pa.large_binary()
    for name in ("value", "key"):
        assert made[name].to_pylist() == [each and each.encode() for each in texts]


def test_texts_of_a_dictionary_of_views_are_stored():
    """Polars has categories so."""
    column = pa.DictionaryArray.from_arrays(
        [1, 0, None], pa.array(["a", "b" * 30], pa.string_view())
    )
    made = to_messages(pa.table({"value": column}), job="clean", piece=PIECE)
    assert made["value"].to_pylist() == [b"b" * 30, b"a", None]


@pytest.mark.parametrize(
    ("unit", "count"),
    [("s", 1_700_000_000), ("ms", 1_700_000_000_000), ("ns", 1_700_000_000_000_000_000 + 999)],
)
def test_time_is_the_same_whatever_its_unit_is(unit, count):
    """pandas gives nanoseconds; the reader gives microseconds."""
    column = pa.array([count], pa.timestamp(unit, "Europe/Berlin"))
    made = to_messages(pa.table({"value": [b"v"], "timestamp": column}), job="clean", piece=PIECE)
    assert made["timestamp"].cast(pa.int64()).to_pylist() == [1_700_000_000_000_000]


@pytest.mark.parametrize(
    "columns",
    [
        {"key": [b"k"]},
        {"value": [b"v"], "more": [1]},
        {"value": [b"v"], "offset": ["x"]},
        {"value": [b"v"], "properties": [1]},
        {"value": [1]},
        {"value": [b"v"], "key": [1.5]},
        {"value": [b"v"], "timestamp": ["yesterday"]},
        {"value": [b"v"], "timestamp": pa.array([1 << 62], pa.timestamp("s"))},
    ],
)
def test_rows_that_are_no_messages_are_refused(columns):
    with raises(Reason.JOB_FAILED, match=r"job clean at \[10, 12\) of partition 3"):
        to_messages(pa.table(columns), job="clean", piece=PIECE)
