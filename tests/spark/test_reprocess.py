"""Real flights reprocessed while they are sent, through a broker's restart, and gone on live behind
a resize.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.arrow.selection import ReadOptions
from keylane.cli.demo.source import flights_file, read_flights
from keylane.errors import Reason
from keylane.protocol.ids import Subject
from keylane.spark.reprocess import folder as folders
from keylane.spark.reprocess import run as runs
from keylane.spark.reprocess.comparing import KeyDifference
from keylane.spark.reprocess.job import Job
from keylane.spark.reprocess.outputs import compare_outputs
from support.cluster import Cluster, eventually
from support.raising import raises

ROWS = 12_000
SOURCE = [each for each in read_flights(flights_file(), ROWS * 2) if each.key][:ROWS]
COLUMNS = ("partition", "offset", "key", "value", "timestamp", "properties")


def same_rows():
    """Functions inside of functions travel to workers by value."""
    return lambda rows: rows


def changed_rows():
    """Messages of one key are changed, others as they are."""

    def change(rows: pa.Table) -> pa.Table:
        chosen = pc.equal(rows["key"], pa.scalar(b"N14228", pa.binary()))
        changed = pc.if_else(chosen, pa.scalar(b"changed", pa.binary()), rows["value"])
        return rows.set_column(rows.column_names.index("value"), "value", changed)

    return change


def options_of(cluster: Cluster, subject: str) -> ReadOptions:
    return ReadOptions(
        meta=(cluster.meta,), subjects=(Subject(subject),), columns=COLUMNS, batch_rows=1_000
    )


async def send(cluster: Cluster, subject: str, start: int, end: int) -> None:
    async with Producer(cluster.meta) as producer:
        await asyncio.gather(
            *(producer.send(subject, each.value, key=each.key) for each in SOURCE[start:end])
        )


def by_key(pairs) -> dict[bytes, list[bytes]]:
    values = defaultdict(list)
    for key, value in pairs:
        values[key].append(value)
    return dict(values)


def rows_of(path) -> list[tuple[bytes, bytes]]:
    table = pq.read_table(path)
    assert set(table["replay"].to_pylist()) == {"same"}
    columns = (table[name].to_pylist() for name in ("partition", "offset", "key", "value"))
    return [(key, value) for _, _, key, value in sorted(zip(*columns, strict=True))]


async def handled_by(cluster: Cluster, subject: str, folder: str, count: int) -> list[Message]:
    """What a group gets that begins where the backfill ended."""
    got: list[Message] = []

    async def handle(message: Message) -> None:
        got.append(message)

    async with Consumer(
        cluster.meta,
        subject=subject,
        group="live",
        handler=handle,
        start=f"manifest:{folder}",
        settings=ConsumerSettings(ttl_ms=3_000),
    ):
        await eventually(lambda: len(got) >= count, what="the live messages")
        await asyncio.sleep(0.5)
    return got


async def prepare(cluster: Cluster, subject: str) -> None:
    await cluster.create(subject, partitions=3)
    await send(cluster, subject, 0, 8_000)


def test_backfill_and_live_group_have_each_flight_once_in_order(spark, file_cluster, tmp_path):
    """Appends and a broker's restart go on meanwhile; partitions are sealed half read, and
    continued by others.
    """
    folder = folders.OutputFolder(str(tmp_path / "out"))
    job = Job("same", same_rows(), "reprocess_jobs:same@1")
    asyncio.run(prepare(file_cluster, "moving"))
    options = options_of(file_cluster, "moving")

    def meanwhile(_plan) -> None:
        def go_on() -> None:
            asyncio.run(send(file_cluster, "moving", 8_000, 10_000))

        appends.append(threading.Thread(target=go_on))
        appends[0].start()
        file_cluster.brokers[0].kill()
        file_cluster.brokers[0].restart()

    appends: list[threading.Thread] = []
    plan = runs.plan_job(job, options, folder)
    assert (plan.rows, plan.tasks, folder.pieces(job.code)) == (8_000, 3, [])
    manifest = runs.run_job(spark, job, options, folder, planned=meanwhile)
    appends[0].join()
    assert (manifest.rows_in, manifest.rows_out) == (8_000, 8_000)

    async def go_on_live() -> list[Message]:
        async with Admin(file_cluster.meta) as admin:
            (held, *_) = (await admin.describe_subject("moving")).partitions
            assert [hold.job for hold in held.holds] == ["same"]
            await admin.wait(await admin.resize("moving", 4))
        await send(file_cluster, "moving", 10_000, ROWS)
        return await handled_by(file_cluster, "moving", str(folder.path), ROWS - 8_000)

    live = asyncio.run(go_on_live())
    backfilled = rows_of(folder.path)
    assert len(backfilled) + len(live) == ROWS
    both = [*backfilled, *((message.key, message.value) for message in live)]
    assert by_key(both) == by_key((each.key, each.value) for each in SOURCE)

    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
    assert runs.run_job(spark, job, options, folder) == manifest
    assert {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")} == before

    async def other_start() -> None:
        async with Admin(file_cluster.meta) as admin:
            await admin.create_group("moving", "live", start="latest")

    with raises(Reason.GROUP_EXISTS):
        asyncio.run(other_start())


def test_killed_job_is_finished_by_the_same_command(spark, file_cluster, tmp_path, monkeypatch):
    """Its pieces stay, those that are missing are done over the ranges of the first run, and the
    rows are the same.
    """
    monkeypatch.setattr(runs, "PIECE_ROWS", 500)
    folder = folders.OutputFolder(str(tmp_path / "out"))
    failing = tmp_path / "fail"

    def fails(rows):
        if failing.exists():
            raise ValueError("the test lets it fail")
        return rows

    job = Job("same", fails, "reprocess_jobs:same@1")
    asyncio.run(prepare(file_cluster, "killed"))
    options = options_of(file_cluster, "killed")
    whole = runs.run_job(spark, job, options, folder)
    gone = whole.pieces[1::2]
    for piece in gone:
        (folder.path / piece.file).unlink()
    (folder.path / "_keylane" / folders.MANIFEST).unlink()
    asyncio.run(send(file_cluster, "killed", 8_000, 9_000))
    with raises(Reason.MANIFEST):
        asyncio.run(handled_by(file_cluster, "killed", str(folder.path), 1))
    failing.touch()
    with pytest.raises(Exception, match=r"KEYLANE_1322 .*the test lets it fail"):
        runs.run_job(spark, job, options, folder)
    failing.unlink()
    plan = runs.plan_job(job, options, folder)
    assert [(each.start, each.end) for each in plan.missing] == [
        (each.start, each.end) for each in gone
    ]
    assert runs.run_job(spark, job, options, folder) == whole


def test_comparison_names_the_key_and_its_first_offset_when_code_changed(
    spark, file_cluster, tmp_path
):
    asyncio.run(prepare(file_cluster, "compared"))
    old, new = (folders.OutputFolder(str(tmp_path / name)) for name in ("old", "new"))
    options = options_of(file_cluster, "compared")
    first = Job("same", same_rows(), "reprocess_jobs:same@1")
    second = Job("same", changed_rows(), "reprocess_jobs:upper@2")
    runs.run_job(spark, first, options, old)
    with raises(Reason.JOB_CHANGED):
        runs.run_job(spark, second, options, old)
    runs.run_job(spark, second, options, new)
    assert compare_outputs("", str(old.path), old) == []
    (unlike,) = compare_outputs("", str(old.path), new)
    table = pq.read_table(new.path)
    changed = [
        (row["partition"], row["offset"]) for row in table.to_pylist() if row["key"] == b"N14228"
    ]
    assert unlike == KeyDifference(
        partition_id=changed[0][0],
        key=b"N14228",
        first_offset=min(offset for _, offset in changed),
        rows=len(changed),
    )
