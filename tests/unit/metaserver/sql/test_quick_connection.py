"""The quick connection answers as SQLAlchemy's does, the first time and later."""

import contextlib
import sqlite3
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from keylane.metaserver.sql.quick_connection import QuickConnection

things = sa.Table(
    "things",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("ready", sa.Boolean, nullable=False),
)
_some = sa.select(things).where(things.c.id.in_(sa.bindparam("ids"))).order_by(things.c.id)
_renamed = (
    sa.update(things).where(things.c.id == sa.bindparam("of")).values(name=sa.bindparam("to"))
)
_ready = sa.update(things).where(things.c.id > 1).values(ready=True).returning(things.c.id)


@pytest.fixture
def connected() -> Iterator[tuple[QuickConnection, sqlite3.Connection]]:
    raw = sqlite3.connect(":memory:", isolation_level=None)
    engine = sa.create_engine("sqlite://", creator=lambda: raw, poolclass=StaticPool)
    things.create(engine)
    yield QuickConnection(engine), raw
    engine.dispose()


def _fill(connection, count: int) -> None:
    rows = [{"id": number, "name": f"n{number}", "ready": False} for number in range(count)]
    connection.execute(sa.insert(things), rows)


def test_statements_answer_the_same_each_time(connected):
    connection, _ = connected
    connection.transact(_fill, 4)

    def look(connection, count: int):
        rows = connection.execute(_some, {"ids": list(range(count))}).all()
        return [(row.id, row.name, row.ready) for row in rows]

    for _ in range(2):
        for count in (0, 1, 3, 2):
            expected = [(number, f"n{number}", False) for number in range(count)]
            assert connection.transact(look, count) == expected


def test_lists_of_one_statement_have_lengths_of_their_own(connected):
    """Beside a constant and another parameter; the values of an earlier execution are forgotten."""
    connection, _ = connected
    connection.transact(_fill, 6)
    both = (
        sa.select(things.c.id)
        .where(
            things.c.id.in_(sa.bindparam("ids")) | things.c.name.in_(sa.bindparam("names")),
            things.c.id < sa.bindparam("below"),
            things.c.ready.is_(sa.false()),
            things.c.id != 3,
        )
        .order_by(things.c.id)
    )

    def look(connection, ids: list[int], names: list[str], below: int) -> list[int]:
        given = {"ids": ids, "names": names, "below": below}
        return list(connection.execute(both, given).scalars())

    for _ in range(2):
        assert connection.transact(look, [0, 1], ["n5"], 9) == [0, 1, 5]
        assert connection.transact(look, [1], ["n3", "n4"], 9) == [1, 4]
        assert connection.transact(look, [4, 2], ["n0"], 3) == [0, 2]
        assert connection.transact(look, [], [], 9) == []


def test_changes_are_counted_and_returned_each_time(connected):
    connection, _ = connected
    connection.transact(_fill, 4)

    def change(connection, name: str):
        counts = [
            connection.execute(_renamed, {"of": number, "to": name}).rowcount for number in (2, 9)
        ]
        return counts, sorted(connection.execute(_ready).scalars())

    for name in ("a", "b", "c"):
        assert connection.transact(change, name) == ([1, 0], [2, 3])
    rows = connection.transact(lambda it: it.execute(_some, {"ids": [1, 2]}).all())
    assert [(row.name, row.ready) for row in rows] == [("n1", False), ("c", True)]


def test_errors_are_those_of_sqlalchemy_and_undo_the_transaction(connected):
    connection, raw = connected
    insert = sa.insert(things)
    row = {"id": 1, "name": "a", "ready": False}

    def twice(connection):
        connection.execute(insert, row)
        connection.execute(insert, row)

    for _ in range(3):
        with pytest.raises(sa.exc.IntegrityError):
            connection.transact(twice)
        assert raw.execute("SELECT count(*) FROM things").fetchone() == (0,)


def test_clones_of_a_known_statement_are_statements_of_their_own(connected):
    connection, _ = connected
    connection.transact(_fill, 4)
    known = sa.select(things.c.id).order_by(things.c.id)

    def look(connection):
        every = connection.execute(known).scalars().all()
        few = [connection.execute(known.where(things.c.id > n)).scalars().all() for n in (1, 2)]
        return every, few

    for _ in range(3):
        assert connection.transact(look) == ([0, 1, 2, 3], [[2, 3], [3]])


def test_rows_of_one_call_are_stored_the_same_each_time(connected):
    connection, raw = connected
    insert = sa.insert(things)
    for turn in range(3):
        rows = [
            {"id": 10 * turn + number, "name": f"n{number}", "ready": number == 1}
            for number in range(3)
        ]
        done = connection.transact(lambda it, rows=rows: it.execute(insert, rows).rowcount)
        assert done == 3
    stored = raw.execute("SELECT id, name, ready FROM things ORDER BY id").fetchall()
    assert stored == [
        (10 * turn + number, f"n{number}", int(number == 1))
        for turn in range(3)
        for number in range(3)
    ]
    for _ in range(2):
        with pytest.raises(sa.exc.IntegrityError):
            connection.transact(lambda it: it.execute(insert, rows))


def test_statement_of_other_columns_is_another_one(connected):
    """An UPDATE takes its columns from what it is given."""
    connection, raw = connected
    connection.transact(_fill, 2)
    change = sa.update(things).where(things.c.id == sa.bindparam("of"))
    for name in ("a", "b", "c"):
        connection.transact(
            lambda it, name=name: (
                it.execute(change, {"of": 0, "name": name}),
                it.execute(change, {"of": 1, "name": name, "ready": True}),
            )
        )
        assert raw.execute("SELECT name, ready FROM things ORDER BY id").fetchall() == [
            (name, 0),
            (name, 1),
        ]


def test_savepoint_undoes_its_part_alone(connected):
    connection, raw = connected
    insert = sa.insert(things)

    def work(connection, number):
        row = {"id": number, "name": "a", "ready": False}
        with connection.begin_nested():
            connection.execute(insert, row)
        with contextlib.suppress(ZeroDivisionError), connection.begin_nested():
            connection.execute(insert, row | {"id": number + 100})
            connection.execute(insert, row | {"id": 1 // 0})

    for number in range(3):
        connection.transact(work, number)
    assert raw.execute("SELECT id FROM things ORDER BY id").fetchall() == [(0,), (1,), (2,)]
