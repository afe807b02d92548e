"""The metaserver's database: its time across boots, its limits, and its errors."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.brokers import (
    broker_views,
    store_refusal,
    store_report,
    writable_groups,
)
from keylane.metaserver.cluster.subjects import open_subject, plan_subject
from keylane.metaserver.groups.lease_rows import settle_group
from keylane.metaserver.groups.sessions import join_group, read_live_session, renew_sessions
from keylane.metaserver.groups.views import read_due_work
from keylane.metaserver.sql import dialect
from keylane.metaserver.sql.database import SqlDatabase, open_database
from keylane.metaserver.sql.dialect import now_ms
from keylane.metaserver.sql.schema import brokers, groups, sessions, subjects
from keylane.metaserver.verify.service import read_sql_view
from keylane.protocol.control import BrokerHeartbeat, CreateSubject, Join
from keylane.protocol.errors import (
    ConfigError,
    DataFolderError,
    FolderRefusedError,
    OverloadedError,
    SessionUnknownError,
    StorageError,
)
from sim.machines.clock import ManualClock

A, B, C = "a" * 16, "b" * 16, "c" * 16


def opened(folder: Path, clock: ManualClock, boot: str = "first"):  # type: ignore[no-untyped-def]
    return open_database(folder=folder, url=None, clock=clock, boot=boot, broker_ttl_ms=10_000)


async def populate(database: SqlDatabase) -> int:
    """One broker, one subject, one session of 5 s; its group's id."""
    report = BrokerHeartbeat(broker_group="b", broker_id="x", address="b:1")
    await database.write(store_report, report, ttl_ms=10_000)
    await database.write(plan_subject, CreateSubject(subject="s"), subjects_max=10)
    await database.write(open_subject, "s")
    ask = Join(subject="s", group="g", session=A, ttl_ms=5_000)
    return (await database.write(join_group, ask, sessions_max=2)).group_id


@pytest.mark.parametrize("uptime_ms", [10, 10_000_000_000])
async def test_another_boot_gives_every_session_a_whole_ttl(tmp_path: Path, uptime_ms: int) -> None:
    """After a restart of the machine, whatever its clock says, no lease ends early or never."""
    async with opened(tmp_path, ManualClock(7_000_000)) as database:
        await populate(database)
    clock = ManualClock(uptime_ms)
    async with opened(tmp_path, clock, "second") as database:
        assert (await database.read(read_live_session, A)).session == A
        assert (await database.read(read_due_work)).next_expiry_ms == 5_000
        (broker,) = await database.read(broker_views)
        assert broker.available
        clock.advance(4_999)
        await database.read(read_live_session, A)
        clock.advance(1)
        with pytest.raises(SessionUnknownError):
            await database.read(read_live_session, A)
        clock.advance(5_000)
        assert not await database.read(writable_groups)


async def test_another_boot_forgets_refused_brokers(tmp_path: Path) -> None:
    """A broker that was refused before a restart of the machine is not reported after it."""
    second = BrokerHeartbeat(broker_group="b", broker_id="y", address="b:2")
    async with opened(tmp_path, ManualClock(7_000_000)) as database:
        await populate(database)
        await database.write(store_refusal, second, ttl_ms=10_000)
        assert (await database.read(read_sql_view)).refused
    async with opened(tmp_path, ManualClock(10), "second") as database:
        assert not (await database.read(read_sql_view)).refused


async def test_restart_in_one_boot_gives_back_the_time_in_which_nobody_was_renewed(
    tmp_path: Path,
) -> None:
    """Twice that time, and at most a whole ttl."""
    clock = ManualClock(7_000_000)
    async with opened(tmp_path, clock) as database:
        await populate(database)
    clock.advance(4_000)
    async with opened(tmp_path, clock) as database:
        assert (await database.read(read_due_work)).next_expiry_ms == 5_000
        clock.advance(5_000)
        assert await database.renew(renew_sessions, [A]) == {}
        with pytest.raises(SessionUnknownError):
            await database.read(read_live_session, A)


async def test_due_work_is_read_again_when_something_was_written_or_a_session_expires(
    tmp_path: Path,
) -> None:
    """While nothing happens, only the time until a session expires is told anew."""
    clock = ManualClock(7_000_000)
    async with opened(tmp_path, clock) as database:
        group_id = await populate(database)
        assert (await database.read(read_due_work)).groups == (group_id,)
        await database.write(settle_group, group_id)
        await database.write(
            lambda connection: connection.execute(sa.update(groups).values(told=True))
        )
        statements: list[str] = []

        def note(statement: str) -> None:
            if (
                "FROM" in statement
            ):  # not what begins and ends the transaction, nor what asks SQLite itself
                statements.append(statement)

        for reader in database._reads:
            await reader.run(
                lambda connection: connection.connection.dbapi_connection.set_trace_callback(note)
            )
        seen = await database.read(read_due_work)
        assert (seen.groups, seen.next_expiry_ms) == ((), 5_000)
        statements.clear()
        clock.advance(3_000)
        assert await database.read(read_due_work) == replace(seen, next_expiry_ms=2_000)
        assert not statements
        await database.renew(renew_sessions, [A])
        assert (await database.read(read_due_work)).next_expiry_ms == 5_000
        assert statements
        clock.advance(5_000)
        assert (await database.read(read_due_work)).groups == (group_id,)


async def test_failed_work_is_rolled_back(tmp_path: Path) -> None:
    """A transaction that ends in an error is undone as a whole."""

    def work(connection: sa.Connection) -> None:
        connection.execute(sa.update(subjects).values(route_version=99))
        raise SessionUnknownError

    async with opened(tmp_path, ManualClock(1_000)) as database:
        await populate(database)
        with pytest.raises(SessionUnknownError):
            await database.write(work)
        version = sa.select(subjects.c.route_version)
        assert await database.read(lambda connection: connection.execute(version).scalar_one()) == 1


async def test_concurrent_works_wait_for_each_other(tmp_path: Path) -> None:
    """Writers, renewals and readers of one process wait for each other, and none is refused."""

    def raise_version(connection: sa.Connection) -> None:
        connection.execute(sa.update(groups).values(version=groups.c.version + 1))

    async with opened(tmp_path, ManualClock(1_000)) as database:
        await populate(database)
        before = sa.select(groups.c.version)
        start = await database.read(lambda connection: connection.execute(before).scalar_one())
        works = [database.write, database.renew]
        await asyncio.gather(
            *(works[index % 2](raise_version) for index in range(60)),
            *(database.read(read_due_work) for _ in range(60)),
        )
        assert (
            await database.read(lambda connection: connection.execute(before).scalar_one())
            == start + 60
        )


async def test_sessions_and_subjects_are_refused_above_their_limits(tmp_path: Path) -> None:
    """They are refused and not stored."""
    async with opened(tmp_path, ManualClock(1_000)) as database:
        await populate(database)
        await database.write(join_group, Join(subject="s", group="g", session=B), sessions_max=2)
        with pytest.raises(OverloadedError):
            await database.write(
                join_group, Join(subject="s", group="g", session=C), sessions_max=2
            )
        with pytest.raises(OverloadedError):
            await database.write(plan_subject, CreateSubject(subject="t"), subjects_max=1)
        for table, count in ((sessions, 2), (subjects, 1)):
            counted = sa.select(sa.func.count()).select_from(table)
            stored = await database.read(
                lambda connection, query=counted: connection.execute(query).scalar_one()
            )
            assert stored == count


async def test_silent_folder_with_partitions_is_not_replaced(tmp_path: Path) -> None:
    """Another data folder cannot take the name of a silent group that has partitions: its data
    would be gone.
    """
    clock = ManualClock(1_000)
    async with opened(tmp_path, clock) as database:
        await populate(database)
        clock.advance(60_000)
        other = BrokerHeartbeat(broker_group="b", broker_id="y", address="b:1")
        with pytest.raises(FolderRefusedError, match="2 partitions"):
            await database.write(store_report, other, ttl_ms=10_000)
        empty = BrokerHeartbeat(broker_group="c", broker_id="y", address="c:1")
        await database.write(store_report, empty, ttl_ms=10_000)
        clock.advance(60_000)
        again = BrokerHeartbeat(broker_group="c", broker_id="z", address="c:1")
        await database.write(store_report, again, ttl_ms=10_000)
        row = sa.select(brokers.c.broker_id).where(brokers.c.broker_group == "c")
        assert await database.read(lambda connection: connection.execute(row).scalar_one()) == "z"


async def test_time_advances_within_a_transaction(tmp_path: Path) -> None:
    """Each read of the database's time reads the clock."""
    clock = ManualClock(123)

    def look(connection: sa.Connection) -> tuple[int, int]:
        first = connection.execute(sa.select(now_ms())).scalar_one()
        clock.advance(7)
        return first, connection.execute(sa.select(now_ms())).scalar_one()

    async with opened(tmp_path, clock) as database:
        assert await database.read(look) == (123, 130)


async def test_foreign_file_is_refused(tmp_path: Path) -> None:
    """A foreign file under the database's name is refused and not changed."""
    file = tmp_path / "meta.db"
    file.write_text("this is a letter to a friend, not a database" * 100)
    before = file.read_bytes()
    with pytest.raises(DataFolderError, match="not a database"):
        async with opened(tmp_path, ManualClock(1)):
            raise AssertionError
    assert file.read_bytes() == before


async def test_folder_in_place_of_the_database_is_refused(tmp_path: Path) -> None:
    """The error has advice."""
    (tmp_path / "meta.db").mkdir()
    with pytest.raises(DataFolderError, match="Give a folder that this user may write"):
        async with opened(tmp_path, ManualClock(1)):
            raise AssertionError


async def test_metaservers_that_open_one_new_database_at_once_all_get_it(tmp_path: Path) -> None:
    """SQLite refuses a concurrent change of its journal mode at once, without a wait."""

    def begin(folder: Path, ready: threading.Barrier) -> None:
        async def work() -> None:
            async with opened(folder, ManualClock(1)) as database:
                assert await database.read(now)

        ready.wait()
        asyncio.run(work())

    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        ready = threading.Barrier(4)
        await asyncio.gather(*(asyncio.to_thread(begin, folder, ready) for _ in range(4)))


async def test_locked_database_is_refused_after_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that another program keeps locked is refused after a bounded wait."""
    monkeypatch.setattr(dialect, "BUSY_MS", 50)
    async with opened(tmp_path, ManualClock(1)) as database:
        other = sqlite3.connect(tmp_path / "meta.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match="locked by another program"):
            await database.write(now)
        other.execute("COMMIT")
        other.close()
        await database.write(now)


async def test_calls_that_come_together_wait_for_a_locked_database_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten calls are refused after one wait or two, not one after another."""
    monkeypatch.setattr(dialect, "BUSY_MS", 500)
    async with opened(tmp_path, ManualClock(1)) as database:
        other = sqlite3.connect(tmp_path / "meta.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with pytest.raises(StorageError, match="locked by another program"):
            await database.write(now)
        one_wait_s = time.monotonic() - began
        calls = [database.write(now) for _ in range(20)]
        async with asyncio.timeout(8 * one_wait_s):
            ended = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in ended} == {StorageError}
        other.execute("COMMIT")
        other.close()
        await database.write(now)


def now(connection: sa.Connection) -> int:
    read_clock: Callable[[], int] = connection.execute(sa.select(now_ms())).scalar_one
    return read_clock()


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("postgresql+asyncpg://stranger@127.0.0.1:1/none", StorageError),
        ("postgresql+nothing://x", ConfigError),
        ("nonsense", ConfigError),
    ],
)
async def test_unreachable_database_is_named_without_its_password(
    tmp_path: Path, url: str, error: type[Exception]
) -> None:
    """The error names the address of the database."""
    with pytest.raises((error, ConfigError)):
        async with open_database(
            folder=tmp_path, url=url, clock=ManualClock(), boot="", broker_ttl_ms=1
        ):
            raise AssertionError
