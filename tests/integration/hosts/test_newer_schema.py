"""A metaserver starts on a schema of a newer keylane if that one says that it can; else nothing is
changed.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command

from keylane import Admin, Producer, Reader
from keylane.cli.connection import wait_for_brokers
from keylane.metaserver.sql.migrate import (
    HEAD,
    HEAD_OF,
    OLDEST_READER,
    READER,
    alembic_config,
    migrate,
)
from keylane.metaserver.sql.schema import facts, metadata
from keylane.protocol.errors import Reason
from keylane.protocol.membership.versions import (
    FIRST_RELEASE,
    OWN,
    minor_version_steps,
    parse_version,
)
from support.raising import raises
from support.server_process import ServerProcess, run_keylane
from support.sql.narrowing import narrowings

NEWER = "9999"
ADDED = (
    "ALTER TABLE brokers ADD COLUMN colour VARCHAR(9) NOT NULL DEFAULT 'red'",
    "ALTER TABLE subjects ADD COLUMN colour VARCHAR(9)",
    "CREATE TABLE colours (name VARCHAR(9) PRIMARY KEY)",
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'meta.db'}")
    yield engine
    engine.dispose()


def reflected(connection: sa.Connection) -> sa.MetaData:
    reflection = sa.MetaData()
    reflection.reflect(connection)
    return reflection


def age(path: Path, reader: str, *statements: str) -> None:
    """Have a newer keylane migrate the database, as far as an older one sees."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)
        connection.execute("UPDATE alembic_version SET version_num = ?", (NEWER,))
        connection.execute("DELETE FROM facts WHERE name = ?", (READER,))
        connection.execute("INSERT INTO facts VALUES (?, ?)", (READER, reader))


def started(stack: ExitStack, program: str, data: Path, *arguments: str) -> str:
    """The address of a server that is stopped with the stack."""
    process = ServerProcess(f"keylane.{program}", ("--data", str(data), "--port", "0", *arguments))
    stack.callback(process.stdout.close)
    stack.callback(process.wait, 20)
    stack.callback(process.terminate)
    address = json.loads(process.stdout.readline())["address"]
    assert isinstance(address, str)
    return address


def content(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [*connection.iterdump()]


def test_migrations_only_add_since_the_oldest_version_that_can_use_the_schema(engine) -> None:
    """A migration that takes away raises OLDEST_READER, at most to the version before."""
    with engine.begin() as connection:
        command.upgrade(alembic_config(connection), HEAD_OF[OLDEST_READER])
        connection.execute(sa.insert(facts).values(name=READER, value=OLDEST_READER))
        before = reflected(connection)
        migrate(connection)
        after = reflected(connection)
    assert narrowings(before, after) == []
    assert after.tables.keys() >= metadata.tables.keys(), "all migrations were applied"
    assert minor_version_steps(parse_version(OLDEST_READER), OWN) == min(
        OWN.minor - FIRST_RELEASE.minor, 1
    )


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        *((statement, []) for statement in ADDED),
        ("DROP TABLE metaservers", ["table metaservers is gone"]),
        ("ALTER TABLE brokers DROP COLUMN version", ["column brokers.version is gone"]),
        ("ALTER TABLE metaservers RENAME COLUMN version TO v", None),
        ("CREATE UNIQUE INDEX one ON metaservers (address)", None),
        (
            (
                "DROP TABLE facts; CREATE TABLE facts (name VARCHAR(64) PRIMARY KEY, value "
                "VARCHAR(512))"
            ),
            [],
        ),
        (
            (
                "DROP TABLE facts; CREATE TABLE facts (name VARCHAR(64) PRIMARY KEY, value INTEGER, "
                "more INTEGER NOT NULL)"
            ),
            ["column facts.value has another type", "new column facts.more has to be given"],
        ),
    ],
)
def test_narrower_schemas_are_found(engine, statement: str, expected: list[str] | None) -> None:
    with engine.begin() as connection:
        migrate(connection)
        before = reflected(connection)
        for each in statement.split("; "):
            connection.execute(sa.text(each))
        told = narrowings(before, reflected(connection))
    assert told == expected if expected is not None else told


def test_migration_says_who_can_use_the_schema(engine) -> None:
    with engine.begin() as connection:
        migrate(connection)
        query = sa.text("SELECT value FROM facts WHERE name = :name")
        assert connection.execute(query, {"name": READER}).scalar_one() == OLDEST_READER


def test_newer_schema_is_refused_when_it_is_not_for_this_version(engine, tmp_path: Path) -> None:
    with engine.begin() as connection:
        migrate(connection)
    age(tmp_path / "meta.db", "0.5", *ADDED)
    before = content(tmp_path / "meta.db")
    with engine.begin() as connection, raises(Reason.SCHEMA_TOO_NEW, match=f"{NEWER}.*{HEAD}"):
        migrate(connection, program="0.4.0")
    done = run_keylane("metaserver", "run", "--data", str(tmp_path), "--port", "0")
    assert (done.returncode, "ConfigError 1390" in done.stderr) == (1, True)
    assert content(tmp_path / "meta.db") == before


async def test_metaserver_starts_and_serves_when_a_newer_one_has_migrated_the_database(
    tmp_path: Path,
) -> None:
    """Twice: the first start must not make the schema its own."""
    assert run_keylane("meta", "migrate", "--data", str(tmp_path / "m")).returncode == 0
    age(tmp_path / "m" / "meta.db", str(OWN), *ADDED)
    for number in range(2):
        with ExitStack() as stack:
            meta = started(stack, "metaserver", tmp_path / "m")
            broker = started(stack, "broker", tmp_path / "b", "--group", "g1", "--meta", meta)
            async with Admin(meta, wait_s=30) as admin:
                # SQL may still have the address of the opening before.
                while [each.address for each in (await admin.list_brokers()).brokers] != [broker]:
                    await asyncio.sleep(0.02)
                await wait_for_brokers(admin, 1)
                await admin.create_subject(f"s{number}", partitions=2)
            async with Producer(meta) as producer:
                await producer.send(f"s{number}", b"v", key=b"k")
            async with Reader(meta, f"s{number}") as reader:
                assert [message.value async for message in reader] == [b"v"]
    with closing(sqlite3.connect(tmp_path / "m" / "meta.db")) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [
            (NEWER,)
        ]
        told = connection.execute("SELECT value FROM facts WHERE name = ?", (READER,)).fetchall()
        assert told == [(str(OWN),)]
        assert connection.execute("SELECT colour FROM brokers").fetchall() == [("red",)]
