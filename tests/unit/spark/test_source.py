"""The data source without a JVM: plan, read, pickle, and every way a read can go wrong."""

from __future__ import annotations

import gc
import itertools
import pickle
import time
from collections import Counter
from dataclasses import replace

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from keylane.arrow import range_reader
from keylane.arrow.schema import arrow_schema
from keylane.protocol.backoff import Backoff
from keylane.protocol.errors import (
    ConfigError,
    CorruptBatchError,
    DataLossError,
    FencedError,
    GroupUnknownError,
    KeylaneError,
    NotSentError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    OverloadedError,
    PartitionUnknownError,
    Reason,
    StaleRouteError,
    SubjectUnknownError,
)
from keylane.protocol.frames import Batches
from keylane.protocol.limits import PULL_BYTES_MAX
from keylane.protocol.record import HEADER_BYTES, stamp_record
from keylane.protocol.routing import PartitionState
from keylane.spark.failure import parse_error
from keylane.spark.schema import key_was_read, spark_schema
from keylane.spark.source import KeylaneReader, KeylaneSource, KeylaneTask
from support.raising import raises
from support.shelves import SENT_AT_NS, Sent, Shelves

ROWS = 1_000


def message(number: int) -> Sent:
    properties = {"n": str(number)} if number % 10 == 0 else {}
    return Sent(
        b"key-%d" % (number % 7),
        b"v" * (number % 5) + b"%d" % number,
        SENT_AT_NS + number,
        properties,
    )


@pytest.fixture
def filled(shelves: Shelves) -> Shelves:
    """Partition 3 has ROWS messages in batches of 1 to 19, 4 has none, 9 is sealed and has 10."""
    shelf, number, size = shelves.shelf(3), 0, 1
    while number < ROWS:
        size = min(size % 19 + 1, ROWS - number)
        shelf.put(*map(message, range(number, number + size)))
        number += size
    shelves.shelf(4)
    shelves.shelf(9, PartitionState.SEALED).put(*map(message, range(10)))
    return shelves


@pytest.fixture
def quick(monkeypatch):
    """Tries follow each other without the waits of production."""
    monkeypatch.setattr(range_reader, "_BACKOFF", Backoff(first_ms=1, max_ms=1))


def source(shelves: Shelves, **options: str) -> KeylaneSource:
    return KeylaneSource(
        {"meta": shelves.address, "subject": "flights", "retrySeconds": "5", **options}
    )


def reader(shelves: Shelves, **options: str) -> KeylaneReader:
    made = source(shelves, **options)
    return made.reader(made.schema())


def rows(source: KeylaneReader) -> pa.Table:
    batches = [record_batch for part in source.partitions() for record_batch in source.read(part)]
    return pa.Table.from_batches(batches, arrow_schema(source._options.columns))


def planned(source: KeylaneReader) -> list[list[tuple[int, int, int]]]:
    return [
        [(each.partition_id, each.start, each.end) for each in part.ranges]
        for part in source.partitions()
    ]


def test_small_partitions_share_a_task_and_empty_ones_have_none(filled):
    """Pinned ranges from one route and one call to the broker, for the partitions in question
    only.
    """
    assert planned(reader(filled)) == [[(3, 0, ROWS), (9, 0, 10)]]
    assert filled.calls == ["route", "bounds"]
    assert planned(reader(filled, partitions="3")) == [[(3, 0, ROWS)]]
    assert filled.asked == [[3, 4, 9], [3]]


def test_large_partition_is_cut_when_asked_for(filled):
    """Never without minPartitions or taskBytes."""
    assert len(reader(filled, partitions="3").partitions()) == 1
    cut = reader(filled, partitions="3", minPartitions="3")
    assert len(cut.partitions()) == 4
    assert rows(cut)["offset"].to_pylist() == list(range(ROWS))


def test_rows_are_what_was_sent(filled):
    """Every message comes once, in order of offset within its partition, with all its columns."""
    source = reader(filled, batchRows="128")
    batches = [record_batch for part in source.partitions() for record_batch in source.read(part)]
    assert max(record_batch.num_rows for record_batch in batches) < 128 + 19
    assert min(record_batch.num_rows for record_batch in batches[:-2]) >= 128
    table = pa.Table.from_batches(batches)
    assert table.schema.equals(arrow_schema())
    assert Counter(table["partition"].to_pylist()) == {3: ROWS, 9: 10}
    three = table.slice(0, ROWS).to_pylist()
    for number, row in enumerate(three):
        sent = message(number)
        assert (row["partition"], row["offset"]) == (3, number)
        assert (row["key"], row["value"]) == (sent.key, sent.value)
        assert row["timestamp"].timestamp() == pytest.approx(sent.sent_at_ns / 1e9, abs=1e-6)
        assert dict(row["properties"]) == sent.properties


def test_range_is_read_to_the_row(filled):
    """Start and end in the midst of batches cut exactly there."""
    table = rows(reader(filled, partitions="3", start='{"3": 13}', end='{"3": 777}'))
    assert table["offset"].to_pylist() == list(range(13, 777))
    assert table["value"].to_pylist() == [message(number).value for number in range(13, 777)]


def test_large_range_takes_several_reads(shelves, monkeypatch):
    """A range larger than one answer is read piece by piece, the next asked for before rows are
    built.
    """
    for number in range(60):
        shelves.shelf(3).put(*[Sent(b"k", bytes(100_000))] * 2, Sent(b"k", b"%d" % number))
    source = reader(shelves, columns="offset,value", batchRows="1")
    (part,) = source.partitions()
    stream = source.read(part)
    next(stream)
    for _ in range(100):
        if len(shelves.reads) >= 2:
            break
        time.sleep(0.01)
    assert len(shelves.reads) >= 2, "the second read is under way while the first is converted"
    offsets = [0, 1, 2, *(o for record_batch in stream for o in record_batch["offset"].to_pylist())]
    assert offsets == list(range(180))
    assert len(shelves.reads) == -(-60 * 200_000 // PULL_BYTES_MAX)


def test_subject_without_rows_has_no_task(filled):
    """No rows, no task, no call to the broker."""
    assert reader(filled, partitions="4").partitions() == []
    assert reader(filled, start="latest").partitions() == []
    assert filled.reads == []


def test_empty_list_of_partitions_reads_as_no_rows(shelves):
    """A subject without partitions plans an empty list; the one task Spark makes of it has no
    rows.
    """
    source = reader(shelves)
    assert source.partitions() == []
    assert list(source.read(InputPartition(None))) == []
    assert list(source.read(None)) == []


def test_snapshot_is_pinned_at_load_and_survives_pickling(filled):
    """Messages stored after load() are in no later plan, also when the source travels as bytes."""
    made = source(filled)
    schema = made.schema()
    filled.shelf(3).put(message(ROWS))
    again = pickle.loads(cloudpickle.dumps(made))
    for loaded in (made, again):
        assert planned(loaded.reader(schema)) == [[(3, 0, ROWS), (9, 0, 10)]]
    assert filled.calls == ["route", "bounds"]


def test_reader_and_partitions_survive_pickling(filled):
    """What Spark sends to its workers reads the same there."""
    source = reader(filled, columns="offset,key")
    parts = pickle.loads(pickle.dumps(source.partitions()))
    assert parts[0].ranges == source.partitions()[0].ranges
    there = pickle.loads(cloudpickle.dumps(source))
    assert isinstance(parts[0], KeylaneTask)
    assert pa.Table.from_batches(there.read(parts[0])).equals(
        pa.Table.from_batches(source.read(source.partitions()[0]))
    )


def test_plan_does_not_travel_with_the_tasks(shelves):
    """What a task gets of 300 partitions is as large as of one: Spark pickles source and reader for
    each task.
    """
    for number in range(1, 301):
        shelves.shelf(number).put(Sent(b"k", b"v"))
    made = source(shelves)
    schema = made.schema()
    loaded = cloudpickle.dumps(made)
    travelling = pickle.loads(loaded)
    reader = travelling.reader(schema)
    assert len(loaded) > 10_000
    assert len(cloudpickle.dumps((travelling, reader))) < 5_000
    assert len(reader.partitions()) == 1


def test_schema_follows_the_columns(filled):
    """The schema told to Spark is that of the columns asked for, in their order."""
    assert source(filled).schema() == spark_schema()
    assert source(filled, columns="value,offset").schema().names == ["value", "offset"]


def test_schema_of_the_users_own_is_refused(filled):
    """Spark hands over a schema the user gave: another than ours is refused with the way to do
    it.
    """
    made = source(filled)
    with pytest.raises(ConfigError, match="choose columns with the option `columns`"):
        made.reader(StructType([spark_schema()["value"]]))


def told(caught: pytest.ExceptionInfo[KeylaneError]) -> KeylaneError:
    """The error as found in a text like Spark's."""
    error = parse_error(f"[PYTHON_EXCEPTION] Traceback …\nkeylane.X: {caught.value}\n\nJVM stack\n")
    assert type(error) is type(caught.value)
    assert error.details == caught.value.details
    return error


def test_bad_options_are_told_with_code_and_json(shelves):
    """An unknown option or a bad value raises at load, text with a stable mark, code and JSON."""
    with pytest.raises(ConfigError) as caught:
        source(shelves, topics="flights", batchRows="0").schema()
    assert str(caught.value).startswith('KEYLANE_1001 {"details": {"batchRows": "give 1 to 1000000')
    assert told(caught).details.keys() == {"topics", "batchRows"}


def test_unknown_subject_is_told_with_code_json_and_the_nearest_name(shelves):
    """The metaserver's word on the subject, marked, and the subject that was meant."""
    with pytest.raises(
        SubjectUnknownError, match=r"no subject flight; did you mean flights\?"
    ) as caught:
        source(shelves, subject="flight").schema()
    assert 'KEYLANE_1110 {"details": {"subject": "flight"}, "fate": "not_done"}' in str(
        caught.value
    )
    assert told(caught).details == {"subject": "flight"}


def test_unknown_group_is_told(filled):
    with pytest.raises(GroupUnknownError) as caught:
        source(filled, start="group:unknown").schema()
    told(caught)


def test_no_metaserver_is_told(shelves):
    """A metaserver that cannot be reached is a NotSentError with the option and the address."""
    with pytest.raises(
        NotSentError, match=r"KEYLANE_1201 .* meta: no metaserver answers"
    ) as caught:
        source(shelves, meta="127.0.0.1:1", retrySeconds="0").schema()
    assert told(caught).details == {"address": "127.0.0.1:1"}


def test_broker_that_is_away_at_planning_is_asked_again(filled):
    """A broker that starts again meanwhile fails no plan; each try asks for the route anew."""
    filled.fail_bounds = [NotSentError(), OverloadedError()]
    assert planned(reader(filled, partitions="3")) == [[(3, 0, ROWS)]]
    assert filled.calls == ["route", "bounds"] * 3


def test_broker_that_stays_away_is_told_with_its_partitions(filled):
    """After retrySeconds the error names the group and what to do without it."""
    filled.fail_bounds = [OutcomeUnknownError()] * 99
    with pytest.raises(
        OutcomeUnknownError, match=r"broker group g0 .* partition 3, 4, 9; .*`partitions`"
    ):
        source(filled, retrySeconds="0").schema()
    assert len(filled.fail_bounds) == 98


def test_start_is_a_time_or_the_cursor_of_a_group(filled):
    """Found by the brokers in the one call of planning."""
    filled.shelf(3).cursors["billing"] = 700
    at = rows(reader(filled, partitions="3", start="group:billing", columns="offset"))
    assert at["offset"].to_pylist() == list(range(700, ROWS))
    assert filled.calls == ["route", "bounds"]
    times = reader(filled, start="2023-11-14T22:13:21Z", end="2023-11-14T22:13:22Z")
    assert times.partitions() == []


def test_rows_of_some_keys_are_those_rows(filled):
    """Exactly the rows of the keys, also when the key is no column that was asked for."""
    table = rows(reader(filled, keys="key-2, key-5,key-99", columns="offset,value"))
    expected = [number for number in range(ROWS) if number % 7 in {2, 5}]
    assert table["offset"].to_pylist()[: len(expected)] == expected
    assert table.schema.names == ["offset", "value"]
    assert table["value"].to_pylist()[: len(expected)] == [message(n).value for n in expected]


def test_options_of_a_table_travel_in_its_schema(filled):
    """CREATE TABLE has the options, a query has only the schema; options of the query count
    more.
    """
    given = {"meta": filled.address, "subject": "flights", "partitions": "3", "end": '{"3": 40}'}
    table = {
        **given,
        **{f"option.{name}": text for name, text in given.items()},
        "provider": "keylane",
    }
    schema = StructType.fromJson(KeylaneSource(table).schema().jsonValue())
    assert schema.names == spark_schema().names
    assert planned(KeylaneSource({}).reader(schema)) == [[(3, 0, 40)]]
    assert key_was_read(schema)
    keyed = StructType.fromJson(KeylaneSource(table | {"columns": "key"}).schema().jsonValue())
    assert key_was_read(keyed)
    assert planned(KeylaneSource({"end": '{"3": 9}'}).reader(schema)) == [[(3, 0, 9)]]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"start": '{"3": 1001}'}, OffsetOutOfRangeError),
        ({"end": '{"4": 1}'}, OffsetOutOfRangeError),
        ({"start": '{"3": 9}', "end": '{"3": 8}'}, OffsetOutOfRangeError),
        ({"start": '{"3": 9223372036854775807}'}, OffsetOutOfRangeError),
        ({"partitions": "5"}, PartitionUnknownError),
    ],
    ids=str,
)
def test_offsets_and_partitions_that_are_not_there_are_told_at_load(filled, options, error):
    """A range that is not stored fails at load, not in a task."""
    with pytest.raises(error) as caught:
        source(filled, **options).schema()
    told(caught)
    assert filled.reads == []


def test_rows_gone_since_planning_are_told(filled):
    """Retention that passed the start of a planned range: partition, lost range, count, and since
    when.
    """
    source = reader(filled, partitions="3")
    filled.shelf(3).first_offset = 500
    with pytest.raises(
        DataLossError, match=r"lost \[0, 500\), 500 rows: .* before 2023-11-14T22:13:20"
    ) as caught:
        list(source.read(source.partitions()[0]))
    error = told(caught)
    assert (error.partition_id, error.offset, error.lost_until, error.rows) == (3, 0, 500, 500)


def test_rows_gone_since_planning_are_left_out_when_losses_are_allowed(filled, caplog):
    """The rest of the task comes whole, and the log has the loss."""
    source = reader(filled, failOnDataLoss="false", columns="partition,offset")
    filled.shelf(3).first_offset = 500
    filled.shelf(9).first_offset = 10
    assert rows(source)["offset"].to_pylist() == list(range(500, ROWS))
    assert "partition 3 of subject flights has lost [0, 500), 500 rows" in caplog.text
    assert "partition 9 of subject flights has lost [0, 10), 10 rows" in caplog.text


def test_rows_gone_during_a_read_are_left_out_from_there_on(shelves):
    """What was yielded before the loss stays, and nothing comes twice."""
    for number in range(60):
        shelves.shelf(3).put(*[Sent(b"k", bytes(100_000))] * 2, Sent(b"k", b"%d" % number))
    source = reader(shelves, failOnDataLoss="false", columns="offset", batchRows="1")
    stream = source.read(source.partitions()[0])
    offsets = next(stream)["offset"].to_pylist()
    shelves.shelf(3).first_offset = 150
    offsets += [offset for batch in stream for offset in batch["offset"].to_pylist()]
    assert offsets[:3] == [0, 1, 2]
    assert offsets[-30:] == list(range(150, 180))
    assert offsets == sorted(set(offsets))
    assert len(offsets) < 180


def test_rows_received_before_a_loss_are_given_though_their_batch_is_not_full(shelves):
    """The broker has them no longer, so they cannot be read again."""
    shelf = shelves.shelf(3)
    for number in range(60):
        shelf.put(*[Sent(b"k", bytes(100_000))] * 2, Sent(b"k", b"%d" % number))

    def lose(request, answer, payload):
        if request.offset:
            shelf.first_offset = 150
        return answer, payload

    shelves.spoil = lose
    source = reader(shelves, failOnDataLoss="false", columns="offset", batchRows="1000")
    offsets = rows(source)["offset"].to_pylist()
    before = [offset for offset in offsets if offset < 150]
    assert before == list(range(len(before)))
    assert len(before) > 3
    assert offsets[len(before) :] == list(range(150, 180))


def cut(_request, answer, payload):
    return answer, payload[:-1]


def flip(_request, answer, payload):
    return answer, payload[:-9] + bytes([payload[-9] ^ 1]) + payload[-8:]


def skip(request, answer, payload):
    size = int.from_bytes(payload[8:12], "little")
    return (answer, payload[size:]) if request.offset else (answer, payload)


def stop_short(_request, answer, payload):
    size = int.from_bytes(payload[8:12], "little")
    return answer, payload[:size]


def go_too_far(_request, answer, payload):
    size = int.from_bytes(payload[8:12], "little")
    return Batches(0, 5_000, 2_000, False), payload[:size]


def stand_still(request, answer, payload):
    return Batches(0, 5_000, request.offset, False), payload


def stranger(_request, answer, payload):
    record = bytearray(payload)
    record[24] ^= 1
    head = bytearray(record[:HEADER_BYTES])
    stamp_record(head, base_offset=0, position=0, appended_at_ms=0)
    return answer, bytes(head) + bytes(record[HEADER_BYTES:])


@pytest.mark.parametrize("spoil", [cut, flip, skip, stop_short, go_too_far, stand_still, stranger])
def test_broker_that_sends_something_else_is_found_out(filled, quick, spoil):
    """Damage, a hole, a lie about the end or another partition's batch: CorruptBatchError, no row
    too few.
    """
    filled.spoil = spoil
    start = '{"3": 700}' if spoil is skip else "earliest"
    source = reader(filled, partitions="3", start=start, end='{"3": 999}')
    with pytest.raises(CorruptBatchError) as caught:
        list(source.read(source.partitions()[0]))
    told(caught)


def test_log_shorter_than_planned_is_told(filled):
    """A broker that no longer has the end of the range gives an error, not fewer rows."""
    source = reader(filled, partitions="3")
    del filled.shelf(3).batches[-3:]
    with pytest.raises(OffsetOutOfRangeError) as caught:
        list(source.read(source.partitions()[0]))
    assert told(caught).next_offset < ROWS


@pytest.mark.parametrize("error", [OverloadedError(), StaleRouteError()], ids=str)
def test_passing_error_is_waited_for(filled, quick, error):
    """A refusal that says "later" or "new route" is tried again, and the rows are whole."""
    filled.fail = [error] * 9
    source = reader(filled, partitions="3", columns="offset")
    assert rows(source)["offset"].to_pylist() == list(range(ROWS))
    assert filled.calls.count("route") == 1 + 9


def test_persistent_error_is_raised_when_the_patience_is_over(filled, quick, monkeypatch):
    """The error names partition, range and time; an error that says "never" is raised at once."""
    monkeypatch.setattr(range_reader, "PATIENCE_S", 0.3)
    seconds = itertools.count(0, 0.01)
    monkeypatch.setattr(
        range_reader, "_now_s", lambda: next(seconds)
    )  # not the machine's, which may be busy
    source = reader(filled, partitions="3")
    filled.fail = [OverloadedError(in_flight=3)] * 10_000
    with raises(Reason.RANGE_UNREADABLE) as caught:
        list(source.read(source.partitions()[0]))
    details = told(caught).details
    assert (details["partition_id"], details["start"], details["end"]) == (3, 0, ROWS)
    assert (details["offset"], details["subject"]) == (0, "flights")
    assert "partition 3, offsets [0, 1000): no answer from offset 0 on for 0 s" in str(caught.value)
    reads = len(filled.reads)
    assert reads > 9
    filled.fail = [FencedError()]
    with pytest.raises(FencedError):
        list(source.read(source.partitions()[0]))
    assert len(filled.reads) == reads + 1


def test_broker_started_again_in_mid_read_is_ridden_out(shelves):
    """A broker that goes away between two reads and comes back at the same place loses no row."""
    for number in range(40):
        shelves.shelf(3).put(Sent(b"k", bytes(100_000)), Sent(b"k", b"%d" % number))
    source = reader(shelves, columns="offset", batchRows="1")
    stream = source.read(source.partitions()[0])
    offsets = next(stream)["offset"].to_pylist()
    shelves.hang_up()
    shelves.listen()
    offsets += [offset for record_batch in stream for offset in record_batch["offset"].to_pylist()]
    assert offsets == list(range(80))


def test_partition_whose_broker_moved_is_found_again(filled, quick):
    """A reader planned with an old address asks the metaserver where the broker is now."""
    source = reader(filled, partitions="3", columns="offset")
    filled.hang_up()
    filled.port = 0
    filled.listen()
    source._options = replace(source._options, meta=(filled.address,))
    assert rows(source)["offset"].to_pylist() == list(range(ROWS))


def test_reader_that_is_left_early_lets_its_connections_go(shelves):
    """A task that stops after a few rows, as LIMIT does, leaves nothing running."""
    for _ in range(40):
        shelves.shelf(3).put(Sent(b"k", bytes(200_000)))
    source = reader(shelves, batchRows="1")
    stream = source.read(source.partitions()[0])
    next(stream)
    stream.close()
    gc.collect()


def test_outside_a_worker_of_spark_the_collector_is_left_alone(filled):
    """gc.freeze is for Spark's worker processes, not for a program that calls a reader."""
    before = gc.get_freeze_count()
    rows(reader(filled, gcFreeze="true", columns="offset"))
    assert gc.get_freeze_count() == before
