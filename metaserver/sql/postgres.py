"""PostgreSQL, for several metaservers on one database; its clock is watched for jumps. I/O: SQL."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlencode

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, ExceptionContext
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from ...protocol.clock import Clock
from ...protocol.errors import ConfigError, KeylaneError
from .clock_restart import restart_times
from .clock_watch import ClockReading, ClockWatch
from .dialect import now_ms
from .transactions import READ_ONLY, TransactionRunner, storage_error

log = logging.getLogger("keylane.metaserver")
P = ParamSpec("P")
T = TypeVar("T")
CONNECTIONS = 8
WRITES_AT_ONCE_MAX = CONNECTIONS - 3
"""Most simultaneous writes; the other connections are left for reads and for the reports of
heartbeats, because hundreds of joins may come at once.
"""
RENEWING_CONNECTIONS = 2
"""Number of connections for renewals alone, so that no other work that waits for the database, or
for a row, can delay them.
"""
IDLE_MS = 5_000
"""Time, in milliseconds, after which PostgreSQL ends an idle transaction of a metaserver, and
releases its locks.
"""
_SETTINGS = {
    "idle_in_transaction_session_timeout": str(IDLE_MS),
    # Set explicitly, because the database or the role may have other defaults: a statement that has
    # waited for a row reads what was stored meanwhile.
    "default_transaction_isolation": "read committed",
}
_SETTINGS_LONG = _SETTINGS | {"statement_timeout": "0", "lock_timeout": "0"}
"""Settings for a migration or a rebuild, whatever the defaults are."""
ANSWER_S = 10.0
"""Time limit of a statement, in seconds, except those of `write_long`. A connection without an
answer until then is given up: its server may have vanished, and the kernel would wait for a quarter
of an hour. It is longer than IDLE_MS, for which another metaserver may hold a row, and a third of
the default ttl, so that the next heartbeat keeps a lease.
"""
_now = sa.select(now_ms())


class _JumpedError(Exception):
    """The database's clock has jumped; the work was rolled back."""

    def __init__(self, by_ms: int) -> None:
        super().__init__(by_ms)
        self.by_ms = by_ms


_DRIVER_PARAMETERS = frozenset(
    {
        *(
            "database",
            "host",
            "passfile",
            "password",
            "port",
            "ssl",
            "target_session_attrs",
            "user",
        ),
        "prepared_statement_cache_size",
    }
)
"""Parameters that SQLAlchemy and asyncpg take from the query of a URL by name."""


def _engine_of(url: URL, *, settings: dict[str, str], **options: Any) -> AsyncEngine:
    """
    Make an engine for a URL, whose query may have the parameters of libpq that asyncpg knows, such
    as `sslmode` and `sslrootcert`.

    The others go to the server, which refuses unknown ones. asyncpg reads these only from a URL,
    but SQLAlchemy passes them as arguments, which would end in a TypeError.
    """
    query = {name: values for name, values in url.query.items() if name not in _DRIVER_PARAMETERS}
    arguments: dict[str, Any] = {"server_settings": settings, "timeout": ANSWER_S}
    if query:
        arguments["dsn"] = "postgresql://?" + urlencode(query, doseq=True)
    arguments |= options.pop("arguments", {})
    return create_async_engine(
        url.difference_update_query(query), connect_args=arguments, **options
    )


def _give_up(context: ExceptionContext) -> None:
    """
    Close a connection whose statement had no answer in time, or that can only read.

    A rollback on the first would wait for that answer. The idle connections of its pool are most
    likely silent as well, so they are replaced too. The second may have been made while the
    database was read-only, or lead to a server that was demoted: a new one is told what is true
    now.
    """
    error = context.original_exception
    if isinstance(error, TimeoutError) or getattr(error, "sqlstate", None) == READ_ONLY:
        context.is_disconnect = True
        context.invalidate_pool_on_disconnect = True


def _pooled(url: URL, connections: int) -> AsyncEngine:
    """Make an engine with a fixed number of connections."""
    engine = _engine_of(
        url,
        settings=_SETTINGS,
        arguments={"command_timeout": ANSWER_S},
        pool_size=connections,
        max_overflow=0,
        pool_pre_ping=True,
    )
    sa.event.listen(engine.sync_engine, "handle_error", _give_up)
    return engine


SHOWS = 3
"""Number of times that each of two connections is asked for its process at the server."""
_shown = sa.text(
    "SELECT pg_backend_pid() AS process, "
    "current_setting('idle_in_transaction_session_timeout') AS idle"
)
POOLED_STATES = frozenset({"26000", "42P05"})
"""SQLSTATEs of errors of prepared statements that belong to another session: unknown here, or
defined already.
"""
POOLED = (
    "a pooler such as PgBouncer is in front of the database, and does not give each connection a "
    "session and settings of its own: let database_url lead to PostgreSQL itself, or set "
    "pool_mode = session in the pooler and ignore_startup_parameters = "
    f"{','.join(_SETTINGS_LONG)}"
)
POOLERS_SAY = ("unsupported startup parameter", "statement pooling mode")
"""Parts of PgBouncer's errors about start-up parameters and transactions."""
DROPPED = (
    "a pooler in front of the database drops the settings of new connections, so that a stopped "
    "metaserver may hold rows for a long time: ALTER ROLE … SET "
    "idle_in_transaction_session_timeout = 5000, or let database_url lead to PostgreSQL itself"
)


def shares_sessions(shown: Sequence[tuple[int, int]]) -> bool:
    """
    Return whether connections have no sessions of their own.

    Args:
        shown: (connection, process at the server) of each transaction, one after the other.
    """
    pairs = set(shown)
    connections, processes = ({pair[side] for pair in pairs} for side in (0, 1))
    return not len(pairs) == len(connections) == len(processes)


class PostgresDatabase:
    """
    PostgreSQL, with a connection for every work. See `Database` for the contract.

    Its clock can be set by people. A writing transaction reads the clock before and after its work,
    a reading one after it. If the clock jumped, the transaction is rolled back, the stored times
    are restarted, and the work is done again.
    """

    name = "postgresql"

    def __init__(self, url: URL, clock: Clock, *, broker_ttl_ms: int) -> None:
        self._url = url
        self._engine = _pooled(url, CONNECTIONS)
        self._renewing = _pooled(url, RENEWING_CONNECTIONS)
        self._transactions = TransactionRunner()
        self._writes = asyncio.Semaphore(WRITES_AT_ONCE_MAX)
        self._boot_ms = clock.boot_ms
        self._watch = ClockWatch()
        self._restart = partial(restart_times, broker_ttl_ms=broker_ttl_ms)
        self._restarting = asyncio.Lock()
        self._restarts = 0

    def on_new_connection(self, call: Callable[[], None]) -> None:
        """Register a callback for each new connection, called before it is used: another server may
        answer on it.
        """
        for engine in (self._engine, self._renewing):
            sa.event.listen(engine.sync_engine, "connect", lambda *_connection: call())

    async def check_sessions(self) -> None:
        """
        Check that connections keep their settings and prepared statements.

        Raises:
            ConfigError: a pooler shares sessions between them.
            StorageError
        """
        shown: list[tuple[int, int]] = []
        dropped = False
        try:
            async with self._engine.connect() as one, self._engine.connect() as two:
                for _ in range(SHOWS):
                    for number, connection in enumerate((one, two)):
                        row = (await connection.execute(_shown)).one()
                        await connection.rollback()
                        shown.append((number, row.process))
                        dropped |= row.idle == "0"
        except DBAPIError as error:
            known = getattr(error.orig, "sqlstate", None) in POOLED_STATES
            if known or any(part in str(error.orig) for part in POOLERS_SAY):
                raise ConfigError(f"cannot use database_url: {POOLED}") from error
            raise storage_error(error, self._url) from error
        except (SQLAlchemyError, OSError) as error:
            raise storage_error(error, self._url) from error
        if shares_sessions(shown):
            raise ConfigError(f"cannot use database_url: {POOLED}")
        if dropped:
            log.warning("%s", DROPPED)

    async def write(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.write`."""
        async with self._writes:
            return await self.write_first(work, *args, **kwargs)

    async def write_first(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.write_first`."""
        return await self._write_on(self._engine, work, *args, **kwargs)

    async def renew(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """
        See `Database.renew`; work that may wait for a row has to use `write_first`.

        It is durable here: the clock of a crashed server advances until its restart, so that a lost
        renewal would end the session.
        """
        return await self._write_on(self._renewing, work, *args, **kwargs)

    async def _write_on(
        self,
        engine: AsyncEngine,
        work: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        def in_time(connection: Connection) -> T:
            self._check_clock(connection)
            return self._with_check(connection, work, *args, **kwargs)

        return await self._run(engine, in_time)

    async def write_long(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work` as `write` does, but without time limits, for a migration or a rebuild."""
        engine = _engine_of(self._url, settings=_SETTINGS_LONG, poolclass=sa.NullPool)
        try:
            return await self._transactions.run(
                engine, lambda connection: work(connection, *args, **kwargs)
            )
        finally:
            await engine.dispose()

    async def read(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.read`."""

        def in_time(connection: Connection) -> T:  # its first statement may be `begin_snapshot`
            return self._with_check(connection, work, *args, **kwargs)

        return await self._run(self._engine, in_time, reads=True)

    async def _run(
        self, engine: AsyncEngine, work: Callable[[Connection], T], *, reads: bool = False
    ) -> T:
        while True:
            before = self._restarts
            try:
                return await self._transactions.run(engine, work, reads=reads)
            except _JumpedError as jumped:
                await self._restart_once(before, jumped.by_ms)

    async def _restart_once(self, before: int, by_ms: int) -> None:
        """Restart the stored times after a jump, once for all works that noticed it."""
        async with self._restarting:
            if self._restarts == before:
                log.warning("the database's clock jumped by %+d ms: leases count from now", by_ms)
                await self._transactions.run(self._engine, self._restart)
                self._watch.restart()
                self._restarts += 1

    def _with_check(
        self,
        connection: Connection,
        work: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        try:
            done = work(connection, *args, **kwargs)
        except KeylaneError:
            self._check_clock(connection)  # with the right time it may not be refused
            raise
        self._check_clock(connection)
        return done

    def _check_clock(self, connection: Connection) -> None:
        asked_ms = self._boot_ms()
        database_ms = connection.execute(_now).scalar_one()
        by_ms = self._watch.jump_ms(ClockReading(asked_ms, database_ms, self._boot_ms()))
        if by_ms:
            raise _JumpedError(by_ms)

    async def close(self) -> None:
        """Close every connection, after the transactions that run."""
        await self._transactions.close()
        await self._engine.dispose()
        await self._renewing.dispose()
