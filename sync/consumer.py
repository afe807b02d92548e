"""The blocking consumer, which runs a `keylane.Consumer` on an event loop in its own thread."""

from __future__ import annotations

import contextlib
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from functools import partial
from inspect import signature
from types import TracebackType
from typing import Any, Generic, Never, NoReturn, Self, TypeVar

from ..consumer import (
    AckMode,
    ArrowBatch,
    Assignment,
    Consumer,
    ConsumerSettings,
    FailurePolicy,
    Lag,
    Position,
)
from ..consumer.handed_out import to_list
from ..consumer.settings import ARGUMENT_HINTS, METHOD_HINTS
from ..protocol.codecs.codec import Codec, V
from ..protocol.errors import ClosedError, ConfigError, InvalidRequestError
from ..protocol.http.tls_settings import TlsSettings
from ..protocol.message import NAMED_OTHERWISE, Lease, Message, advise
from ..protocol.reading.instants import GroupStartOption
from ..protocol.settings import names_missing_address, refuse_unknown_arguments
from ..rpc.loop_binding import NonCopyable
from .arrow_batch import TakenBatch
from .loop_thread import ExitHook, LoopThread

T = TypeVar("T")
R = TypeVar("R")


class MessageRequest(Generic[T]):
    """
    Takes messages, and puts them back if the caller is interrupted, for example by Ctrl-C.

    Args:
        request: takes the messages; runs on the event loop.
        put_back: puts back messages that the caller did not receive; runs on the event loop.
    """

    def __init__(
        self, request: Callable[[], Coroutine[Any, Any, T]], put_back: Callable[[T], None]
    ) -> None:
        self._request = request
        self._put_back = put_back
        self._messages: list[T] = []
        self._abandoned = False

    def run(self, thread: LoopThread, convert: Callable[[T], R]) -> R:
        """Take messages and return `convert(messages)`. Raises the same errors as
        `LoopThread.run`.
        """
        try:
            thread.run(self._request_messages)
            return convert(self._messages[0])
        except BaseException:
            thread.post(self._abandon)
            raise

    async def _request_messages(self) -> None:
        self._messages.append(await self._request())
        if self._abandoned:
            self._abandon()

    def _abandon(self) -> None:
        self._abandoned = True
        while self._messages:
            self._put_back(self._messages.pop())


class TakenMessage(Generic[V]):
    """A message like `keylane.Message`, whose `ack` and `nack` block."""

    __slots__ = ("_thread", "message")

    def __init__(self, thread: LoopThread | None, message: Message[V]) -> None:
        self._thread = thread
        self.message = message
        """The `keylane.Message`."""

    def __repr__(self) -> str:
        return repr(self.message)

    def __eq__(self, other: object) -> bool:
        return self.message == other.message if isinstance(other, TakenMessage) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.message)

    @property
    def subject(self) -> str:
        """The subject to which the message was sent."""
        return self.message.subject

    @property
    def key(self) -> bytes:
        """The order key; b"" if the message was sent without one."""
        return self.message.key

    @property
    def key_text(self) -> str:
        """The key as text. Raises CodecError if it is not UTF-8."""
        return self.message.key_text

    @property
    def value(self) -> bytes:
        """The value as stored."""
        return self.message.value

    @property
    def partition_id(self) -> int:
        """The id of the partition."""
        return self.message.partition_id

    @property
    def offset(self) -> int:
        """The offset in the partition."""
        return self.message.offset

    @property
    def sent_at_ns(self) -> int:
        """The time of sending by the sender's clock, in nanoseconds since 1970."""
        return self.message.sent_at_ns

    @property
    def lease(self) -> Lease | None:
        """The lease under which the message was delivered; a database can use it to refuse late
        writes.
        """
        return self.message.lease

    @property
    def fencing_token(self) -> int:
        """The token of `lease`."""
        return self.message.fencing_token

    @property
    def attempt(self) -> int:
        """How often the message was delivered, including this time."""
        return self.message.attempt

    @property
    def properties(self) -> Mapping[str, str | bytes]:
        """The properties, read-only."""
        return self.message.properties

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags, in the order in which they were sent."""
        return self.message.tags

    @property
    def group(self) -> str:
        """The consumer group that received the message; "" for a broadcast consumer."""
        return self.message.group

    @property
    def queue(self) -> int:
        """The number of the partition's logic queue."""
        return self.message.queue

    @property
    def logic_offset(self) -> int:
        """The offset in the logic queue of a static subject."""
        return self.message.logic_offset

    def decode(self) -> V:
        """Return the value, decoded by the consumer's codec. Raises CodecError."""
        return self.message.decode()

    def ack(self) -> None:
        """Ack the message. Raises the same errors as `keylane.Message.ack`."""
        self._run(self.message.ack)

    def nack(self, *, after_s: float = 0) -> None:
        """Nack the message. Raises the same errors as `keylane.Message.nack`."""
        self._run(partial(self.message.nack, after_s=after_s))

    def _run(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._thread is None:
            call().send(None)  # the message is a copy, so its first step raises an error
        else:
            self._thread.run(call)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy in another process has no thread to ack on.
        return TakenMessage, (None, self.message)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        return self


_CALLBACKS = ("on_assigned", "on_revoked", "on_lost")
_HANDLER_SETTINGS = (*_CALLBACKS, "threads", "concurrency", "max_wait_ms")
"""Settings that only a consumer with a handler uses."""


advise(TakenMessage, NAMED_OTHERWISE)


class SyncConsumer(NonCopyable, Generic[V]):
    """
    Receives messages in programs without an event loop, and in notebooks, which run a loop of their
    own.

        with Consumer("127.0.0.1:7000", subject="orders", group="billing") as consumer:
            for message in consumer:
                ...
                message.ack()

    It works like a `keylane.Consumer` without a handler, on its own thread: heartbeats continue
    while the program works, so the loop body may take as long as it needs. A message is returned
    only after all earlier messages of its key were acked; `getmany` may return several messages of
    a key. When the block ends, the partitions are released, and unacked messages are redelivered.
    """

    _method_hints = METHOD_HINTS | {"subscribe": "give subject= and group="}

    @names_missing_address("Consumer", ConsumerSettings, ARGUMENT_HINTS)
    def __init__(
        self,
        meta: str | Iterable[str],
        *,
        subject: str,
        group: str | None = None,
        codec: Codec[V] | None = None,
        start: GroupStartOption | None = None,
        ack: AckMode | str | None = None,
        on_failure: FailurePolicy | str | None = None,
        tries_max: int | None = None,
        settings: ConsumerSettings | None = None,
        wait_s: float = 0,
        tls: TlsSettings | None = None,
        token: str | None = None,
        **others: Never,
    ) -> None:
        """
        Create a consumer with the arguments of `keylane.Consumer`; `with` or `open` opens it.

        Args:
            others: rejected; only `keylane.Consumer` takes a handler and its options.

        Raises:
            ConfigError: an argument is invalid, or is accepted only by `keylane.Consumer`.
        """
        _refuse_arguments(others)
        for name in _CALLBACKS:
            if getattr(settings, name, None) is not None:
                raise _handler_only_error(name)
        self._consumer: Consumer[V] = Consumer(
            meta,
            subject=subject,
            group=group,
            codec=codec,
            start=start,
            ack=ack,
            on_failure=on_failure,
            tries_max=tries_max,
            settings=settings,
            wait_s=wait_s,
            tls=tls,
            token=token,
        )
        self._thread = LoopThread("consumer", close_client=self._consumer.close)
        self._exit_hook = ExitHook(self.close)
        self._was_open = False

    def __repr__(self) -> str:
        return f"<sync {self._consumer!r:.200}>".replace("<sync <", "<sync ").replace(">>", ">")

    # ── life ──────────────────────────────────────────────────────────────────────────────────────
    def open(self) -> Self:
        """
        Start the thread, join the group, and return the consumer.

        Raises:
            UsageError: the consumer is already open, or was opened before a fork.
            KeylaneError: see `keylane.Consumer.__aenter__`; `open` may be called again.
        """
        self._thread.open_client(self._consumer.__aenter__, self._exit_hook)
        self._was_open = True
        return self

    def close(self) -> None:
        """
        Release the partitions and close the consumer. This does nothing if it is already closed, or
        in a forked child.

        Raises:
            UsageError: called by this consumer's filter; the consumer stays open.
        """
        self._thread.close_client(self._consumer.close, self._exit_hook)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None and self._thread.state == "open":
                with contextlib.suppress(ClosedError):
                    self._thread.run(partial(self._consumer.__aexit__, kind, error, trace))
        finally:
            self.close()

    # ── messages ──────────────────────────────────────────────────────────────────────────────────
    def __iter__(self) -> Iterator[TakenMessage[V]]:
        return self

    def __next__(self) -> TakenMessage[V]:
        """
        Wait for the next message and return it.

        Raises:
            StopIteration: the consumer is closed.
            ClosedError: the consumer was never opened.
            KeylaneError: an error ended the consumer.
        """
        try:
            request = partial(_anext_or_none, self._consumer)
            message = MessageRequest(request, self._put_back).run(self._thread, self._wrap)
        except ClosedError:
            if not self._was_closed:
                raise
            message = None
        if message is None:
            raise StopIteration
        return message

    def _wrap(self, message: Message[V] | None) -> TakenMessage[V] | None:
        return None if message is None else TakenMessage(self._thread, message)

    def _put_back(self, messages: Message[V] | list[Message[V]] | ArrowBatch | None) -> None:
        if messages is not None:
            self._consumer._put_back(messages)

    @property
    def _was_closed(self) -> bool:
        """True if the consumer was open and is closed, so that loops over it end."""
        return self._was_open and self._thread.state != "open"

    def getmany(
        self, *, max_records: int | None = None, timeout_ms: int = 1_000
    ) -> list[TakenMessage[V]]:
        """
        Take several messages at once, as `keylane.Consumer.getmany` does, for `ack` and `nack`.

        If Ctrl-C interrupts this call, the next one returns the messages.
        """
        request = partial(self._consumer.getmany, max_records=max_records, timeout_ms=timeout_ms)
        return MessageRequest(request, self._put_back).run(
            self._thread, lambda messages: [TakenMessage(self._thread, item) for item in messages]
        )

    def batches(self) -> Iterator[TakenBatch]:
        """Iterate over messages as Arrow record batches, as `keylane.Consumer.batches` does; call
        `batch.ack()` before taking the next one.
        """
        # Not a generator, because Ctrl-C would end it.
        return iter(partial(self._next_batch, self._consumer.batches()), None)

    def _next_batch(self, batches: AsyncIterator[ArrowBatch]) -> TakenBatch | None:
        """Return the next batch, or None if the consumer is closed."""
        try:
            request = partial(_anext_or_none, batches)
            return MessageRequest(request, self._put_back).run(self._thread, self._wrap_batch)
        except ClosedError:
            if not self._was_closed:
                raise
            return None

    def _wrap_batch(self, batch: ArrowBatch | None) -> TakenBatch | None:
        return None if batch is None else TakenBatch(self._thread, batch)

    def ack(self, messages: Iterable[TakenMessage[V]]) -> None:
        """Ack messages, as `keylane.Consumer.ack` does."""
        self._thread.run(partial(self._consumer.ack, _unwrap(messages)))

    def nack(self, messages: Iterable[TakenMessage[V]], *, after_s: float = 0) -> None:
        """Nack messages, as `keylane.Consumer.nack` does."""
        self._thread.run(partial(self._consumer.nack, _unwrap(messages), after_s=after_s))

    def pause(self, *partition_ids: int) -> None:
        """Receive no messages from these partitions until `resume`, as `keylane.Consumer.pause`
        does.
        """
        self._thread.run(partial(self._consumer.pause, *partition_ids))

    def resume(self, *partition_ids: int) -> None:
        """Receive messages from these partitions again, or from all partitions if no ids are given,
        as `keylane.Consumer.resume` does.
        """
        self._thread.run(partial(self._consumer.resume, *partition_ids))

    def seek_to_time(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Always raise UsageError; see `keylane.Consumer.seek`."""
        self._consumer.seek_to_time(*_args, **_kwargs)

    def seek(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Always raise UsageError; see `keylane.Consumer.seek`."""
        self._consumer.seek(*_args, **_kwargs)

    @property
    def position(self) -> dict[int, Position]:
        """How far each owned partition is pulled and acked, and its lag, by partition id."""
        return self._consumer.position

    @property
    def lag(self) -> Lag:
        """The total lag of the partitions owned now."""
        return self._consumer.lag

    @property
    def throttled_ms(self) -> int:
        """The time, in milliseconds, by which servers have delayed this consumer's calls because of
        a quota; overlapping delays are added up.
        """
        return self._consumer.throttled_ms

    @property
    def assignment(self) -> list[Assignment]:
        """The partitions owned now, sorted by id; empty while the consumer is not open."""
        return self._consumer.assignment

    @property
    def waiting_for(self) -> str:
        """A text for users: who has suspended the consumer, and which partitions' messages it
        handles one at a time; "" if neither applies. See `keylane.Consumer.waiting_for`.
        """
        return self._consumer.waiting_for


def _refuse_arguments(arguments: Collection[str]) -> None:
    """
    Reject arguments that this consumer does not take.

    Raises:
        ConfigError: the argument is accepted only by `keylane.Consumer`.
        TypeError: no consumer takes the argument; the message says what to pass instead.
    """
    for name in arguments:
        is_known = name in signature(Consumer).parameters and not name.startswith("_")
        if is_known or name in _HANDLER_SETTINGS:
            raise _handler_only_error(name)
    refuse_unknown_arguments("Consumer", arguments, ConsumerSettings, ARGUMENT_HINTS)


def _handler_only_error(name: str) -> ConfigError:
    """Return the error for an argument that only `keylane.Consumer` takes."""
    return ConfigError(
        f"keylane.sync.Consumer takes no {name}=: take messages in a loop, `for message in "
        "consumer`, and ack them; or use keylane.Consumer, which calls functions, in an async def "
        "(docs/CONSUMING.md, Without an event loop)"
    )


async def _anext_or_none(iterator: AsyncIterator[T]) -> T | None:
    return await anext(iterator, None)


def _unwrap(messages: Iterable[TakenMessage[Any]]) -> list[Message[Any]]:
    if isinstance(messages, TakenMessage):
        raise InvalidRequestError(
            "pass a list of messages, as in consumer.ack([message]), or call message.ack()"
        )
    items: list[Any] = to_list(messages)  # type: ignore[arg-type]  # it checks the types
    return [item.message if isinstance(item, TakenMessage) else item for item in items]
