"""The migrations make exactly the schema that the metaserver's SQL is written for, and that a new
database gets.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from keylane import migrations
from keylane.metaserver.sql.migrate import HEAD, READER, alembic_config, migrate
from keylane.metaserver.sql.schema import metadata
from keylane.protocol.errors import ConfigError
from support.server_process import run_keylane

FOLDER = Path(migrations.__file__).parent


@pytest.fixture
def engine(tmp_path: Path) -> sa.Engine:
    return sa.create_engine(f"sqlite:///{tmp_path / 'meta.db'}")


def test_migrated_schema_is_the_metadata(engine: sa.Engine) -> None:
    """After all migrations nothing is missing, too much or of another type."""
    with engine.begin() as connection:
        command.upgrade(alembic_config(connection), "head")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_new_database_says_the_same_sql_as_a_migrated_one(engine: sa.Engine) -> None:
    """Table by table, SQLite's own text of the schema is the same: keys, names, AUTOINCREMENT; and
    so are the rows.
    """
    other = sa.create_engine("sqlite://")
    texts, rows = [], []
    for database in (engine, other):
        with database.begin() as connection:
            if database is engine:
                command.upgrade(alembic_config(connection), "head")
            migrate(connection)
            schema = connection.execute(sa.text("SELECT name, sql FROM sqlite_master"))
            texts.append({name: _words(sql) for name, sql in schema if sql})
            tables = [*metadata.tables, "alembic_version"]
            rows.append(
                [connection.exec_driver_sql(f"SELECT * FROM {name}").all() for name in tables]
            )
        database.dispose()
    assert texts[0] == texts[1]
    assert rows[0] == rows[1]


def test_new_database_loads_no_alembic(tmp_path: Path) -> None:
    """What Alembic takes of memory would stay for as long as the metaserver runs."""
    assert _opens_with_alembic(tmp_path) is False


def _words(sql: str) -> list[str]:
    """The parts of a CREATE statement, whatever their order and spaces."""
    inner = sql.replace("\n", " ").replace("\t", " ")
    return sorted(part.strip(" ()") for part in inner.split(","))


def test_head_is_the_newest_revision(engine: sa.Engine) -> None:
    """HEAD is the last revision of the files, which form one line."""
    with engine.connect() as connection:
        script = ScriptDirectory.from_config(alembic_config(connection))
    assert script.get_heads() == [HEAD]
    assert script.get_bases() == ["0200"]
    engine.dispose()


def test_every_migration_can_be_undone(engine: sa.Engine) -> None:
    """Nothing but Alembic's own table is left; the database was made new."""
    with engine.begin() as connection:
        migrate(connection)
        config = alembic_config(connection)
        command.downgrade(config, "base")
        left = set(sa.inspect(connection).get_table_names())
    assert left <= {"alembic_version", "sqlite_sequence"}
    engine.dispose()


def test_migrate_does_nothing_when_repeated(engine: sa.Engine) -> None:
    """A database that is up to date is not changed."""
    for _ in range(2):
        with engine.begin() as connection:
            migrate(connection)
    engine.dispose()


def test_newer_database_is_refused(engine: sa.Engine) -> None:
    """A database that a newer version has written is not changed."""
    with engine.begin() as connection:
        migrate(connection)
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
        connection.execute(sa.text("UPDATE facts SET value = '9.9' WHERE name LIKE 'oldest%'"))
    with engine.begin() as connection, pytest.raises(ConfigError, match="newer keylane"):
        migrate(connection)
    engine.dispose()


def content(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [*connection.iterdump()]


@pytest.mark.parametrize("reader", [None, "0.1"])
def test_database_of_before_the_first_release_is_refused_and_not_changed(
    tmp_path: Path, reader: str | None
) -> None:
    path = tmp_path / "meta.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE facts (name VARCHAR(64) PRIMARY KEY, value VARCHAR(512))")
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        connection.execute("INSERT INTO alembic_version VALUES ('0034')")
        if reader is not None:
            connection.execute("INSERT INTO facts VALUES (?, ?)", (READER, reader))
    before = content(path)
    for command_words in (("meta", "migrate"), ("metaserver", "run", "--port", "0")):
        done = run_keylane(*command_words, "--data", str(tmp_path))
        assert done.returncode != 0
        assert "is at 0034, from a keylane before 0.2, the first release: use a new" in done.stderr
        assert content(path) == before


def test_migrations_import_nothing_of_ours() -> None:
    """A migration must keep its meaning when the code around it changes."""
    for file in FOLDER.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert "keylane" not in text.replace("keylane's", ""), file
        assert "from .." not in text, file


OPEN = """
import asyncio, sys
from pathlib import Path
from keylane.metaserver.sql.database import open_database
from keylane.protocol.clock import SystemClock

async def main():
    options = dict(url=None, clock=SystemClock(), boot="boot", broker_ttl_ms=1_000)
    async with open_database(folder=Path(sys.argv[1]), **options):
        print("alembic" in sys.modules)

asyncio.run(main())
"""


def _opens_with_alembic(folder: Path) -> bool:
    """Open the database in another process; returns whether it loads Alembic."""
    told = subprocess.run(
        [sys.executable, "-c", OPEN, str(folder)], capture_output=True, text=True, check=True
    )
    return told.stdout.strip() == "True"


def test_opening_applies_the_migrations(tmp_path: Path) -> None:
    """Opening a database brings it up to date; opening it again does not even load Alembic."""
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'meta.db'}")
    with engine.begin() as connection:
        migrate(connection)
        command.downgrade(alembic_config(connection), "base")
    assert [_opens_with_alembic(tmp_path) for _ in range(2)] == [True, False]
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()
