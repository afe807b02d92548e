"""Opens and migrates the database, and runs short transactions on it.

    work(connection, …) ──▶ write         durable when it returns; on SQLite, queued writes share a
                                          transaction
                        ──▶ write_urgent   like `write`, but before other queued writes
                        ──▶ renew         like `write_urgent`; on SQLite it survives a crash of the
                                          process, but possibly not of the machine
                        ──▶ read          sees a consistent state

Work is a synchronous function that takes a connection, so that a simulation can run it inline.
Losing a renewal is harmless, because every session gets a full ttl after a reboot.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import SQLAlchemyError

from ...protocol.clock import Clock
from ...protocol.errors import ConfigError, DataFolderError, MissingExtraError
from ...protocol.errors.failures import open_files_error
from ...protocol.membership.versions import VERSION
from ...protocol.text import UNREADABLE_URL
from .clock_restart import give_time_back, restart_times_after_boot
from .cluster_facts import open_cluster
from .dialect import BUSY_MS, prepare_sqlite
from .group_write import GroupCommitWriter
from .open_files import lacks_file_descriptors
from .sqlite_driver import SqliteTransactions

if TYPE_CHECKING:
    from .postgres import PostgresDatabase

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("keylane.metaserver")
FILE = "meta.db"
BROKER_FILE = "identity.json"
"""A file that exists only in the data folder of a broker."""
SQLITE_SUFFIXES = ("", "-wal", "-shm", "-journal")
PRIVATE_MODE, PRIVATE_FOLDER_MODE = 0o600, 0o700
READERS = 2
LOCKED_PAUSE_MS = 50


class Database(Protocol):
    """The interface through which services run transactions."""

    async def write(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work` in a transaction and return its result. Raises StorageError and any error of
        `work`.
        """
        ...

    async def write_urgent(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work` like `write`, but before other queued writes. Intended for heartbeats, because
        a late reply would cost the session.
        """
        ...

    async def renew(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work` like `write_urgent`, for a change that a crash of the machine is allowed to
        undo.
        """
        ...

    async def read(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work`, which only reads, and return its result. Raises StorageError and any error of
        `work`.
        """
        ...


class SqliteDatabase:
    """SQLite in a file, with a single writer. See `Database` for the contract."""

    name = "sqlite"
    connections = 2 + READERS

    def __init__(
        self,
        write: SqliteTransactions,
        renew: SqliteTransactions,
        reads: Sequence[SqliteTransactions],
    ) -> None:
        self._write = write
        self._renew = renew
        self._reads = reads
        self._writer = GroupCommitWriter(
            lambda work, durable: (write if durable else renew).run(work)
        )
        self._file: tuple[Path, int] | None = None
        """Path and inode of the database file; set by `remember_file`."""

    def remember_file(self, path: Path) -> None:
        """Record which file is open, for `lost_file`."""
        self._file = path, path.stat().st_ino

    def lost_file(self) -> str:
        """Return a message if the file was removed or replaced, in which case all writes will be
        lost when it is closed; otherwise "".
        """
        if self._file is None:
            return ""
        path, inode = self._file
        try:
            is_same = path.stat().st_ino == inode
        except OSError:
            is_same = False
        return "" if is_same else f"its file {path} was removed or replaced; stop the metaserver"

    async def write(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.write`."""
        result: T = await self._writer.submit(
            lambda connection: work(connection, *args, **kwargs), durable=True
        )
        return result

    write_long = write
    """The same as `write`, because SQLite has no time limit for statements. PostgreSQL needs a
    separate method for migrations and rebuilds.
    """

    async def write_urgent(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.write_urgent`."""
        result: T = await self._writer.submit(
            lambda connection: work(connection, *args, **kwargs), durable=True, urgent=True
        )
        return result

    async def renew(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.renew`."""
        result: T = await self._writer.submit(
            lambda connection: work(connection, *args, **kwargs), durable=False, urgent=True
        )
        return result

    async def read(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.read`."""
        reader = min(self._reads, key=_pending)
        return await reader.run(work, *args, **kwargs)

    async def close(self) -> None:
        """Wait for the queued transactions, then close all connections."""
        await self._writer.close()
        for transactions in (self._write, self._renew, *self._reads):
            await transactions.close()


def _pending(reader: SqliteTransactions) -> int:
    return reader.pending


SqlDatabase: TypeAlias = "SqliteDatabase | PostgresDatabase"


@asynccontextmanager
async def open_database(
    *,
    folder: Path,
    url: str | None,
    clock: Clock,
    boot: str,
    broker_ttl_ms: int,
    cluster: str = "",
    program: str = VERSION,
    before: Callable[[Connection], None] = lambda _connection: None,
) -> AsyncIterator[SqlDatabase]:
    """
    Open the database and migrate its schema.

    Args:
        folder: the folder of the SQLite file; ignored if there is a `url`.
        url: the URL of a database server, or None for SQLite.
        clock: with SQLite, its boot time is the time of the database.
        boot: id of the current boot.
        broker_ttl_ms: the ttl that live brokers get if the stored times must be restarted.
        cluster: the name of the cluster to which the database must belong; "" accepts any.
        program: the version of keylane that opens the database.
        before: called with an existing database before anything is changed.

    Raises:
        ConfigError, DataFolderError, StorageError
        ConflictError, VersionError: nothing was changed.
        Exception: any error of `before`.
    """
    try:
        location = _embedded_url(folder) if url is None else make_url(url)
        database = _create_database(location, clock, broker_ttl_ms=broker_ttl_ms)
    except ModuleNotFoundError as error:
        raise MissingExtraError.of_driver(error) from error
    except (ImportError, SQLAlchemyError) as error:
        raise ConfigError(f"cannot use database_url: {error}") from error
    except ValueError:  # its message may contain part of the password
        raise ConfigError(f"cannot use database_url: {UNREADABLE_URL}") from None
    try:
        if database.name == "sqlite":
            _restrict_access(Path(location.database or ""))
            await _enable_write_ahead_log(location.database or "")
        if not isinstance(database, SqliteDatabase):
            await database.check_sessions()
        await database.write_long(open_cluster, program=program, cluster=cluster, before=before)
        if database.name == "sqlite":
            await database.write(restart_times_after_boot, boot, broker_ttl_ms=broker_ttl_ms)
        await database.write(give_time_back, away_ms=None, broker_ttl_ms=broker_ttl_ms)
        if isinstance(database, SqliteDatabase):
            database.remember_file(Path(location.database or ""))
        yield database
    finally:
        await database.close()


def _embedded_url(folder: Path) -> URL:
    """Return the URL of the embedded database. Checks first that it can be opened, because a failed
    attempt of the driver would leak its thread.
    """
    if (folder / BROKER_FILE).exists() and not (folder / FILE).exists():
        raise DataFolderError(
            f"{folder} is a broker's data folder: it has {BROKER_FILE}", path=str(folder)
        )
    try:
        sqlite3.connect(folder / FILE).close()
    except sqlite3.Error as error:
        if lacks_file_descriptors():
            raise open_files_error(
                f"cannot use the database {folder / FILE}", operation="open", path=str(folder)
            ) from error
        raise DataFolderError(
            f"cannot use the database {folder / FILE}: {error}", operation="open"
        ) from error
    return URL.create("sqlite+aiosqlite", database=str(folder / FILE))


def _restrict_access(path: Path) -> None:
    """
    Restrict access to the database to its owner. SQLite creates its other files with the same mode.

    Access to the folder is also restricted, unless it contains other files.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE_MODE))
        existing_files = [
            file
            for suffix in SQLITE_SUFFIXES
            if (file := path.with_name(path.name + suffix)).exists()
        ]
        for file in existing_files:
            file.chmod(PRIVATE_MODE)
        if {file.name for file in path.parent.iterdir()} <= {file.name for file in existing_files}:
            path.parent.chmod(PRIVATE_FOLDER_MODE)
    except OSError as error:
        # This is not fatal: SQLite will report an error if the database cannot be used.
        log.warning("cannot restrict the file mode of %s: %s", path, error.strerror or error)


async def _enable_write_ahead_log(path: str) -> None:
    """Set the journal mode. This is retried, because SQLite's busy timeout does not apply while
    another metaserver is changing the mode.
    """
    for _ in range(BUSY_MS // LOCKED_PAUSE_MS):
        try:
            with closing(sqlite3.connect(path, timeout=0)) as connection:
                connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.Error as error:
            if "locked" not in str(error):
                return  # reported by whoever uses the file next
        await asyncio.sleep(LOCKED_PAUSE_MS / 1000)


def _create_database(url: URL, clock: Clock, *, broker_ttl_ms: int) -> SqlDatabase:
    if url.get_backend_name() == "postgresql":
        # Imported here because it loads parts of SQLAlchemy that are not needed for SQLite.
        from .postgres import PostgresDatabase

        return PostgresDatabase(url, clock, broker_ttl_ms=broker_ttl_ms)
    write = SqliteTransactions(url, partial(prepare_sqlite, clock=clock))
    renew = SqliteTransactions(url, partial(prepare_sqlite, clock=clock, durable=False))
    prepare_reader = partial(prepare_sqlite, clock=clock, read_only=True)
    reads = [SqliteTransactions(url, prepare_reader) for _ in range(READERS)]
    return SqliteDatabase(write, renew, reads)
