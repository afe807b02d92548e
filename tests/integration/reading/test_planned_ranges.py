"""Real flights read by planned ranges while others are sent, partitions change and brokers end.
Without a JVM.
"""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import threading
from collections import defaultdict

import pytest
from pyspark import cloudpickle

from keylane import Producer
from keylane.cli.demo.source import Flight, flights_file, read_flights
from keylane.protocol.errors import UnreachableError
from keylane.protocol.operations import OperationKind, Reshape
from keylane.spark.source import KeylaneReader, KeylaneSource
from support.cluster import Cluster

COUNT = 6_000
FLIGHTS = [each for each in read_flights(flights_file(), 3 * COUNT) if each.key][: 2 * COUNT]
COLUMNS = "logical_partition,epoch,partition,offset,key,value"


async def send(cluster: Cluster, flights: list[Flight]) -> None:
    async with Producer(cluster.meta) as producer:
        await asyncio.gather(
            *(producer.send("flights", each.value, key=each.key) for each in flights)
        )


@pytest.fixture
def filled(cluster: Cluster) -> Cluster:
    """The first COUNT flights in four partitions on two brokers."""

    async def fill() -> None:
        await cluster.create("flights", partitions=4)
        await send(cluster, FLIGHTS[:COUNT])

    asyncio.run(fill())
    return cluster


def reader_of(cluster: Cluster, **options: str) -> KeylaneReader:
    given = {"meta": cluster.meta, "subject": "flights", "columns": COLUMNS, "batchRows": "200"}
    source = KeylaneSource({**given, **options})
    return source.reader(source.schema())


def rows_of(reader: KeylaneReader, meanwhile=lambda: None) -> list[tuple]:
    """As tasks of Spark read; `meanwhile` is called behind the first batch."""
    rows: list[tuple] = []
    travelled = cloudpickle.dumps(reader)
    for part in reader.partitions():
        for batch in pickle.loads(travelled).read(part):
            rows += zip(*(column.to_pylist() for column in batch.columns), strict=True)
            meanwhile()
            meanwhile = int
    return rows


def by_key(pairs) -> dict[bytes, list[bytes]]:
    values = defaultdict(list)
    for key, value in pairs:
        values[key].append(value)
    return dict(values)


def digest(pairs) -> str:
    """Of all values, each key's in its order."""
    whole = hashlib.sha256()
    for key, values in sorted(by_key(pairs).items()):
        whole.update(key + b"".join(values))
    return whole.hexdigest()


def test_planned_range_is_the_same_twice_through_appends_a_resize_and_a_restart(filled: Cluster):
    """The rows of the plan, twice the same, and equal to the file; a new plan has those that were
    sent meanwhile, too.
    """
    made = reader_of(filled)
    sent: list[threading.Thread] = []

    def meanwhile() -> None:
        sent.append(threading.Thread(target=lambda: asyncio.run(send(filled, FLIGHTS[COUNT:]))))
        sent[0].start()
        resize = Reshape(kind=OperationKind.RESIZE, subject="flights", partitions=6)
        asyncio.run(filled.reshape(resize))
        for broker in filled.brokers:
            broker.kill()
            broker.restart()

    first = rows_of(made, meanwhile)
    assert rows_of(made) == first
    sent[0].join()
    assert len(first) == COUNT
    of_file = [(each.key, each.value) for each in FLIGHTS]
    assert digest((row[4], row[5]) for row in first) == digest(of_file[:COUNT])
    both = sorted(rows_of(reader_of(filled)))
    assert len(both) == 2 * COUNT
    assert digest((row[4], row[5]) for row in both) == digest(of_file)


def test_broker_that_is_gone_is_told_and_the_others_are_read_without_it(
    filled: Cluster, monkeypatch
):
    """At planning with its partitions and the option; a plan that was made before fails in its
    ranges alone.
    """
    made = reader_of(filled, minPartitions="4")
    owner = {
        int(planned.partition_id): planned.broker_group
        for part in made.partitions()
        for planned in part.ranges  # type: ignore[attr-defined]
    }
    assert sorted(owner.values()) == ["g1", "g1", "g2", "g2"]
    filled.brokers[1].kill()
    with pytest.raises(UnreachableError) as caught:
        reader_of(filled, retrySeconds="1")
    assert "broker group g2" in caught.value.message
    left = sorted(number for number, group in owner.items() if group == "g1")
    named = ",".join(map(str, left))
    rows = rows_of(reader_of(filled, partitions=named))
    assert {row[2] for row in rows} == set(left)
    monkeypatch.setattr("keylane.arrow.range_reader.PATIENCE_S", 0.5)
    read, unread = [], []
    for part in made.partitions():
        try:
            read += [row for batch in made.read(part) for row in batch["partition"].to_pylist()]
        except UnreachableError as error:
            unread.append(error.partition_id)
    assert (set(read), len(read)) == (set(left), len(rows))
    assert set(owner) - set(unread) == set(left)


@pytest.mark.whole  # it takes a minute and a half
def test_reader_that_pauses_a_minute_between_batches_misses_nothing(filled: Cluster):
    """Longer than every timeout of a connection; pings are answered meanwhile."""
    paused = threading.Event()
    rows = rows_of(reader_of(filled), lambda: paused.wait(65))
    assert digest((row[4], row[5]) for row in rows) == digest(
        (each.key, each.value) for each in FLIGHTS[:COUNT]
    )
