"""Connections to PostgreSQL that fall silent, as when its host loses its power and another one
takes its address.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, urlsplit

import pytest
import sqlalchemy as sa

from keylane.metaserver.sql import postgres as postgres_database
from keylane.metaserver.sql.database import SqlDatabase, open_database
from keylane.metaserver.sql.dialect import now_ms
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import StorageError
from support.postgres import Postgres

LIMIT_S = 20.0


class SilencedWire:
    """Forwards connections to a server; those that are open at `silence` pass no byte from then on,
    and are not closed.
    """

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._open: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._server.close()
        self.silence()
        await asyncio.gather(*self._open, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_unix_connection(self._socket)
        self._writers += (writer, there_writer)
        for source, target in ((reader, there_writer), (there_reader, writer)):
            self._open.append(asyncio.create_task(_pass_on(source, target)))

    def silence(self) -> None:
        for task in self._open:
            task.cancel()


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        target.write(data)
    target.close()


@pytest.fixture
async def wire(postgres: Postgres) -> AsyncIterator[tuple[SilencedWire, str]]:
    parts = urlsplit(postgres.url())
    (folder,) = parse_qs(parts.query)["host"]
    async with SilencedWire(f"{folder}/.s.PGSQL.5432") as wire:
        yield wire, f"postgresql+asyncpg://keylane@127.0.0.1:{wire.port}{parts.path}"


def look(connection: sa.Connection) -> int:
    return connection.execute(sa.select(now_ms())).scalar_one()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_database, "ANSWER_S", 1.0)


@asynccontextmanager
async def opened(url: str, folder: Path) -> AsyncIterator[SqlDatabase]:
    options = {"clock": SystemClock(), "boot": "", "broker_ttl_ms": 1_000}
    async with open_database(folder=folder, url=url, **options) as database:
        yield database


async def test_database_answers_again_when_its_connections_fell_silent(
    wire: tuple[SilencedWire, str], tmp_path: Path
):
    """Who waits is told that the database does not answer; then new connections are made."""
    there, url = wire
    async with opened(url, tmp_path) as database:
        calls = [database.write, database.write_urgent, database.read]
        await asyncio.gather(*(call(look) for call in calls * 4))
        there.silence()
        async with asyncio.timeout(LIMIT_S):
            outcomes = await asyncio.gather(
                *(call(look) for call in calls * 8), return_exceptions=True
            )
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert failed, "the connections were silent"
        assert {type(error) for error in failed} == {StorageError}
        async with asyncio.timeout(LIMIT_S):
            for call in calls * 4:
                assert await call(look)


async def test_transaction_ends_when_its_connection_falls_silent(
    wire: tuple[SilencedWire, str], tmp_path: Path
):
    """Between two of its statements; its rollback has no answer either."""
    there, url = wire

    def fall_silent(connection: sa.Connection) -> int:
        look(connection)
        there.silence()
        return look(connection)

    async with opened(url, tmp_path) as database, asyncio.timeout(LIMIT_S):
        with pytest.raises(StorageError, match="no answer in time"):
            await database.write(fall_silent)
        assert await database.write(look)


def sleep(connection: sa.Connection) -> int:
    connection.execute(sa.select(sa.func.pg_sleep(postgres_database.ANSWER_S * 2)))
    return look(connection)


async def test_migration_has_no_limit_when_its_statements_take_long(
    wire: tuple[SilencedWire, str], tmp_path: Path
):
    """A table of millions of rows may get an index."""
    async with opened(wire[1], tmp_path) as database:
        assert await database.write_long(sleep)
        with pytest.raises(StorageError, match="no answer in time"):
            await database.write(sleep)


async def test_opening_fails_with_a_storage_error_when_no_connection_is_answered(tmp_path: Path):
    """The error of a connect that takes too long has no text."""

    async def say_nothing(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, asyncio.timeout(LIMIT_S):
        with pytest.raises(StorageError, match="no answer in time"):
            async with opened(f"postgresql+asyncpg://keylane@127.0.0.1:{port}/none", tmp_path):
                pass
        for writer in writers:
            writer.transport.abort()
