"""What a table that grows for years costs: rows are found by an index, whether they are asked for
or referred to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.announcements import store_announced
from keylane.metaserver.cluster.removals import (
    name_was_deleted,
    subject_of_deleted_group,
    was_deleted,
)
from keylane.metaserver.groups.views import read_due_work
from keylane.metaserver.retention.history import remove_old_rows, start_row_ages
from keylane.metaserver.sql.schema import metadata
from support.sql.rows import Rows

LOOKS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "an unknown name": (name_was_deleted, ("s",), "deletions"),
    "a group that was known": (was_deleted, ("s",), "deletions"),
    "a group joined again": (subject_of_deleted_group, ("s", 7), "deletions"),
    "a group that brokers know": (store_announced, ({1: [7]},), "heard"),
    "a round of the periodic work": (read_due_work, (), "operations"),
    "deletions that are new": (start_row_ages, (0,), "deletions"),
    "deletions that are old": (remove_old_rows, (0,), "deletions"),
    "operations that are new": (start_row_ages, (0,), "operations"),
    "operations that are old": (remove_old_rows, (0,), "operations"),
}


def test_reference_has_an_index_for_the_deletion_of_its_row() -> None:
    """Without one each deleted partition reads every row of each table that refers to
    partitions.
    """
    missing = [
        f"{table.name}.{key.parent.name}"
        for table in metadata.sorted_tables
        for key in table.foreign_keys
        if key.parent.name not in set(_leading(table))
    ]
    assert missing == []


def _leading(table: sa.Table) -> Iterator[str]:
    """The first column of each index and key of a table."""
    yield next(iter(table.primary_key.columns)).name
    for index in table.indexes:
        yield next(iter(index.columns)).name
    for constraint in table.constraints:
        if isinstance(constraint, sa.UniqueConstraint):
            yield next(iter(constraint.columns)).name


@pytest.mark.parametrize("look", LOOKS)
def test_look_reads_no_whole_table_when_it_is_for_one_row(rows: Rows, look: str) -> None:
    work, arguments, table = LOOKS[look]
    with _plans(rows) as plans:
        rows.run(work, *arguments)
    assert any(table in step for step in plans)
    assert not [step for step in plans if step.startswith(f"SCAN {table}")]


@contextmanager
def _plans(rows: Rows) -> Iterator[list[str]]:
    """What SQLite does for each statement that is run here."""
    steps: list[str] = []
    explaining = False

    def explain(_conn: Any, cursor: Any, sql: str, values: Any, *_more: Any) -> None:
        nonlocal explaining
        if not explaining:
            explaining = True
            steps.extend(
                row[3] for row in cursor.connection.execute(f"EXPLAIN QUERY PLAN {sql}", values)
            )
            explaining = False

    sa.event.listen(rows.engine, "before_cursor_execute", explain)
    try:
        yield steps
    finally:
        sa.event.remove(rows.engine, "before_cursor_execute", explain)
