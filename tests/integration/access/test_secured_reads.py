"""Reads, streams and writes of Spark's source over TLS with access control: by options, and by the
environment.
"""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import cloudpickle

import keylane.arrow
from keylane import Admin, Producer
from keylane.arrow.opening import run_with_network
from keylane.cli.connection import wait_for_brokers
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import (
    AccessDeniedError,
    Reason,
    UnauthenticatedError,
)
from keylane.spark.schema import spark_schema
from keylane.spark.source import KeylaneSource
from keylane.spark.writing.job import parse_write_options
from keylane.spark.writing.task import write_task
from support.access.secured_cluster import SecuredCluster
from support.raising import raises

COUNT = 300


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    cluster = SecuredCluster(tmp_path_factory.mktemp("secured"))
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def options(secured: SecuredCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Options of a principal that may read and write `flights`, which has COUNT messages."""
    token = tmp_path_factory.mktemp("token") / "spark.token"

    async def fill() -> None:
        access = {"tls": secured.tls, "token": secured.admin_token}
        async with Admin(secured.meta, **access, wait_s=30) as admin:
            await wait_for_brokers(admin, 1)
            for subject in ("flights", "others"):
                await admin.create_subject(subject, partitions=2)
            token.write_text((await admin.create_token("spark")).token)
            await admin.grant("spark", "produce", subject="flights")
            await admin.grant("spark", "consume", subject="flights", group="*")
        async with Producer(secured.meta, **access) as producer:
            for number in range(COUNT):
                producer.send("flights", b"%d" % number, key=b"k%d" % (number % 7))
            await producer.flush()

    asyncio.run(fill())
    given = {"meta": secured.meta, "tlsCa": secured.tls.ca, "tokenFile": str(token)}
    return {**given, "subject": "flights"}


def rows_of(options: dict[str, str]) -> list[int]:
    """As Spark reads: planned here, and each task by a pickled reader."""
    source = KeylaneSource({**options, "retrySeconds": "1"})
    reader = source.reader(source.schema())
    return sorted(
        int(value)
        for part in reader.partitions()
        for batch in pickle.loads(cloudpickle.dumps(reader)).read(part)
        for value in batch["value"].to_pylist()
    )


def test_batch_is_planned_and_read_with_the_files_of_its_options(options):
    assert rows_of(options) == list(range(COUNT))


def test_batch_is_read_as_the_environment_says(options, monkeypatch):
    """Where the options name no files."""
    monkeypatch.setenv("KEYLANE_TLS_CA", options["tlsCa"])
    monkeypatch.setenv("KEYLANE_TOKEN_FILE", options["tokenFile"])
    assert rows_of({name: options[name] for name in ("meta", "subject")}) == list(range(COUNT))


def test_stream_is_read_with_the_files_of_its_options(options):
    reader = KeylaneSource(options).streamReader(spark_schema())
    try:
        start = reader.initialOffset()
        end = reader.latestOffset(start)
        rows = [
            value
            for part in reader.partitions(start, end)
            for batch in pickle.loads(cloudpickle.dumps(reader)).read(part)
            for value in batch["value"].to_pylist()
        ]
    finally:
        reader.stop()
    assert sorted(map(int, rows)) == list(range(COUNT))


def test_reader_without_spark_is_given_tls_and_a_token(secured, options):
    token = Path(options["tokenFile"]).read_text()
    reader = keylane.arrow.read(secured.meta, "flights", tls=secured.tls, token=token)
    assert reader.read_all().num_rows == COUNT


def test_task_writes_with_the_files_of_its_options(options):
    """As a task of a stream does."""
    given = parse_write_options(options)
    batch = pa.record_batch({"key": [b"k"] * 3, "value": [b"%d" % (COUNT + n) for n in range(3)]})

    async def work(network):
        return await write_task(
            network,
            given,
            given.subject,
            iter([batch]),
            identity=("stream", "flights", "query", 1, 0),
            task=0,
            sent_at_ns=SystemClock.wall_ns(),
            clock=SystemClock(),
            rng=random.Random(),
        )

    report = run_with_network(work, given.security)
    assert sum(report.rows.values()) == 3
    assert rows_of({**options, "keys": "k"}) == list(range(COUNT, COUNT + 3))


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"tlsCa": None}, Reason.TLS_NEEDED),
        ({"tokenFile": None}, UnauthenticatedError),
        ({"tlsCa": "/nowhere/ca.pem"}, Reason.CERTIFICATE_FILE),
        ({"subject": "others"}, AccessDeniedError),
    ],
    ids=str,
)
def test_missing_file_or_right_is_told_at_planning(options, changed, error):
    """With the stable code, for the driver's message."""
    given = {name: value for name, value in {**options, **changed}.items() if value is not None}
    with raises(error, match=f"KEYLANE_{error.code}"):
        rows_of(given)
