"""Arrow tables sent by column, against real brokers."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from keylane import Fate, Producer
from keylane.errors import Reason
from keylane.producer import ProducerSettings
from keylane.protocol.errors import InvalidRequestError, SubjectUnknownError
from keylane.protocol.limits import KEY_BYTES_MAX, MESSAGE_BYTES_MAX
from support.cluster import Cluster, assert_order_per_key
from support.raising import raises

ROWS = 100_000


def rows_of(count: int, first: int = 0) -> tuple[list[bytes], list[bytes]]:
    numbers = range(first, first + count)
    return [b"key-%d" % (number % 1_013) for number in numbers], [b"%d" % n for n in numbers]


def sent_of(keys: list[bytes], values: list[bytes]) -> dict[bytes, list[bytes]]:
    sent: dict[bytes, list[bytes]] = {}
    for key, value in zip(keys, values, strict=True):
        sent.setdefault(key, []).append(value)
    return sent


async def stored(cluster: Cluster, route: Any) -> list[Any]:
    log = await cluster.log(route)
    return [message for part in log.values() for message in part]


KINDS = {
    "binary": (pa.binary(), pa.binary()),
    "text": (pa.string(), pa.large_string()),
    "views": (pa.string_view(), pa.binary_view()),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), pa.large_binary()),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_table_keeps_the_order_of_each_key(shared_cluster: Cluster, kind: str):
    """All rows are stored once, in the order of their key, between the messages sent before and
    after.
    """
    subject = f"arrow-{kind}"
    route = await shared_cluster.create(subject, partitions=4)
    keys, values = rows_of(ROWS)
    key_type, value_type = KINDS[kind]
    key_column = pa.array([key.decode() for key in keys])
    table = pa.table(
        {
            "key": key_column.dictionary_encode()
            if pa.types.is_dictionary(key_type)
            else key_column.cast(key_type),
            "value": pa.array(values, pa.binary()).cast(value_type),
        }
    )
    async with Producer(shared_cluster.meta) as producer:
        producer.send(subject, b"before", key=keys[5])
        receipt = await producer.send_arrow(subject, table, key="key", value="value")
        producer.send(subject, b"after", key=keys[5])
        await producer.flush()
    assert (receipt.stored, receipt.refused) == (ROWS, {})
    sent = sent_of(keys, values)
    sent[keys[5]] = [b"before", *sent[keys[5]], b"after"]
    assert_order_per_key(await stored(shared_cluster, route), sent)


async def test_stream_is_sent_while_it_is_read(shared_cluster: Cluster):
    """A reader of record batches, sliced and of fixed width, is sent whole; rows without a key go
    anywhere.
    """
    route = await shared_cluster.create("arrow-stream", partitions=3)
    values = [b"%06d" % number for number in range(9_000)]
    keys = [None if number % 3 else b"k%d" % (number % 7) for number in range(9_000)]
    table = pa.table({"k": pa.array(keys, pa.binary()), "v": pa.array(values, pa.binary(6))})
    reader = pa.RecordBatchReader.from_batches(
        table.schema, table.slice(100).to_batches(max_chunksize=1_000)
    )
    async with Producer(shared_cluster.meta) as producer:
        assert (
            await producer.send_arrow("arrow-stream", reader, key="k", value="v")
        ).stored == 8_900
        unkeyed = await producer.send_arrow("arrow-stream", table.slice(0, 100), value="v")
        assert unkeyed.stored == 100
    messages = await stored(shared_cluster, route)
    assert sorted(message.value for message in messages) == values
    keyed = [(key, value) for key, value in zip(keys, values, strict=True) if key][34:]
    assert_order_per_key(
        [message for message in messages if message.key],
        sent_of([key for key, _ in keyed], [value for _, value in keyed]),
    )


async def test_small_queue_and_batches_hold_back_a_large_table(shared_cluster: Cluster):
    """A table of many times `queue_bytes` goes through, in batches within their limits."""
    route = await shared_cluster.create("arrow-small", partitions=2)
    keys, values = rows_of(20_000)
    values = [value + bytes(500) for value in values]
    settings = ProducerSettings(queue_bytes=1 << 20, batch_count=100)
    table = pa.table({"k": pa.array(keys, pa.binary()), "v": pa.array(values, pa.binary())})
    async with Producer(shared_cluster.meta, settings=settings) as producer:
        assert (
            await producer.send_arrow("arrow-small", table, key="k", value="v")
        ).stored == 20_000
    assert_order_per_key(await stored(shared_cluster, route), sent_of(keys, values))


async def test_no_row_is_sent_when_one_cannot_be(shared_cluster: Cluster):
    """
    A bad row deep in a table refuses all of it; with `partial` that row alone is left out, and
    named.

    Messages that the producer sends before and after a refused table are stored in order.
    """
    route = await shared_cluster.create("arrow-bad", partitions=2)
    keys, values = rows_of(80_000)
    bad_values: list[bytes | None] = [*values]
    bad_values[70_000] = None
    bad_values[70_001] = bytes(MESSAGE_BYTES_MAX)
    keys[70_002] = bytes(KEY_BYTES_MAX + 1)
    table = pa.table({"k": pa.array(keys, pa.binary()), "v": pa.array(bad_values, pa.binary())})
    async with Producer(shared_cluster.meta) as producer:
        before = [producer.send("arrow-bad", b"before", key=key) for key in (b"other", keys[0])]
        with raises(
            Reason.ROWS_REFUSED, match="3 rows cannot be sent, the first is row 70000: no value"
        ) as refused:
            await producer.send_arrow("arrow-bad", table, key="k", value="v")
        assert refused.value.rows == [70_000, 70_001, 70_002]
        for future in before:
            await future
        await producer.send("arrow-bad", b"after", key=b"other")
        values_stored = [message.value for message in await stored(shared_cluster, route)]
        assert sorted(values_stored) == [b"after", b"before", b"before"]
        receipt = await producer.send_arrow("arrow-bad", table, key="k", value="v", partial=True)
    assert receipt.stored == 79_997
    assert list(receipt.refused) == [70_000, 70_001, 70_002]
    good = [row for row in range(80_000) if row not in receipt.refused]
    sent = sent_of([keys[row] for row in good], [values[row] for row in good])
    sent[b"other"] = [b"before", b"after"]
    sent[keys[0]].insert(0, b"before")
    assert_order_per_key(await stored(shared_cluster, route), sent)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ([1, 2], "send_arrow takes a pyarrow Table"),
        (pa.array(["a"]), "Arrow does not accept this data"),
        (pa.table({"v": [b"1"]}), "the table must have exactly one column 'k'; it has v"),
        (pa.table({"k": [1], "v": [b"1"]}), "column 'k' holds int64, not bytes or text: cast it"),
    ],
)
async def test_source_without_the_columns_is_refused(
    shared_cluster: Cluster, source: Any, text: str
):
    async with Producer(shared_cluster.meta) as producer:
        with pytest.raises(InvalidRequestError, match=text):
            await producer.send_arrow("anything", source, key="k", value="v")


async def test_unknown_subject_refuses_a_table(shared_cluster: Cluster):
    async with Producer(shared_cluster.meta) as producer:
        with pytest.raises(SubjectUnknownError):
            await producer.send_arrow("arrow-nowhere", pa.table({"v": [b"1"]}), value="v")


async def test_frames_of_pandas_are_sent(shared_cluster: Cluster):
    import pandas as pd

    await shared_cluster.create("arrow-frame")
    frame = pd.DataFrame({"k": ["a", "b"], "v": ["1", "2"]})
    mixed = pd.DataFrame({"k": ["a", float("nan")], "v": ["3", "4"], "other": ["a", 1]})
    async with Producer(shared_cluster.meta) as producer:
        assert (await producer.send_arrow("arrow-frame", frame, key="k", value="v")).stored == 2
        assert (await producer.send_arrow("arrow-frame", mixed, key="k", value="v")).stored == 2


async def test_row_of_another_type_refuses_a_frame(shared_cluster: Cluster):
    """A number among the texts of row 70,000 refuses the frame; with `partial` that row alone is
    left out.
    """
    import pandas as pd

    route = await shared_cluster.create("arrow-objects")
    values: list[object] = [f"{row}" for row in range(70_010)]
    values[70_000] = 3.5
    frame = pd.DataFrame({"v": pd.Series(values, dtype=object), "k": "one key"})
    async with Producer(shared_cluster.meta) as producer:
        with raises(Reason.ROWS_REFUSED, match=r"row 70000: 3\.5 is neither bytes nor text"):
            await producer.send_arrow("arrow-objects", frame, key="k", value="v")
        assert not await stored(shared_cluster, route)
        receipt = await producer.send_arrow(
            "arrow-objects", frame, key="k", value="v", partial=True
        )
    assert (receipt.stored, list(receipt.refused)) == (70_009, [70_000])


@pytest.mark.cluster(brokers=1)
async def test_rows_given_up_are_named_when_the_broker_is_gone(cluster: Cluster):
    """Rows that cannot be stored within `delivery_timeout_ms` are counted and named, and none is
    told twice.
    """
    await cluster.create("arrow-gone", partitions=1)
    keys, values = rows_of(3_000)
    table = pa.table({"k": pa.array(keys, pa.binary()), "v": pa.array(values, pa.binary())})
    settings = ProducerSettings(delivery_timeout_ms=1_000)
    async with Producer(cluster.meta, settings=settings) as producer:
        await producer.send_arrow("arrow-gone", table.slice(0, 10), key="k", value="v")
        cluster.brokers[0].kill()
        with raises(Reason.ROWS_GIVEN_UP, match="3000 rows were given up") as gone:
            await producer.send_arrow("arrow-gone", table, key="k", value="v")
        assert gone.value.messages == 3_000
        assert gone.value.rows == list(range(100))
        await producer.flush()


def failing_reader(batches: int, rows: int) -> pa.RecordBatchReader:
    """A stream of `batches` record batches that raises behind the last."""
    schema = pa.schema([("k", pa.binary()), ("v", pa.binary())])

    def read() -> Iterator[pa.RecordBatch]:
        for number in range(batches):
            keys = [b"%d" % (row % 7) for row in range(rows)]
            values = [b"%d" % (number * rows + row) for row in range(rows)]
            yield pa.record_batch([pa.array(keys), pa.array(values)], schema)
        raise OSError("the file is cut off")

    return pa.RecordBatchReader.from_batches(schema, read())


@pytest.mark.parametrize("batches", [0, 3])
async def test_stream_that_raises_says_how_many_rows_are_stored(
    shared_cluster: Cluster, batches: int
):
    """The rows before are stored, in their order, and the source's own error is the cause."""
    subject = f"arrow-cut-{batches}"
    route = await shared_cluster.create(subject)
    async with Producer(shared_cluster.meta) as producer:
        with raises(Reason.ROWS_UNFINISHED, match="the file is cut off") as cut:
            await producer.send_arrow(subject, failing_reader(batches, 1_000), key="k", value="v")
        error = cut.value
        assert (error.sent, error.stored, error.messages) == (batches * 1_000, batches * 1_000, 0)
        assert error.fate is Fate.NOT_DONE
        assert isinstance(error.__cause__, OSError)
        await producer.flush()
    there = await stored(shared_cluster, route)
    assert sorted(int(message.value) for message in there) == list(range(batches * 1_000))


@pytest.mark.cluster(brokers=1)
async def test_stream_that_raises_counts_rows_that_were_given_up(cluster: Cluster):
    await cluster.create("arrow-cut-gone", partitions=1)
    settings = ProducerSettings(delivery_timeout_ms=1_000)
    async with Producer(cluster.meta, settings=settings) as producer:
        await producer.send_arrow("arrow-cut-gone", pa.table({"v": [b"1"]}), value="v")
        cluster.brokers[0].kill()
        with raises(Reason.ROWS_UNFINISHED, match="2000 were given up") as cut:
            await producer.send_arrow("arrow-cut-gone", failing_reader(2, 1_000), value="v")
        assert (cut.value.sent, cut.value.stored, cut.value.messages) == (2_000, 0, 2_000)
        assert cut.value.rows == list(range(100))


def test_table_is_cut_without_pandas():
    """Pandas, which pyarrow imports for some calls where it is installed, costs a quarter of a
    second and 47 MB.
    """
    code = """
import sys
import numpy as np
import pyarrow as pa
from keylane.producer.tables.arrow import ArrowSource
edges, blob = pa.py_buffer(np.array([0, 1, 3, 6], np.int64)), pa.py_buffer(b"abbccc")
column = pa.Array.from_buffers(pa.large_binary(), 3, [None, edges, blob])
table = pa.Table.from_arrays([column, column], names=["key", "value"])
(block,) = ArrowSource(table, key="key", value="value").iter_blocks()
assert not block.find_unsendable_rows(1 << 20)
assert block.take(np.array([2, 0])).values.row(0) == b"ccc"
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
