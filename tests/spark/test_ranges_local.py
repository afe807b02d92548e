"""Ranges by `mapInArrow`, and workers that are warm, in a real local Spark session."""

from __future__ import annotations

import gc
import json
import sys

import pyarrow as pa
import pytest
from pyspark.errors import PythonException

from keylane.arrow.snapshot import take_snapshot
from keylane.protocol.errors import DataLossError
from keylane.spark.failure import parse_error
from keylane.spark.options import parse_options
from keylane.spark.ranges import read_ranges
from keylane.spark.schema import spark_schema
from support.shelves import Sent, Shelves


@pytest.fixture
def filled(shelves: Shelves) -> Shelves:
    """Partitions 3, 4 and 5 with 300 rows each."""
    for partition_id in (3, 4, 5):
        for number in range(0, 300, 100):
            values = [json.dumps({"n": number + each}).encode() for each in range(100)]
            shelves.shelf(partition_id).put(*[Sent(b"k%d" % partition_id, v) for v in values])
    return shelves


def options(shelves: Shelves, **given: str):
    return parse_options({"meta": shelves.address, "subject": "flights", **given}, now_ms=0)


def test_ranges_are_a_frame_of_their_rows_in_the_tasks_given(spark, filled):
    """One task for each element; a list of ranges is read in its order."""
    asked = options(filled, columns="partition,offset")
    three, four, five = take_snapshot(asked)
    frame = read_ranges(spark, asked, [[five, three], four])
    assert frame.schema == spark_schema(("partition", "offset"))
    assert frame.rdd.getNumPartitions() == 2
    tasks = frame.rdd.mapPartitions(lambda rows: [[tuple(row) for row in rows]]).collect()
    assert tasks == [
        [(number, at) for number in (5, 3) for at in range(300)],
        [(4, at) for at in range(300)],
    ]


def test_function_runs_in_the_worker_over_the_batches_of_a_task(spark, filled):
    """It sees all columns asked for, and makes rows of its own."""

    def count(batches):
        rows = sum(batch.num_rows for batch in batches)
        yield pa.RecordBatch.from_pydict({"rows": [rows]})

    asked = options(filled)
    frame = read_ranges(spark, asked, take_snapshot(asked), apply=count, schema="rows LONG")
    assert [row.rows for row in frame.collect()] == [300, 300, 300]


def test_no_ranges_are_an_empty_frame(spark, filled):
    """Nothing to read has the columns still."""
    asked = options(filled, columns="key")
    frame = read_ranges(spark, asked, [])
    assert (frame.columns, frame.count()) == (["key"], 0)


def test_error_of_a_range_is_found_in_the_message_of_the_driver(spark, filled):
    """With its code, as from the data source."""
    asked = options(filled)
    ranges = take_snapshot(asked)
    filled.shelf(4).first_offset = 200
    with pytest.raises(PythonException) as caught:
        read_ranges(spark, asked, ranges).collect()
    error = parse_error(str(caught.value))
    assert isinstance(error, DataLossError)
    assert (error.partition_id, error.lost_until) == (4, 200)


def test_values_are_decoded_in_the_worker(spark, filled):
    """A scan with a schema has structs, which SQL reads by field, and nulls for values that do not
    fit.
    """
    filled.shelf(5).put(Sent(b"k", b"no JSON"))
    reader = spark.read.format("keylane").options(
        meta=filled.address,
        subject="flights",
        jsonSchema="n INT, tags ARRAY<STRING>",
        badValues="null",
    )
    row = reader.load().selectExpr("sum(value.n) s", "count(value.n) n", "count(*) c").first()
    assert (row.s, row.n, row.c) == (3 * sum(range(300)), 900, 901)


FROM_JSON = [
    ("s STRING", b'{"s":{"k":1}}'),
    ("s STRING", b'{"s": {"k" : 1.5, "b":[1, {"x":"\\u00e9\\n"}]}}'),
    ("s STRING", b'{"s":5}'),
    ("s STRING", b'{"s":[1]}'),
    ("s STRING", b'{"s":true}'),
    ("s STRING", b'{"s":"a\nb"}'),
    ("s STRING", b'{"s":\n"ab"\t}'),
    ("s ARRAY<STRING>", b'{"s":[1,"x",{"k":1},null,true]}'),
    ("s TIMESTAMP", b'{"s":"2026-11-20T12:00:00.123456789Z"}'),
    ("s TIMESTAMP", b'{"s":1700000000}'),
    ("s INT", b'{"s":1,"s":2}'),
    ("s DOUBLE", b'{"s":"-INF"}'),
]


def test_values_are_those_of_from_json(spark, shelves):
    """Maps, numbers, flags and arrays as texts, fine times, a field given twice; a raw control
    character fits neither.
    """
    for place, (_, value) in enumerate(FROM_JSON):
        shelves.shelf(place + 1).put(Sent(b"k", value))
    for place, (schema, value) in enumerate(FROM_JSON):
        reader = spark.read.format("keylane").options(
            meta=shelves.address,
            subject="flights",
            partitions=str(place + 1),
            jsonSchema=schema,
            badValues="null",
        )
        row = reader.load().selectExpr("value.s found").first()
        text = f"cast(unhex('{value.hex()}') AS STRING)"
        wanted = spark.sql(f"SELECT from_json({text}, '{schema}').s wanted").first().wanted
        assert row.found == wanted, value


def test_workers_are_forked_with_keylane_loaded(spark):
    """What the daemon loaded is in the worker before its first task asks, outside of its
    collections.
    """

    def look(_rows):
        return [("keylane.arrow.range_reader" in sys.modules, gc.get_freeze_count() > 1_000)]

    states = spark.sparkContext.parallelize([1], 1).mapPartitions(look).collect()
    assert states == [(True, True)]
