"""Waiting rows are read past those that nothing takes now, of however many subjects and partitions
these are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from keylane.outbox import rows as outbox_rows
from keylane.outbox.assignment import SubjectRange
from keylane.outbox.rows import read_waiting
from keylane.outbox.tables import OutboxTables
from keylane.protocol.limits import LOGICAL_PARTITIONS

TABLES = OutboxTables()
OPCODES = 100
"""Of SQLite's virtual machine, between two calls of a progress handler."""


@pytest.fixture
def connection() -> Iterator[sa.Connection]:
    engine = sa.create_engine("sqlite://")
    with engine.begin() as connection:
        TABLES.create(connection)
        yield connection
    engine.dispose()


def add(connection: sa.Connection, places: list[tuple[str, int]]) -> None:
    common = {"order_key": b"k", "value": b"v", "properties": b"", "added_at_ns": 0}
    rows = [{"subject": subject, "logical": logical} | common for subject, logical in places]
    connection.execute(sa.insert(TABLES.rows), rows)


def read(
    connection: sa.Connection, closed: list[SubjectRange], rows_max: int = 1_000
) -> tuple[list[tuple[str, int]], bool]:
    rows, more = read_waiting(connection, TABLES, closed, rows_max=rows_max, bytes_max=1 << 20)
    return [(row.subject, row.logical) for row in rows], more


def whole(subject: str) -> SubjectRange:
    return SubjectRange(subject, 0, LOGICAL_PARTITIONS)


def test_waiting_row_is_read_while_rows_of_thousands_of_subjects_wait(connection):
    """SQLite refused the statement of 1,000 closed ranges, and the outbox sent nothing of any
    subject.
    """
    add(connection, [("gone.7", 1), ("live", 1), ("gone.2999", 1)])
    closed = [whole(f"gone.{number}") for number in range(3_000)]
    assert read(connection, closed) == ([("live", 1)], False)


def test_waiting_row_is_read_while_every_other_partition_of_subjects_is_full(connection):
    places = [(f"s{number}", logical) for number in range(3) for logical in (0, 1, 510, 511, 1023)]
    add(connection, places)
    closed = [SubjectRange(f"s{s}", p, p + 1) for s in range(3) for p in range(0, 1024, 2)]
    assert read(connection, closed) == ([place for place in places if place[1] % 2], False)


@pytest.mark.parametrize("seed", range(20))
def test_waiting_rows_are_those_outside_of_closed_ranges_in_the_order_of_ids(connection, seed):
    rng = random.Random(seed)
    places = [(f"s{rng.randrange(6)}", rng.randrange(LOGICAL_PARTITIONS)) for _ in range(300)]
    add(connection, places)
    closed = [whole("s0")]
    for number in range(1, 5):
        edges = sorted(rng.sample(range(LOGICAL_PARTITIONS + 1), 2 * rng.randrange(1, 20)))
        closed += [
            SubjectRange(f"s{number}", start, end)
            for start, end in zip(edges[::2], edges[1::2], strict=True)
        ]
    opened = [
        (subject, logical)
        for subject, logical in places
        if not any(subject == each.subject and each.start <= logical < each.end for each in closed)
    ]
    assert read(connection, closed) == (opened, False)
    assert read(connection, closed, rows_max=10) == (opened[:10], True)


@pytest.mark.parametrize("limit", ["SUBJECTS_MAX", "RANGES_MAX"])
def test_waiting_row_is_read_behind_more_closed_ranges_than_a_statement_takes(
    connection, monkeypatch, limit
):
    monkeypatch.setattr(outbox_rows, limit, 1)
    add(connection, [(f"s{n % 4}", 7) for n in range(40)] + [("live", 7)])
    closed = [SubjectRange(f"s{number}", 0, 8) for number in range(4)]
    rows, more = read(connection, closed, rows_max=5)
    assert ("live", 7) in rows
    assert not more


def test_row_overtakes_no_older_one_that_was_committed_while_closed_rows_were_passed(
    connection, monkeypatch
):
    """On PostgreSQL each page sees what was committed before it; the second one saw the newer row
    alone.
    """
    monkeypatch.setattr(outbox_rows, "RANGES_MAX", 0)
    closed = [SubjectRange("s", 0, 8)]
    common = {"order_key": b"k", "value": b"v", "properties": b"", "added_at_ns": 0, "logical": 7}

    def commit(subject: str, *ids: int) -> None:
        rows = [{"id": number, "subject": subject} | common for number in ids]
        connection.execute(sa.insert(TABLES.rows), rows)

    def read_page(*args: object, **more: object) -> object:
        page = unpatched(*args, **more)
        if not late:
            late.append(page)
            commit("live", 2, 6)
        return page

    late: list[object] = []
    unpatched = outbox_rows._read_page
    monkeypatch.setattr(outbox_rows, "_read_page", read_page)
    commit("s", 1, 3, 4, 5)
    ids = [
        [
            row.id
            for row in read_waiting(connection, TABLES, closed, rows_max=3, bytes_max=1 << 20)[0]
        ]
        for _ in range(2)
    ]
    assert ids == [[5], [1, 2, 3]]


def test_statement_of_ranges_is_kept_in_no_cache(connection):
    """Each round has other ones, and a text of up to 5,000 ranges: 500 of them would stay in the
    memory of the program.
    """
    add(connection, [("s", 1), ("s", 2)])
    for start in range(3, 103):
        assert len(read(connection, [SubjectRange("s", 2, start)])[0]) == 1
    assert len(connection.engine._compiled_cache or ()) < 20


def test_look_past_waiting_rows_costs_about_the_same_when_four_or_hundreds_of_subjects_wait(
    connection,
):
    """It took 27 times as long with 300: each row was compared with each subject, while the
    database was locked.
    """
    add(connection, [("gone.0", number % 1024) for number in range(20_000)] + [("live", 1)])

    def steps(closed: list[SubjectRange]) -> int:
        calls = []
        driver = connection.connection.driver_connection
        driver.set_progress_handler(lambda: calls.append(1) and None, OPCODES)
        assert read(connection, closed) == ([("live", 1)], False)
        driver.set_progress_handler(None, 0)
        return len(calls) * OPCODES

    few = steps([whole(f"gone.{number}") for number in range(4)])
    assert steps([whole(f"gone.{number}") for number in range(300)]) < 1.5 * few
