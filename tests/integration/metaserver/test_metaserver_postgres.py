"""The metaserver's SQL on PostgreSQL: schema, concurrent starts, transactions that are retried."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import create_async_engine

from keylane.metaserver.catalogue.accepted import accept_folder
from keylane.metaserver.cluster.subjects import open_subject, plan_subject
from keylane.metaserver.groups.sessions import join_group, renew_sessions
from keylane.metaserver.retention.history import count_age, remove_old_rows, start_row_ages
from keylane.metaserver.sql.database import SqlDatabase, open_database
from keylane.metaserver.sql.migrate import HEAD, alembic_config, migrate
from keylane.metaserver.sql.schema import (
    brokers,
    deletions,
    facts,
    metadata,
    publications,
    refused_brokers,
    subjects,
)
from keylane.protocol.clock import SystemClock
from keylane.protocol.control import AcceptFolder, CreateSubject, Join
from keylane.protocol.errors import StorageError
from support.postgres import Postgres, machine_programs, packaged_programs, running_postgres
from support.sql.told_groups import settle_group


@pytest.fixture
def url(postgres: Postgres) -> str:
    return postgres.url()


@asynccontextmanager
async def opened(url: str, folder: Path) -> AsyncIterator[SqlDatabase]:
    options = {"clock": SystemClock(), "boot": "", "broker_ttl_ms": 1_000}
    async with open_database(folder=folder, url=url, **options) as database:
        yield database


async def in_transaction(url: str, work) -> object:
    engine = create_async_engine(url)
    try:
        async with engine.begin() as connection:
            return await connection.run_sync(work)
    finally:
        await engine.dispose()


@pytest.mark.parametrize("programs", [machine_programs, packaged_programs])
def test_postgresql_server_answers(programs) -> None:
    """With the machine's own programs or without, the tests find a PostgreSQL that answers."""
    with running_postgres(programs()) as server:
        (row,) = server.execute("SELECT version()")
    assert row[0].startswith("PostgreSQL 1")


async def test_migrated_schema_is_the_metadata(url: str) -> None:
    """After all migrations nothing is missing, too much or of another type."""

    def compare(connection: Connection) -> list[object]:
        command.upgrade(alembic_config(connection), "head")
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return compare_metadata(context, metadata)

    assert await in_transaction(url, compare) == []


_SCHEMA = (
    """SELECT table_name, column_name, data_type, is_nullable, column_default, is_identity
    FROM information_schema.columns WHERE table_schema = 'public' ORDER BY 1, 2""",
    "SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1, 2",
    """SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid)
    FROM pg_constraint WHERE connamespace = 'public'::regnamespace ORDER BY 1, 2""",
)


async def test_new_database_has_the_schema_of_a_migrated_one(url: str) -> None:
    """Columns with their defaults, indexes and constraints are the same."""

    def both(connection: Connection) -> tuple[list[Any], list[Any]]:
        def schema() -> list[Any]:
            return [connection.exec_driver_sql(query).all() for query in _SCHEMA]

        migrate(connection)
        new = schema()
        config = alembic_config(connection)
        command.downgrade(config, "base")
        command.upgrade(config, "head")
        return new, schema()

    new, migrated = await in_transaction(url, both)
    assert new == migrated


async def test_every_migration_can_be_undone(url: str) -> None:
    """All migrations are undone, and done again."""

    def down_and_up(connection: Connection) -> tuple[set[str], set[str]]:
        migrate(connection)
        command.downgrade(alembic_config(connection), "base")
        left = set(sa.inspect(connection).get_table_names())
        migrate(connection)
        return left, set(sa.inspect(connection).get_table_names())

    left, back = await in_transaction(url, down_and_up)
    assert left <= {"alembic_version"}
    assert back == {*metadata.tables, "alembic_version"}


async def test_concurrent_starts_migrate_once(url: str, tmp_path: Path) -> None:
    """Metaservers that start on one empty database at once migrate it once, and none fails."""

    async def start() -> str:
        async with opened(url, tmp_path) as database:
            read = sa.text("SELECT version_num FROM alembic_version")
            return await database.read(lambda connection: connection.execute(read).scalar_one())

    assert await asyncio.gather(*(start() for _ in range(4))) == [HEAD] * 4


async def test_deadlock_is_retried(url: str, tmp_path: Path) -> None:
    """Two transactions that lock the same rows in opposite orders both complete, each once."""
    async with opened(url, tmp_path) as database:

        def prepare(connection: Connection) -> None:
            rows = [{"name": name, "value": "0"} for name in ("left", "right")]
            connection.execute(sa.insert(facts), rows)

        await database.write(prepare)
        tries, locked, through = [], set(), []

        def wait_until(connection: Connection, there: Callable[[], bool]) -> None:
            while not there():
                connection.execute(sa.select(sa.func.pg_sleep(0.02)))

        def add_one(connection: Connection, first: str, second: str) -> None:
            tries.append(first)
            if (
                tries.count(first) > 1
            ):  # what was undone could lock its row again before the other hears of it
                wait_until(connection, lambda: bool(through))
            for name in (first, second):
                row = facts.c.name == name
                value = connection.execute(
                    sa.select(facts.c.value).where(row).with_for_update()
                ).scalar_one()
                connection.execute(sa.update(facts).where(row).values(value=str(int(value) + 1)))
                locked.add(first)
                wait_until(connection, lambda: len(locked) == 2)
            through.append(first)

        await asyncio.gather(
            database.write(add_one, "left", "right"), database.write(add_one, "right", "left")
        )
        assert len(tries) == 3

        def values(connection: Connection) -> list[str]:
            ours = facts.c.name.in_(["left", "right"])
            return list(connection.execute(sa.select(facts.c.value).where(ours)).scalars())

        assert await database.read(values) == ["2", "2"]


async def test_ended_server_is_named(tmp_path: Path) -> None:
    """There is no traceback; a restarted server is connected to without a restart here."""
    with running_postgres() as server:
        url = server.url()
        async with opened(url, tmp_path) as database:
            ended = sa.text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND datname = current_database()"
            )
            await database.read(lambda connection: connection.execute(ended).all())
            query = sa.select(sa.literal(1))
            assert (
                await database.read(lambda connection: connection.execute(query).scalar_one()) == 1
            )
    with pytest.raises(StorageError, match="cannot reach the database"):
        async with opened(url, tmp_path):
            pass


def deadlocks(postgres: Postgres) -> int:
    (row,) = postgres.execute("SELECT sum(deadlocks)::int FROM pg_stat_database")
    return row[0]


def one_broker(connection: Connection) -> None:
    seen = {"seen_at": 0, "expires_at": 2**62, "readable": True, "writable": True}
    who = {"broker_group": "b", "broker_id": "b", "address": "b:1"}
    connection.execute(sa.insert(brokers).values(**who, **seen))


async def test_renewals_and_changes_lock_in_one_order(
    url: str, tmp_path: Path, postgres: Postgres
) -> None:
    """Renewing many sessions while all their grants change costs no deadlock, which would stop both
    for a second.
    """
    ids = [f"{number:032x}" for number in range(60)]
    before = deadlocks(postgres)
    async with opened(url, tmp_path) as first, opened(url, tmp_path) as other:
        await first.write(one_broker)
        await first.write(plan_subject, CreateSubject(subject="s", partitions=2), subjects_max=9)
        await first.write(open_subject, "s")
        for session in ids:
            ask = Join(subject="s", group="g", session=session)
            group_id = (await first.write(join_group, ask, sessions_max=99)).group_id
        await first.write(settle_group, group_id)

        def change_everything(connection: Connection) -> None:
            connection.execute(
                sa.update(subjects).values(route_version=subjects.c.route_version + 1)
            )
            assert len(settle_group(connection, group_id).versions) == len(ids)

        async def renew(rng: random.Random) -> None:
            for _ in range(30):
                asked = rng.sample(ids, len(ids))
                assert len(await first.renew(renew_sessions, asked)) == len(ids)

        async def change() -> None:
            for _ in range(30):
                await other.write(change_everything)

        await asyncio.gather(renew(random.Random(1)), renew(random.Random(2)), change(), change())
    assert deadlocks(postgres) == before


async def test_renewals_and_an_accepted_copy_lock_in_one_order(
    url: str, tmp_path: Path, postgres: Postgres
) -> None:
    """An accepted copy ends leases of many groups, whose sessions' ids are mixed, while heartbeats
    renew all of them.
    """
    rng = random.Random(1)
    ids = [f"{rng.getrandbits(128):032x}" for _ in range(60)]
    before = deadlocks(postgres)
    async with opened(url, tmp_path) as first, opened(url, tmp_path) as other:
        await first.write(one_broker)
        await first.write(plan_subject, CreateSubject(subject="s", partitions=2), subjects_max=9)
        await first.write(open_subject, "s")
        for number, session in enumerate(ids):
            ask = Join(subject="s", group=f"g{number % 6}", session=session)
            await first.write(join_group, ask, sessions_max=99)

        def lose_broker(connection: Connection) -> None:
            connection.execute(sa.update(brokers).values(expires_at=0))
            report = {"broker_group": "b", "broker_id": "b", "address": "b:1"}
            connection.execute(sa.insert(refused_brokers).values(**report, expires_at=2**62))

        await first.write(lose_broker)

        async def renew() -> None:
            for _ in range(30):
                assert len(await first.renew(renew_sessions, ids)) == len(ids)

        async def accept() -> None:
            for _ in range(30):
                await other.write(accept_folder, "b", AcceptFolder())

        await asyncio.gather(renew(), renew(), accept())
    assert deadlocks(postgres) == before


@pytest.mark.parametrize("given_up", [False, True])
async def test_close_waits_for_running_works(
    url: str, tmp_path: Path, postgres: Postgres, given_up: bool
) -> None:
    """A work that runs at the close is done, even if its caller is gone; no connection stays."""

    def slow(connection: Connection) -> None:
        connection.execute(sa.select(sa.func.pg_sleep(0.3)))
        connection.execute(sa.insert(facts).values(name="slow", value="done"))

    async with opened(url, tmp_path) as database:
        caller = asyncio.create_task(database.write(slow))
        await asyncio.sleep(0.1)
        if given_up:
            caller.cancel()
    await asyncio.wait([caller])
    assert caller.cancelled() == given_up
    name = sa.make_url(url).database
    counted = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}'"
    assert postgres.execute(counted)[0][0] == 0
    stored = "SELECT value FROM facts WHERE name = 'slow'"
    assert [row[0] for row in postgres.execute(stored, database=name)] == ["done"]
    with pytest.raises(StorageError, match="shutting down"):
        await database.read(slow)


async def test_close_cancels_works_that_take_too_long(
    url: str, tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement that does not end is broken off, and its connection closed: a metaserver can
    always end.
    """
    monkeypatch.setattr("keylane.metaserver.sql.transactions.CLOSE_S", 0.2)
    sleep = sa.select(sa.func.pg_sleep(60))
    async with opened(url, tmp_path) as database:
        caller = asyncio.create_task(database.write(lambda connection: connection.execute(sleep)))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(30):
            await database.close()
    assert caller.done()
    name = sa.make_url(url).database
    left = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}'"
    assert postgres.execute(left)[0][0] == 0


async def test_transaction_is_lost_when_its_metaserver_stops(
    url: str, tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that a metaserver holds and says nothing about are the others' before long; nothing of
    its work stays.
    """
    async with opened(url, tmp_path):
        pass  # the schema is made before the time-out is as short as below
    kept = {"idle_in_transaction_session_timeout": "300"}
    monkeypatch.setattr("keylane.metaserver.sql.postgres._SETTINGS", kept)
    name = sa.make_url(url).database
    async with opened(url, tmp_path) as database:

        def begin(connection: Connection) -> None:
            connection.execute(sa.insert(facts).values(name="held", value="before"))

        def stop(connection: Connection) -> None:
            connection.execute(sa.update(facts).values(value="stopped"))
            time.sleep(1.0)
            postgres.execute("UPDATE facts SET value = 'other'", database=name)  # it does not wait

        await database.write(begin)
        async with asyncio.timeout(60):
            with pytest.raises(StorageError):
                await database.write(stop)

        def value(connection: Connection) -> str:
            return str(
                connection.execute(
                    sa.select(facts.c.value).where(facts.c.name == "held")
                ).scalar_one()
            )

        assert await database.read(value) == "other"


async def test_rows_of_what_is_over_begin_to_count_and_go(url: str) -> None:
    """As on SQLite, with keys of one column and of two."""

    def age(connection: Connection) -> tuple[int, list[int]]:
        migrate(connection)
        rows = [{"subject_id": 1, "group_id": each, "subject": "s"} for each in (0, 7)]
        connection.execute(sa.insert(deletions), rows)
        row = {"hidden": "h", "target": "t", "operation_id": 0, "replaces": False}
        connection.execute(sa.insert(publications), row)
        left = []
        for before in (5, 6):
            assert start_row_ages(connection, count_age(connection, 5)) is False
            assert remove_old_rows(connection, before) is False
            left += [
                connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
                for table in (deletions, publications)
            ]
        return count_age(connection, 0), left

    assert await in_transaction(url, age) == (10, [2, 1, 0, 0])
