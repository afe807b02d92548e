"""Defaults that an administrator sets for a database or a role, and parameters of its URL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection, make_url

from keylane.metaserver.sql.database import SqlDatabase, open_database
from keylane.metaserver.sql.write_watch import _write_fact
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import StorageError
from support.postgres import Postgres

LIMIT_S = 20.0


class Administered:
    """A database with defaults of its own."""

    def __init__(self, postgres: Postgres) -> None:
        self.url = postgres.url()
        self._postgres = postgres
        self._name = make_url(self.url).database

    def change(self, change: str) -> None:
        """Change a default; connections that are open keep the old one."""
        self._postgres.execute(f"ALTER DATABASE {self._name} {change}")

    def end_connections(self) -> None:
        self._postgres.execute(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{self._name}'"
        )


@pytest.fixture
def administered(postgres: Postgres) -> Administered:
    return Administered(postgres)


@asynccontextmanager
async def opened(url: str, folder: Path) -> AsyncIterator[SqlDatabase]:
    options = {"clock": SystemClock(), "boot": "", "broker_ttl_ms": 1_000}
    async with open_database(folder=folder, url=url, **options) as database:
        yield database


def setting(connection: Connection, name: str) -> str:
    return str(connection.execute(sa.select(sa.func.current_setting(name))).scalar_one())


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_transaction_reads_what_is_committed_when_the_default_is_stricter(
    administered: Administered, tmp_path: Path, level: str
):
    """Who has waited for a row would be refused, or would read what was there before."""
    administered.change(f"SET default_transaction_isolation = '{level}'")
    async with opened(administered.url, tmp_path) as database:
        for call in (database.write, database.write_urgent, database.read, database.write_long):
            assert await call(setting, "transaction_isolation") == "read committed"


def sleep(connection: Connection) -> None:
    connection.execute(sa.select(sa.func.pg_sleep(0.5)))


async def test_migration_is_not_ended_when_the_default_limits_statements(
    administered: Administered, tmp_path: Path
):
    """The limit counts for what a client waits for."""
    async with opened(administered.url, tmp_path):
        pass
    administered.change("SET statement_timeout = '200ms'")
    administered.change("SET lock_timeout = '200ms'")
    async with opened(administered.url, tmp_path) as database:
        await database.write_long(sleep)
        assert await database.write_long(setting, "lock_timeout") == "0"
        with pytest.raises(StorageError, match="statement timeout"):
            await database.write(sleep)


async def test_database_is_written_again_when_connections_were_made_while_it_was_read_only(
    administered: Administered, tmp_path: Path
):
    """A connection keeps the default that it began with, for as long as it is open."""
    async with opened(administered.url, tmp_path) as database, asyncio.timeout(LIMIT_S):
        administered.change("SET default_transaction_read_only = on")
        administered.end_connections()
        for _ in range(2):
            with pytest.raises(StorageError, match=r"answered: .* read-only transaction"):
                await database.write(_write_fact, "1")
        administered.change("RESET default_transaction_read_only")
        await database.write(_write_fact, "2")


async def test_parameters_of_libpq_are_taken_when_they_are_in_the_url(
    administered: Administered, tmp_path: Path
):
    """As providers of databases give them; the driver takes none of them as an argument."""
    url = make_url(administered.url).update_query_dict(
        {"sslmode": "prefer", "application_name": "key lane", "prepared_statement_cache_size": "9"}
    )
    async with opened(url.render_as_string(hide_password=False), tmp_path) as database:
        for call in (database.write, database.write_long):
            assert await call(setting, "application_name") == "key lane"


async def test_parameter_is_named_when_the_server_does_not_know_it(
    administered: Administered, tmp_path: Path
):
    with pytest.raises(StorageError, match="nonsense"):
        async with opened(f"{administered.url}&nonsense=1", tmp_path):
            pass
