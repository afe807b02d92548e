"""The tables of fenced effects: made, checked, migrated."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

import keylane.sink.alembic as registered  # noqa: F401 - it registers operations
from keylane.errors import ConfigError, Reason
from keylane.sink import create_tables, forget
from keylane.sink.tables import VERSION, SinkTables
from support.raising import raises
from support.sql.user_migrations import migrating, written_as_sql

TABLES = SinkTables()


async def test_tables_are_created_once(tmp_path):
    url = f"sqlite+aiosqlite:///{tmp_path / 'user.db'}"
    await create_tables(url)
    await create_tables(url, prefix="shop")
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'user.db'}")
    await create_tables(engine)
    with engine.begin() as connection:
        TABLES.check(connection)
        assert len(sa.inspect(connection).get_table_names()) == 6
    for version, kind in ((VERSION - 1, Reason.SINK_OLDER), (VERSION + 1, Reason.SINK_NEWER)):
        with engine.begin() as connection:
            connection.execute(sa.update(TABLES.version_table).values(version=version))
        with raises(kind):
            await create_tables(engine)
        with raises(kind):
            await forget(engine, "s", "g")
    engine.dispose()


async def test_effects_are_not_forgotten_without_tables(tmp_path):
    with raises(Reason.SINK_MISSING):
        await forget(f"sqlite:///{tmp_path / 'user.db'}", "s", "g")


@pytest.mark.parametrize("prefix", ["", "Shop", "a-b", "a" * 41, 7])
def test_prefix_of_tables_is_a_name(prefix):
    with pytest.raises(ConfigError):
        SinkTables(prefix)


@pytest.mark.parametrize("url", ["nonsense", "sqlite+nodriver://", 7])
async def test_tables_need_an_engine_or_a_url(url):
    with pytest.raises(ConfigError):
        await create_tables(url)


def test_migration_creates_and_drops_the_tables(tmp_path):
    with migrating(tmp_path / "user.db") as (operations, connection):
        operations.keylane_sink_upgrade()
        operations.keylane_sink_upgrade()
        TABLES.check(connection)
        operations.keylane_sink_drop()


@pytest.mark.parametrize("dialect", ["postgresql", "mysql", "sqlite"])
def test_migration_can_be_written_as_sql(dialect):
    written = written_as_sql(dialect, lambda to: to.keylane_sink_upgrade("shop"))
    assert "CREATE TABLE shop_done" in written
    assert "INSERT INTO shop_version" in written
