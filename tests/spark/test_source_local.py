"""The data source in a real local Spark session, over a real metaserver and two real brokers."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest
from pyspark.errors import AnalysisException, PythonException

from keylane import Producer
from keylane.admin import Admin
from keylane.protocol.errors import (
    ConfigError,
    CorruptBatchError,
    NotSentError,
    OffsetOutOfRangeError,
    SubjectUnknownError,
)
from keylane.protocol.message import Message
from keylane.spark import ordered
from keylane.spark.failure import parse_error
from keylane.spark.schema import spark_schema
from support.brokers.spare import Spare
from support.shelves import Sent

SUBJECT = "flights"
COUNT = 20_000
CARRIERS = 13


@dataclass(frozen=True)
class Filled:
    """A cluster with COUNT messages in 4 partitions, and the log as its brokers tell it."""

    meta: str
    log: dict[int, list[Message]]


def key_of(number: int) -> bytes:
    """Every tenth message has no key."""
    return b"" if number % 10 == 0 else b"N%d" % (number * 7919 % 97)


def value_of(number: int) -> bytes:
    delay = None if number % 11 == 0 else number % 240 - 30
    return json.dumps({"n": number, "carrier": f"C{number % CARRIERS}", "delay": delay}).encode()


async def send(meta: str, subject: str, numbers: range) -> None:
    async with Producer(meta) as producer:
        futures = []
        for number in numbers:
            properties = {"n": str(number)} if number % 1_000 == 0 else None
            futures.append(
                producer.send(subject, value_of(number), key=key_of(number), properties=properties)
            )
            if number % 2_000 == 1_999:
                await asyncio.gather(*futures)
                futures.clear()
        await asyncio.gather(*futures)


@pytest.fixture(scope="module")
def filled(file_cluster) -> Filled:
    async def fill() -> Filled:
        route = await file_cluster.create(SUBJECT, partitions=4)
        await send(file_cluster.meta, SUBJECT, range(COUNT))
        return Filled(file_cluster.meta, await file_cluster.log(route))

    subject = asyncio.run(fill())
    assert sum(map(len, subject.log.values())) == COUNT
    assert min(map(len, subject.log.values())) > 0
    return subject


@pytest.fixture
def load(spark, file_cluster):
    """Loads a subject with options; Spark finds the format by itself."""

    def load(subject: str = SUBJECT, meta: str | None = None, **options: str):
        reader = spark.read.format("keylane").option("meta", meta or file_cluster.meta)
        return reader.option("subject", subject).options(**options).load()

    return load


def test_small_partitions_share_a_task_with_all_their_rows(load, filled):
    """Spark sees every message of every partition, the columns of the schema, and as many tasks as
    are worth it.
    """
    frame = load()
    assert frame.schema == spark_schema()
    assert frame.rdd.getNumPartitions() == 1
    assert load(minPartitions="4").rdd.getNumPartitions() >= 4
    counted = frame.groupBy("partition").count().collect()
    assert {row["partition"]: row["count"] for row in counted} == {
        number: len(messages) for number, messages in filled.log.items()
    }
    assert frame.count() == COUNT


def test_rows_are_the_log_in_its_order(load, filled):
    """Within a partition rows come by offset, without gap, and each is the message at that
    offset.
    """
    offsets: dict[int, int] = Counter()
    for row in load(batchRows="700").collect():
        stored = filled.log[row["partition"]][offsets[row["partition"]]]
        assert row["offset"] == stored.offset
        assert (bytes(row["key"]), bytes(row["value"])) == (stored.key, stored.value)
        offsets[row["partition"]] += 1
    assert offsets == {number: len(messages) for number, messages in filled.log.items()}


def test_rows_come_from_a_copy_that_serves_reads(load, filled, file_cluster, tmp_path):
    """The other broker has no copy, and is asked for its rows."""
    spare = Spare(file_cluster, tmp_path / "copy", "--serve-reads", "true")
    spare.start()
    try:
        copy = asyncio.run(copy_of_g1(filled.meta))
        pattern = re.compile(r"^keylane_copy_read_bytes_total (\S+)$", re.MULTILINE)

        def bytes_read() -> float:
            with urllib.request.urlopen(f"http://{copy}/metrics") as answer:
                return float(pattern.findall(answer.read().decode())[0])

        until = time.monotonic() + 60
        while not bytes_read():
            assert time.monotonic() < until
            assert load(fromCopies="true").count() == COUNT
    finally:
        spare.kill()
    assert load(fromCopies="true").count() == COUNT


async def copy_of_g1(meta: str) -> str:
    """Return the address of the copy of g1 once it has everything."""
    async with Admin(meta) as admin, asyncio.timeout(60):
        brokers = (await admin.list_brokers()).brokers
        [address] = [each.address for each in brokers if each.broker_group == "g1"]
        while True:
            details = (await admin.broker_health(address)).details
            for view in details["copies"].values():
                if view["reads_at"] and not view["bytes_behind"]:
                    return view["reads_at"]
            await asyncio.sleep(0.1)


def test_each_key_keeps_its_order(load, filled):
    """The messages of one key come in the order they were sent, each once."""
    by_key: dict[bytes, list[int]] = defaultdict(list)
    for row in load(columns="key,value").collect():
        by_key[bytes(row["key"])].append(json.loads(row["value"])["n"])
    del by_key[b""]
    assert len(by_key) == 97
    sent: dict[bytes, list[int]] = defaultdict(list)
    for number in range(COUNT):
        sent[key_of(number)].append(number)
    assert all(numbers == sent[key] for key, numbers in by_key.items())


def test_mean_by_group_equals_the_mean_in_plain_python(load, filled):
    """SQL over the values gives the counts and means that a loop over what was sent gives."""
    delays: dict[str, list[int]] = defaultdict(list)
    flights: Counter[str] = Counter()
    for number in range(COUNT):
        flight = json.loads(value_of(number))
        flights[flight["carrier"]] += 1
        if flight["delay"] is not None:
            delays[flight["carrier"]].append(flight["delay"])
    expected = {
        carrier: (count, sum(delays[carrier]) / len(delays[carrier]))
        for carrier, count in flights.items()
    }
    frame = load(columns="value")
    parsed = frame.selectExpr(
        "from_json(CAST(value AS STRING), 'carrier STRING, delay INT') AS flight"
    )
    rows = parsed.groupBy("flight.carrier").agg({"*": "count", "flight.delay": "avg"}).collect()
    assert {row[0]: (row[1], row[2]) for row in rows} == {
        carrier: (count, pytest.approx(mean)) for carrier, (count, mean) in expected.items()
    }


def test_properties_and_times_are_readable_in_sql(load, filled):
    """A property is a value of a map, absent ones are null; the time is that of sending, in UTC."""
    frame = load(columns="properties,timestamp,value")
    tagged = frame.where("properties['n'] IS NOT NULL")
    rows = tagged.selectExpr("properties['n']", "CAST(value AS STRING)").collect()
    assert sorted(int(row[0]) for row in rows) == list(range(0, COUNT, 1_000))
    assert all(json.loads(row[1])["n"] == int(row[0]) for row in rows)
    assert frame.where("size(properties) = 0").count() == COUNT - COUNT // 1_000
    (span,) = frame.selectExpr(
        "max(timestamp) <= now()", "min(timestamp) > now() - INTERVAL 1 HOUR"
    ).collect()
    assert tuple(span) == (True, True)


def test_frame_keeps_reading_the_rows_it_was_loaded_with(load, file_cluster):
    """Messages stored after load() are in no action on that frame, but in the next load()."""
    asyncio.run(file_cluster.create("growing", partitions=2))
    asyncio.run(send(file_cluster.meta, "growing", range(50)))
    before = load("growing", columns="offset")
    asyncio.run(send(file_cluster.meta, "growing", range(50, 80)))
    assert before.count() == 50
    assert before.union(before).count() == 100
    assert load("growing").count() == 80


def test_ranges_of_offsets_are_read_to_the_row(load, filled):
    """Start and end by partition id cut exactly there."""
    number = min(filled.log)
    frame = load(
        partitions=str(number), start=json.dumps({number: 17}), end=json.dumps({number: 1_234})
    )
    assert [row["offset"] for row in frame.select("offset").collect()] == list(range(17, 1_234))


def test_table_and_view_of_sql_read_the_subject(spark, file_cluster, filled):
    """CREATE VIEW and CREATE TABLE take the options; a table is planned anew by each query, which
    may change options.
    """
    options = f"OPTIONS (meta '{file_cluster.meta}', subject '{SUBJECT}', batchRows '900')"
    spark.sql(f"CREATE TEMPORARY VIEW seen USING keylane {options}")
    assert spark.sql("SELECT count(*) FROM seen").first()[0] == COUNT
    spark.sql(
        f"CREATE TABLE kept USING keylane {options} COMMENT 'a log' TBLPROPERTIES ('a' = 'b')"
    )
    try:
        (row,) = spark.sql("SELECT count(*), count(DISTINCT `partition`) FROM kept").collect()
        assert tuple(row) == (COUNT, 4)
        none = spark.sql("SELECT count(*) FROM kept WITH (`start` = 'latest')").first()[0]
        assert none == 0
    finally:
        spark.sql("DROP TABLE kept")
        spark.sql("DROP VIEW seen")


def test_table_without_options_is_refused_readably(spark, file_cluster):
    with pytest.raises(AnalysisException, match="meta: required; subject: required"):
        spark.sql("CREATE TABLE nothing USING keylane")
    with pytest.raises(AnalysisException, match=r"subjec: unknown; did you mean subject\?"):
        spark.sql("CREATE TABLE nothing USING keylane OPTIONS (meta '127.0.0.1:1', subjec 'x')")


def test_ordered_restores_the_order_of_keys_after_a_shuffle(load, filled):
    """More tasks than partitions, and the rows of each key as they were stored."""
    shuffled = load(columns="logical_partition,epoch,offset,key,value").repartition(5)
    frame = ordered(shuffled, 6)
    assert frame.rdd.getNumPartitions() == 6
    by_key: dict[bytes, list[int]] = defaultdict(list)
    for row in frame.collect():
        by_key[bytes(row["key"])].append(json.loads(row["value"])["n"])
    del by_key[b""]
    assert len(by_key) == 97
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


def test_subjects_without_messages_or_partitions_are_empty_frames(load, file_cluster, shelves):
    """Nothing stored is zero rows, also when there is not even a partition."""
    asyncio.run(file_cluster.create("silent", partitions=3))
    assert load("silent").count() == 0
    assert load(meta=shelves.address).count() == 0


@pytest.mark.parametrize(
    ("options", "error", "details"),
    [
        ({"subject": "flight"}, SubjectUnknownError, {"subject": "flight"}),
        ({"meta": "127.0.0.1:1", "retrySeconds": "0"}, NotSentError, {"address": "127.0.0.1:1"}),
        ({"batchRows": "0"}, ConfigError, None),
        ({"topic": "flights"}, ConfigError, None),
        ({"end": '{"1": 99999999}'}, OffsetOutOfRangeError, None),
    ],
    ids=str,
)
def test_load_error_has_code_details_and_hint(load, filled, options, error, details):
    """load() raises, and Spark's text holds our code, details as JSON, and what to do."""
    with pytest.raises(AnalysisException) as caught:
        load(**options)
    text = str(caught.value)
    raised = parse_error(text)
    assert type(raised) is error
    assert details is None or raised.details == details
    assert raised.hint.splitlines()[0] in text
    assert "NAME" not in raised.hint


def test_schema_given_by_the_user_is_refused_readably(spark, load, filled):
    """Another schema than ours cannot be read into; the text says which option chooses columns."""
    with pytest.raises(AnalysisException, match="choose columns with the option `columns`"):
        spark.read.format("keylane").schema("value STRING").option("meta", filled.meta).option(
            "subject", SUBJECT
        ).load().count()


def test_damage_found_in_a_task_says_so_readably(load, shelves):
    """A task that meets a damaged batch fails with our code in Spark's text; no row is left out in
    silence.
    """
    shelves.shelf(3).put(Sent(b"k", b"value"))
    frame = load(meta=shelves.address)
    shelves.spoil = lambda _request, answer, payload: (answer, payload[:-1] + b"!")
    with pytest.raises(PythonException) as caught:
        frame.collect()
    assert type(parse_error(str(caught.value))) is CorruptBatchError
