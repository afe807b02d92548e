"""Batches become exactly the rows that were sent, however they are sliced and combined."""

from __future__ import annotations

import subprocess
import sys
from base64 import b64encode

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from keylane.arrow import rows as rows_module
from keylane.arrow.planner import PlannedRange
from keylane.arrow.rows import RowBuilder
from keylane.arrow.schema import COLUMNS, EVERY_COLUMN, arrow_schema
from keylane.protocol.batch import encode_batch
from keylane.protocol.errors import CorruptBatchError
from keylane.protocol.message import pack_properties
from keylane.protocol.record import Compression, Kind, encode_record, stamp_record
from keylane.protocol.routing import logical_partition
from keylane.spark.schema import spark_schema

PARTITION = 7
Sent = tuple[bytes, bytes, int, dict[str, str]]


def batch(
    messages: list[Sent],
    base_offset: int,
    partition_id: int = PARTITION,
    compression: Compression = Compression.NONE,
) -> bytes:
    keys, values, times, properties = (list(column) for column in zip(*messages, strict=True))
    packed = [pack_properties(mapping) for mapping in properties]
    record = bytearray(
        encode_batch(
            partition_id=partition_id,
            sent_at_ns=times,
            keys=keys,
            values=values,
            properties=packed if any(packed) else (),
            compression=compression,
            producer_id=0xAB,
            producer_epoch=4,
            sequence=0,
        )
    )
    stamp_record(record, base_offset=base_offset, position=0, appended_at_ms=5_000 + base_offset)
    return bytes(record)


def planned(start: int, end: int) -> PlannedRange:
    return PlannedRange(
        partition_id=PARTITION,
        broker_group="g1",
        address="127.0.0.1:1",
        start=start,
        end=end,
        subject="flights",
        range_start=0,
        range_end=1024,
        queue=3,
        logic_start=1_000,
        epoch=2,
    )


def builder(start: int, end: int, columns=COLUMNS, batch_rows: int = 100) -> RowBuilder:
    return RowBuilder(planned(start, end), columns=tuple(columns), batch_rows=batch_rows)


def taken(build: RowBuilder, *payloads: bytes) -> list[pa.RecordBatch]:
    batches = [
        record_batch for payload in payloads for record_batch in build.add(memoryview(payload))
    ]
    return [*batches, *build.flush()]


def plain(count: int, at: int = 0) -> list[Sent]:
    return [(b"k%d" % n, b"v%d" % n, n * 1_000, {}) for n in range(at, at + count)]


def shown(value: str | bytes) -> str:
    return value if isinstance(value, str) else b64encode(value).decode()


def test_schema_is_sparks_to_the_letter():
    """The Arrow schema equals what Spark derives from the schema we tell it, whole and for chosen
    columns.
    """
    for columns in (COLUMNS, ("value", "offset"), ("properties", "timestamp", "key")):
        assert to_arrow_schema(spark_schema(columns), timezone="UTC").equals(arrow_schema(columns))


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
messages = st.tuples(
    st.binary(max_size=9),
    st.binary(max_size=30) | st.just(b"text" * 30),
    st.integers(-(2**62), 2**62),
    st.one_of(st.just({}), st.dictionaries(texts, texts | st.binary(max_size=5), max_size=3)),
)


@given(
    st.lists(st.lists(messages, min_size=1, max_size=7), min_size=1, max_size=6),
    st.integers(0, 2**40),
    st.data(),
)
@settings(deadline=None)
def test_rows_are_the_messages_of_the_range(batches, base, data):
    """For any batches, slices and frames, the rows are the range's messages in order."""
    total = sum(len(batch) for batch in batches)
    start = base + data.draw(st.integers(0, len(batches[0]) - 1), label="start")
    end = data.draw(st.integers(start, base + total), label="end")
    batch_rows = data.draw(st.integers(1, 12), label="batch_rows")
    records, offset = [], base
    for packed in batches:
        compression = data.draw(st.sampled_from(Compression), label="compression")
        records.append(batch(packed, offset, compression=compression))
        offset += len(packed)
    cut = data.draw(st.integers(0, len(records)), label="frame")
    build = builder(start, end, batch_rows=batch_rows)
    record_batches = taken(build, b"".join(records[:cut]), b"".join(records[cut:]))
    assert build.next_offset == end
    for record_batch in record_batches:
        record_batch.validate(full=True)
        assert record_batch.schema.equals(arrow_schema())
        assert 0 < record_batch.num_rows < batch_rows + 7
    table = pa.Table.from_batches(record_batches, arrow_schema())
    sent = [row for group in batches for row in group][start - base : end - base]
    assert table["offset"].to_pylist() == list(range(start, end))
    assert table["key"].to_pylist() == [row[0] for row in sent]
    assert table["value"].to_pylist() == [row[1] for row in sent]
    assert table["timestamp"].cast(pa.int64()).to_pylist() == [row[2] // 1_000 for row in sent]
    assert [dict(partition) for partition in table["properties"].to_pylist()] == [
        {name: shown(value) for name, value in row[3].items()} for row in sent
    ]
    assert set(table["partition"].to_pylist()) <= {PARTITION}
    assert sum(column.null_count for column in table.columns) == 0


def test_only_the_columns_asked_for_are_made():
    """The columns option decides names and order."""
    (record_batch,) = taken(builder(0, 5, columns=("value", "offset")), batch(plain(5), 0))
    assert record_batch.schema.names == ["value", "offset"]
    assert record_batch["value"].to_pylist() == [b"v0", b"v1", b"v2", b"v3", b"v4"]


def test_every_column_can_be_asked_for():
    """Columns of the plan, of the batch and of the key are in each row, over several batches, cut
    at both ends.
    """
    sent = [(b"", b"v", 0, {}), *plain(4), (b"k" * 99, b"v", 0, {"a": "b"})]
    build = builder(1, 9, columns=EVERY_COLUMN)
    (record_batch,) = taken(build, batch(plain(3), 0) + batch(sent, 3))
    record_batch.validate(full=True)
    assert record_batch.schema.equals(arrow_schema(EVERY_COLUMN))
    keys = [key for key, *_ in (plain(3) + sent)[1:9]]
    rows = record_batch.to_pydict()
    assert rows["subject"] == ["flights"] * 8
    assert rows["queue"] == [3] * 8
    assert rows["logic_offset"] == list(range(1_001, 1_009))
    assert rows["logical_partition"] == [logical_partition(key) if key else None for key in keys]
    assert rows["epoch"] == [2] * 8
    stored = record_batch["stored"].cast(pa.int64()).to_pylist()
    assert stored == [5_000_000] * 2 + [5_003_000] * 6
    assert rows["producer"] == ["00000000000000ab-4"] * 8


def test_worker_imports_no_pandas_when_it_builds_every_column():
    """Pandas, which pyarrow imports for some calls where it is installed, costs a quarter of a
    second and 47 MB.
    """
    record = batch([*plain(2), (b"", b"", 0, {"a": "b"})], 0)
    program = f"""
import sys
import keylane.arrow.range_reader
from keylane.arrow.planner import PlannedRange
from keylane.arrow.rows import RowBuilder
from keylane.arrow.schema import EVERY_COLUMN
planned = {planned(0, 3)!r}
(record_batch,) = RowBuilder(planned, columns=EVERY_COLUMN, batch_rows=3).add(memoryview({record!r}))
assert record_batch.num_rows == 3
print("pandas" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("False\n", "")
    subprocess.run([sys.executable, "-c", "import pandas"], check=True)


def test_small_batches_are_joined_and_large_ones_are_not_copied():
    """Many small batches become one of about batch_rows; a batch alone is a view of the bytes
    received.
    """
    small = [batch(plain(1, n), n) for n in range(250)]
    assert [batch.num_rows for batch in taken(builder(0, 250), b"".join(small))] == [100, 100, 50]
    record = batch(plain(100), 0)
    payload = memoryview(record)
    (record_batch,) = list(builder(0, 100).add(payload))
    values = record_batch["value"].buffers()[2]
    whole = pa.py_buffer(record)
    assert whole.address <= values.address < whole.address + whole.size


def test_large_values_end_an_arrow_batch_early(monkeypatch):
    """An Arrow batch is limited in bytes too: no worker should hold 16,384 large messages."""
    monkeypatch.setattr(rows_module, "BATCH_BYTES_MAX", 1_000)
    large = [batch([(b"k", bytes(400), 0, {})], n) for n in range(10)]
    assert [batch.num_rows for batch in taken(builder(0, 10), b"".join(large))] == [3, 3, 3, 1]


def test_batches_after_the_end_are_left():
    """Data beyond the range is neither examined nor yielded."""
    build = builder(2, 4)
    (record_batch,) = taken(build, batch(plain(5), 0) + batch(plain(5, 5), 5))
    assert record_batch["offset"].to_pylist() == [2, 3]
    assert build.next_offset == 4


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (batch(plain(3), 0) + batch(plain(3), 4), "offset 3 is missing"),
        (batch(plain(3), 0) + batch(plain(3), 0), "offset 3 is missing"),
        (batch(plain(3), 1), "offset 0 is missing"),
        (batch(plain(9), 0, partition_id=8), "a batch of partition 8"),
        (batch(plain(9), 0)[:-1], "cut short"),
        (batch(plain(9), 0) + b"\0", "cut short"),
        (batch(plain(9), 0)[:-1] + b"!", "body checksum"),
        (b"\0" * 200, "no magic"),
        (
            encode_record(
                bytes(8) + b"\5\0\0\0" + bytes(8) + b"ab",
                kind=Kind.MESSAGES,
                count=1,
                partition_id=PARTITION,
            ),
            "do not add up",
        ),
    ],
    ids=["hole", "again", "late", "stranger", "cut", "tail", "damage", "zeros", "lengths"],
)
def test_batch_without_the_next_offsets_is_refused(payload, reason):
    """A gap, an overlap, damage or another partition's batch raises a typed error."""
    build = builder(0, 9)
    with pytest.raises(CorruptBatchError, match=reason):
        list(build.add(memoryview(payload)))


def test_undecodable_properties_are_a_typed_error():
    """Damaged property bytes of a hostile sender are reported, and not guessed."""
    record = bytearray(
        encode_batch(
            partition_id=PARTITION,
            sent_at_ns=[0],
            keys=[b""],
            values=[b""],
            properties=[b"\xc1"],
            producer_id=1,
            producer_epoch=0,
            sequence=0,
        )
    )
    with pytest.raises(CorruptBatchError, match="unreadable properties"):
        taken(builder(0, 1), bytes(record))
