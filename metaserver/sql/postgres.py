"""Runs transactions on PostgreSQL, which several metaservers may share, and detects jumps of its
clock.
"""

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
from .clock_restart import AWAY_MS_MIN, give_time_back, restart_times
from .clock_watch import ClockReading, ClockWatch
from .dialect import now_ms
from .transactions import READ_ONLY, TransactionRunner, storage_error

log = logging.getLogger("keylane.metaserver")
P = ParamSpec("P")
T = TypeVar("T")
CONNECTIONS = 8
CONCURRENT_WRITES_MAX = CONNECTIONS - 3
"""Maximum number of concurrent writes. The other connections are reserved for reads and heartbeats,
because hundreds of joins may arrive at the same time.
"""
RENEWING_CONNECTIONS = 2
"""Number of connections that are used only for renewals, so that these are not delayed by other
work that is waiting for the database or for a row.
"""
IDLE_MS = 5_000
"""Time, in milliseconds, after which PostgreSQL ends an idle transaction of a metaserver, which
releases its locks.
"""
_SETTINGS = {
    "idle_in_transaction_session_timeout": str(IDLE_MS),
    # Required because a statement that has waited for a row must read what was stored in the
    # meantime; the database or the role may have another default.
    "default_transaction_isolation": "read committed",
}
_SETTINGS_LONG = _SETTINGS | {"statement_timeout": "0", "lock_timeout": "0"}
"""Settings for migrations and rebuilds, which must not depend on the server's defaults."""
ANSWER_S = 10.0
"""Time limit, in seconds, for a statement, except in `write_long`. After this time the connection
is closed, because the server may have vanished, and the kernel would only give up after a quarter
of an hour. The limit is longer than IDLE_MS, for which another metaserver may hold a row. It is
also a third of the default ttl, so that the next heartbeat is in time to keep a lease.
"""
_now_query = sa.select(now_ms())


class _DatabaseAwayError(Exception):
    """Raised to roll back a transaction when the database was not reached for a long time."""

    def __init__(self, for_ms: int) -> None:
        super().__init__(for_ms)
        self.for_ms = for_ms


class _ClockJumpedError(Exception):
    """Raised to roll back a transaction when the database's clock has jumped."""

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
"""Query parameters of a URL that SQLAlchemy passes to asyncpg as arguments."""


def _create_engine(url: URL, *, settings: dict[str, str], **options: Any) -> AsyncEngine:
    """
    Create an engine for a URL whose query may contain any libpq parameters that asyncpg supports,
    such as `sslmode` and `sslrootcert`.

    asyncpg reads these only from a URL, whereas SQLAlchemy would pass them as arguments, which
    causes a TypeError. So they are passed in a separate `dsn`. Unknown parameters are sent to the
    server, which rejects them.
    """
    query = {name: values for name, values in url.query.items() if name not in _DRIVER_PARAMETERS}
    arguments: dict[str, Any] = {"server_settings": settings, "timeout": ANSWER_S}
    if query:
        arguments["dsn"] = "postgresql://?" + urlencode(query, doseq=True)
    arguments |= options.pop("arguments", {})
    return create_async_engine(
        url.difference_update_query(query), connect_args=arguments, **options
    )


def _discard_connection(context: ExceptionContext) -> None:
    """
    Discard a connection whose statement timed out, or that is read-only.

    After a timeout, a rollback would hang as well. The idle connections in the pool are most likely
    dead too, so all of them are replaced. A read-only connection may have been opened while the
    database was read-only, or may lead to a server that has since been demoted; a new connection
    may be writable.
    """
    error = context.original_exception
    if isinstance(error, TimeoutError) or getattr(error, "sqlstate", None) == READ_ONLY:
        context.is_disconnect = True
        context.invalidate_pool_on_disconnect = True


def _create_pool(url: URL, connections: int) -> AsyncEngine:
    """Create an engine with a fixed number of pooled connections."""
    engine = _create_engine(
        url,
        settings=_SETTINGS,
        arguments={"command_timeout": ANSWER_S},
        pool_size=connections,
        max_overflow=0,
        pool_pre_ping=True,
    )
    sa.event.listen(engine.sync_engine, "handle_error", _discard_connection)
    return engine


SESSION_CHECKS = 3
"""Number of times that two connections are each asked for the process that serves them."""
_session_query = sa.text(
    "SELECT pg_backend_pid() AS process, "
    "current_setting('idle_in_transaction_session_timeout') AS idle"
)
SHARED_SESSION_STATES = frozenset({"26000", "42P05"})
"""SQLSTATEs of errors that occur if prepared statements belong to another session: unknown, or
already defined.
"""
SHARED_SESSIONS = (
    "a pooler such as PgBouncer is in front of the database, and connections share sessions and "
    "settings: let database_url point to PostgreSQL itself, or set "
    "pool_mode = session in the pooler and ignore_startup_parameters = "
    f"{','.join(_SETTINGS_LONG)}"
)
POOLER_ERRORS = ("unsupported startup parameter", "statement pooling mode")
"""Substrings of the errors that PgBouncer reports about startup parameters and transactions."""
SETTINGS_DROPPED = (
    "a pooler in front of the database drops the settings of new connections, so that a stopped "
    "metaserver may hold rows for a long time: ALTER ROLE … SET "
    "idle_in_transaction_session_timeout = 5000, or let database_url point to PostgreSQL itself"
)


def shares_sessions(observed_processes: Sequence[tuple[int, int]]) -> bool:
    """
    Return True if connections share server sessions.

    Args:
        observed_processes: the (connection, server process) pairs of successive transactions.
    """
    distinct = set(observed_processes)
    connections, processes = ({pair[side] for pair in distinct} for side in (0, 1))
    return not len(distinct) == len(connections) == len(processes)


class PostgresDatabase:
    """
    PostgreSQL, with a pooled connection for each transaction. See `Database` for the contract.

    Its wall clock may be set by people. Writing transactions read the clock before and after their
    work, and reading ones only after it. If the clock has jumped, the transaction is rolled back,
    the stored times are restarted, and the work is repeated.
    """

    name = "postgresql"
    connections = CONNECTIONS + RENEWING_CONNECTIONS

    def __init__(self, url: URL, clock: Clock, *, broker_ttl_ms: int) -> None:
        self._url = url
        self._engine = _create_pool(url, CONNECTIONS)
        self._renewal_engine = _create_pool(url, RENEWING_CONNECTIONS)
        self._transactions = TransactionRunner()
        self._write_limit = asyncio.Semaphore(CONCURRENT_WRITES_MAX)
        self._boot_ms = clock.boot_ms
        self._watch = ClockWatch()
        self._restart_times = partial(restart_times, broker_ttl_ms=broker_ttl_ms)
        self._give_time_back = partial(give_time_back, broker_ttl_ms=broker_ttl_ms)
        self._away_ms = 0
        """The longest time, in milliseconds, for which the database's clock was not read, and which
        was not given back yet.
        """
        self._restart_lock = asyncio.Lock()
        self._restart_count = 0

    def on_new_connection(self, call: Callable[[], None]) -> None:
        """Register a callback to be called before a new connection is used, because it may lead to
        a different server than before.
        """
        for engine in (self._engine, self._renewal_engine):
            sa.event.listen(engine.sync_engine, "connect", lambda *_connection: call())

    async def check_sessions(self) -> None:
        """
        Check that connections keep their settings and prepared statements.

        Raises:
            ConfigError: connections share sessions because of a pooler.
            StorageError
        """
        observed_processes: list[tuple[int, int]] = []
        are_settings_dropped = False
        try:
            async with self._engine.connect() as first, self._engine.connect() as second:
                for _ in range(SESSION_CHECKS):
                    for number, connection in enumerate((first, second)):
                        row = (await connection.execute(_session_query)).one()
                        await connection.rollback()
                        observed_processes.append((number, row.process))
                        are_settings_dropped |= row.idle == "0"
        except DBAPIError as error:
            is_pooler_error = getattr(error.orig, "sqlstate", None) in SHARED_SESSION_STATES
            if is_pooler_error or any(substring in str(error.orig) for substring in POOLER_ERRORS):
                raise ConfigError(f"cannot use database_url: {SHARED_SESSIONS}") from error
            raise storage_error(error, self._url) from error
        except (SQLAlchemyError, OSError) as error:
            raise storage_error(error, self._url) from error
        if shares_sessions(observed_processes):
            raise ConfigError(f"cannot use database_url: {SHARED_SESSIONS}")
        if are_settings_dropped:
            log.warning("%s", SETTINGS_DROPPED)

    async def write(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.write`."""
        async with self._write_limit:
            return await self.write_urgent(work, *args, **kwargs)

    async def write_urgent(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.write_urgent`."""
        return await self._write_with(self._engine, work, *args, **kwargs)

    async def renew(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """
        See `Database.renew`. Work that may have to wait for a row must use `write_urgent`.

        Unlike in SQLite, the change is durable, because the clock advances while a crashed server
        is down, so a lost renewal would end the session.
        """
        return await self._write_with(self._renewal_engine, work, *args, **kwargs)

    async def _write_with(
        self,
        engine: AsyncEngine,
        work: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a writing transaction that checks the clock before and after its work."""
        is_repeated = False

        def checked(connection: Connection) -> T:
            nonlocal is_repeated
            self._check_clock(connection)
            self._check_reached()
            result = self._run_checked(connection, work, *args, **kwargs)
            if not is_repeated:  # one that takes long by itself is not repeated for ever
                is_repeated = True
                self._check_reached()  # its work may have ended sessions after an outage within it
            return result

        return await self._run(engine, checked)

    async def write_long(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work` like `write`, but without time limits, for migrations and rebuilds."""
        engine = _create_engine(self._url, settings=_SETTINGS_LONG, poolclass=sa.NullPool)
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

        def checked(
            connection: Connection,
        ) -> T:  # no check before it: its first statement may be `begin_snapshot`
            return self._run_checked(connection, work, *args, **kwargs)

        return await self._run(self._engine, checked, read_only=True)

    async def _run(
        self, engine: AsyncEngine, work: Callable[[Connection], T], *, read_only: bool = False
    ) -> T:
        """Run a transaction, repeating it after each jump of the clock."""
        while True:
            restarts_before = self._restart_count
            try:
                return await self._transactions.run(engine, work, read_only=read_only)
            except _ClockJumpedError as jumped:
                await self._restart_once(restarts_before, jumped.by_ms)
            except _DatabaseAwayError as away:
                await self._give_back_once(restarts_before, away.for_ms)

    async def _restart_once(self, restarts_before: int, jump_ms: int) -> None:
        """Restart the stored times after a jump, once for all transactions that detected it."""
        async with self._restart_lock:
            if self._restart_count == restarts_before:
                log.warning(
                    "the database's clock jumped by %+d ms: all ttls are restarted", jump_ms
                )
                await self._transactions.run(self._engine, self._restart_times)
                self._watch.restart()
                self._restart_count += 1

    async def _give_back_once(self, restarts_before: int, away_ms: int) -> None:
        """Give the time of an outage back, once for all transactions that noticed it."""
        async with self._restart_lock:
            if self._restart_count == restarts_before:
                outage_ms = await self._transactions.run(
                    self._engine, partial(self._give_time_back, away_ms=away_ms)
                )
                if outage_ms:
                    log.warning(
                        "no metaserver reached the database for %.1f s: sessions and brokers that "
                        "were alive then get that time back",
                        outage_ms / 1000,
                    )
                self._away_ms = 0
                self._restart_count += 1

    def _run_checked(
        self,
        connection: Connection,
        work: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run `work` and check the clock afterwards, even if it fails."""
        try:
            result = work(connection, *args, **kwargs)
        except KeylaneError:
            self._check_clock(connection)  # a jump may have caused the error
            raise
        self._check_clock(connection)
        return result

    def _check_clock(self, connection: Connection) -> None:
        """Raise _ClockJumpedError if the database's clock has jumped since the last reading."""
        sent_ms = self._boot_ms()
        database_ms = connection.execute(_now_query).scalar_one()
        reading = ClockReading(sent_ms, database_ms, self._boot_ms())
        self._away_ms = max(self._away_ms, self._watch.unread_ms(reading.received_ms))
        jump_ms = self._watch.jump_ms(reading)
        if jump_ms:
            raise _ClockJumpedError(jump_ms)

    def _check_reached(self) -> None:
        """Raise _DatabaseAwayError if the clock was not read for a long time, until that time was
        given back.
        """
        if self._away_ms >= AWAY_MS_MIN:
            raise _DatabaseAwayError(self._away_ms)

    async def close(self) -> None:
        """Wait for the running transactions, then close all connections."""
        await self._transactions.close()
        await self._engine.dispose()
        await self._renewal_engine.dispose()
