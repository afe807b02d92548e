"""Which connections commit each statement by itself, as each driver tells it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from keylane.protocol.errors import InvalidRequestError
from keylane.user_database.autocommit import begin_before_savepoint, check_transaction


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


@pytest.mark.parametrize("connection", drivers(alone=False))
def test_connection_is_taken_when_its_driver_has_transactions(connection: Any) -> None:
    check_transaction(connection)


def test_transaction_is_begun_once_when_savepoints_come_first() -> None:
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        assert not driver.in_transaction
        begin_before_savepoint(connection)
        assert driver.in_transaction
        begin_before_savepoint(connection)
        connection.rollback()
        assert not driver.in_transaction
