"""The outbox client: adds messages in the user's transactions, and sends them after the commit."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any, Generic, Self, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from ..protocol.address import parse_addresses, refuse_virtual_address
from ..protocol.codecs.by_subject import check_codecs, encode_for
from ..protocol.codecs.codec import Codec, V
from ..protocol.errors import Fate, InvalidRequestError
from ..protocol.http.tls_settings import TlsSettings
from ..protocol.ids import check_name
from ..protocol.limits import LOGICAL_PARTITIONS, MESSAGE_BYTES_MAX
from ..protocol.message import check_message_size, encode_key, pack_properties, refuse_text
from ..protocol.routing import logical_partition
from ..protocol.settings import check_no_problems, type_problems
from ..rpc.client import MetaClient
from ..rpc.connections import Connections, clean_up
from ..rpc.environment import Environment, environment_of
from ..rpc.loop_binding import LoopBoundClient
from ..rpc.tracing import add_fields, current_tracing
from ..user_database.autocommit import check_transaction
from ..user_database.transactions import EngineOrUrl
from .commits import CommitWatch
from .database import OutboxDatabase, Transactions
from .drainer import Drainer, stopped_error
from .routes import OutboxRoutes
from .rows import insert_statement
from .settings import OutboxSettings
from .tables import DEFAULT_PREFIX, OutboxTables
from .upkeep import OutboxGauges, OutboxStatus, read_gauges, read_status
from .waiters import RowWaiters

T = TypeVar("T")


class Outbox(LoopBoundClient, Generic[V]):
    """
    Adds messages in a transaction of the user's database. They are sent if it commits and discarded
    if it rolls back.

        outbox = Outbox("127.0.0.1:7000", engine)
        async with outbox, AsyncSession(engine) as session, session.begin():
            session.add(Order(...))
            await outbox.add(session, "orders", b"...", key=b"customer-7")

    Messages of a key are stored in the order of their rows, each exactly once. Several processes
    may open an outbox on the same tables; the one that holds the lease sends the messages. Adding
    messages requires neither an open outbox nor a reachable metaserver: any process that opens an
    outbox on these tables sends the rows.

    An outbox works only in the event loop and process that opened it; `add_sync` may be called from
    any thread.
    """

    def __init__(
        self,
        meta: str | Iterable[str],
        engine_or_url: EngineOrUrl,
        *,
        prefix: str = DEFAULT_PREFIX,
        codec: Codec[V] | Mapping[str, Codec[Any]] | None = None,
        settings: OutboxSettings | None = None,
        tls: TlsSettings | None = None,
        token: str | None = None,
        _environment: Environment | None = None,
        _database: Transactions | None = None,
    ) -> None:
        """
        Create an outbox. `async with` opens it; it sends only while it is open.

        Args:
            meta: `host:port` of a metaserver; for several metaservers, an iterable of strings or
                one comma-separated string.
            engine_or_url: a SQLAlchemy engine, async or not, or a database URL.
            prefix: the prefix of the tables' names.
            codec: encodes the values, for example JsonCodec(Order), in the thread that adds them. A
                mapping gives a codec for each subject; annotate such an outbox as `Outbox[Any]`.
                Subjects without a codec take bytes. None: no subject has a codec.
            settings: times in milliseconds, sizes in bytes.
            tls: the certificate authority of the servers; None: the environment variable
                KEYLANE_TLS_CA, or no TLS.
            token: the access token, for a cluster with access control; None: read from the file
                that KEYLANE_TOKEN_FILE names, or from KEYLANE_TOKEN.

        Raises:
            ConfigError: an argument is invalid.
        """
        self._addresses = parse_addresses(meta)
        self._tables = OutboxTables(prefix)
        self._codec = check_codecs(codec)
        self._settings = OutboxSettings() if settings is None else settings
        check_no_problems(type_problems({"settings": self._settings}, {"settings": OutboxSettings}))
        self._environment = environment_of(_environment)
        self._database = _database or OutboxDatabase(engine_or_url, self._tables)
        self._connections = Connections(
            self._environment.network,
            timeout_ms=self._settings.call_timeout_ms,
            what="outbox",
            tls=tls,
            token=token,
        )
        self._insert = insert_statement(self._tables)
        self._waiters = RowWaiters(self._database, self._tables, poll_ms=self._settings.rescan_ms)
        self._routes: OutboxRoutes | None = None
        self._drainer: Drainer | None = None
        self._closing_drainer: Drainer | None = None
        """The drainer that is being closed; a repeated `close` finishes the work."""
        self._commit_watch: CommitWatch | None = None

    def __repr__(self) -> str:
        return f"<Outbox at {', '.join(self._addresses)}, {self._connections.loop_binding.state}>"

    async def __aenter__(self) -> Self:
        """
        Start sending. Rows wait until a metaserver is reachable.

        Raises:
            SchemaError: the tables are missing or have another version.
            StorageError: the database does not respond.
            StoryError: the metaserver belongs to a virtual cluster, and no story is running.
            UsageError: the outbox is already open.
        """
        if self._environment.network is None:
            for address in self._addresses:
                refuse_virtual_address(address)
        network = self._connections.open()
        try:
            await self._database.run(self._tables.check)
        except BaseException:
            await clean_up(self._close_connections)
            raise
        environment, settings = self._environment, self._settings
        meta = MetaClient(network, self._addresses, timeout_ms=settings.call_timeout_ms)
        self._routes = OutboxRoutes(meta)
        identity = environment.draw_identity(63)
        self._drainer = Drainer(
            self._database,
            self._tables,
            self._routes,
            owner=f"{socket.gethostname()[:100]} process {os.getpid()} {identity:016x}",
            broker_at=self._connections.broker_at,
            settings=settings,
            rng=environment.new_rng(),
            draw_identity=environment.draw_identity,
            waiters=self._waiters,
        )
        self._commit_watch = CommitWatch(asyncio.get_running_loop(), self._drainer.wake)
        return self

    async def close(self) -> None:
        """
        Stop sending; unsent rows stay in the table. Does nothing in a forked child.

        Raises:
            UsageError: the outbox was opened in another event loop.
            InternalError: the outbox had stopped sending because of a bug in keylane; it is closed
                anyway.
        """
        if not self._connections.loop_binding.is_open_here:
            return
        self._connections.loop_binding.check()
        await clean_up(self._close_all)

    async def _close_all(self) -> None:
        drainer = self._closing_drainer = self._drainer or self._closing_drainer
        self._drainer = self._commit_watch = None
        self._waiters.close()
        if drainer is not None:
            await drainer.close()
        if self._routes is not None:
            await self._routes.close()
        await self._close_connections()
        self._closing_drainer = None
        if drainer is not None and drainer.fault is not None:
            raise stopped_error(drainer.fault)

    async def status(self) -> OutboxStatus:
        """
        Return the row counts by subject, the first failed rows, and the process that sends the
        rows.

        This reads every row.

        Raises:
            SchemaError: the tables are missing or have another version.
            StorageError: the database reported an error.
        """
        now_ns = self._environment.clock.wall_ns()
        return await self._run_read(read_status, now_ns)

    async def gauges(self) -> OutboxGauges:
        """
        Return the number of rows, and the age of the oldest one.

        This takes a few index lookups, no matter how many rows are waiting. An outbox that is not
        open uses a new connection for each call, because it may never be closed; a program that
        polls should open the outbox, or pass an engine, whose pool keeps connections.

        Raises:
            SchemaError: the tables are missing or have another version.
            StorageError: the database reported an error.
        """
        now_ns = self._environment.clock.wall_ns()
        return await self._run_read(read_gauges, now_ns)

    async def _run_read(self, read: Callable[..., T], now_ns: int) -> T:
        """Run `read` in a transaction, and close the connections afterwards if the outbox is not
        open.
        """
        try:
            return await self._database.run(read, self._tables, now_ns=now_ns)
        finally:
            if self._drainer is None:
                await clean_up(self._database.close)

    async def _close_connections(self) -> None:
        await self._connections.close()
        await self._database.close()

    @property
    def waiting(self) -> dict[str, str]:
        """
        Why rows that this process should send are waiting, by subject; empty if none are.

        Raises:
            InternalError: this outbox has stopped sending because of a bug in keylane.
        """
        if self._drainer is None:
            return {}
        if self._drainer.fault is not None:
            raise stopped_error(self._drainer.fault)
        return self._drainer.problems

    # ── adding ────────────────────────────────────────────────────────────────────────────────────
    def add(
        self,
        target: AsyncSession | AsyncConnection,
        subject: str,
        value: V,
        *,
        key: bytes | str = b"",
        properties: Mapping[str, str | bytes] | None = None,
        tags: Collection[str] = (),
    ) -> Coroutine[Any, Any, int]:
        """
        Add a message in the transaction of `target`. The result must be awaited.

        Args:
            subject: the name of the subject, which need not exist yet; messages wait until it does.
            value: bytes, or a value for the codec. Key, value and properties together may not
                exceed the subject's limit (1 MiB by default). A larger row is refused when it is
                due to be sent, and newer rows of its key are sent; see `status`.
            key: the order key, bytes or a string, which is sent as UTF-8; b"" means any partition
                and no order.
            properties: a mapping from strings to strings or bytes, up to 64 KiB when encoded.
            tags: strings without commas, which `message.tags` returns; they are sent as the
                property "keylane.tags".

        Returns:
            The id of the row.

        Raises:
            MessageTooLargeError, CodecError: raised by the call itself, before it is awaited;
                nothing was added.
            InvalidRequestError: an argument is invalid (raised by the call itself), or the
                connection uses AUTOCOMMIT, so that a rollback would not remove the row.
            SchemaError: the tables do not exist; whether the transaction can continue depends on
                the database.
            SQLAlchemyError: any other error from the database, unchanged.
        """
        if not isinstance(target, AsyncSession | AsyncConnection):
            raise InvalidRequestError(
                f"add takes an AsyncSession or an AsyncConnection, not {type(target).__name__}; "
                "add_sync takes a Session or a Connection"
            )
        return target.run_sync(self._add, self._build_row(subject, value, key, properties, tags))

    def add_sync(
        self,
        target: Session | Connection,
        subject: str,
        value: V,
        *,
        key: bytes | str = b"",
        properties: Mapping[str, str | bytes] | None = None,
        tags: Collection[str] = (),
    ) -> int:
        """Add a message with a synchronous Session or Connection, from any thread; see `add`."""
        if not isinstance(target, Session | Connection):
            raise InvalidRequestError(
                f"add_sync takes a Session or a Connection, not {type(target).__name__}"
            )
        return self._add(target, self._build_row(subject, value, key, properties, tags))

    def _add(self, target: Session | Connection, row: dict[str, Any]) -> int:
        try:
            if isinstance(target, Connection):
                check_transaction(target)
            else:
                check_transaction(target.connection({"clause": self._insert}))
            result = target.execute(self._insert, row)
        except SQLAlchemyError as error:
            raise self._tables.missing_error(error) or error from error
        if self._commit_watch is not None and self._connections.loop_binding.is_open_here:
            self._commit_watch.watch(target)
        return _row_id(result)

    async def send(
        self,
        subject: str,
        value: V,
        *,
        key: bytes | str = b"",
        properties: Mapping[str, str | bytes] | None = None,
        tags: Collection[str] = (),
    ) -> None:
        """
        Add a message in its own transaction, and wait until a broker has stored it.

        Use this for a message that belongs to no transaction but must stay in order with the rows
        of its key. If an operator purges rows during the call, the call cannot know whether its row
        was sent or purged.

        Raises:
            As `add`.
            MessageTooLargeError: also if the row exceeds the subject's limit; the row stays in the
                table, marked as refused.
            DeliveryError: no broker knows whether the row is stored, or an operator purged rows
                during the call.
            StorageError: the database does not respond; the message may have been added.
            InternalError: this outbox has stopped sending because of a bug in keylane; the `fate`
                says whether the message may have been added.
            ClosedError: the outbox is not open, or was closed during the call, in which case the
                `fate` is UNKNOWN and the message is in the table.
            UsageError: the outbox is open in another process or event loop.
        """
        self._connections.loop_binding.check()
        if self._drainer is not None and self._drainer.fault is not None:
            raise stopped_error(self._drainer.fault).copy(Fate.NOT_DONE)
        row = self._build_row(subject, value, key, properties, tags)
        row_id, token = await self._database.run(self._insert_row, row)
        if self._drainer is not None:  # it may have been closed in the meantime
            self._drainer.wake()
        await self._waiters.wait(row_id, token)

    def _insert_row(self, connection: Connection, row: dict[str, Any]) -> tuple[int, int]:
        """Insert the row. Return its id and the lease's token, which is read before operators can
        see the row.
        """
        row_id = _row_id(connection.execute(self._insert, row))
        return row_id, connection.execute(sa.select(self._tables.lease.c.token)).scalar_one()

    def _build_row(
        self,
        subject: str,
        value: V,
        key: bytes | str,
        properties: Mapping[str, str | bytes] | None,
        tags: Collection[str] = (),
    ) -> dict[str, Any]:
        check_name("subject", subject)
        data = encode_for(self._codec, subject, value)
        if type(data) is not bytes:
            refuse_text(value=data)
        key = encode_key(key)
        packed = pack_properties(properties, tags)
        check_message_size(len(key), len(data), len(packed))
        if (tracing := current_tracing()) is not None:
            limit_bytes = MESSAGE_BYTES_MAX - len(key) - len(data)
            fields = tracing.create(subject, properties)
            packed = add_fields(fields, packed, properties, tags, limit_bytes)
        random_partition = self._environment.draw_identity(LOGICAL_PARTITIONS.bit_length() - 1)
        return {
            "subject": subject,
            "logical": logical_partition(key) if key else random_partition,
            "order_key": key,
            "value": data,
            "properties": packed,
            "added_at_ns": self._environment.clock.wall_ns(),
        }


def _row_id(result: Any) -> int:
    return int(result.inserted_primary_key[0])
