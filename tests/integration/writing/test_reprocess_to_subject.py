"""Jobs whose rows go to a subject: published at once, each row once, each key in order; run again,
done again. No Java.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import keylane.arrow
from keylane import Admin, Producer
from keylane.cli.commands.spark.reprocess import ReprocessOptions, reprocess
from keylane.cli.options import OutputFormat
from keylane.protocol.errors import Reason, SubjectUnknownError
from keylane.protocol.operations import OperationKind, Reshape
from keylane.spark.options import parse_options
from keylane.spark.reprocess import run as runs
from keylane.spark.reprocess.folder import MANIFEST, OutputFolder
from keylane.spark.reprocess.job import Job
from keylane.spark.reprocess.target import JobTarget
from keylane.spark.writing.job import WriteOptions
from support.cluster import Cluster, delete_subject
from support.raising import raises
from support.server_process import run_keylane
from support.tasks_here import TasksHere

COLUMNS = "partition,offset,key,value,timestamp,properties"
KEYS = 20
COUNT = 600


async def send(cluster: Cluster, subject: str, numbers: range) -> None:
    async with Producer(cluster.meta) as producer:
        await asyncio.gather(
            *(
                producer.send(subject, b"%d" % n, key=b"k%d" % (n % KEYS), properties={"n": str(n)})
                for n in numbers
            )
        )


def resize(cluster: Cluster, subject: str, count: int) -> None:
    ask = Reshape(kind=OperationKind.RESIZE, subject=subject, partitions=count)
    asyncio.run(cluster.reshape(ask))


class SubjectJob:
    """A job on `source`, with its folder and target."""

    def __init__(self, cluster: Cluster, source: str, folder: Path, target: str, **options) -> None:
        given = {"meta": cluster.meta, "subject": source, "columns": COLUMNS}
        self.options = parse_options(given, now_ms=0)
        self.folder = OutputFolder(str(folder))
        write = WriteOptions(meta=(cluster.meta,), subject=target, timeout_ms=20_000, **options)
        self.to = JobTarget(options=write)

    def run(self, function=lambda rows: rows, code: str = "jobs:same@1", spark=TasksHere, **more):
        job = Job("same", function, code)
        return runs.run_job(spark, job, self.options, self.folder, to=self.to, **more)


def rows_of(cluster: Cluster, subject: str) -> list[dict]:
    table = keylane.arrow.read(
        cluster.meta, subject, columns=(*COLUMNS.split(","), "epoch")
    ).read_all()
    return sorted(
        table.to_pylist(), key=lambda row: (row["epoch"], row["partition"], row["offset"])
    )


def check_each_once_in_order(rows: list[dict], sent: range) -> None:
    numbers = [int(row["value"]) for row in rows]
    assert sorted(numbers) == list(sent)
    last: dict[bytes, int] = {}
    for row in rows:
        assert last.get(row["key"], -1) < int(row["value"])
        last[row["key"]] = int(row["value"])


@pytest.fixture
def source(file_cluster: Cluster, request: pytest.FixtureRequest, monkeypatch) -> Iterator[str]:
    """A subject with COUNT messages in two generations of partitions, and small pieces."""
    monkeypatch.setattr(runs, "PIECE_ROWS", 70)
    name = request.node.name.removeprefix("test_").rstrip("]").replace("[", "-")[:80]
    asyncio.run(file_cluster.create(name, partitions=2))
    asyncio.run(send(file_cluster, name, range(COUNT // 2)))
    resize(file_cluster, name, 3)
    asyncio.run(send(file_cluster, name, range(COUNT // 2, COUNT)))
    return name


def hidden_subjects(cluster: Cluster, target: str) -> list[str]:
    async def ask() -> list[str]:
        async with Admin(cluster.meta) as admin:
            listed = await admin.list_subjects(hidden=True)
        return [each.subject for each in listed if each.hidden_for == target]

    return asyncio.run(ask())


def test_rows_are_published_at_once_and_marked_and_a_repeat_does_nothing(
    file_cluster, source, tmp_path
):
    """To a subject that does not exist, with fewer partitions than the source ever had."""
    work = SubjectJob(file_cluster, source, tmp_path, "published", partitions=2)
    seen: list[str] = []

    def look(rows: pa.Table) -> pa.Table:
        seen.extend(hidden_subjects(file_cluster, "published"))
        with pytest.raises(SubjectUnknownError):
            rows_of(file_cluster, "published")
        return rows

    with raises(Reason.JOB_FAILED, match="no column value"):
        work.run(lambda rows: rows.drop_columns(["value"]))
    manifest = work.run(look)
    assert (manifest.rows_in, manifest.rows_out) == (COUNT, COUNT)
    assert set(seen) == {manifest.output.hidden}
    rows = rows_of(file_cluster, "published")
    check_each_once_in_order(rows, range(COUNT))
    before = {(row["partition"], row["offset"]): row for row in rows_of(file_cluster, source)}
    for row in rows:
        properties = dict(row["properties"])
        assert properties.pop("replay") == "same"
        came_from = tuple(map(int, properties.pop("keylane.source").split("/")))
        assert properties == dict(before[came_from]["properties"])
        assert (row["key"], row["value"]) == (before[came_from]["key"], before[came_from]["value"])
        assert row["timestamp"] == before[came_from]["timestamp"]
    assert work.run(look) == manifest
    assert len(rows_of(file_cluster, "published")) == COUNT
    assert hidden_subjects(file_cluster, "published") == []
    with raises(Reason.JOB_CHANGED):
        SubjectJob(file_cluster, source, tmp_path, "elsewhere", partitions=2).run()


@pytest.mark.parametrize("kind", ["files", "subject"])
def test_spark_is_started_only_if_a_piece_is_missing(file_cluster, source, tmp_path, kind):
    """A start of Java takes seconds."""
    target = f"started-{kind}"
    asyncio.run(file_cluster.create(target, partitions=2))
    work = SubjectJob(file_cluster, source, tmp_path, target)
    if kind == "files":
        work.to = None
    started: list[TasksHere] = []

    def start() -> TasksHere:
        started.append(TasksHere())
        return started[-1]

    manifest = work.run(spark=start)
    assert work.run(spark=start) == manifest
    assert len(started) == 1


def failing(*numbers: int) -> Callable[[pa.Table], pa.Table]:
    """Fails for a table that has one of these values."""

    def run(rows: pa.Table) -> pa.Table:
        for value in rows["value"].to_pylist():
            if int(value) in numbers:
                raise ValueError(f"bad {int(value)}")
        return rows

    return run


@pytest.mark.parametrize("kind", ["files", "subject"])
def test_job_goes_on_after_its_function_was_mended_when_the_code_is_accepted(
    file_cluster, source, tmp_path, kind
):
    """Pieces that are done stay, and the manifest names the code of each; a repeat does nothing."""
    target = f"mended-{kind}"
    asyncio.run(file_cluster.create(target, partitions=2))
    work = SubjectJob(file_cluster, source, tmp_path, target)
    if kind == "files":
        work.to = None
    with raises(Reason.JOB_FAILED, match=f"bad {COUNT - 1}") as failed:
        work.run(failing(COUNT - 1))
    assert "--accept-code" in failed.value.hint
    with raises(Reason.JOB_CHANGED, match="jobs:same@2") as changed:
        work.run(code="jobs:same@2")
    assert "--accept-code" in changed.value.hint
    manifest = work.run(code="jobs:same@2", accept_code=True)
    assert (manifest.code, manifest.earlier_codes) == ("jobs:same@2", ("jobs:same@1",))
    codes = [piece.code for piece in manifest.pieces]
    assert set(codes) == {"", "jobs:same@1"}
    assert manifest.rows_out == COUNT
    if kind == "subject":
        check_each_once_in_order(rows_of(file_cluster, target), range(COUNT))
    assert work.run(code="jobs:same@2") == manifest
    with raises(Reason.JOB_CHANGED) as other:
        SubjectJob(file_cluster, source, tmp_path, f"{target}-2", partitions=1).run(
            accept_code=True
        )
    assert "--accept-code" not in other.value.hint


@pytest.mark.parametrize("kind", ["files", "subject"])
def test_messages_that_fail_are_parked_in_the_folder_and_the_job_ends(
    file_cluster, source, tmp_path, kind
):
    """With their place and the error; the manifest counts them by piece, and a repeat does
    nothing.
    """
    bad, target = {3, 77, 78, COUNT - 1}, f"parked-{kind}"
    asyncio.run(file_cluster.create(target, partitions=2))
    work = SubjectJob(file_cluster, source, tmp_path, target)
    if kind == "files":
        work.to = None
    manifest = work.run(failing(*bad), park=True)
    assert (manifest.parked, manifest.rows_out) == (4, COUNT - 4)
    parked = pq.read_table(work.folder.parked).to_pylist()
    assert {int(row["value"]): row["error"] for row in parked} == {
        number: f"ValueError: bad {number}" for number in bad
    }
    sent = {int(row["value"]): row for row in rows_of(file_cluster, source)}
    for row in parked:
        assert {**sent[int(row["value"])], "error": row["error"]} == {
            **sent[int(row["value"])],
            **row,
        }
    good = [number for number in range(COUNT) if number not in bad]
    if kind == "subject":
        rows = [int(row["value"]) for row in rows_of(file_cluster, target)]
    else:
        rows = [int(value) for value in pq.read_table(work.folder.path)["value"].to_pylist()]
    assert sorted(rows) == good
    assert work.run(failing(*bad), park=True) == manifest
    assert "4 messages" in work.folder.describe_parked(manifest)


def test_command_tells_of_parked_messages_in_its_output_its_status_and_the_comparison(
    file_cluster, source, tmp_path, monkeypatch, capsys
):
    """Status 3; a comparison with an output that has their rows is 2, and a cut-over says that they
    are deleted.
    """
    monkeypatch.setattr("keylane.spark.session.local_session", lambda **_: TasksHere())
    monkeypatch.setattr("keylane.cli.java.find_java", lambda: SimpleNamespace(path=tmp_path))
    (tmp_path / "command_job.py").write_text(
        "def same(rows):\n    return rows\n\n\ndef strict(rows):\n"
        "    assert b'7' not in rows['value'].to_pylist()\n    return rows\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def command(function: str, into: str, to: str = "", **more: object) -> tuple[int, str]:
        asked = ReprocessOptions(
            meta=file_cluster.meta,
            source=source,
            to=to or f"parquet:{tmp_path / into}",
            job=f"command_job:{function}",
            start="earliest",
            end="latest",
            name="",
            plan=False,
            handover_ms=0,
            **{"compare": "", **more},
        )
        status = reprocess(OutputFormat.TABLE, asked)
        captured = capsys.readouterr()
        return status, " ".join((captured.out + captured.err).split())

    status, said = command("strict", "strict")
    assert (status, "--on-error park" in said) == (1, True)
    status, said = command("strict", "strict", park=True)
    assert status == 3
    assert "1 message of" in said
    assert "parked in" in said
    assert command("strict", "strict", park=True)[0] == 3
    assert command("same", "same")[0] == 0
    status, said = command("strict", "strict", park=True, compare=str(tmp_path / "same"))
    assert (status, "1 key with other rows" in said) == (2, True)
    assert said.count("1 message of") == 2
    folder = str(tmp_path / "cut")
    more = {"folder": folder, "hidden": f"{source}.new", "park": True}
    assert command("strict", "", source, **more)[0] == 3
    words = ("publish", f"{source}.new", source, "--replace", "--yes", "--groups-from", folder)
    published = run_keylane("subject", *words, "--meta", file_cluster.meta)
    assert published.returncode == 0, published.stderr
    assert "a cut-over deletes them" in " ".join(published.stderr.split())
    assert len(rows_of(file_cluster, source)) == COUNT - 1


def test_killed_job_is_finished_by_a_second_run_with_each_row_once(
    file_cluster, source, tmp_path, monkeypatch
):
    """It dies in mid-piece, and again between the manifest and the publication."""

    def killed(*_arguments: object) -> None:
        raise InterruptedError

    asyncio.run(file_cluster.create("behind", partitions=2))
    work = SubjectJob(file_cluster, source, tmp_path, "behind")
    left = [9]

    def dies(rows: pa.Table) -> pa.Table:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("the test kills it")
        return rows

    with raises(Reason.JOB_FAILED, match="the test kills it"):
        work.run(dies)
    (hidden,) = hidden_subjects(file_cluster, "behind")
    assert rows_of(file_cluster, "behind") == []
    assert 0 < len(rows_of(file_cluster, hidden)) < COUNT
    # The facts of a stored piece are lost, as if the worker were killed before it noted them.
    facts = sorted((tmp_path / "_keylane" / "pieces").iterdir())
    facts[-1].unlink()
    with monkeypatch.context() as dying:
        dying.setattr(JobTarget, "publish", killed)
        with pytest.raises(InterruptedError):
            work.run()
    assert rows_of(file_cluster, "behind") == []
    assert work.folder.read(MANIFEST) is not None
    manifest = work.run()
    check_each_once_in_order(rows_of(file_cluster, "behind"), range(COUNT))
    assert manifest.output.hidden == hidden


def test_job_whose_hidden_subject_is_gone_writes_its_rows_again(file_cluster, source, tmp_path):
    """It was deleted, as after a change of the target's partitions, which refuses the
    publication.
    """
    asyncio.run(file_cluster.create("resized", partitions=2))
    work = SubjectJob(file_cluster, source, tmp_path, "resized")
    changes = [lambda: resize(file_cluster, "resized", 3)]

    def resizes(rows: pa.Table) -> pa.Table:
        while changes:
            changes.pop()()
        return rows

    with raises(Reason.PUBLISH_OUTDATED):
        work.run(resizes)
    with raises(Reason.PUBLISH_OUTDATED):
        work.run(resizes)
    (hidden,) = hidden_subjects(file_cluster, "resized")
    asyncio.run(delete_subject(file_cluster.meta, hidden))
    work.run(resizes)
    check_each_once_in_order(rows_of(file_cluster, "resized"), range(COUNT))


@pytest.mark.parametrize("pieces", [0, 5])
def test_job_publishes_no_part_when_killed_while_it_writes_anew(
    file_cluster, source, tmp_path, pieces: int
):
    """The manifest says of the rows that are gone that they were complete; the new hidden subject
    lacks most of them.
    """
    target = f"again-{pieces}"
    asyncio.run(file_cluster.create(target, partitions=2))
    work = SubjectJob(file_cluster, source, tmp_path, target)
    changes = [lambda: resize(file_cluster, target, 3)]

    def resizes(rows: pa.Table) -> pa.Table:
        while changes:
            changes.pop()()
        return rows

    with raises(Reason.PUBLISH_OUTDATED):
        work.run(resizes)
    (hidden,) = hidden_subjects(file_cluster, target)
    asyncio.run(delete_subject(file_cluster.meta, hidden))
    left = [pieces]

    def dies(rows: pa.Table) -> pa.Table:
        if not left[0]:
            raise RuntimeError("the test kills it")
        left[0] -= 1
        return rows

    with raises(Reason.JOB_FAILED, match="the test kills it"):
        work.run(dies)
    manifest = work.run()
    check_each_once_in_order(rows_of(file_cluster, target), range(COUNT))
    assert work.run() == manifest
    assert len(rows_of(file_cluster, target)) == COUNT


def test_rows_of_another_hand_in_the_hidden_subject_are_not_published(
    file_cluster, source, tmp_path
):
    asyncio.run(file_cluster.create("mixed", partitions=2))
    work = SubjectJob(file_cluster, source, tmp_path, "mixed", hidden="mixed.rows", publish=False)
    others = [lambda: asyncio.run(send(file_cluster, "mixed.rows", range(1)))]

    def mixes(rows: pa.Table) -> pa.Table:
        while others:
            others.pop()()
        return rows

    with raises(Reason.ROWS_DIFFER, match="delete it"):
        work.run(mixes)
    asyncio.run(delete_subject(file_cluster.meta, "mixed.rows"))
    manifest = work.run(mixes)
    assert rows_of(file_cluster, "mixed") == []
    check_each_once_in_order(rows_of(file_cluster, "mixed.rows"), range(COUNT))
    assert work.run(mixes) == manifest


def test_hidden_subject_of_another_job_is_refused_and_keeps_its_rows(
    file_cluster, source, tmp_path
):
    """Before a row is written: else the rows of two jobs would be mixed."""
    asyncio.run(file_cluster.create("shared", partitions=2))
    given = {"hidden": "shared.rows", "publish": False}
    first = SubjectJob(file_cluster, source, tmp_path / "first", "shared", **given)
    manifest = first.run()
    other = SubjectJob(file_cluster, source, tmp_path / "other", "shared", **given)
    with raises(Reason.HIDDEN_TAKEN, match=f"of folder {tmp_path}/first"):
        other.run()
    check_each_once_in_order(rows_of(file_cluster, "shared.rows"), range(COUNT))
    assert first.run() == manifest


def test_job_takes_no_earlier_publication_under_its_hidden_name_for_its_own(
    file_cluster, source, tmp_path
):
    """Its hidden subject was deleted, and another one made and published under its name: its rows
    are nowhere.
    """
    asyncio.run(file_cluster.create("named", partitions=2))
    work = SubjectJob(file_cluster, source, tmp_path, "named", hidden="named.rows", publish=False)
    manifest = work.run()
    assert work.run() == manifest
    asyncio.run(delete_subject(file_cluster.meta, "named.rows"))

    async def publish_another() -> None:
        async with Admin(file_cluster.meta) as admin, Producer(file_cluster.meta) as producer:
            await admin.hide_subject("named", "named.rows")
            await producer.send("named.rows", b"other", key=b"k")
            await admin.publish_subject("named.rows", "named")

    asyncio.run(publish_another())
    with raises(Reason.PUBLISH_TARGET, match="choose another name"):
        work.run()


def test_job_that_was_published_by_hand_is_done_when_it_is_run_again(
    file_cluster, source, tmp_path
):
    asyncio.run(file_cluster.create("byhand", partitions=2))
    work = SubjectJob(file_cluster, source, tmp_path, "byhand", hidden="byhand.rows", publish=False)
    manifest = work.run()

    async def publish() -> None:
        async with Admin(file_cluster.meta) as admin:
            await admin.publish_subject("byhand.rows", "byhand")

    asyncio.run(publish())
    assert work.run() == manifest
    check_each_once_in_order(rows_of(file_cluster, "byhand"), range(COUNT))


def test_second_job_is_refused_while_the_first_fills_the_hidden_subject(
    file_cluster, source, tmp_path
):
    """Before a row is stored, so that the first one's rows stay as it has counted them."""
    asyncio.run(file_cluster.create("both", partitions=2))
    given = {"hidden": "both.rows", "publish": False}
    first = SubjectJob(file_cluster, source, tmp_path / "first", "both", **given)
    other = SubjectJob(file_cluster, source, tmp_path / "other", "both", **given)
    begun: list[str] = []

    def begins_the_other(rows: pa.Table) -> pa.Table:
        if not begun:
            begun.append("other")
            assert rows_of(file_cluster, "both.rows") == []
            with raises(Reason.HIDDEN_TAKEN, match=f"of folder {tmp_path}/first"):
                other.run(code="jobs:other@1")
        return rows

    first.run(begins_the_other)
    assert begun
    check_each_once_in_order(rows_of(file_cluster, "both.rows"), range(COUNT))
