"""A standalone cluster on loopback, of the pip package: a worker is killed with its executor, and the job goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest

from keylane import Producer
from keylane.cli.java import find_java
from support.cluster import Cluster
from support.ports import free_port

COUNT = 8_000
JOB = Path(__file__).with_name("standalone_job.py")
DEPLOY = "org.apache.spark.deploy"


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "JAVA_HOME": str(find_java().path),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(folder / "work"),
        "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    }


@contextmanager
def spark_class(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Spark, ended with all that it has started."""
    program = Path(pyspark.__path__[0], "bin", "spark-class")
    with (folder / f"{arguments[0].rpartition('.')[2]}-{free_port()}.log").open("wb") as log:
        process = subprocess.Popen(
            [str(program), *arguments],
            env=environment(folder),
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill_session(process)


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, by the id of its own process group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """The address of a master, and two workers with a core each."""
    port = free_port()
    master = f"spark://127.0.0.1:{port}"
    host = ("--host", "127.0.0.1", "--webui-port", "0")
    with ExitStack() as stack:
        stack.enter_context(
            spark_class(tmp_path, f"{DEPLOY}.master.Master", *host, "--port", str(port))
        )
        size = ("--cores", "1", "--memory", "600m")
        workers = [
            stack.enter_context(
                spark_class(tmp_path, f"{DEPLOY}.worker.Worker", *host, *size, master)
            )
            for _ in range(2)
        ]
        yield master, workers


async def fill(cluster: Cluster) -> None:
    await cluster.create("flights", partitions=4)
    async with Producer(cluster.meta) as producer:
        await asyncio.gather(
            *(
                producer.send("flights", b"%d" % number, key=b"k%d" % (number % 53))
                for number in range(COUNT)
            )
        )


@pytest.mark.timeout(240)
def test_job_goes_on_when_a_worker_of_a_standalone_cluster_is_killed(
    standalone, file_cluster, tmp_path
):
    """Each row is there once, in order by key; the executors run this Python, which has keylane."""
    master, workers = standalone
    asyncio.run(fill(file_cluster))
    output = tmp_path / "output"
    with (
        (tmp_path / "driver.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, str(JOB), master, file_cluster.meta, "flights", str(output)],
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=log,
        ) as driver,
    ):
        assert driver.stdout is not None
        said = []
        for line in driver.stdout:
            said.append(json.loads(line))
            if "missing" in said[-1]:
                kill_session(workers[0])
    assert driver.returncode == 0, (tmp_path / "driver.log").read_text()[-3_000:]
    assert [facts.get("rows") for facts in said[:1]] == [COUNT]
    assert said[-1]["rows_out"] == COUNT
    table = pq.read_table(output)
    rows = sorted(
        zip(
            *(table[name].to_pylist() for name in ("partition", "offset", "key", "value")),
            strict=True,
        )
    )
    by_key: dict[bytes, list[int]] = {}
    for _, _, key, value in rows:
        by_key.setdefault(key, []).append(int(value))
    assert by_key == {b"k%d" % key: list(range(key, COUNT, 53)) for key in range(53)}
