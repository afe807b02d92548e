"""The driver of a job is killed: nothing is visible, a second run finishes it, and without one its
rows are deleted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import keylane.arrow
from keylane import Admin, Producer
from keylane.errors import SubjectUnknownError
from keylane.spark.reprocess.folder import MANIFEST, OutputFolder
from support.cluster import Cluster

COUNT = 400
DRIVER = """
import sys, time
from keylane.spark.options import parse_options
from keylane.spark.reprocess import run as runs
from keylane.spark.reprocess.folder import OutputFolder
from keylane.spark.reprocess.job import Job
from keylane.spark.reprocess.target import JobTarget
from keylane.spark.writing.job import WriteOptions
from support.tasks_here import TasksHere

meta, folder, pause = sys.argv[1:]
runs.PIECE_ROWS = 50
calls = []

def rows_of(rows):
    calls.append(rows)
    if len(calls) == 4 and float(pause):
        print("here", flush=True)
        time.sleep(float(pause))
    return rows

columns = "partition,offset,key,value,timestamp,properties"
options = parse_options({"meta": meta, "subject": "orders", "columns": columns}, now_ms=0)
to = JobTarget(options=WriteOptions(meta=(meta,), subject="clean", partitions=2, timeout_ms=20_000))
runs.run_job(TasksHere(), Job("same", rows_of, "jobs:same@1"), options, OutputFolder(folder), to=to)
"""


def driver(cluster: Cluster, folder: Path, pause_s: float) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", DRIVER, cluster.meta, str(folder), str(pause_s)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)


async def hidden_of(admin: Admin) -> dict[str, int | None]:
    listed = await admin.list_subjects(hidden=True)
    return {each.subject: each.expires_in_ms for each in listed if each.hidden_for == "clean"}


def values(cluster: Cluster, subject: str) -> list[int]:
    table = keylane.arrow.read(cluster.meta, subject).read_all()
    return sorted(int(value) for value in table["value"].to_pylist())


async def fill(cluster: Cluster) -> None:
    await cluster.create("orders", partitions=2)
    async with Producer(cluster.meta) as producer:
        for number in range(COUNT):
            await producer.send("orders", b"%d" % number, key=b"k%d" % (number % 9))


async def test_rows_of_a_killed_driver_are_hidden_until_a_second_run_publishes_all(
    file_cluster: Cluster, tmp_path
):
    await fill(file_cluster)
    async with Admin(file_cluster.meta) as admin:
        await asyncio.to_thread(kill_in_mid_job, file_cluster, tmp_path)
        (left,) = await hidden_of(admin)
        assert 0 < len(await asyncio.to_thread(values, file_cluster, left)) < COUNT
        with pytest.raises(SubjectUnknownError):
            await asyncio.to_thread(values, file_cluster, "clean")
        await finish(file_cluster, tmp_path)
        assert await hidden_of(admin) == {}


@pytest.mark.cluster(meta_settings="expire_ms = 100\nhidden_expires_ms = 5000\n", brokers=1)
async def test_hidden_subject_of_a_killed_driver_expires_and_its_rows_are_written_again(
    cluster: Cluster, tmp_path
):
    """It is there while it is filled; a metaserver that deletes none tells no time."""
    await fill(cluster)
    async with Admin(cluster.meta) as admin:
        await asyncio.to_thread(kill_in_mid_job, cluster, tmp_path / "job")
        async with asyncio.timeout(60):
            while left := await hidden_of(admin):
                assert all((left_ms or 0) <= 5_000 for left_ms in left.values())
                await asyncio.sleep(0.05)
        (tmp_path / "metaserver.toml").write_text("hidden_expires_ms = 0\n")
        cluster.meta_program.kill()
        cluster.meta_program.restart()
        await asyncio.to_thread(kill_in_mid_job, cluster, tmp_path / "job")
        assert list((await hidden_of(admin)).values()) == [None]
        await finish(cluster, tmp_path / "job")


async def finish(cluster: Cluster, folder: Path) -> None:
    """Run the driver of the same job again, and see each row once."""
    process = driver(cluster, folder, 0)
    assert process.stdout is not None
    with process.stdout:
        assert await asyncio.to_thread(process.wait, 60) == 0
    assert await asyncio.to_thread(values, cluster, "clean") == list(range(COUNT))
    manifest = OutputFolder(str(folder)).read(MANIFEST)
    assert manifest is not None
    assert manifest.rows_out == COUNT


def kill_in_mid_job(cluster: Cluster, folder: Path) -> None:
    """SIGKILL while some pieces are stored, and one is not."""
    process = driver(cluster, folder, 60)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
