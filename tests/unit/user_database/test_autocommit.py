"""Which connections commit each statement by itself, as each driver tells it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from keylane.protocol.errors import InvalidRequestError
from keylane.user_database.autocommit import check_transaction


class MysqlDriver:
    """A driver for MySQL: `autocommit` is how it is set."""

    def __init__(self, *, alone: bool) -> None:
        self.alone = alone

    def autocommit(self, value: bool) -> None:
        self.alone = value

    def get_autocommit(self) -> bool:
        return self.alone


def connection_of(url: str, driver: object) -> Any:
    """One of SQLAlchemy's dialect to a driver's connection."""
    dialect = sa.make_url(url).get_dialect()()
    return SimpleNamespace(
        dialect=dialect,
        connection=SimpleNamespace(dbapi_connection=driver, driver_connection=driver),
    )


def drivers(*, alone: bool) -> list[Any]:
    """A connection of each kind of driver."""
    sqlite = SimpleNamespace(isolation_level="", in_transaction=False, autocommit=alone)
    hidden = SimpleNamespace(isolation_level="", in_transaction=False, _conn=sqlite)
    return [
        *(
            connection_of(url, SimpleNamespace(autocommit=alone))
            for url in ("postgresql+asyncpg://", "postgresql+psycopg://", "mysql+mysqlconnector://")
        ),
        *(
            connection_of(url, MysqlDriver(alone=alone))
            for url in ("mysql+asyncmy://", "mysql+pymysql://", "mariadb+aiomysql://")
        ),
        connection_of("mysql+pyodbc://", SimpleNamespace(autocommit=alone)),
        connection_of("sqlite://", sqlite),
        connection_of("sqlite+aiosqlite://", hidden),
    ]


@pytest.mark.parametrize("connection", drivers(alone=True))
def test_connection_is_refused_when_its_driver_commits_each_statement(connection: Any) -> None:
    """SQLAlchemy knows nothing of it where `connect_args` have it so."""
    with pytest.raises(InvalidRequestError, match="AUTOCOMMIT"):
        check_transaction(connection)


@pytest.mark.parametrize(
    "connection", [each for each in drivers(alone=False) if each.dialect.name != "sqlite"]
)
def test_connection_is_taken_when_its_driver_has_transactions(connection: Any) -> None:
    check_transaction(connection)


@pytest.mark.parametrize("first", ["savepoint", "statement"])
@pytest.mark.parametrize("isolation_level", ["", None])
def test_rows_are_rolled_back_when_savepoints_that_came_first_have_ended(
    isolation_level: str | None, first: str
) -> None:
    """The release of a savepoint that began the transaction was a commit."""
    engine = sa.create_engine("sqlite://", connect_args={"isolation_level": isolation_level})
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE numbers (n INTEGER)")
    insert = sa.text("INSERT INTO numbers VALUES (:n)")

    def ended(connection: sa.Connection) -> None:
        if first == "statement" and isolation_level is not None:
            connection.execute(insert, {"n": 0})
        with connection.begin_nested():
            with connection.begin_nested():
                check_transaction(connection)
                connection.execute(insert, {"n": 1})
        with connection.begin_nested() as undone:
            connection.execute(insert, {"n": 2})
            undone.rollback()
        for n in (3, 4):
            with connection.begin_nested():
                check_transaction(connection)
                connection.execute(insert, {"n": n})

    with engine.connect() as connection:
        count = sa.text("SELECT sum(n) FROM numbers")
        for _ in range(2):
            ended(connection)
            connection.rollback()
            assert connection.execute(count).scalar() is None
            connection.rollback()
        ended(connection)
        connection.commit()
        connection.rollback()
        assert connection.execute(count).scalar() == 8
    engine.dispose()


def test_rows_are_rolled_back_when_the_outer_savepoint_is_released_before_the_inner() -> None:
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE TABLE numbers (n INTEGER)")
        outer = connection.begin_nested()
        connection.begin_nested()
        check_transaction(connection)
        connection.exec_driver_sql("INSERT INTO numbers VALUES (1)")
        with pytest.warns(sa.exc.SAWarning):
            outer.commit()
        connection.rollback()
        assert connection.exec_driver_sql("SELECT n FROM numbers").all() == []
    engine.dispose()
