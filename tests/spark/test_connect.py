"""Spark Connect on loopback: a server of its own, and a client that has no JVM. Needs grpcio:
`make spark-connect`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import keylane.arrow
from keylane import Producer
from support.cluster import Cluster, eventually
from support.ports import free_port
from support.spark.programs import said, spark_class, spark_driver

COUNT = 3_000
KEYS = 53
JOB = Path(__file__).with_name("connect_job.py")
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    """The address of a server with two cores."""
    if importlib.util.find_spec("grpc") is None:
        pytest.fail("a client of Spark Connect needs grpcio and grpcio-status: make spark-connect")
    port = free_port()
    settings = {
        "spark.master": "local[2]",
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    given = [part for item in settings.items() for part in ("--conf", "=".join(item))]
    submit = ("org.apache.spark.deploy.SparkSubmit", "--class", SERVER, "--name", "connect")

    async def listens() -> None:
        def connects() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        await eventually(connects, what="the server of Spark Connect")

    with spark_class(tmp_path, *submit, *given, "spark-internal", memory="700m"):
        asyncio.run(listens())
        yield f"sc://127.0.0.1:{port}"


async def fill(cluster: Cluster) -> None:
    for subject in ("flights", "streamed", "copied"):
        await cluster.create(subject, partitions=3)
    async with Producer(cluster.meta) as producer:
        await asyncio.gather(
            *(
                producer.send("flights", b"%d" % number, key=b"k%d" % (number % KEYS))
                for number in range(COUNT)
            )
        )


def check_each_once_in_order(cluster: Cluster, subject: str) -> None:
    rows = keylane.arrow.read(cluster.meta, subject).read_all()
    rows = rows.sort_by([("partition", "ascending"), ("offset", "ascending")])
    by_key: dict[bytes, list[int]] = {}
    for key, value in zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True):
        by_key.setdefault(key, []).append(int(value))
    assert by_key == {b"k%d" % key: list(range(key, COUNT, KEYS)) for key in range(KEYS)}


@pytest.mark.whole  # grpcio is not in the lock
@pytest.mark.timeout(400)
def test_client_of_spark_connect_reads_streams_and_writes(remote, file_cluster, tmp_path):
    """Batches, views, ranges, order, a stream with its lag, both writes, and errors with their
    codes.
    """
    asyncio.run(fill(file_cluster))
    with spark_driver(tmp_path, JOB, remote, file_cluster.meta, str(tmp_path)) as client:
        assert said(client, "rows")["rows"] == COUNT
        assert said(client, "in_view") == {"in_view": COUNT}
        assert said(client, "ordered") == {"ordered": True, "keys": KEYS}
        in_ranges = said(client, "in_ranges")["in_ranges"]
        assert isinstance(in_ranges, list)
        assert (len(in_ranges), sum(in_ranges)) == (3, COUNT)
        assert said(client, "lags")["lags"] == [2_000, 1_000, 0]
        assert said(client, "copied")
        assert said(client, "unknown") == {
            "unknown": "SubjectUnknownError",
            "option": "ConfigError",
        }
    for subject in ("streamed", "copied"):
        check_each_once_in_order(file_cluster, subject)
