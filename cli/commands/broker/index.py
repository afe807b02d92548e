"""`keylane broker index`: rebuilds, converts and compares the index of a stopped broker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from ....broker.offline.index_work import IndexReport, rebuild_index, switch_index, verify_indexes
from ....broker.settings import INDEX_KINDS
from ....broker.storage.files import Files
from ...options import OutputFormat
from ...screen import make_table, show_json, show_line, show_table
from .folder import locked_folder


def rebuild(folder: Path, index: str, form: OutputFormat) -> None:
    """Build one index again from the log."""
    _check(index)
    _do(folder, form, lambda files: [rebuild_index(files, index)])


def switch(folder: Path, to: str, form: OutputFormat) -> None:
    """Convert the other kind of index to this one."""
    _check(to)
    _do(folder, form, lambda files: [switch_index(files, to)])


def verify(folder: Path, form: OutputFormat) -> None:
    """Compare all indexes with the log; the exit status is 1 if anything differs."""
    _do(folder, form, verify_indexes)


def _check(index: str) -> None:
    if index not in INDEX_KINDS:
        raise typer.BadParameter(f"{index!r} is neither {' nor '.join(INDEX_KINDS)}")


def _do(folder: Path, form: OutputFormat, work: Callable[[Files], list[IndexReport]]) -> None:
    with locked_folder(folder, form, writes=True) as files:
        reports = work(files)
    if form is OutputFormat.JSON:
        show_json(reports)
    else:
        rows = [
            (report.index, report.partitions, report.batches, report.position, len(report.problems))
            for report in reports
        ]
        columns = ("index", "partitions#", "batches#", "position#", "problems#")
        show_table(make_table(str(folder), columns, rows))
        for report in reports:
            for problem in report.problems:
                show_line(f"{report.index}: {problem}")
    if any(report.problems for report in reports):
        raise typer.Exit(1)
