"""Which connections commit each statement by itself, as each driver tells it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from keylane.protocol.errors import InvalidRequestError
from keylane.user_database.autocommit import begin_before_savepoint, check_transaction


def connection_of(
    *, option: str | None = None, engine: str | None = None, driver: bool | None = None
) -> Any:
    """One to PostgreSQL, with the isolation levels that it and its engine were given."""
    options = {} if option is None else {"isolation_level": option}
    return SimpleNamespace(
        dialect=SimpleNamespace(name="postgresql", _on_connect_isolation_level=engine),
        connection=SimpleNamespace(dbapi_connection=SimpleNamespace(autocommit=driver)),
        get_execution_options=lambda: options,
    )


@pytest.mark.parametrize(
    "given", [{"option": "AUTOCOMMIT"}, {"engine": "autocommit"}, {"driver": True}]
)
def test_connection_is_refused_when_it_has_autocommit(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="AUTOCOMMIT"):
        check_transaction(connection_of(**given))


@pytest.mark.parametrize(
    "given",
    [{}, {"option": "SERIALIZABLE"}, {"engine": "AUTOCOMMIT", "option": "READ COMMITTED"}],
)
def test_connection_is_taken_when_it_has_transactions(given: dict[str, Any]) -> None:
    check_transaction(connection_of(**given))


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
