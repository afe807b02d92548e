"""The bars of `keylane spark reprocess`: one for each partition, moved by the pieces that are
done.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from keylane.cli.commands.spark import reprocess
from keylane.protocol.reprocess.manifest import JobPiece, Manifest, SourceRange
from keylane.spark.reprocess.folder import OutputFolder
from keylane.spark.reprocess.run import JobPlan


def plan() -> JobPlan:
    ranges = tuple(SourceRange(partition_id=number, start=10, end=50) for number in (3, 4))
    manifest = Manifest(
        job="clean", code="1", subject="orders", planned_at_ms=0, ranges=ranges, piece_rows=20
    )
    return JobPlan(manifest=manifest, missing=())


def note(folder: OutputFolder, partition_id: int, start: int) -> None:
    """A piece of 20 messages is done."""
    piece = JobPiece(
        partition_id=partition_id, start=start, end=start + 20, rows=1, digest="0", file=""
    )
    folder.record_piece(piece, "mark")


def test_each_partition_has_a_bar_of_the_messages_that_are_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Pieces of an earlier run count."""
    folder = OutputFolder(str(tmp_path))
    note(folder, 3, 10)
    with reprocess._progress_bars(folder, is_visible=True) as (begin, show):
        begin(plan())
        show()
        note(folder, 3, 30)
        note(folder, 4, 10)
    shown = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()}
    assert "40/40" in shown["3"]
    assert "20/40" in shown["4"]


def test_no_bar_is_shown_beside_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = OutputFolder(str(tmp_path))
    with reprocess._progress_bars(folder, is_visible=False) as (begin, show):
        begin(plan())
        show()
    assert capsys.readouterr().out == ""


def test_no_bar_is_shown_when_spark_is_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """There is nothing to do."""
    folder = OutputFolder(str(tmp_path))
    with reprocess._progress_bars(folder, is_visible=True) as (begin, _show):
        begin(plan())
    assert capsys.readouterr().out == ""
