"""A standalone cluster on loopback, of the pip package: a worker is killed with its executor, then
the driver with its JVM; a slow task is run twice.
"""

from __future__ import annotations

import asyncio
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import keylane.arrow
from keylane import Producer
from keylane.errors import SubjectUnknownError
from support.cluster import Cluster, eventually
from support.ports import free_port
from support.spark.archive import pack_environment
from support.spark.programs import kill_session, said, spark_class, spark_driver

COUNT = 3_000
KEYS = 53
JOB = Path(__file__).with_name("standalone_job.py")
DEPLOY = "org.apache.spark.deploy"
HOSTS = ("127.0.0.1", "127.0.0.2")
"""Of the workers: Spark runs no task a second time on the host that it is on."""


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """The address of a master, and two workers with a core each."""
    port = free_port()
    master = f"spark://127.0.0.1:{port}"
    ui = ("--webui-port", "0")
    with ExitStack() as stack:
        stack.enter_context(
            spark_class(
                tmp_path, f"{DEPLOY}.master.Master", "--host", HOSTS[0], *ui, "--port", str(port)
            )
        )
        size = ("--cores", "1", "--memory", "600m")
        workers = [
            stack.enter_context(
                spark_class(tmp_path, f"{DEPLOY}.worker.Worker", "--host", host, *ui, *size, master)
            )
            for host in HOSTS
        ]
        yield master, workers


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
    columns = ("partition", "offset", "key", "value")
    rows = keylane.arrow.read(cluster.meta, subject, columns=columns).read_all()
    rows = rows.sort_by([("partition", "ascending"), ("offset", "ascending")])
    by_key: dict[bytes, list[int]] = {}
    for key, value in zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True):
        by_key.setdefault(key, []).append(int(value))
    assert by_key == {b"k%d" % key: list(range(key, COUNT, KEYS)) for key in range(KEYS)}


@contextmanager
def driver(
    master: str, cluster: Cluster, folder: Path, stage: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The program beside this file, with its JVM."""
    with spark_driver(folder, JOB, master, cluster.meta, str(folder), stage) as process:
        yield process


@pytest.mark.whole  # five JVMs, which take a minute and more
@pytest.mark.timeout(600)
def test_standalone_cluster_reads_streams_and_writes_while_a_worker_and_a_driver_are_killed(
    standalone, cluster, tmp_path
):
    """Each row is there once, in the order of its key; the executors run this Python, which has
    keylane.
    """
    master, workers = standalone
    asyncio.run(fill(cluster))
    with driver(master, cluster, tmp_path, "first") as first:
        assert said(first, "rows") == {"rows": COUNT}
        said(first, "writing")
        time.sleep(1)  # rows of some tasks are stored
        kill_session(workers[0])
        said(first, "copied")
        check_each_once_in_order(cluster, "streamed")
        check_each_once_in_order(cluster, "copied")
        said(first, "missing")
        facts = tmp_path / "job" / "_keylane" / "pieces"
        asyncio.run(eventually(lambda: len(list(facts.glob("*.json"))) > 2, what="some pieces"))
    with pytest.raises(SubjectUnknownError):
        keylane.arrow.read(cluster.meta, "clean")
    with driver(master, cluster, tmp_path, "second") as second:
        missing = said(second, "missing")["missing"]
        assert 0 < int(str(missing)) < COUNT
        assert said(second, "rows_out") == {"rows_out": COUNT}
    check_each_once_in_order(cluster, "clean")


@pytest.mark.whole  # as above
@pytest.mark.timeout(600)
def test_standalone_cluster_stores_each_row_once_when_the_driver_of_a_stream_is_killed(
    standalone, cluster, tmp_path
):
    """SIGKILL of a stream's driver in mid-batch, which is replayed."""
    master, _ = standalone
    asyncio.run(fill(cluster))

    def some_rows() -> bool:
        return keylane.arrow.read(cluster.meta, "streamed").read_all().num_rows > 0

    with driver(master, cluster, tmp_path, "stream"):
        asyncio.run(eventually(some_rows, seconds=120, what="rows of a batch that runs"))
    assert keylane.arrow.read(cluster.meta, "streamed").read_all().num_rows < COUNT
    with driver(master, cluster, tmp_path, "stream") as again:
        assert said(again, "streamed")
    check_each_once_in_order(cluster, "streamed")


@pytest.mark.whole  # as above
@pytest.mark.timeout(600)
def test_standalone_cluster_stores_each_row_once_when_a_slow_task_is_run_beside_itself(
    standalone, cluster, tmp_path
):
    """Speculation: a second attempt begins on the other worker while the first one is storing the
    same rows.
    """
    master, _ = standalone
    asyncio.run(fill(cluster))
    with driver(master, cluster, tmp_path, "speculate") as process:
        assert said(process, "attempts") == {"attempts": ["0", "1"]}
    check_each_once_in_order(cluster, "copied")


@pytest.mark.whole  # as above
@pytest.mark.timeout(600)
def test_standalone_cluster_reads_and_writes_with_the_python_of_an_archive(
    standalone, cluster, tmp_path
):
    """`--archives`: executors unpack it beside their work, and keylane comes from there."""
    master, _ = standalone
    asyncio.run(fill(cluster))
    pack_environment(tmp_path / "env.tar.gz")
    with tarfile.open(tmp_path / "env.tar.gz") as archive:
        archive.extractall(tmp_path / "env", filter="fully_trusted")
    with driver(master, cluster, tmp_path, "archive") as process:
        rows = said(process, "rows")["rows"]
        assert isinstance(rows, list)
        assert sum(count for _, _, count in rows) == COUNT
        work = str(tmp_path / "work")
        for prefix, package, _ in rows:
            assert prefix.startswith(work), "the executor has another Python"
            assert package.startswith(work), "the executor has another keylane"
        said(process, "copied")
    check_each_once_in_order(cluster, "copied")
