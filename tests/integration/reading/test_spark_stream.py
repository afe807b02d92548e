"""The stream reader, driven as Spark drives it, over a real metaserver and real brokers; no
Java.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from keylane import Producer
from keylane.protocol import endpoints
from keylane.protocol.control import Retention
from keylane.protocol.errors import (
    CheckpointMismatchError,
    ConfigError,
    DataLossError,
    KeylaneError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    Reason,
    SubjectDeletedError,
    SubjectUnknownError,
)
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.routing import PartitionState
from keylane.rpc.client import BrokerClient
from keylane.rpc.http_network import HttpNetwork
from keylane.spark import source as source_module
from keylane.spark.failure import parse_error
from keylane.spark.schema import spark_schema
from keylane.spark.source import KeylaneSource
from keylane.spark.streaming import watch
from keylane.spark.streaming.limits import ReadAllAvailable, ReadMaxRows
from keylane.spark.streaming.reader import KeylaneStreamReader
from support.cluster import Cluster, delete_subject, meta_of
from support.raising import raises
from support.spark.query import Query

KEYS = 40


async def send(meta: str, subject: str, numbers: range) -> None:
    async with Producer(meta) as producer:
        await asyncio.gather(
            *(producer.send(subject, b"%d" % n, key=b"k%d" % (n % KEYS)) for n in numbers)
        )


def reader_of(meta: str, subject: str, **options: str) -> KeylaneStreamReader:
    return source_of(meta, subject, **options).streamReader(spark_schema())


def source_of(meta: str, subject: str, **options: str) -> KeylaneSource:
    return KeylaneSource({"meta": meta, "subject": subject, **options})


@contextmanager
def streaming(meta: str, subject: str, **options: str) -> Iterator[KeylaneStreamReader]:
    reader = reader_of(meta, subject, **options)
    try:
        yield reader
    finally:
        reader.stop()


@pytest.fixture
def subject(shared_cluster: Cluster, request: pytest.FixtureRequest) -> str:
    """A subject of the test's own, with 3 partitions and messages 0 to 299."""
    name = request.node.name.partition("[")[0].removeprefix("test_")[:60]
    asyncio.run(shared_cluster.create(name, partitions=3))
    asyncio.run(send(shared_cluster.meta, name, range(300)))
    return name


def resize(cluster: Cluster, subject: str, count: int) -> None:
    ask = Reshape(kind=OperationKind.RESIZE, subject=subject, partitions=count)
    asyncio.run(cluster.reshape(ask))


def test_stream_keeps_order_through_resizes_between_its_batches(
    shared_cluster, subject, monkeypatch
):
    """Small batches, messages and resizes in turn: every message once, each key in order."""
    # What continues a partition that was seen sealed is asked for at once, however short ago the
    # last question was.
    monkeypatch.setattr(watch, "LINEAGE_MS", 3_600_000)
    with streaming(shared_cluster.meta, subject, maxRowsPerTrigger="70") as reader:
        query = Query(reader)
        for step, count in enumerate((5, 2, 4), 1):
            assert query.construct()
            query.run()
            resize(shared_cluster, subject, count)
            asyncio.run(send(shared_cluster.meta, subject, range(300 * step, 300 * (step + 1))))
        query.all()
        query.check(range(1_200))
        assert max(map(len, query.batches)) <= 70
        assert not query.construct()
        assert reader.reportLatestOffset()["offsets"].keys() == query.start()["offsets"].keys()


def test_batch_is_replayed_after_a_resize_and_available_now_ends(shared_cluster, subject):
    """A batch that was constructed and not committed, then a resize: a restart replays it, goes on,
    and ends.
    """
    with streaming(shared_cluster.meta, subject, maxRowsPerTrigger="100") as reader:
        first = Query(reader)
        first.construct()
        first.run()
        first.construct()  # and the program is killed
    resize(shared_cluster, subject, 4)
    asyncio.run(send(shared_cluster.meta, subject, range(300, 500)))
    with streaming(shared_cluster.meta, subject, maxRowsPerTrigger="100") as reader:
        reader.prepareForTriggerAvailableNow()
        second = Query(reader, first.checkpoint)
        second.run()
        asyncio.run(send(shared_cluster.meta, subject, range(500, 510)))
        second.all()
        second.batches[:0] = first.batches
        second.check(range(500))


def test_start_at_latest_stays_where_it_was_when_batch_0_is_replayed(shared_cluster, subject):
    """The end of batch 0 says where it began: messages stored before the restart are not passed
    over.
    """
    with streaming(shared_cluster.meta, subject, start="latest") as reader:
        first = Query(reader)
        reader.initialOffset()
        asyncio.run(send(shared_cluster.meta, subject, range(300, 320)))
        assert first.construct()
    with streaming(shared_cluster.meta, subject, start="latest") as reader:
        second = Query(reader, first.checkpoint)
        second.run()
        second.check(range(300, 320))


def test_bounded_stream_offers_nothing_behind_its_end(shared_cluster, subject):
    """The end of the options is fixed at the start; a later end goes on with the same
    checkpoint.
    """
    with streaming(shared_cluster.meta, subject, end="latest") as reader:
        query = Query(reader)
        query.construct()
        query.run()
        asyncio.run(send(shared_cluster.meta, subject, range(300, 400)))
        assert not query.construct()
        query.check(range(300))
    offsets = {number: at + 1 for number, at in query.start()["offsets"].items()}
    end = json.dumps(offsets)
    with streaming(shared_cluster.meta, subject, end=end) as reader:
        reader.prepareForTriggerAvailableNow()
        more = Query(reader, query.checkpoint)
        more.all()
        assert len(more.rows) == len(offsets)


def test_stream_of_an_older_pyspark_reads_everything_in_order(shared_cluster, subject):
    """Without start and limit a batch has all, children behind their parents in one task."""
    resize(shared_cluster, subject, 4)
    asyncio.run(send(shared_cluster.meta, subject, range(300, 400)))
    with streaming(shared_cluster.meta, subject) as reader:
        start, end = reader.initialOffset(), reader.latestOffset()
        query = Query(reader, [start, end])
        query.run()
        asyncio.run(send(shared_cluster.meta, subject, range(400, 450)))
        query.checkpoint.append(reader.latestOffset())
        query.run()
        query.check(range(450))


def test_selected_partitions_are_streamed_to_their_end(shared_cluster, subject):
    """What continues them is not read."""
    with streaming(shared_cluster.meta, subject) as reader:
        numbers = sorted(map(int, reader.initialOffset()["offsets"]))
    with streaming(shared_cluster.meta, subject, partitions=str(numbers[0])) as reader:
        query = Query(reader)
        query.all()
        resize(shared_cluster, subject, 4)
        asyncio.run(send(shared_cluster.meta, subject, range(300, 400)))
        assert not query.construct()
        assert {row[0] for row in query.rows} == {numbers[0]}


def test_keys_of_a_stream_are_read_through_resizes_whatever_partitions_hold_them(
    shared_cluster, subject
):
    """Each key's partition is split, and a part of it merged again; options may name partitions
    that hold none of the keys.
    """
    for count, begin in ((6, 300), (4, 600)):
        resize(shared_cluster, subject, count)
        asyncio.run(send(shared_cluster.meta, subject, range(begin, begin + 300)))
    with streaming(shared_cluster.meta, subject) as reader:
        query = Query(reader)
        query.all()
    places = {key: {row[0] for row in query.rows if row[2] == key} for _, _, key, _ in query.rows}
    every = frozenset().union(*places.values())
    for key in sorted(places)[:8]:
        with streaming(shared_cluster.meta, subject, keys=key.decode()) as reader:
            of_key = Query(reader)
            of_key.all()
        wanted = [row for row in query.rows if row[2] == key]
        assert len(wanted) == 900 // KEYS + (int(key[1:]) < 900 % KEYS)
        assert of_key.rows == wanted
    other = min(every - places[key])
    for options in ({"partitions": str(other)}, {"start": json.dumps({other: 1})}):
        with streaming(shared_cluster.meta, subject, keys=key.decode(), **options) as reader:
            of_key = Query(reader)
            of_key.all()
        assert of_key.rows == ([] if "partitions" in options else wanted)


def test_limit_of_spark_goes_before_the_option(shared_cluster, subject):
    """Trigger.Once asks for everything."""
    with streaming(shared_cluster.meta, subject, maxRowsPerTrigger="7") as reader:
        assert reader.getDefaultReadLimit() == ReadMaxRows(7)
        query = Query(reader)
        query.construct(ReadAllAvailable())
        query.run()
        query.check(range(300))


def test_checkpoint_of_another_subject_is_refused(shared_cluster, subject):
    """Also one of the same name that was deleted."""
    other = f"{subject}-2"
    asyncio.run(shared_cluster.create(other, partitions=1))
    with streaming(shared_cluster.meta, other) as reader:
        query = Query(reader)
        query.construct()
    with streaming(shared_cluster.meta, subject) as reader:
        with pytest.raises(CheckpointMismatchError, match=f"is of {other}"):
            reader.latestOffset(query.start(), ReadAllAvailable())
        with pytest.raises(CheckpointMismatchError, match=f"is of {other}"):
            reader.partitions({**query.start(), "offsets": {}}, query.start())
    asyncio.run(delete_subject(shared_cluster.meta, other))
    asyncio.run(shared_cluster.create(other, partitions=1))
    with (
        streaming(shared_cluster.meta, other) as reader,
        pytest.raises(CheckpointMismatchError, match="was deleted"),
    ):
        reader.latestOffset(query.start(), ReadAllAvailable())


@pytest.mark.parametrize(("before", "now"), [("k1,k2", ""), ("", "k1"), ("k1", "k2")], ids=str)
def test_checkpoint_of_other_keys_is_refused(shared_cluster, subject, before, now):
    """Rows of the others were left out for ever; in the order of before keys may come, and an
    earlier version says none.
    """
    with streaming(shared_cluster.meta, subject, **({"keys": before} if before else {})) as reader:
        query = Query(reader)
        query.all()
    checkpoint = query.checkpoint
    with streaming(shared_cluster.meta, subject, **({"keys": now} if now else {})) as reader:
        with pytest.raises(CheckpointMismatchError, match="and the stream reads"):
            reader.latestOffset(query.start(), ReadAllAvailable())
        with pytest.raises(CheckpointMismatchError, match="and the stream reads"):
            reader.partitions({**query.start(), "offsets": {}}, query.start())
        earlier = {name: each for name, each in checkpoint[-1].items() if name != "keys"}
        Query(reader, [{**earlier, "keylane": 1}]).construct()
    with streaming(shared_cluster.meta, subject, keys="k2, k1") as reader:
        if before == "k1,k2":
            assert not Query(reader, checkpoint).construct()


def test_stream_says_that_its_subject_was_deleted_when_it_runs_or_begins_again(
    shared_cluster, subject
):
    """Not that the name may be wrong, nor that it is to be created; one that has read nothing says
    that.
    """
    with streaming(shared_cluster.meta, subject) as reader:
        query = Query(reader)
        query.all()
        asyncio.run(delete_subject(shared_cluster.meta, subject))
        with pytest.raises(SubjectDeletedError, match="was deleted") as caught:
            reader.latestOffset(query.start(), ReadAllAvailable())
        assert "checkpointLocation" in caught.value.message
    with streaming(shared_cluster.meta, subject) as reader:
        with pytest.raises(SubjectDeletedError):
            reader.latestOffset(query.start(), ReadAllAvailable())
        with pytest.raises(SubjectUnknownError):
            reader.initialOffset()


def test_stream_says_that_its_subject_was_deleted_when_another_one_has_its_name(
    shared_cluster, subject
):
    with streaming(shared_cluster.meta, subject) as reader:
        query = Query(reader)
        query.all()
        asyncio.run(delete_subject(shared_cluster.meta, subject))
        asyncio.run(shared_cluster.create(subject, partitions=1))
        with pytest.raises(CheckpointMismatchError, match="was deleted"):
            reader.latestOffset(query.start(), ReadAllAvailable())


def test_stream_waits_when_a_broker_stores_less_than_it_has_read(shared_cluster, subject):
    """The broker stands on an older copy of its folder, and the original comes back."""
    with streaming(shared_cluster.meta, subject) as reader:
        offset = reader.initialOffset()
        number = min(offset["offsets"])
        ahead = {**offset, "offsets": {**offset["offsets"], number: 300}}
        comes_back = threading.Timer(
            0.5, lambda: asyncio.run(send(shared_cluster.meta, subject, range(300, 1_500)))
        )
        comes_back.start()
        try:
            end = reader.latestOffset(ahead, ReadAllAvailable())
        finally:
            comes_back.join()
        assert end["offsets"][number] >= 300
    with streaming(shared_cluster.meta, subject) as restarted:
        assert restarted.partitions(ahead, end)


def test_checkpoint_beyond_the_end_of_a_partition_is_refused(shared_cluster, subject, monkeypatch):
    """The broker stays on an older copy of its folder, or the checkpoint was changed; so a batch
    that was planned is refused.
    """
    monkeypatch.setattr(watch, "READ_GIVE_UP_MS", 300)
    with streaming(shared_cluster.meta, subject) as reader:
        offset = reader.initialOffset()
        number = min(offset["offsets"])
        ahead = {**offset, "offsets": {**offset["offsets"], number: 10_000}}
        with pytest.raises(CheckpointMismatchError) as caught:
            reader.latestOffset(ahead, ReadAllAvailable())
        assert (caught.value.partition_id, caught.value.offset) == (int(number), 10_000)
    with streaming(shared_cluster.meta, subject) as restarted:
        with pytest.raises(CheckpointMismatchError):
            restarted.partitions(offset, ahead)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"subject": "flight"}, SubjectUnknownError),
        ({"start": '{"999999": 0}'}, PartitionUnknownError),
        ({"end": '{"999999": 0}'}, PartitionUnknownError),
        ({"partitions": "999999"}, PartitionUnknownError),
    ],
    ids=str,
)
def test_stream_of_what_is_not_there_fails_at_its_start(shared_cluster, subject, options, error):
    """At once, without waiting for it to appear; the error names the option."""
    (option,) = options
    given = {"meta": shared_cluster.meta, "subject": subject} | options
    reader = KeylaneSource(given).streamReader(spark_schema())
    with pytest.raises(error, match=f"(?s)KEYLANE_{error.code}.*{option}"):
        reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reader.stop()


def test_start_beyond_the_end_is_refused(shared_cluster, subject):
    """With the partition, and what it has."""
    with streaming(shared_cluster.meta, subject) as reader:
        number = int(min(reader.initialOffset()["offsets"]))
    with (
        streaming(shared_cluster.meta, subject, start=json.dumps({number: 9_999})) as reader,
        pytest.raises(OffsetOutOfRangeError, match="start: offset 9999") as caught,
    ):
        Query(reader).construct()
    assert (caught.value.partition_id, caught.value.offset) == (number, 9_999)


def test_stream_fails_in_its_first_call_when_it_cannot_be_one(shared_cluster, subject, monkeypatch):
    """PySpark hides an error of `streamReader` behind one of its own."""
    reader = source_of(shared_cluster.meta, subject).streamReader(StructType([]))
    with pytest.raises(ConfigError, match="give no schema"):
        reader.initialOffset()
    texts = StructType([StructField(each.name, StringType()) for each in spark_schema()])
    reader = source_of(shared_cluster.meta, subject).streamReader(texts)
    with pytest.raises(ConfigError, match="column partition is int, and the schema says string"):
        reader.initialOffset()
    monkeypatch.setattr(source_module, "HAS_READ_LIMITS", False)
    with streaming(shared_cluster.meta, subject, end="latest") as reader:
        for call in (reader.initialOffset, reader.latestOffset):
            with raises(Reason.NOT_STREAMABLE):
                call()
    with raises(Reason.NOT_STREAMABLE, match="maxRowsPerTrigger"):
        source_of(shared_cluster.meta, subject, maxRowsPerTrigger="5").schema()


def test_metaserver_and_broker_may_be_away_for_a_while(cluster):
    """A look waits for them, and gives up after a time with the error of the last try."""
    asyncio.run(cluster.create("flights", partitions=2))
    asyncio.run(send(cluster.meta, "flights", range(100)))
    with streaming(cluster.meta, "flights") as reader:
        query = Query(reader)
        reader.initialOffset()
        for program in (cluster.meta_program, *cluster.brokers):
            program.kill()

        async def restarted() -> None:
            await asyncio.sleep(1)
            for program in (cluster.meta_program, *cluster.brokers):
                await asyncio.to_thread(program.restart)

        restarting = threading.Thread(target=lambda: asyncio.run(restarted()))
        restarting.start()
        query.all()
        restarting.join()
        query.check(range(100))


def test_look_gives_up_after_a_time(shared_cluster, monkeypatch):
    """With the error of the last try."""
    monkeypatch.setattr(watch, "RETRY_MS", 300)
    began = time.monotonic()
    with (
        streaming("127.0.0.1:1", "flights") as reader,
        pytest.raises(KeylaneError, match="KEYLANE_1201"),
    ):
        reader.initialOffset()
    assert 0.3 <= time.monotonic() - began < 20


async def removed(cluster: Cluster, subject: str) -> None:
    """Wait until retention has removed messages of the subject's only partition."""
    network = HttpNetwork()
    try:
        async with meta_of(cluster) as meta, asyncio.timeout(60):
            (partition,) = (await meta.route(subject)).partitions
            broker = BrokerClient(network, str(partition.address))
            while not (
                await broker.control(endpoints.PARTITION, id=partition.partition_id)
            ).first_offset:
                await asyncio.sleep(0.05)
    finally:
        await network.close()


@pytest.mark.cluster(broker_settings="segment_bytes = 16384\nretention_bytes = 32768\n")
def test_retention_that_passes_the_checkpoint_ends_the_stream_or_is_passed_over(cluster):
    """The error names the partition and the offsets; where losses are allowed, the rest is read."""
    asyncio.run(cluster.create("flights", partitions=1, retention=Retention.TIME))
    asyncio.run(send(cluster.meta, "flights", range(100)))
    with streaming(cluster.meta, "flights", maxRowsPerTrigger="10") as reader:
        query = Query(reader)
        query.construct()
        query.run()
        query.construct()  # and the program is killed
    for begin in range(100, 5_100, 500):
        asyncio.run(send(cluster.meta, "flights", range(begin, begin + 500)))
    for broker in cluster.brokers:  # they look for what to remove when they start
        broker.kill()
        broker.restart()
    asyncio.run(removed(cluster, "flights"))
    with streaming(cluster.meta, "flights") as reader:
        with pytest.raises(DataLossError) as replayed:
            Query(reader, query.checkpoint).run()
        details = replayed.value.details
        assert [details[name] for name in ("offset", "lost_until", "rows")] == [10, 20, 10]
        with pytest.raises(DataLossError) as caught:
            reader.latestOffset(query.checkpoint[0], ReadAllAvailable())
        lost = parse_error(str(caught.value)).details
        assert lost == lost | {"subject": "flights", "offset": 10, "rows": lost["lost_until"] - 10}
    start = json.dumps({min(query.start()["offsets"]): 10})
    batch = source_of(cluster.meta, "flights", start=start)
    with pytest.raises(OffsetOutOfRangeError):
        batch.reader(
            batch.schema()
        )  # load() succeeds: a stream may have a checkpoint behind its start
    with streaming(cluster.meta, "flights") as reader:
        reader._options = replace(reader._options, fail_on_data_loss=False)
        more = Query(reader, query.checkpoint)
        more.run()
        more.all()
        assert more.batches[0] == []
        assert [row[1] for row in more.rows] == list(range(lost["lost_until"], 5_100))


async def expired(cluster: Cluster, subject: str, partition_id: int) -> None:
    """Wait until the metaserver has noted that retention has removed all of a sealed partition."""
    async with meta_of(cluster) as meta, asyncio.timeout(60):
        while True:
            states = {
                past.partition.partition_id: past.partition.state
                for past in (await meta.call(endpoints.HISTORY, subject=subject)).partitions
            }
            if states[partition_id] is PartitionState.EXPIRED:
                return
            await asyncio.sleep(0.05)


@pytest.mark.cluster(
    brokers=1,
    meta_settings="expire_ms = 200\n",
    broker_settings="segment_bytes = 16384\nretention_bytes = 32768\n",
)
def test_stream_goes_on_from_its_checkpoint_when_a_partition_of_its_options_has_expired(cluster):
    """A new stream is told what it asks for and cannot have, and so is a batch."""
    meta = cluster.meta
    for subject in ("flights", "filler"):
        asyncio.run(cluster.create(subject, partitions=1, retention=Retention.TIME))
    asyncio.run(send(meta, "flights", range(20)))
    first = {"start": '{"1": 5}'}
    with streaming(meta, "flights", **first) as reader:
        query = Query(reader)
        query.all()
    resize(cluster, "flights", 2)
    asyncio.run(send(meta, "filler", range(3_000)))
    cluster.brokers[0].kill()  # it looks for what to remove when it starts
    cluster.brokers[0].restart()
    asyncio.run(send(meta, "flights", range(20, 40)))
    asyncio.run(expired(cluster, "flights", 1))
    for options in (first, {"end": '{"1": 15}'}, {"partitions": "1"}):
        source = source_of(meta, "flights", **options)
        reader = source.streamReader(source.schema())
        query = Query(reader, query.checkpoint[:1])
        query.all()
        reader.stop()
        wanted = [] if "partitions" in options else list(range(20, 40))
        assert sorted(row[3] for row in query.rows) == wanted
        with streaming(meta, "flights", **options) as reader:
            end = reader.latestOffset()  # as PySpark asks before 4.2, also behind a checkpoint
            assert sum(end["offsets"].values()) == len(wanted)
            assert "origin" not in end or "end" in options
        with pytest.raises(PartitionUnknownError):
            source.reader(source.schema())
    with streaming(meta, "flights", **first) as reader:
        with pytest.raises(DataLossError) as caught:
            Query(reader).construct()
        details = caught.value.details
        assert [details[name] for name in ("partition_id", "offset", "lost_until")] == [1, 5, 20]
    with streaming(meta, "flights", start='{"1": 20}') as reader:
        query = Query(reader)
        query.all()
        assert sorted(row[3] for row in query.rows) == list(range(20, 40))
    with (
        streaming(meta, "flights", partitions="1") as reader,
        pytest.raises(PartitionUnknownError),
    ):
        Query(reader).construct()
    with pytest.raises(PartitionUnknownError):
        source_of(meta, "flights", start='{"99": 5}').schema()


@pytest.mark.cluster(
    brokers=1,
    meta_settings="expire_ms = 200\n",
    broker_settings="segment_bytes = 16384\nretention_bytes = 32768\n",
)
@pytest.mark.parametrize("asked", [{"partitions": "1"}, {"start": '{"1": 5}'}], ids=str)
def test_batch_0_is_replayed_as_lost_when_all_that_it_had_has_expired(cluster, asked):
    """What the checkpoint says was there is told with its offsets, or passed over; a new query is
    refused as before.
    """
    meta, begin = cluster.meta, 5 if "start" in asked else 0
    for subject in ("flights", "filler"):
        asyncio.run(cluster.create(subject, partitions=1, retention=Retention.TIME))
    asyncio.run(send(meta, "flights", range(20)))
    with streaming(meta, "flights", **asked) as reader:
        killed = Query(reader)
        assert killed.construct()
        tasks = len(reader.partitions(reader.initialOffset(), killed.checkpoint[0]))
    resize(cluster, "flights", 2)
    asyncio.run(send(meta, "filler", range(3_000)))
    cluster.brokers[0].kill()  # it looks for what to remove when it starts
    cluster.brokers[0].restart()
    asyncio.run(expired(cluster, "flights", 1))
    source_of(meta, "flights", **asked).schema()
    with streaming(meta, "flights", **asked) as reader:
        with pytest.raises(DataLossError) as caught:
            Query(reader, killed.checkpoint).run()
        details = caught.value.details
        lost = [details[name] for name in ("partition_id", "offset", "lost_until", "rows")]
        assert lost == [1, begin, 20, 20 - begin]
    with streaming(meta, "flights", failOnDataLoss="false", **asked) as reader:
        again = Query(reader, killed.checkpoint)
        again.run()
        assert len(reader.partitions(reader.initialOffset(), killed.checkpoint[0])) == tasks == 1
        asyncio.run(send(meta, "flights", range(20, 40)))
        again.all()
        assert again.batches[0] == []
        assert [row[3] for row in sorted(again.rows, key=lambda row: row[3])] == (
            [] if "partitions" in asked else list(range(20, 40))
        )
    error = PartitionUnknownError if "partitions" in asked else DataLossError
    with streaming(meta, "flights", **asked) as reader:
        end = reader.latestOffset()  # as PySpark asks before 4.2
        with pytest.raises(error):
            reader.initialOffset()
    with streaming(meta, "flights", **asked) as reader, pytest.raises(error):
        reader.partitions(reader.initialOffset(), end)
