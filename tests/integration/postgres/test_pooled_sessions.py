"""A pooler in transaction mode before PostgreSQL is recognised when a metaserver opens its
database.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from keylane.metaserver.sql.database import open_database
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import ConfigError
from support.postgres import Postgres

SSL_REQUEST = 80877103


class OneSession:
    """
    Gives one session of a server to all connections, each for a transaction at a time, as PgBouncer
    in transaction mode.

    Source: https://www.postgresql.org/docs/current/protocol-message-formats.html
    """

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._turn = asyncio.Lock()
        self._greeting = b""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        """Listen; returns the port."""
        self._reader, self._writer = await asyncio.open_unix_connection(self._socket)
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.transport.abort()

    async def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.append(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            startup = await _untyped(reader)
            if struct.unpack("!I", startup[4:8]) == (SSL_REQUEST,):
                writer.write(b"N")
                startup = await _untyped(reader)
            async with self._turn:
                if not self._greeting:
                    self._writer.write(startup)
                    self._greeting = await self._answers()
            writer.write(self._greeting)
            while True:
                await self._transact(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    async def _transact(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what a client asks until the server says that no transaction is open."""
        message = await _typed(reader)
        async with self._turn:
            while True:
                self._writer.write(message)
                if message[:1] in b"SQ":  # Sync, Query: the server answers with ReadyForQuery
                    answers = await self._answers()
                    writer.write(answers)
                    if answers[-1:] == b"I":
                        return
                elif message[:1] == b"X":
                    raise ConnectionError
                elif message[:1] == b"H":  # Flush: what is there already
                    writer.write(await self._flushed())
                message = await _typed(reader)

    async def _flushed(self) -> bytes:
        answers = b""
        while True:
            answer = await _typed(self._reader)
            answers += answer
            if answer[:1] in b"TnE":  # RowDescription, NoData, ErrorResponse end a Describe
                return answers

    async def _answers(self) -> bytes:
        answers = b""
        while True:
            answer = await _typed(self._reader)
            answers += answer
            if answer[:1] == b"Z":
                return answers


async def _untyped(reader: asyncio.StreamReader) -> bytes:
    length = await reader.readexactly(4)
    return length + await reader.readexactly(struct.unpack("!I", length)[0] - 4)


async def _typed(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(1) + await _untyped(reader)


@pytest.fixture
async def pooled(postgres: Postgres) -> AsyncIterator[str]:
    parts = urlsplit(postgres.url())
    (folder,) = parse_qs(parts.query)["host"]
    pooler = OneSession(f"{folder}/.s.PGSQL.5432")
    port = await pooler.start()
    yield f"postgresql+asyncpg://keylane@127.0.0.1:{port}{parts.path}"
    await pooler.close()


@pytest.mark.parametrize("parameters", ["", "?prepared_statement_cache_size=0"])
async def test_pooler_in_transaction_mode_is_refused_with_what_to_set(
    pooled: str, parameters: str, tmp_path: Path
) -> None:
    opening = open_database(
        folder=tmp_path, url=pooled + parameters, clock=SystemClock(), boot="", broker_ttl_ms=10_000
    )
    with pytest.raises(ConfigError, match=r"PgBouncer .* pool_mode = session"):
        async with asyncio.timeout(60), opening:
            pass
