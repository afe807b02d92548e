"""The migrations make exactly the schema that the metaserver's SQL is written for, and that a new database gets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from keylane import migrations
from keylane.metaserver.retention.past_rows import note_ended, remove_ended
from keylane.metaserver.sql.migrate import HEAD, alembic_config, migrate
from keylane.metaserver.sql.schema import metadata
from keylane.protocol.errors import ConfigError

FOLDER = Path(migrations.__file__).parent


@pytest.fixture
def engine(tmp_path: Path) -> sa.Engine:
    return sa.create_engine(f"sqlite:///{tmp_path / 'meta.db'}")


def test_migrated_schema_is_the_metadata(engine: sa.Engine) -> None:
    """After all migrations nothing is missing, too much or of another type."""
    with engine.begin() as connection:
        _go(connection, HEAD)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_new_database_says_the_same_sql_as_a_migrated_one(engine: sa.Engine) -> None:
    """Table by table, SQLite's own text of the schema is the same: keys, names, AUTOINCREMENT; and so are the rows."""
    other = sa.create_engine("sqlite://")
    texts, rows = [], []
    for database in (engine, other):
        with database.begin() as connection:
            if database is engine:
                _go(connection, HEAD)
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
    assert script.get_bases() == ["0001"]
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


def _go(connection: sa.Connection, revision: str) -> None:
    """Bring the database to a revision, from an older or a newer one."""
    config = alembic_config(connection)
    at = MigrationContext.configure(connection).get_current_revision() or ""
    (command.upgrade if at < revision else command.downgrade)(config, revision)


def _insert(connection: sa.Connection, table_name: str, /, **values: object) -> None:
    """A row; columns that are not named and may not be empty get 0."""
    table = sa.Table(table_name, sa.MetaData(), autoload_with=connection)
    zeros = {
        column.name: "0" if isinstance(column.type, sa.String) else 0
        for column in table.columns
        if not column.nullable and column.server_default is None
    }
    connection.execute(sa.insert(table), zeros | values)


def _column(connection: sa.Connection, name: str, key: str, value: str) -> dict[object, object]:
    """One column of a table by another."""
    pairs = connection.exec_driver_sql(f"SELECT {key}, {value} FROM {name}")
    return {row[0]: row[1] for row in pairs}


def test_accepted_losses_are_carried_over_in_both_directions(engine: sa.Engine) -> None:
    """0008: an operation that accepted a loss marks its steps that seal, and only those; back again it is marked."""
    with engine.begin() as connection:
        _go(connection, "0007")
        for operation_id, accept_loss in ((1, True), (2, False)):
            _insert(connection, "operations", operation_id=operation_id, accept_loss=accept_loss)
            for action, partition_id in (("host", 10), ("seal", 11), ("seal", 12)):
                _insert(
                    connection,
                    "steps",
                    operation_id=operation_id,
                    action=action,
                    partition_id=100 * operation_id + partition_id,
                )
        _go(connection, "0008")
        given_up = _column(connection, "steps", "partition_id", "given_up")
        assert {step for step, flag in given_up.items() if flag} == {111, 112}
        assert len(given_up) == 6
        _go(connection, "0007")
        assert _column(connection, "operations", "operation_id", "accept_loss") == {1: 1, 2: 0}
        assert len(_column(connection, "steps", "partition_id", "action")) == 6
    engine.dispose()


def test_rows_of_what_is_over_stay_and_begin_to_count_when_ends_are_added(
    engine: sa.Engine,
) -> None:
    """0032: no row is old at once, and back again all are there."""
    tables = {"operations": 2, "publications": 1, "deletions": 2}
    with engine.begin() as connection:
        _go(connection, "0031")
        for operation_id, state in ((1, "done"), (2, "seal")):
            values = {"operation_id": operation_id, "state": state, "running": operation_id}
            _insert(connection, "operations", **values)
        _insert(connection, "publications", hidden="h")
        for group_id in (0, 7):
            _insert(connection, "deletions", subject_id=1, group_id=group_id, subject="s")
        _go(connection, "0032")
        for table, count in tables.items():
            ends = connection.exec_driver_sql(f"SELECT ended_at FROM {table}").scalars().all()
            assert ends == [None] * count, table
        assert note_ended(connection, 5) is False
        assert remove_ended(connection, 5) is False
        ended = _column(connection, "operations", "operation_id", "ended_at")
        assert ended == {1: 5, 2: None}
        _go(connection, "0031")
        for table, count in tables.items():
            rows = connection.exec_driver_sql(f"SELECT * FROM {table}").all()
            assert len(rows) == count, table
    engine.dispose()


def test_abandoned_partitions_keep_their_mark_under_its_new_name(engine: sa.Engine) -> None:
    """0010 renames the column, there and back; no row changes."""
    old_name, marks = "forsaken", {1: 0, 2: 1}
    with engine.begin() as connection:
        _go(connection, "0009")
        for partition_id, mark in marks.items():
            _insert(
                connection,
                "partitions",
                partition_id=partition_id,
                name=f"p{partition_id}",
                **{old_name: mark},
            )
        _go(connection, "0010")
        assert _column(connection, "partitions", "partition_id", "abandoned") == marks
        _go(connection, "0009")
        assert _column(connection, "partitions", "partition_id", old_name) == marks
    engine.dispose()


def test_migrate_does_nothing_when_repeated(engine: sa.Engine) -> None:
    """A database that is up to date is not changed."""
    for _ in range(2):
        with engine.begin() as connection:
            migrate(connection)
    engine.dispose()


def test_duties_are_kept_when_their_table_is_made(engine: sa.Engine) -> None:
    """A lease that a metaserver holds is held in the new table too, and in the facts again after a downgrade."""
    lease = {"name": "duty:reset:7", "value": "1234 holder.1"}
    facts = sa.text("SELECT name, value FROM facts WHERE name LIKE 'duty:%'")
    with engine.begin() as connection:
        config = alembic_config(connection)
        command.upgrade(config, "0010")
        connection.execute(sa.text("INSERT INTO facts VALUES (:name, :value)"), lease)
        command.upgrade(config, "0011")
        assert connection.execute(sa.text("SELECT * FROM duties")).all() == [
            ("reset:7", "holder.1", 1234)
        ]
        assert connection.execute(facts).all() == []
        command.downgrade(config, "0010")
        assert connection.execute(facts).mappings().all() == [lease]
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
        _go(connection, "0024")
    assert [_opens_with_alembic(tmp_path) for _ in range(2)] == [True, False]
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()
