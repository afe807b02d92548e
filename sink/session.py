"""Blocks whose effects are committed exactly once per message, in the user's transaction or in
their own.

    enter ─▶ is it done? ─▶ the user's statements ─▶ exit: write fence and offset ─▶ commit
             └──────────────────────── one transaction ────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from operator import attrgetter
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import InvalidRequestError as TransactionError
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from ..protocol.errors import InvalidRequestError
from ..protocol.message import Delivery, Message
from ..user_database.autocommit import check_transaction
from .rows import EffectRows, Source, SourceState
from .tables import DEFAULT_PREFIX, SinkTables, tables_of

T = TypeVar("T")
Target = AsyncSession | AsyncConnection | Session | Connection


class MessageHolder(Protocol):
    """A message of `keylane.sync`, whose `ack` blocks."""

    @property
    def message(self) -> Message[Any]:
        """The message as delivered by `keylane.Consumer`."""
        ...


MERGE_EVERY = 256
"""The number of offsets between two merges of rows."""

_checked_engines: WeakKeyDictionary[SinkTables, WeakSet[Engine]] = WeakKeyDictionary()
"""The engines whose tables were found to have the right version."""
_next_merge_offsets: WeakKeyDictionary[Delivery, int] = WeakKeyDictionary()
"""The offset at which a partition's next merge starts. If it is lost, or its transaction is rolled
back, rows merely stay unmerged for longer.
"""


class Fenced(AbstractContextManager[T], AbstractAsyncContextManager[T], Generic[T]):
    """
    A block inside the user's transaction; `fenced` and `fenced_batch` create it.

    Use `async with` for an AsyncSession or an AsyncConnection, `with` for a Session or a
    Connection.
    """

    def __init__(
        self, target: Target, messages: list[Message[Any]], result_type: type[T], prefix: str
    ) -> None:
        self._target = target
        self._tables = tables_of(prefix)
        self._messages = messages
        self._result_type = result_type
        self._transaction: object = None
        self._guarded_connection: Connection | None = None
        self._commit_refused = False
        self._states: list[tuple[Source, SourceState]] = []
        self._deliveries = {_source_of(message): message.delivery for message in messages}
        self._by_source: dict[Source, dict[int, Message[Any]]] = {}
        for message in messages:
            self._by_source.setdefault(_source_of(message), {})[message.offset] = message

    def __enter__(self) -> T:
        """
        Return True if the effect still has to be applied; for `fenced_batch`, return the messages
        to handle.

        Raises:
            InvalidRequestError: the session or connection cannot be used, or has no transaction.
            LeaseLostError: a newer owner has committed effects.
            SchemaError: the tables are missing, have another version, or have effects of another
                cluster.
        """
        if not isinstance(self._target, Session | Connection):
            raise InvalidRequestError(
                f"`with` takes a Session or a Connection, not {type(self._target).__name__}: use "
                f"`async with` there"
            )
        return self._begin(self._target)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """
        Record the effects as done, unless the block failed.

        Raises:
            LeaseLostError, EffectDoneError: the caller must roll back the transaction.
            InvalidRequestError: the block's transaction was ended inside the block, or spans two
                databases.
        """
        assert isinstance(self._target, Session | Connection)
        self._end(self._target, error)

    async def __aenter__(self) -> T:
        """Enter the block; see `__enter__`."""
        if not isinstance(self._target, AsyncSession | AsyncConnection):
            raise InvalidRequestError(
                f"`async with` takes an AsyncSession or an AsyncConnection, not "
                f"{type(self._target).__name__}: "
                "use `with` for a Session or a Connection"
            )
        return await self._target.run_sync(self._begin)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Exit the block; see `__exit__`."""
        assert isinstance(self._target, AsyncSession | AsyncConnection)
        await self._target.run_sync(self._end, error)

    # ── in a thread or greenlet that may block ────────────────────────────────────────────────────
    def _begin(self, target: Session | Connection) -> T:
        if not target.in_transaction():
            raise InvalidRequestError(
                "no transaction has begun: put `async with session.begin():` around the block, or "
                "use FencedSession, which begins its own"
            )
        connection = _connection_of(target)
        self._transaction = target.get_transaction()
        self._commit_refused = False
        check_transaction(connection)
        self._check_tables(connection)
        self._states = [
            (
                source,
                EffectRows(connection, self._tables, source).read_state(
                    sorted(self._by_source[source])
                ),
            )
            for source in sorted(self._by_source)
        ]
        pending = [
            self._by_source[source][offset]
            for source, state in self._states
            for offset in state.pending
        ]
        # A commit without the offset must be prevented: each redelivery would repeat the effects.
        for name, listener in self._listeners().items():
            event.listen(connection, name, listener)
        self._guarded_connection = connection
        result: Any = bool(pending) if self._result_type is bool else pending
        return result  # type: ignore[no-any-return]  # the caller chose the type

    def _listeners(self) -> dict[str, Callable[..., None]]:
        return {
            "commit": self._refuse_commit,
            "prepare_twophase": self._refuse_prepare,
            "commit_twophase": self._refuse_unprepared,
        }

    def _refuse_commit(self, connection: Connection) -> None:
        self._commit_refused = True
        # SQLAlchemy considers the transaction ended; without this, the connection's next commit
        # would write its effects.
        connection.connection.rollback()
        raise _transaction_ended_error()

    def _refuse_prepare(self, _connection: Connection, _xid: object) -> None:
        """Refuse to prepare the transaction, which makes a session with `twophase` roll back."""
        self._commit_refused = True
        raise _transaction_ended_error()

    def _refuse_unprepared(self, connection: Connection, xid: object, _is_prepared: bool) -> None:
        """Refuse a commit without a preceding prepare, which `begin_twophase` would allow."""
        self._commit_refused = True
        connection.dialect.do_rollback_twophase(connection, xid, is_prepared=False)
        raise _transaction_ended_error()

    def _end(self, target: Session | Connection, error: BaseException | None) -> None:
        guarded, self._guarded_connection = self._guarded_connection, None
        if guarded is not None:
            for name, listener in self._listeners().items():
                event.remove(guarded, name, listener)
        if error is not None:
            return
        if self._commit_refused or target.get_transaction() is not self._transaction:
            raise _transaction_ended_error()
        if isinstance(target, Session):
            target.flush()
        connection = _connection_of(target)
        for source, state in self._states:
            if not state.pending:
                continue
            rows = EffectRows(connection, self._tables, source)
            fence_id = rows.record(state)
            delivery = self._deliveries[source]
            # Check after the INSERT. While the cursor is at or below a message, the message's row
            # cannot have been merged.
            if delivery is not None and (delivery.is_copied or state.pending[0] < delivery.cursor):
                rows.check_not_merged(fence_id, state)
            if delivery is not None and _crosses_merge_boundary(state.pending):
                start_offset = _next_merge_offsets.get(delivery)
                _next_merge_offsets[delivery] = rows.merge(fence_id, start_offset, delivery.cursor)

    def _check_tables(self, connection: Connection) -> None:
        engines = _checked_engines.setdefault(self._tables, WeakSet())
        if connection.engine not in engines:
            self._tables.check(connection)
            engines.add(connection.engine)


class FencedSession(Fenced[bool]):
    """
    A block with its own transaction, which commits the effect of a message exactly once.

        async def handle(message: keylane.Message) -> None:
            async with AsyncSession(engine) as session, FencedSession(session, message) as todo:
                if todo:
                    session.add(Entry(account=message.key, amount=message.value))

    The block begins a transaction, and commits it at the end together with the message's offset and
    fencing token. The transaction is rolled back if the block fails, or if the effect was already
    applied (`todo` is False).
    """

    def __init__(
        self, target: Target, message: Message[Any] | MessageHolder, *, prefix: str = DEFAULT_PREFIX
    ) -> None:
        """
        Create a block; `async with` begins the transaction, or `with` for a Session or a
        Connection.

        Args:
            target: the user's session or connection, not in a transaction.
            message: a message that a consumer of an exclusive group received.
            prefix: the prefix of the tables' names.

        Raises:
            InvalidRequestError: the target or the message is not of the described kind.
            ConfigError: the prefix is invalid.
        """
        super().__init__(_check_target(target), [_check_message(message)], bool, prefix)
        self._own_transaction: Any = None

    def _begin(self, target: Session | Connection) -> bool:
        try:
            self._own_transaction = target.begin()
        except TransactionError as error:
            raise InvalidRequestError(
                f"FencedSession begins a transaction of its own; in one of yours "
                f"use `fenced`: {error}"
            ) from error
        try:
            return super()._begin(target)
        except BaseException:
            self._own_transaction.rollback()
            raise

    def _end(self, target: Session | Connection, error: BaseException | None) -> None:
        own_transaction = self._own_transaction
        try:
            super()._end(target, error)
            if error is None and self._states[0][1].pending:
                own_transaction.commit()
        finally:
            if own_transaction.is_active or target.get_transaction() is own_transaction:
                own_transaction.rollback()


def fenced(
    target: Target, message: Message[Any] | MessageHolder, *, prefix: str = DEFAULT_PREFIX
) -> Fenced[bool]:
    """
    Return a context manager for use inside an open transaction. It yields True if the message's
    effect still has to be applied, and False if it already was.

        async with session.begin():
            async with fenced(session, message) as todo:
                if todo:
                    session.add(Entry(...))

    On exit, it adds the message's offset and fencing token to the transaction, which the caller
    commits.

    Args:
        target: the user's session or connection, in a transaction.
        message: a message that a consumer of an exclusive group received.
        prefix: the prefix of the tables' names.

    Raises:
        InvalidRequestError: the target or the message is not of the described kind.
        ConfigError: the prefix is invalid.
    """
    return Fenced(_check_target(target), [_check_message(message)], bool, prefix)


def fenced_batch(
    target: Target,
    messages: Iterable[Message[Any] | MessageHolder],
    *,
    prefix: str = DEFAULT_PREFIX,
) -> Fenced[list[Message[Any]]]:
    """
    Return a context manager for many messages in one transaction. It yields a list of the distinct
    messages whose effects still have to be applied.

    The list is sorted by partition and offset, so messages of one key keep their order. If one
    message is refused, nothing is committed.

    Args:
        target: the user's session or connection, in a transaction.
        messages: messages that a consumer of an exclusive group received, from any partitions.
        prefix: the prefix of the tables' names.

    Raises:
        InvalidRequestError: the target or the messages are not of the described kind.
        LeaseLostError: two messages were delivered to different owners of the same partition.
        ConfigError: the prefix is invalid.
    """
    if isinstance(messages, Message) or not isinstance(messages, Iterable):
        raise InvalidRequestError(
            f"fenced_batch takes a list of messages, not "
            f"{type(messages).__name__}: fenced takes one"
        )
    checked_messages = [_check_message(message) for message in messages]
    source_by_lease: dict[tuple[str, str, int], Source] = {}
    for message in checked_messages:
        source = _source_of(message)
        other = source_by_lease.setdefault((source.subject, source.group, source.leased_id), source)
        if other.token != source.token:
            oldest, newest = sorted((other, source), key=attrgetter("token"))
            raise oldest.fenced_error(newest.token, message.offset)
    return Fenced(_check_target(target), checked_messages, list, prefix)


def _transaction_ended_error() -> InvalidRequestError:
    return InvalidRequestError(
        "the transaction was ended inside the block, so its effects are not fenced: commit "
        "after the block"
    )


def _crosses_merge_boundary(offsets: list[int]) -> bool:
    """Return True if the offsets cross a multiple of MERGE_EVERY, so that a merge is due."""
    return offsets[-1] // MERGE_EVERY != (offsets[0] - 1) // MERGE_EVERY


def _source_of(message: Message[Any]) -> Source:
    delivery = message.delivery
    assert delivery is not None
    lease_fields = (message.partition_id, message.fencing_token, delivery.leased_id)
    return Source(message.subject, message.group, *lease_fields, delivery.cluster_id)


def _connection_of(target: Session | Connection) -> Connection:
    """
    Return the connection of the current transaction.

    Raises:
        InvalidRequestError: the session is not bound to one database, or its transaction spans
            two.
    """
    if isinstance(target, Connection):
        return target
    try:
        connection = target.connection()
    except UnboundExecutionError as error:
        raise InvalidRequestError(
            "the session is not bound to one database: effects can be fenced only in a session of "
            "one database"
        ) from error
    transaction: Any = target.get_transaction()
    connections = {id(entry[0]) for entry in transaction._connections.values()}
    if len(connections) > 1:
        raise InvalidRequestError(
            "the transaction has two databases, which do not commit together: effects can be "
            "fenced only in a transaction of one database"
        )
    return connection


def _check_target(target: object) -> Any:
    if not isinstance(target, AsyncSession | AsyncConnection | Session | Connection):
        raise InvalidRequestError(
            f"effects are fenced in a session or a connection of SQLAlchemy, not in a "
            f"{type(target).__name__}"
        )
    return target


def _check_message(value: object) -> Message[Any]:
    message = value if isinstance(value, Message) else getattr(value, "message", value)
    if not isinstance(message, Message):
        raise InvalidRequestError(f"fenced effects need a Message, not {type(message).__name__}")
    delivery = message.delivery
    if delivery is None or not delivery.group or message.fencing_token <= 0:
        raise InvalidRequestError(
            f"message {message.offset} was read without a group, so no lease can fence its "
            "effects: use a Consumer"
        )
    if not delivery.exclusive:
        raise InvalidRequestError(
            f"group {delivery.group!r} is shared: all its consumers have the same token, which "
            "fences none of them; use an exclusive group"
        )
    return message
