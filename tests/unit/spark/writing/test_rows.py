"""Rows as columns: the same batches however Spark cuts its record batches, and errors that name a
row.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.protocol.batch import check_batch, columns, encode_body
from keylane.protocol.errors import Reason
from keylane.protocol.limits import LOGICAL_PARTITIONS
from keylane.protocol.message import pack_properties
from keylane.protocol.routing import logical_partition
from keylane.spark.writing.rows import (
    BATCH_BYTES,
    BATCH_ROWS,
    MICROS_MAX,
    BatchCutter,
    Body,
    RowColumns,
    RowReader,
    Span,
)
from support.raising import raises


def reader() -> RowReader:
    return RowReader(salt=b"job", message_bytes_max=1 << 20, task=3)


def bodies(table: pa.Table, chunk: int) -> list[bytes]:
    """The bodies of one lane that gets the rows of a table in record batches of `chunk` rows."""
    read, cutter, made, digest = reader(), BatchCutter(), [], 0
    batches = [whole(read.read(batch)) for batch in table.to_batches(max_chunksize=chunk)]
    cut = [spans for span in batches for spans in cutter.add(span)]
    for spans in [*cut, cutter.pop_rest()]:
        body = Body(spans, sent_at_ns=5, previous_digest=digest)
        digest = body.digest
        made.append(body.data)
    return made


def whole(rows: RowColumns) -> Span:
    return Span(rows, 0, len(rows))


@pytest.mark.parametrize("size", [0, 10, 200, 5_000])
def test_batches_are_the_same_however_the_rows_come(size: int):
    """They end where a row would make them too large, or at their number of rows."""
    count = 20_000 if size < 1_000 else 300
    values = [b"%d" % n + b"v" * (n * 7919 % (size + 1)) for n in range(count)]
    table = pa.table({"key": [b"k%d" % (n % 9) for n in range(count)], "value": values})
    expected = bodies(table, count)
    assert len(expected) > 1
    assert all(len(body) <= BATCH_BYTES for body in expected)
    for chunk in (1_000, 97):
        assert bodies(table, chunk) == expected


def test_rows_become_messages_with_all_their_columns():
    """Key, value, properties and time, as a reader of the batch sees them."""
    table = pa.record_batch(
        {
            "value": pa.array(["a", "b"]),
            "key": pa.array([b"k", None]),
            "properties": pa.array([[("n", "1")], None], type=pa.map_(pa.string(), pa.string())),
            "timestamp": pa.array([1_000, 2_000], pa.timestamp("us", "UTC")),
        }
    )
    rows = reader().read(table)
    body = Body([whole(rows)], sent_at_ns=9, previous_digest=0)
    data = encode_body(body.data, count=2, partition_id=1, sequence=0)
    decoded = columns(data, check_batch(data))
    for edges, texts in (
        (decoded.key_edges, [b"k", b""]),
        (decoded.value_edges, [b"a", b"b"]),
        (decoded.property_edges, [pack_properties({"n": "1"}), b""]),
    ):
        assert [decoded.blob[start:end] for start, end in pairwise(edges)] == texts
    assert (body.first_ns, body.last_ns) == (1_000_000, 2_000_000)


def test_rows_have_their_times_to_the_edges_of_what_a_message_holds():
    """A DataFrame has years from 1 to 9999; nanoseconds of 64 bits do not."""
    rows = reader().read(pa.record_batch(times(-MICROS_MAX, 0, MICROS_MAX)))
    assert rows.times is not None
    assert rows.times.tolist() == [-MICROS_MAX * 1_000, 0, MICROS_MAX * 1_000]


def test_rows_say_whether_they_have_a_key():
    values = [b"v"] * 3
    rows = reader().read(pa.record_batch({"value": values, "key": [b"k", None, b""]}))
    assert rows.keyed.tolist() == [True, False, False]
    assert reader().read(pa.record_batch({"value": values})).keyed.tolist() == [False] * 3
    texts = pa.array(["k", None, ""])
    with raises(Reason.ROWS_INVALID, match="row 2 of task 3, column key: an empty text"):
        reader().read(pa.record_batch({"value": values, "key": texts}))


def test_keys_go_where_other_clients_send_them():
    """A key's partition does not depend on who hashes it."""
    keys = [b"", b"a", b"key-12", b"x" * 100]
    rows = reader().read(pa.record_batch({"key": keys, "value": keys}))
    assert rows.logical_partitions.tolist()[1:] == [logical_partition(key) for key in keys[1:]]
    assert 0 <= rows.logical_partitions[0] < LOGICAL_PARTITIONS


def test_rows_without_key_go_to_the_same_partitions_each_time():
    """By the number of the row; a run of them goes to one partition."""
    values = pa.record_batch({"value": [b"v"] * 9_000})
    first, second = reader().read(values), reader()
    again = np.concatenate(
        [second.read(values[at : at + 500]).logical_partitions for at in range(0, 9_000, 500)]
    )
    assert np.array_equal(first.logical_partitions, again)
    assert len(np.unique(again)) == 3


@given(start=st.integers(0, LOGICAL_PARTITIONS - 1), size=st.integers(1, LOGICAL_PARTITIONS))
def test_rows_without_key_stay_in_their_bounds_and_others_go_by_their_key(start: int, size: int):
    """The same ones in each attempt, spread over the bounds."""
    end = min(start + size, LOGICAL_PARTITIONS)
    keys = [b"k%d" % row if row % 10_000 == 0 else None for row in range(100_000)]
    batch = pa.record_batch({"value": [b"v"] * len(keys), "key": pa.array(keys, pa.binary())})
    first, again = (
        RowReader(salt=b"job", message_bytes_max=1 << 20, task=3, keyless_bounds=(start, end))
        .read(batch)
        .logical_partitions
        for _ in range(2)
    )
    assert np.array_equal(first, again)
    assert first[::10_000].tolist() == [logical_partition(key) for key in keys if key]
    keyless = np.delete(first, range(0, len(keys), 10_000))
    assert start <= keyless.min() <= keyless.max() < end
    assert len(np.unique(keyless)) > 1 or end - start < 10


def test_batch_has_at_most_its_number_of_rows():
    """Rows without bytes end a batch by their number."""
    rows = reader().read(pa.record_batch({"value": [b""] * (BATCH_ROWS + 1)}))
    cutter = BatchCutter()
    assert list(cutter.add(whole(rows))) == [[Span(rows, 0, BATCH_ROWS)]]
    assert cutter.pop_rest() == [Span(rows, BATCH_ROWS, BATCH_ROWS + 1)]
    assert cutter.pop_rest() == []


def test_row_over_the_limit_of_a_batch_is_a_batch_alone():
    """It takes no row with it, before or behind."""
    sizes = [10, BATCH_BYTES + 1, 10]
    rows = reader().read(pa.record_batch({"value": [b"v" * size for size in sizes]}))
    cutter = BatchCutter()
    cut = [*cutter.add(whole(rows)), cutter.pop_rest()]
    assert cut == [[Span(rows, row, row + 1)] for row in range(3)]


@settings(deadline=None)
@given(
    keys=st.lists(st.one_of(st.none(), st.binary(max_size=12)), max_size=60),
    at=st.integers(0, 60),
    edges=st.sets(st.integers(1, LOGICAL_PARTITIONS - 1), max_size=6),
    kind=st.sampled_from([pa.binary(), pa.large_binary()]),
)
def test_span_gives_each_range_its_rows_in_order(
    keys: list[bytes | None], at: int, edges: set[int], kind: pa.DataType
):
    """Every row once, with its key and its value, whatever is null, empty or cut off in front."""
    values = [b"%d" % number for number in range(len(keys))]
    batch = pa.record_batch({"key": pa.array(keys, kind), "value": pa.array(values, kind)})
    rows = reader().read(batch)
    cuts = sorted({0, LOGICAL_PARTITIONS, *edges})
    bounds = list(pairwise(cuts))
    span = Span(rows, min(at, len(keys)), len(keys))
    given_to: dict[int, list[tuple[bytes, bytes]]] = {}
    for number, mine in span.split_by_bounds(bounds):
        assert mine.rows.keys is not None
        places = range(mine.start, mine.end)
        given_to[number] = [(mine.rows.keys.row(n), mine.rows.values.row(n)) for n in places]
    expected: dict[int, list[tuple[bytes, bytes]]] = {}
    for row in range(span.start, span.end):
        number = next(
            n for n, each in enumerate(bounds) if rows.logical_partitions[row] in range(*each)
        )
        expected.setdefault(number, []).append((keys[row] or b"", values[row]))
    assert given_to == expected


def test_empty_record_batch_gives_no_rows():
    """As Spark may hand it over: with buffers of no bytes."""
    schema = pa.schema({"key": pa.string(), "value": pa.binary()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.RecordBatch.from_pylist([], schema))
    batch = pa.ipc.open_stream(sink.getvalue()).read_next_batch()
    rows = reader().read(batch)
    assert list(whole(rows).split_by_bounds([(0, LOGICAL_PARTITIONS)])) == []
    assert list(BatchCutter().add(whole(rows))) == []


def times(*micros: int) -> dict[str, object]:
    return {"value": [b"v"] * len(micros), "timestamp": pa.array(micros, pa.timestamp("us", "UTC"))}


def maps(*rows: list[tuple[str, str | None]]) -> pa.Array:
    return pa.array(rows, pa.map_(pa.string(), pa.string()))


@pytest.mark.parametrize(
    ("column", "table"),
    [
        ("value", {"value": pa.array([b"a", None])}),
        ("value", {"value": [b"a", b"x" * (2 << 20)]}),
        ("key", {"value": [b"a", b"b"], "key": [b"", b"k" * 1_025]}),
        ("properties", {"value": [b"a", b"b"], "properties": maps([("n", "1")], [("n", None)])}),
        ("properties", {"value": [b"a", b"b"], "properties": maps([], [("n", "x" * 70_000)])}),
        (
            "properties",
            {"value": [b"a", b"b"], "properties": maps([("n", "1")], [("keylane.source", "3/1")])},
        ),
        (
            "timestamp",
            {"value": [b"a", b"b"], "timestamp": pa.array([1, None], pa.timestamp("us"))},
        ),
        ("timestamp", times(MICROS_MAX, MICROS_MAX + 1)),
        ("timestamp", times(-MICROS_MAX, -MICROS_MAX - 1)),
        ("timestamp", times(0, -(1 << 63))),
    ],
)
def test_row_that_cannot_be_sent_is_named(column: str, table: dict):
    """By its column, its number in the task and the task."""
    with raises(Reason.ROWS_INVALID) as caught:
        reader().read(pa.record_batch(table))
    assert (caught.value.column, caught.value.row, caught.value.task) == (column, 1, 3)


def test_properties_of_keylane_are_taken_from_a_job():
    """Rows of a job say what they were made of, and those of a user may be sent on with their
    tags.
    """
    made = maps([("keylane.source", "3/1")], [("keylane.tags", "paid")])
    table = pa.record_batch({"value": [b"a", b"b"], "properties": made})
    job = RowReader(salt=b"job", message_bytes_max=1 << 20, task=3, allow_reserved=True)
    assert len(job.read(table)) == 2
    assert len(reader().read(table.slice(1, 1))) == 1
