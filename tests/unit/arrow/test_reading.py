"""`keylane.arrow.read` returns a subject as a RecordBatchReader, without Spark."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pandas as pd
import pyarrow as pa
import pytest

import keylane.arrow
from keylane.arrow import reading
from keylane.arrow.selection import StoredAt
from keylane.protocol.errors import (
    ConfigError,
    DataLossError,
    KeylaneError,
    NotSentError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    Reason,
    SubjectUnknownError,
)
from support.raising import raises
from support.shelves import SENT_AT_NS, Sent, Shelves


@pytest.fixture
def filled(shelves: Shelves) -> Shelves:
    """Partitions 3 and 4 with 100 rows each, of keys 0 to 6; value 99 of partition 4 is not
    JSON.
    """
    for partition_id in (3, 4):
        for number in range(0, 100, 10):
            shelves.shelf(partition_id).put(
                *[
                    Sent(b"key-%d" % (each % 7), b'{"n": %d}' % each)
                    for each in range(number, number + 10)
                ]
            )
    shelves.shelf(4).put(Sent(b"key-1", b"no JSON"))
    return shelves


def test_reader_has_every_row_in_order(filled):
    """Rows are sorted by partition and offset; the schema is known before the first batch."""
    reader = keylane.arrow.read(filled.address, "flights", batch_rows=30)
    table = reader.read_all()
    assert table.schema.equals(reader.schema)
    assert table["partition"].to_pylist() == [3] * 100 + [4] * 101
    assert table["offset"].to_pylist() == [*range(100), *range(101)]


def test_reader_goes_to_pandas_and_through_the_arrow_stream_that_others_read(filled):
    """DuckDB and Polars import `__arrow_c_stream__`; pandas has the dtypes of Arrow's own
    conversion.
    """
    columns = ("partition", "offset", "timestamp", "properties")
    reader = keylane.arrow.read(filled.address, "flights", columns=columns)
    imported = pa.RecordBatchReader.from_stream(reader).read_all()
    assert imported["offset"].to_pylist() == [*range(100), *range(101)]
    frame = keylane.arrow.read(filled.address, "flights", columns=columns).read_pandas()
    assert frame.groupby("partition")["offset"].max().to_dict() == {3: 99, 4: 100}
    assert str(frame["timestamp"].dt.tz) == "UTC"


def test_reader_has_the_rows_and_columns_asked_for(filled):
    """Start, end, partitions, keys and columns are combined."""
    reader = keylane.arrow.read(
        filled.address,
        "flights",
        start={3: 10},
        end={3: 90},
        partitions=[3],
        keys=[b"key-2", b"key-none"],
        columns=("value", "offset"),
    )
    assert reader.schema.names == ["value", "offset"]
    assert reader.read_all()["offset"].to_pylist() == [at for at in range(10, 90) if at % 7 == 2]


@pytest.mark.parametrize("start", ["-1h", timedelta(hours=-1), "2023-11-14T22:00:00Z"])
def test_reader_begins_at_an_instant_as_every_reader_does(filled, monkeypatch, start):
    """How long ago or a time, as a text or a value: all rows were stored since."""
    monkeypatch.setattr(reading.SystemClock, "wall_ms", lambda: SENT_AT_NS // 1_000_000 + 60_000)
    assert keylane.arrow.read(filled.address, "flights", start=start).read_all().num_rows == 201
    assert keylane.arrow.read(filled.address, "flights", end=start).read_all().num_rows == 0


def test_reader_is_made_where_an_event_loop_runs(filled):
    """As in a notebook."""

    async def read() -> int:
        return keylane.arrow.read(filled.address, "flights").read_all().num_rows

    assert asyncio.run(read()) == 201


def test_values_are_decoded_with_a_schema(filled):
    """Text or Arrow schema; a value that does not fit is an error or a null."""
    for schema in ("n INT", pa.schema([("n", pa.int32())])):
        reader = keylane.arrow.read(
            filled.address, "flights", columns=["value"], schema=schema, bad_values="null"
        )
        values = reader.read_all()["value"].to_pylist()
        assert values == [{"n": number} for number in [*range(100), *range(100)]] + [None]
    reader = keylane.arrow.read(filled.address, "flights", schema="n INT")
    with raises(Reason.JSON_VALUE, match="partition 4, offset 100"):
        reader.read_all()


def test_reader_raises_the_error_of_the_read(filled):
    """Rows that were removed since the call raise DataLossError, as everywhere."""
    reader = keylane.arrow.read(filled.address, "flights")
    filled.shelf(4).first_offset = 50
    with pytest.raises(DataLossError, match="partition 4") as caught:
        reader.read_all()
    assert caught.value.lost_until == 50


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"columns": ["offzet"]}, ConfigError, "no column 'offzet'; there are"),
        ({"columns": []}, ConfigError, "give at least one, and each once"),
        ({"columns": ["key", "key"]}, ConfigError, "each once"),
        ({"columns": "key"}, ConfigError, "columns: give a list of names, not 'key'"),
        ({"partitions": 5}, ConfigError, "partitions: give a list of partition ids, not 5"),
        ({"partitions": "4"}, ConfigError, "partitions: give a list of partition ids"),
        (
            {"start": "yesterday"},
            ConfigError,
            "start: 'yesterday' is not a time: .* 'earliest', 'latest', 'group:NAME'",
        ),
        ({"start": pd.NaT}, ConfigError, "NaT is not an instant: give a datetime with a time zone"),
        ({"end": {"3": 1}}, ConfigError, "end: '3' is not a partition id"),
        ({"start": {3: 90}, "end": {3: 10}}, OffsetOutOfRangeError, "after the end"),
        ({"end": {3: 500}}, OffsetOutOfRangeError, "offset 500 is not in partition 3"),
        ({"end": {3: -1}}, KeylaneError, "-1"),
        ({"keys": ["k"]}, ConfigError, "keys: give a list of bytes"),
        ({"keys": b"k"}, ConfigError, "keys: give a list of bytes"),
        ({"keys": 5}, ConfigError, "keys: give a list of bytes"),
        ({"columns": 5}, ConfigError, "columns: give a list of names, not 5"),
        ({"start": {3: True}}, KeylaneError, "not an offset: True"),
        ({"schema": 5}, ConfigError, "schema: give NAME TYPE, … or a pyarrow.Schema, not 5"),
        ({"bad_values": "skip"}, ConfigError, "bad_values"),
        ({"bad_values": None}, ConfigError, "bad_values"),
        ({"bad_values": "null"}, ConfigError, "values are decoded only with a schema"),
        ({"start": "1h"}, ConfigError, "how long ago"),
        ({"start": "2024-05-31T12:00:00"}, ConfigError, "no time zone"),
        ({"end": datetime(2999, 1, 1, tzinfo=UTC)}, ConfigError, "in the future"),
        ({"batch_rows": 0}, ConfigError, "batch_rows"),
        ({"bytes_per_second": 0}, ConfigError, "bytes_per_second"),
        ({"schema": "n WHAT"}, ConfigError, "schema: one of"),
        ({"bad_values": "skip", "schema": "n INT"}, ConfigError, "bad_values"),
        ({"partitions": [5]}, PartitionUnknownError, "partition 5"),
        ({"subject": "flight"}, SubjectUnknownError, "flight"),
        ({"subject": "fli ght"}, KeylaneError, "fli ght"),
        ({"meta": "nowhere"}, KeylaneError, "nowhere"),
        ({"meta": "127.0.0.1:1"}, NotSentError, "cannot reach"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_are_told_by_the_call(filled, monkeypatch, arguments, error, text):
    """The error names the argument, and nothing is read."""
    monkeypatch.setattr("keylane.arrow.snapshot.META_RETRY_S", 0.5)
    with pytest.raises(error, match=text):
        keylane.arrow.read(**{"meta": filled.address, "subject": "flights"} | arguments)
    assert filled.reads == []


def test_reading_imports_neither_pyspark_nor_pandas(filled):
    """In a fresh process, to the last row and at the exit."""
    program = f"""
import sys, keylane.arrow
reader = keylane.arrow.read({filled.address!r}, "flights", schema="n INT", bad_values="null")
rows = sum(batch.num_rows for batch in reader)
print(rows, {{"pyspark", "pandas"}} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("201 set()\n", "")


def test_start_is_the_millisecond_that_is_given_after_2038(monkeypatch):
    """A quarter of all times meant the millisecond before, and gave messages that were stored in
    it.
    """
    begin = datetime(2039, 1, 1, tzinfo=UTC)
    begin_ms = int(begin.timestamp()) * 1_000
    monkeypatch.setattr(reading.SystemClock, "wall_ms", lambda: begin_ms + 1_000)
    given = [begin + timedelta(milliseconds=ms) for ms in range(1_000)]
    wanted = [StoredAt(begin_ms + ms) for ms in range(1_000)]
    assert [reading._parse_point("start", at) for at in given] == wanted
