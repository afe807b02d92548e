"""The tables of the screen as text: columns, sort order, filter and widths. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from rich.cells import cell_len, set_cell_size

from ...admin.views import PartitionProgress
from ...protocol.text import format_rate, format_size, printable, sentence, sum_text
from .board import BrokerFigures, GroupFigures, Problem, SubjectFigures, age_text

Row = TypeVar("Row")
ALL_IS_WELL = "Nothing is wrong that the servers know of."
LOOKING = "Looking: it takes 10 s to see whether a group is stuck."
ROWS_MAX = 200
"""The largest number of rows of a table on the screen; a filter reaches the others."""
NAME_CELLS_MIN = 12
GAP_CELLS = 2
"""The space between two columns, in terminal cells."""


@dataclass(frozen=True, slots=True)
class TableColumn(Generic[Row]):
    """A column. Columns of names share the width that columns of numbers leave."""

    title: str
    text: Callable[[Row], str]
    order: Callable[[Row], Any]
    """What rows are sorted by; None sorts below everything else."""
    is_name: bool = False


@dataclass(frozen=True, slots=True)
class TableView(Generic[Row]):
    """What is shown of a table: its columns, its order and its filter."""

    title: str
    columns: tuple[TableColumn[Row], ...]
    key: Callable[[Row], str]
    """What a row is known by, as the screen changes."""
    sorted_by: int
    """The index of a column."""
    descending: bool = True
    filter: str = ""
    """Only rows with this text in a column of names, in any case."""

    def by_next_column(self) -> TableView[Row]:
        """Return the view sorted by the next column: names from A, numbers from the greatest."""
        index = (self.sorted_by + 1) % len(self.columns)
        return replace(self, sorted_by=index, descending=not self.columns[index].is_name)

    def reversed(self) -> TableView[Row]:
        """Return the view in the opposite order."""
        return replace(self, descending=not self.descending)

    def filtered(self, text: str) -> TableView[Row]:
        """Return the view with another filter."""
        return replace(self, filter=text)


@dataclass(frozen=True, slots=True)
class Arranged:
    """A table as text."""

    caption: str
    titles: tuple[str, ...]
    widths: tuple[int, ...]
    """In terminal cells."""
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    """The key of each row, and its cells, which are as wide as their columns."""


def arrange(view: TableView[Row], rows: Sequence[Row], width: int) -> Arranged:
    """Return the table for a screen of this width."""
    wanted = view.filter.casefold()
    names = [column for column in view.columns if column.is_name]
    matching = [
        row for row in rows if any(wanted in column.text(row).casefold() for column in names)
    ]
    order = view.columns[view.sorted_by].order
    matching.sort(key=view.key)
    matching.sort(
        key=lambda row: (order(row) is not None, order(row) if order(row) is not None else 0),
        reverse=view.descending,
    )
    shown = matching[:ROWS_MAX]
    titles = [
        f"{column.title}{('↓' if view.descending else '↑') if index == view.sorted_by else ' '}"
        for index, column in enumerate(view.columns)
    ]
    texts = [[printable(column.text(row)) for column in view.columns] for row in shown]
    is_name = [column.is_name for column in view.columns]
    widths = _fitting_widths(
        [
            max([cell_len(title), *(cell_len(cells[index]) for cells in texts)])
            for index, title in enumerate(titles)
        ],
        is_name,
        width,
    )

    def line(cells: Sequence[str]) -> tuple[str, ...]:
        return tuple(
            _fit(cell, room, left=left)
            for cell, room, left in zip(cells, widths, is_name, strict=False)
        )

    return Arranged(
        _caption(view, len(shown), len(rows)),
        line(titles),
        tuple(widths),
        tuple((view.key(row), line(cells)) for row, cells in zip(shown, texts, strict=True)),
    )


def _fitting_widths(widths: Sequence[int], is_name: Sequence[bool], width: int) -> list[int]:
    """Return the widths of the columns that fit into a width: those of names become narrower, and
    if that is not enough, the last columns are left out.
    """
    fitting = list(widths)
    while True:
        excess = sum(fitting) + GAP_CELLS * len(fitting) - width
        wide = [
            index for index, each in enumerate(fitting) if is_name[index] and each > NAME_CELLS_MIN
        ]
        if excess <= 0 or len(fitting) == 1:
            return fitting
        if sum(fitting[index] - NAME_CELLS_MIN for index in wide) < excess:
            fitting = list(widths[: len(fitting) - 1])
            continue
        fitting[max(wide, key=lambda index: fitting[index])] -= 1


def _fit(text: str, width: int, *, left: bool) -> str:
    """Return a text that takes this many cells."""
    length = cell_len(text)
    if length > width:
        return f"{set_cell_size(text, width - 1)}…"
    return text + " " * (width - length) if left else " " * (width - length) + text


def _caption(view: TableView[Any], shown: int, total: int) -> str:
    counts = f"{total:,}" if shown == total else f"{shown:,} of {total:,}"
    chosen = f', filter "{printable(view.filter)}"' if view.filter else ""
    return f"{view.title} ({counts}{chosen})"


def problem_lines(problems: Sequence[Problem], width: int, lines_max: int) -> list[str]:
    """
    Return what is wrong as lines, each problem with its next step.

    If there is no room for all, each but the first has at most two lines, and the rest is counted.
    """
    lines = [line for each in problems for line in _lines_of(each, width, None)]
    if len(lines) <= lines_max:
        return lines
    lines = []
    for number, problem in enumerate(problems):
        more = _lines_of(problem, width, 2 if number else max(2, lines_max - 5))
        if number and len(lines) + len(more) + (number + 1 < len(problems)) > lines_max:
            return [*lines, f"  … and {len(problems) - number} more"]
        lines += more
    return lines


def _lines_of(problem: Problem, width: int, lines_max: int | None) -> list[str]:
    wrap = partial(textwrap.wrap, width=max(20, width), max_lines=lines_max, placeholder=" …")
    mark = "! " if problem.is_wrong else "· "
    about = problem.about and f"{problem.about}: "
    words = printable(f"{about}{sentence(problem.text)}")
    text = wrap(words, initial_indent=mark, subsequent_indent="  ")
    step = printable(problem.step)
    return text + (wrap(step, initial_indent="  → ", subsequent_indent="    ") if step else [])


# ── the four tables ───────────────────────────────────────────────────────────────────────────────
def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _sum(value: float, *, is_partial: bool) -> str:
    return sum_text(_count(value), is_partial=is_partial)


def _stale(text: str, *, stale: bool) -> str:
    return f"~{text}" if stale else text


BROKERS: TableView[BrokerFigures] = TableView(
    "Brokers",
    (
        TableColumn("broker", lambda row: row.name, lambda row: row.name, is_name=True),
        TableColumn("state", lambda row: row.state, lambda row: row.state, is_name=True),
        TableColumn(
            "stored/s", lambda row: format_rate(row.stored_per_s), lambda row: row.stored_per_s
        ),
        TableColumn(
            "handed/s", lambda row: format_rate(row.handed_per_s), lambda row: row.handed_per_s
        ),
        TableColumn("folders", lambda row: row.folders, lambda row: row.folders),
        TableColumn(
            "disk",
            lambda row: "-" if row.disk_used is None else f"{row.disk_used:.0%}",
            lambda row: row.disk_used,
        ),
        TableColumn(
            "copy lag", lambda row: format_size(row.copy_lag_bytes), lambda row: row.copy_lag_bytes
        ),
        TableColumn(
            "free", lambda row: format_size(row.disk_free_bytes), lambda row: row.disk_free_bytes
        ),
        TableColumn("partitions", lambda row: _count(row.partitions), lambda row: row.partitions),
    ),
    key=lambda row: row.name,
    sorted_by=0,
    descending=False,
)
GROUPS: TableView[GroupFigures] = TableView(
    "Groups",
    (
        TableColumn("group", lambda row: row.group, lambda row: row.group, is_name=True),
        TableColumn("subject", lambda row: row.subject, lambda row: row.subject, is_name=True),
        TableColumn(
            "lag",
            lambda row: _stale(_sum(row.lag, is_partial=row.is_partial), stale=row.stale),
            lambda row: row.lag,
        ),
        TableColumn(
            "oldest",
            lambda row: age_text(row.lag_s) if row.lag_s else "?" if row.is_partial else "-",
            lambda row: row.lag_s,
        ),
        TableColumn(
            "acked/s", lambda row: format_rate(row.acked_per_s), lambda row: row.acked_per_s
        ),
        TableColumn(
            "lag/s",
            lambda row: format_rate(row.slope_per_s, sign="+"),
            lambda row: row.slope_per_s,
        ),
        TableColumn("cons.", lambda row: _count(row.consumers), lambda row: row.consumers),
        TableColumn(
            "parked",
            lambda row: _sum(row.parked, is_partial=row.is_partial),
            lambda row: row.parked,
        ),
    ),
    key=lambda row: f"{row.subject} {row.group}",
    sorted_by=2,
)
SUBJECTS: TableView[SubjectFigures] = TableView(
    "Subjects",
    (
        TableColumn("subject", lambda row: row.subject, lambda row: row.subject, is_name=True),
        TableColumn(
            "stored/s",
            lambda row: _stale(format_rate(row.stored_per_s), stale=row.stale),
            lambda row: row.stored_per_s,
        ),
        TableColumn(
            "bytes/s", lambda row: format_size(row.bytes_per_s), lambda row: row.bytes_per_s
        ),
        TableColumn(
            "handed/s", lambda row: format_rate(row.handed_per_s), lambda row: row.handed_per_s
        ),
        TableColumn("partitions", lambda row: _count(row.partitions), lambda row: row.partitions),
        TableColumn("groups", lambda row: _count(row.groups), lambda row: row.groups),
        TableColumn(
            "lag", lambda row: _sum(row.lag, is_partial=row.is_partial), lambda row: row.lag
        ),
    ),
    key=lambda row: row.subject,
    sorted_by=1,
)


def _note(row: PartitionProgress) -> str:
    if row.problem:
        return row.problem
    failing = row.failing
    if failing is None:
        return ""
    if failing.running_ms is not None:
        return f"handler busy with {failing.offset} for {age_text(failing.running_ms / 1000)}"
    more = f", {failing.others_count} more fail" if failing.others_count else ""
    return f"fails at {failing.offset}: {failing.kind}{more}"


PARTITIONS: TableView[PartitionProgress] = TableView(
    "Partitions",
    (
        TableColumn("id", lambda row: str(row.partition_id), lambda row: row.partition_id),
        TableColumn("state", lambda row: row.state.lower(), lambda row: row.state),
        TableColumn(
            "broker", lambda row: row.broker_group, lambda row: row.broker_group, is_name=True
        ),
        TableColumn("owner", lambda row: row.owner or "-", lambda row: row.owner, is_name=True),
        TableColumn("offset", lambda row: _count(row.offset), lambda row: row.offset),
        TableColumn("next", lambda row: _count(row.next_offset), lambda row: row.next_offset),
        TableColumn("lag", lambda row: _count(row.lag), lambda row: row.lag),
        TableColumn("note", _note, _note, is_name=True),
        TableColumn("parked", lambda row: _count(row.parked), lambda row: row.parked),
    ),
    key=lambda row: f"{row.partition_id:020}",
    sorted_by=6,
)
