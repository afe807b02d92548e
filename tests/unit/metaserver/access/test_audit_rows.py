"""The audit log in SQL: listed page by page, and bounded by age and number."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from keylane.metaserver.access import audit_log as audit_rows
from keylane.metaserver.access.audit_log import (
    AuditSearch,
    append_events,
    read_events,
    remove_events,
)
from keylane.protocol.http.access import AuditEvent
from keylane.protocol.ids import MAX_I64

ALL = {"who": None, "subject": None, "outcome": None, "since_ms": 0, "before": MAX_I64, "limit": 4}


def events(count: int) -> list[AuditEvent]:
    return [
        AuditEvent(
            at_ms=number,
            who=f"p{number % 2}",
            remote="",
            did="call",
            subject="s",
            group="g",
            outcome="refused" if number % 3 == 0 else "done",
            detail="d",
            server="g1",
        )
        for number in range(count)
    ]


def search(**changes: Any) -> AuditSearch:
    return AuditSearch(**(ALL | changes))


def test_pages_go_from_the_newest_to_the_oldest(engine: sa.Engine):
    with engine.begin() as connection:
        append_events(connection, events(10))
        append_events(connection, [])
        seen: list[int] = []
        before: int | None = MAX_I64
        while before is not None:
            page = read_events(connection, search(before=before))
            seen += [row.event.at_ms for row in page.rows]
            before = page.before
        assert seen == list(range(9, -1, -1))
        mine = read_events(connection, search(who="p1", outcome="refused", limit=10))
        assert [row.event.at_ms for row in mine.rows] == [9, 3]
        late = read_events(connection, search(since_ms=8))
        assert [row.event.at_ms for row in late.rows] == [9, 8]
        assert not read_events(connection, search(subject="other")).rows


def times(connection: sa.Connection) -> list[int]:
    return [row.event.at_ms for row in read_events(connection, search(limit=100)).rows]


def test_old_events_and_those_above_the_number_are_removed(engine: sa.Engine):
    with engine.begin() as connection:
        assert not remove_events(connection, older_than_ms=5, rows_max=10)
        append_events(connection, events(10))
        assert not remove_events(connection, older_than_ms=3, rows_max=1_000)
        assert times(connection) == [9, 8, 7, 6, 5, 4, 3]
        assert not remove_events(connection, older_than_ms=0, rows_max=4)
        assert times(connection) == [9, 8, 7, 6]


def test_events_are_removed_in_parts_when_many_are_old(engine: sa.Engine, monkeypatch):
    """In one statement, which PostgreSQL ends after 10 s, those of a metaserver that was off for
    months were never removed.
    """
    monkeypatch.setattr(audit_rows, "ROWS_AT_ONCE", 4)
    with engine.begin() as connection:
        append_events(connection, events(10))
        left = []
        while remove_events(connection, older_than_ms=9, rows_max=1_000):
            left.append(len(times(connection)))
        assert left == [6, 2]
        assert times(connection) == [9]
