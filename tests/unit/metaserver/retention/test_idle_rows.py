"""Groups without consumers, of which a cluster may have tens of thousands."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from keylane.metaserver.retention.idle_groups import start_idle_times
from keylane.metaserver.sql.schema import groups
from support.sql.rows import Rows

PARAMETERS_MAX = 32_767
"""Of a statement on PostgreSQL."""


def test_groups_are_noted_as_idle_when_they_are_more_than_a_statement_has_parameters(rows: Rows):
    """On PostgreSQL the statement was refused in each round, so that none of them ever expired."""
    rows.report("b")
    rows.create("s", 1)
    numbers = range(PARAMETERS_MAX + 1)
    made = [
        {
            "subject_id": 1,
            "name": f"g{number}",
            "last_token": 0,
            "version": 0,
            "settled": True,
            "route_version": 1,
        }
        for number in numbers
    ]
    rows.run(lambda connection: connection.execute(sa.insert(groups), made))
    counts: list[int] = []

    def count(_conn: Any, _cursor: Any, _sql: str, values: Any, *_more: Any) -> None:
        counts.append(len(values))

    sa.event.listen(rows.engine, "before_cursor_execute", count)
    rows.run(start_idle_times)
    idle = sa.select(sa.func.count()).where(groups.c.idle_since.is_not(None))
    assert rows.run(lambda connection: connection.execute(idle).scalar_one()) == len(made)
    assert max(counts) < PARAMETERS_MAX
