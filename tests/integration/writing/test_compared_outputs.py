"""What a job has stored in a subject, compared with older rows: down to the first offset of each
key. No Java.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from keylane import Producer
from keylane.arrow.task_reader import read_task
from keylane.errors import Reason, SubjectUnknownError
from keylane.protocol.operations import OperationKind, Reshape
from keylane.spark.options import parse_options
from keylane.spark.reprocess import outputs
from keylane.spark.reprocess import run as runs
from keylane.spark.reprocess.comparing import KeyDifference
from keylane.spark.reprocess.folder import OutputFolder
from keylane.spark.reprocess.job import Job
from keylane.spark.reprocess.outputs import compare_outputs
from keylane.spark.reprocess.target import JobTarget
from keylane.spark.writing.job import WriteOptions
from support.cluster import Cluster
from support.raising import raises
from support.server_process import run_keylane
from support.tasks_here import TasksHere

COLUMNS = "partition,offset,key,value,timestamp,properties"
KEYS = 10
COUNT = 400
CHANGED = {b"77", b"207", b"300"}


async def send(cluster: Cluster, subject: str, numbers: range) -> None:
    async with Producer(cluster.meta) as producer:
        for number in numbers:
            properties = {"n": str(number)}
            await producer.send(
                subject, b"%d" % number, key=b"k%d" % (number % KEYS), properties=properties
            )


def same(rows: pa.Table) -> pa.Table:
    return rows


def bare(rows: pa.Table) -> pa.Table:
    """Rows get the time of their job's plan."""
    return rows.select(["offset", "key", "value"])


def nameless_rows(rows: pa.Table) -> pa.Table:
    """Rows that do not say what they were made of."""
    return rows.select(["key", "value"])


def changed(rows: pa.Table) -> pa.Table:
    """One message has another value, one is left out, one is there twice."""
    values = rows["value"].to_pylist()
    taken = [
        at
        for at, value in enumerate(values)
        if value != b"207"
        for _ in range(2 if value == b"300" else 1)
    ]
    other = [b"x" if value == b"77" else value for value in values]
    at = rows.column_names.index("value")
    return rows.set_column(at, "value", pa.array(other, pa.binary())).take(pa.array(taken))


def bare_changed(rows: pa.Table) -> pa.Table:
    return bare(changed(rows))


class StoredOutputs:
    """Jobs on a subject of two generations of partitions, in small pieces that are compared a few
    at a time.
    """

    def __init__(self, cluster: Cluster, folder: Path, source: str) -> None:
        self.cluster, self.folder, self.source = cluster, folder, source

    def run(self, function, target: str = "", *, hidden: str = "", folder: str = "") -> str:
        """Run a job; returns its folder."""
        given = {"meta": self.cluster.meta, "subject": self.source, "columns": COLUMNS}
        path = self.folder / (folder or f"{function.__name__}-{target}")
        options = WriteOptions(
            meta=(self.cluster.meta,),
            subject=f"{self.source}.{target}",  # type: ignore[arg-type]
            partitions=3,
            hidden=f"{self.source}.{hidden}" if hidden else None,
            publish=not hidden,
            timeout_ms=20_000,
        )
        runs.run_job(
            TasksHere(),  # type: ignore[arg-type]
            Job(function.__name__, function, f"jobs:{function.__name__}@1"),
            parse_options(given, now_ms=0),
            OutputFolder(str(path)),
            to=JobTarget(options=options) if target else None,
        )
        return str(path)

    def compare(self, old: str, new: str) -> list[KeyDifference]:
        return compare_outputs(self.cluster.meta, old, OutputFolder(new))


@pytest.fixture
def work(
    file_cluster: Cluster,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> StoredOutputs:
    monkeypatch.setattr(runs, "PIECE_ROWS", 30)
    monkeypatch.setattr(outputs, "ROUND_ROWS", 70)
    source = request.node.name.removeprefix("test_")[:40]
    asyncio.run(file_cluster.create(source, partitions=2))
    asyncio.run(send(file_cluster, source, range(COUNT // 2)))
    ask = Reshape(kind=OperationKind.RESIZE, subject=source, partitions=3)
    asyncio.run(file_cluster.reshape(ask))
    asyncio.run(send(file_cluster, source, range(COUNT // 2, COUNT)))
    return StoredOutputs(file_cluster, tmp_path, source)


def expected(work: StoredOutputs) -> list[KeyDifference]:
    """One row of each of the changed messages, at its place."""
    options = parse_options(
        {"meta": work.cluster.meta, "subject": work.source, "columns": COLUMNS}, now_ms=0
    )
    rows = [
        row
        for planned in runs.take_snapshot(options)
        for batch in read_task(options, [planned])
        for row in batch.filter(pc.is_in(batch["value"], pa.array(CHANGED))).to_pylist()
    ]
    matches = [
        KeyDifference(
            partition_id=row["partition"], key=row["key"], first_offset=row["offset"], rows=1
        )
        for row in rows
    ]
    merged: dict[tuple[int, object], KeyDifference] = {}
    for each in sorted(matches, key=lambda each: (each.partition_id, each.first_offset or 0)):
        before = merged.get((each.partition_id, each.key))
        if before is None:
            merged[each.partition_id, each.key] = each
        else:
            merged[each.partition_id, each.key] = KeyDifference(
                partition_id=each.partition_id,
                key=each.key,
                first_offset=before.first_offset,
                rows=before.rows + 1,
            )
    return list(merged.values())


def test_rows_in_subjects_and_files_are_compared_down_to_the_first_offset_of_a_key(work):
    """Old and new each in files, in a published subject, in a hidden one, and the messages
    themselves.
    """
    differences = expected(work)
    assert sum(each.rows for each in differences) == len(CHANGED)
    old_files, old_subject = work.run(same), work.run(same, "same")
    new_files, new_subject = work.run(changed), work.run(changed, "changed")
    new_hidden = work.run(changed, "changed", hidden="changed.rows", folder="hidden")
    asyncio.run(
        send(work.cluster, f"{work.source}.changed", range(5))
    )  # live rows are no rows of the job
    for old in (old_files, old_subject, f"subject:{work.source}", f"subject:{work.source}.same"):
        for new in (new_files, new_subject, new_hidden):
            assert work.compare(old, new) == differences, (old, new)
        assert work.compare(old, old_subject) == []
    names = (f"{work.source}.changed.rows", f"{work.source}.changed")
    run_keylane("subject", "publish", *names, "--meta", work.cluster.meta).check_returncode()
    assert work.compare(old_subject, new_hidden) == differences
    assert work.compare(new_hidden, new_subject) == []


def test_time_of_the_plan_and_properties_of_the_job_are_no_difference(work):
    old, new = work.run(bare, "old"), work.run(bare_changed, "new")
    assert work.compare(old, new) == expected(work)
    bare_and_whole = work.compare(f"subject:{work.source}", old)
    assert sum(each.rows for each in bare_and_whole) == COUNT, "the properties are left out"


def test_outputs_that_cannot_be_compared_are_refused(work, tmp_path):
    """Rows that do not say their source, a subject that is not there, a job that is not complete,
    rows that are gone.
    """
    whole = work.run(same, "same")
    nameless = work.run(nameless_rows, "nameless")
    with raises(Reason.OUTPUTS_DIFFER, match="keep the column offset"):
        work.compare(whole, nameless)
    with pytest.raises(SubjectUnknownError):
        work.compare("subject:nothing", whole)
    with raises(Reason.MANIFEST, match="not complete"):
        work.compare(str(tmp_path / "nothing"), whole)
    asyncio.run(send(work.cluster, work.source, range(1)))
    longer = work.run(same, "same", folder="longer")
    with raises(Reason.MANIFEST, match="different ranges"):
        work.compare(whole, longer)
    run_keylane(
        "subject", "delete", f"{work.source}.same", "--yes", "--force", "--meta", work.cluster.meta
    ).check_returncode()
    with raises((Reason.OUTPUTS_DIFFER, SubjectUnknownError)):
        work.compare(f"subject:{work.source}", whole)
