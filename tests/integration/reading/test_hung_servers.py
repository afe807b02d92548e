"""Readers of ranges beside programs that hang (SIGSTOP): they accept connections and answer
nothing. Without a JVM.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from keylane import Producer
from keylane.arrow import range_reader
from keylane.protocol.errors import KeylaneError, Reason, UnreachableError
from keylane.spark.failure import parse_error
from keylane.spark.source import KeylaneReader, KeylaneSource
from support.cluster import Cluster, Program, pause, resume
from support.raising import raises

ROWS = 200
VALUE_BYTES = 100_000
"""So that the rows take ten answers of a broker."""
pytestmark = pytest.mark.cluster(brokers=1)


@pytest.fixture
def hanging(cluster: Cluster) -> Cluster:
    """A cluster with ROWS messages in one partition of `large`."""

    async def fill() -> None:
        await cluster.create("large", partitions=1)
        async with Producer(cluster.meta) as producer:
            for number in range(ROWS):
                producer.send("large", b"%d" % number + bytes(VALUE_BYTES))
                if number % 50 == 0:
                    await producer.flush()

    asyncio.run(fill())
    return cluster


@contextmanager
def hung(program: Program) -> Iterator[None]:
    pause(program.process.pid)
    try:
        yield
    finally:
        resume(program.process.pid)


def reader(cluster: Cluster) -> KeylaneReader:
    given = {"meta": cluster.meta, "subject": "large", "retrySeconds": "1", "batchRows": "1"}
    source = KeylaneSource({**given, "columns": "offset"})
    return source.reader(source.schema())


def told(error: KeylaneError) -> str:
    """The one sentence that the driver shows."""
    again = parse_error(f"{type(error).__name__}: {error}")
    assert type(again) is type(error)
    assert "\n" not in error.message
    return error.message


def test_hung_program_at_planning_is_told_with_its_option(hanging: Cluster):
    """The metaserver by `meta`, a broker by its group and its partitions."""
    began = time.monotonic()
    with hung(hanging.meta_program), pytest.raises(UnreachableError) as of_meta:
        reader(hanging)
    assert f"meta: no metaserver answers at {hanging.meta}" in told(of_meta.value)
    with hung(hanging.brokers[0]), pytest.raises(UnreachableError) as of_broker:
        reader(hanging)
    assert "broker group g1 does not answer, which has partition" in told(of_broker.value)
    assert "option `partitions`" in told(of_broker.value)
    assert time.monotonic() - began < 40  # a call waits for 5 s


def test_broker_hung_in_mid_read_is_told_or_ridden_out(hanging: Cluster, monkeypatch):
    """With partition, range and offset when the patience is over; the rows are whole when it
    answers again.
    """
    made = reader(hanging)
    (task,) = made.partitions()
    stream = made.read(task)
    offsets = next(stream)["offset"].to_pylist()
    monkeypatch.setattr(range_reader, "PATIENCE_S", 0.3)
    with hung(hanging.brokers[0]), raises(Reason.RANGE_UNREADABLE) as caught:
        list(stream)
    assert f"offsets [0, {ROWS}): no answer from offset" in told(caught.value)
    monkeypatch.undo()
    stream = made.read(task)
    offsets = next(stream)["offset"].to_pylist()
    pause(hanging.brokers[0].process.pid)
    try:
        asyncio.run(asyncio.sleep(0.2))
    finally:
        resume(hanging.brokers[0].process.pid)
    offsets += [offset for batch in stream for offset in batch["offset"].to_pylist()]
    assert offsets == list(range(ROWS))


def test_metaserver_hung_in_mid_read_is_not_noticed(hanging: Cluster):
    """A task asks brokers alone."""
    made = reader(hanging)
    (task,) = made.partitions()
    with hung(hanging.meta_program):
        offsets = [n for batch in made.read(task) for n in batch["offset"].to_pylist()]
    assert offsets == list(range(ROWS))
