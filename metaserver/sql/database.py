"""The database: opened, migrated, and used in short transactions. I/O: SQL.

    work(connection, …) ──▶ write         durable when it returns; waiting writes share a
                                          transaction on SQLite
                        ──▶ write_first   as `write`, before other waiting writes
                        ──▶ renew         as `write_first`; SQLite may lose it with the machine, but
                                          not with the process
                        ──▶ read          sees one state

Work is a synchronous function that takes a connection, so that a simulation can run it inline. A
renewal that is lost with the machine does no harm, because every session gets a whole ttl after a
new boot.
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
from ...protocol.errors import ConfigError, DataFolderError
from ...protocol.errors.failures import open_files_error
from ...protocol.membership.versions import VERSION
from ...protocol.text import UNREADABLE_URL
from .clock_restart import adopt_boot
from .cluster_facts import open_cluster
from .dialect import BUSY_MS, prepare_sqlite
from .group_write import GroupWriter
from .open_files import few_files_left
from .sqlite_driver import SqliteTransactions

if TYPE_CHECKING:
    from .postgres import PostgresDatabase

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("keylane.metaserver")
FILE = "meta.db"
BROKER_FILE = "identity.json"
"""Name of a file that only the data folder of a broker has."""
OWN_SUFFIXES = ("", "-wal", "-shm", "-journal")
PRIVATE_MODE, PRIVATE_FOLDER_MODE = 0o600, 0o700
READERS = 2
LOCKED_PAUSE_MS = 50


class Database(Protocol):
    """The transactions that services use."""

    async def write(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work` in a transaction, and return its result. Raises its errors, and
        StorageError.
        """
        ...

    async def write_first(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work` as `write` does, but before other waiting writes: for heartbeats, whose
        sessions end if the answer is late.
        """
        ...

    async def renew(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work` as `write_first` does, for changes that may be lost with the machine."""
        ...

    async def read(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work`, which only reads, and return its result. Raises its errors, and
        StorageError.
        """
        ...


class SqliteDatabase:
    """SQLite in a file, with one writer. See `Database` for the contract."""

    name = "sqlite"

    def __init__(
        self,
        write: SqliteTransactions,
        renew: SqliteTransactions,
        reads: Sequence[SqliteTransactions],
    ) -> None:
        self._write = write
        self._renew = renew
        self._reads = reads
        self._writer = GroupWriter(lambda work, durable: (write if durable else renew).run(work))
        self._file: tuple[Path, int] | None = None
        """Path and inode of the file, once it is open."""

    def remember_file(self, path: Path) -> None:
        """Remember which file is open, for `lost_file`."""
        self._file = path, path.stat().st_ino

    def lost_file(self) -> str:
        """Return the reason why the next start would lose all writes, or "": the file was removed
        or replaced.
        """
        if self._file is None:
            return ""
        path, inode = self._file
        try:
            same = path.stat().st_ino == inode
        except OSError:
            same = False
        return "" if same else f"its file {path} was removed or replaced; stop the metaserver"

    async def write(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.write`."""
        done: T = await self._writer.submit(
            lambda connection: work(connection, *args, **kwargs), durable=True
        )
        return done

    write_long = write
    """The same as `write`, because statements of SQLite have no time limit; PostgreSQL needs a
    method of its own for migrations and rebuilds.
    """

    async def write_first(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.write_first`."""
        done: T = await self._writer.submit(
            lambda connection: work(connection, *args, **kwargs), durable=True, urgent=True
        )
        return done

    async def renew(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.renew`."""
        done: T = await self._writer.submit(
            lambda connection: work(connection, *args, **kwargs), durable=False, urgent=True
        )
        return done

    async def read(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.read`."""
        reader = min(self._reads, key=_pending)
        return await reader.run(work, *args, **kwargs)

    async def close(self) -> None:
        """Close every connection, after the transactions that run."""
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
        folder: the folder of the SQLite file; unused with a `url`.
        clock: its boot time is SQLite's time.
        boot: id of the boot to which this time belongs.
        cluster: name of the cluster to which it has to belong; "": any.
        program: the version of keylane that opens the database.
        before: checks an existing database before anything is changed.

    Raises:
        Any error of `before`.
        ConfigError, DataFolderError, StorageError
        ConflictError, VersionError: nothing was changed.
    """
    try:
        where = _embedded(folder) if url is None else make_url(url)
        database = _engines(where, clock, broker_ttl_ms=broker_ttl_ms)
    except (ImportError, SQLAlchemyError) as error:
        raise ConfigError(f"cannot use database_url: {error}") from error
    except ValueError:  # its text may contain a part of the password
        raise ConfigError(f"cannot use database_url: {UNREADABLE_URL}") from None
    try:
        if database.name == "sqlite":
            _set_private(Path(where.database or ""))
            await _set_write_ahead(where.database or "")
        if not isinstance(database, SqliteDatabase):
            await database.check_sessions()
        await database.write_long(open_cluster, program=program, cluster=cluster, before=before)
        if database.name == "sqlite":
            await database.write(adopt_boot, boot, broker_ttl_ms=broker_ttl_ms)
        if isinstance(database, SqliteDatabase):
            database.remember_file(Path(where.database or ""))
        yield database
    finally:
        await database.close()


def _embedded(folder: Path) -> URL:
    """Return the URL of the embedded database. It is opened once here, because the driver's thread
    would outlive a failure.
    """
    if (folder / BROKER_FILE).exists() and not (folder / FILE).exists():
        raise DataFolderError(
            f"{folder} is a broker's data folder: it has {BROKER_FILE}", path=str(folder)
        )
    try:
        sqlite3.connect(folder / FILE).close()
    except sqlite3.Error as error:
        if few_files_left():
            raise open_files_error(
                f"cannot use the database {folder / FILE}", operation="open", path=str(folder)
            ) from error
        raise DataFolderError(
            f"cannot use the database {folder / FILE}: {error}", operation="open"
        ) from error
    return URL.create("sqlite+aiosqlite", database=str(folder / FILE))


def _set_private(path: Path) -> None:
    """
    Restrict the database to its user; SQLite gives its other files the mode of the first.

    The folder is restricted too if it has no other files.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE_MODE))
        files = [
            file for suffix in OWN_SUFFIXES if (file := path.with_name(path.name + suffix)).exists()
        ]
        for file in files:
            file.chmod(PRIVATE_MODE)
        if {file.name for file in path.parent.iterdir()} <= {file.name for file in files}:
            path.parent.chmod(PRIVATE_FOLDER_MODE)
    except OSError as error:
        # Not fatal: SQLite reports whether the database can be used.
        log.warning("cannot restrict the file mode of %s: %s", path, error.strerror or error)


async def _set_write_ahead(path: str) -> None:
    """Set the journal mode, with retries: SQLite's busy timeout does not cover a change by another
    metaserver.
    """
    for _ in range(BUSY_MS // LOCKED_PAUSE_MS):
        try:
            with closing(sqlite3.connect(path, timeout=0)) as connection:
                connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.Error as error:
            if "locked" not in str(error):
                return  # the next user of the file reports it
        await asyncio.sleep(LOCKED_PAUSE_MS / 1000)


def _engines(url: URL, clock: Clock, *, broker_ttl_ms: int) -> SqlDatabase:
    if url.get_backend_name() == "postgresql":
        from .postgres import (
            PostgresDatabase,
        )  # imports parts of SQLAlchemy that SQLite does not need

        return PostgresDatabase(url, clock, broker_ttl_ms=broker_ttl_ms)
    write = SqliteTransactions(url, partial(prepare_sqlite, clock=clock))
    renew = SqliteTransactions(url, partial(prepare_sqlite, clock=clock, durable=False))
    prepare_reader = partial(prepare_sqlite, clock=clock, reads=True)
    reads = [SqliteTransactions(url, prepare_reader) for _ in range(READERS)]
    return SqliteDatabase(write, renew, reads)
