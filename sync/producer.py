"""The blocking producer, which runs a `keylane.Producer` on an event loop in its own thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Generic, Never, Protocol, Self, TypeVar, overload

from ..producer import (
    LogicQueue,
    Producer,
    ProducerSettings,
    ProducerStats,
)
from ..producer.sending import refuse_send_argument
from ..producer.settings import ARGUMENT_HINTS, METHOD_HINTS
from ..producer.waiting_keys import WaitingMessages
from ..protocol.codecs.codec import Codec, V
from ..protocol.errors import (
    ClosedError,
    DeliveryTimeoutError,
    InvalidRequestError,
    KeyHaltedError,
)
from ..protocol.http.tls_settings import TlsSettings
from ..protocol.message import Receipt, TableReceipt
from ..protocol.routing import OrderStrategy
from ..protocol.scheduled.receipt import CancelOutcome, ScheduledReceipt
from ..protocol.settings import check_no_call_problems, flag_problems, names_missing_address
from ..rpc.loop_binding import NonCopyable
from .loop_thread import ExitHook, LoopThread

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
F = TypeVar("F")
CHUNK_MESSAGES = 1_000
"""The number of messages that `send_all` passes to the other thread at a time."""


class _MessageFuture(Protocol[R_co]):
    """The future of a message."""

    def __await__(self) -> Generator[Any, None, R_co]: ...

    def done(self) -> bool: ...

    def result(self) -> R_co: ...

    @property
    def cancel(self) -> Any: ...


class _QueuedSend(Generic[R]):
    """A message that was passed to the producer on the other thread."""

    def __init__(self, thread: LoopThread, future: _MessageFuture[R]) -> None:
        self._thread = thread
        self._future = future

    def result(self, timeout_s: float | None = None, *, timeout: float | None = None) -> R:
        """
        Wait until the message is stored, scheduled or given up. This also works after the producer
        is closed.

        Args:
            timeout_s: how many seconds to wait; None: no timeout.
            timeout: the same, under the name that `concurrent.futures` uses.

        Returns:
            The receipt.

        Raises:
            TimeoutError: the message is still pending; the producer continues to send it.
            InvalidRequestError: `timeout_s` is not a number of seconds, or both are passed.
            KeylaneError: the message was given up; the error's `fate` says whether it may be
                stored.
        """
        if timeout is not None:
            if timeout_s is not None:
                raise InvalidRequestError("timeout is another name for timeout_s: pass one of them")
            timeout_s = timeout
        try:
            return self._thread.run(self._wait_for_receipt, timeout_s)
        except ClosedError:
            if not self._future.done():
                raise
            return self._future.result()

    async def _wait_for_receipt(self) -> R:
        return await self._future

    def done(self) -> bool:
        """Return True once the message is stored, scheduled or given up."""
        return self._future.done()

    @property
    def cancel(self) -> Any:
        """Always raises AttributeError, which says what to use instead, so that `hasattr` returns
        False.
        """
        return self._future.cancel

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'done' if self.done() else 'pending'}>"


class SentMessage(_QueuedSend[Receipt]):
    """A message that `send` has queued; `result` waits for its receipt."""


class ScheduledMessage(_QueuedSend[ScheduledReceipt]):
    """A message that was sent with `deliver_at`. `result` waits for its receipt, which
    `Producer.cancel` takes.
    """


class SyncProducer(NonCopyable, Generic[V]):
    """
    Sends messages from programs without an event loop, and from notebooks, which run a loop of
    their own.

        with Producer("127.0.0.1:7000") as producer:
            receipt = producer.send("orders", b"paid", key="customer-7").result()

    It calls a `keylane.Producer` on its own thread, and may be called from any thread: the messages
    of a key are stored in the order in which the `send` calls return. Each `send` is a round trip
    to the other thread; `send_all` needs one per thousand messages.

    Leaving the block waits until all messages are stored. In a notebook, `producer =
    Producer(...).open()` opens the producer for several cells; it is closed by `close()`, or when
    the program or `multiprocessing` child ends. A process that a signal or `os._exit` ends, such as
    uvicorn or a Celery or RQ worker, does not close it, and queued messages are lost: call
    `result`, `flush` or `close` first.
    """

    _method_hints = METHOD_HINTS | {"send_and_wait": "use send(...).result()"}

    @names_missing_address("Producer", ProducerSettings, ARGUMENT_HINTS)
    def __init__(
        self,
        meta: str | Iterable[str],
        *,
        order_strategy: OrderStrategy | str | None = None,
        partitioner: Callable[[bytes], int | LogicQueue] | None = None,
        codec: Codec[V] | Mapping[str, Codec[Any]] | None = None,
        settings: ProducerSettings | None = None,
        wait_s: float = 0,
        tls: TlsSettings | None = None,
        token: str | None = None,
        **others: Never,
    ) -> None:
        """
        Create a producer with the arguments of `keylane.Producer`; `with` or `open` opens it.

        Raises:
            ConfigError, TypeError: an argument is invalid; see `keylane.Producer`.
        """
        self._producer: Producer[V] = Producer(
            meta,
            order_strategy=order_strategy,
            partitioner=partitioner,
            codec=codec,
            settings=settings,
            wait_s=wait_s,
            tls=tls,
            token=token,
            **others,
        )
        self._thread = LoopThread(
            "producer", close_client=partial(self._producer.close, flush=False)
        )
        self._exit_hook = ExitHook(self.close)

    def __repr__(self) -> str:
        return f"<sync {self._producer!r:.200}>".replace("<sync <", "<sync ").replace(">>", ">")

    # ── life ──────────────────────────────────────────────────────────────────────────────────────
    def open(self) -> Self:
        """
        Start the thread, connect to a metaserver, and return the producer.

        Raises:
            NotSentError, OutcomeUnknownError: no metaserver replied within `wait_s`; `open` may be
                called again.
            UsageError: the producer is already open, or was opened before a fork.
        """
        self._thread.open_client(self._producer.__aenter__, self._exit_hook)
        return self

    def close(self, *, flush: bool = True) -> None:
        """
        Close the producer. This does nothing if it is already closed, or in a forked child.

        Args:
            flush: True: wait for the queued messages; False: give them up at once.

        Raises:
            GivenUpError: messages were given up, either earlier (see `flush`) or by this call.
            InvalidRequestError: `flush` is neither True nor False; the producer stays open.
            UsageError: this was called by a codec or partitioner of the producer, which stays open.
        """
        check_no_call_problems(flag_problems(flush=flush))
        close = partial(self._producer.close, flush=flush)
        self._thread.close_client(close, self._exit_hook)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        leave = partial(self._producer.__aexit__, kind, error, trace)
        self._thread.close_client(leave, self._exit_hook)

    # ── sending ───────────────────────────────────────────────────────────────────────────────────
    @overload
    def send(
        self,
        subject: str,
        value: V,
        *,
        key: bytes | str = b"",
        deliver_at: None = None,
        properties: Mapping[str, str | bytes] | None = None,
        tags: Collection[str] = (),
        queue: int | None = None,
        timeout_ms: int | None = None,
    ) -> SentMessage: ...
    @overload
    def send(
        self,
        subject: str,
        value: V,
        *,
        key: bytes | str = b"",
        deliver_at: datetime | int,
        properties: Mapping[str, str | bytes] | None = None,
        tags: Collection[str] = (),
        queue: int | None = None,
        timeout_ms: int | None = None,
    ) -> ScheduledMessage: ...
    def send(
        self,
        subject: str,
        value: V,
        *,
        key: bytes | str = b"",
        deliver_at: datetime | int | None = None,
        properties: Mapping[str, str | bytes] | None = None,
        tags: Collection[str] = (),
        queue: int | None = None,
        timeout_ms: int | None = None,
        **others: Never,
    ) -> SentMessage | ScheduledMessage:
        """
        Queue a message, as `keylane.Producer.send` does, but wait while the queue is full.

        Returns:
            The queued message, whose `result()` waits for the Receipt or, with `deliver_at`, for
            the ScheduledReceipt. If `result` is never called, `flush` and `close` report whether
            the message was given up.

        Raises:
            KeylaneError: see `keylane.Producer.send`; there is no QueueFullError. Nothing was
                queued.
            UsageError: this was called by a codec or partitioner of the producer.
        """
        for name in others:
            refuse_send_argument(name)
        send: Callable[[], Any] = partial(
            self._producer.send,
            subject,
            value,
            key=key,
            deliver_at=deliver_at,
            properties=properties,
            tags=tags,
            queue=queue,
            timeout_ms=timeout_ms,
        )
        future = self._thread.run(partial(self._drain_and_send, send))
        kind = SentMessage if deliver_at is None else ScheduledMessage
        return kind(self._thread, future)

    async def _drain_and_send(self, send: Callable[[], F]) -> F:
        await self._producer.drain()
        return send()

    def cancel(self, receipt: ScheduledReceipt) -> CancelOutcome:
        """Cancel the delivery of a message that was sent with `deliver_at`, as
        `keylane.Producer.cancel` does.
        """
        return self._thread.run(partial(self._producer.cancel, receipt))

    def send_all(self, subject: str, messages: Iterable[tuple[bytes | str, V]]) -> int:
        """
        Queue messages, waiting while the queue is full, and `flush`.

        Args:
            messages: pairs `(key, value)`; iterated in the caller's thread.

        Returns:
            The number of messages, all of which are stored.

        Raises:
            DeliveryError, GivenUpError: see `keylane.Producer.send_all`.
            InvalidRequestError: `messages` cannot be iterated; nothing was queued.
        """
        if not isinstance(messages, Iterable):
            raise InvalidRequestError(
                f"messages must be pairs (key, value), as [(b'customer-7', b'paid')], not "
                f"{messages!r:.60}"
            )
        iterator, count, has_more = iter(messages), 0, True
        while has_more:
            chunk = _Chunk(iterator)
            has_more = chunk.has_more
            count = self._thread.run(
                partial(self._producer._queue_all, subject, chunk, CHUNK_MESSAGES, count)
            )
        self.flush()
        return count

    def send_arrow(
        self,
        subject: str,
        source: Any,
        *,
        value: str,
        key: str | None = None,
        partial: bool = False,
    ) -> TableReceipt:
        """Send each row of Arrow data as a message, and wait until all are stored; see
        `keylane.Producer.send_arrow`.
        """

        async def send_table() -> TableReceipt:
            return await self._producer.send_arrow(
                subject, source, value=value, key=key, partial=partial
            )

        return self._thread.run(send_table)

    def flush(self, timeout_s: float | None = None) -> None:
        """
        Wait until every message that was sent is stored or given up.

        Raises:
            GivenUpError: messages whose `result` was not called have been given up since the last
                flush.
            InvalidRequestError: `timeout_s` is not a number of seconds.
            TimeoutError: the flush took longer than `timeout_s` seconds.
        """
        self._thread.run(self._producer.flush, timeout_s)

    def resume(self, error: DeliveryTimeoutError | KeyHaltedError) -> None:
        """Accept messages of a halted key again, as `keylane.Producer.resume` does."""

        async def resume() -> None:
            self._producer.resume(error)

        self._thread.run(resume)

    @property
    def stats(self) -> ProducerStats:
        """The counts since the producer was opened. Raises ClosedError."""

        async def get_stats() -> ProducerStats:
            return self._producer.stats

        return self._thread.run(get_stats)

    def waiting(self, *, limit: int = 100) -> WaitingMessages:
        """List the messages that are neither stored nor given up, as `keylane.Producer.waiting`
        does.
        """

        async def list_waiting() -> WaitingMessages:
            return self._producer.waiting(limit=limit)

        return self._thread.run(list_waiting)


class _Chunk(Generic[V]):
    """Up to CHUNK_MESSAGES messages from a source. If the source raised an error, iterating over
    the chunk raises it at the same point.
    """

    def __init__(self, source: Iterator[tuple[bytes | str, V]]) -> None:
        self._messages: list[tuple[bytes | str, V]] = []
        self._error: Exception | None = None
        try:
            for message in source:
                self._messages.append(message)
                if len(self._messages) == CHUNK_MESSAGES:
                    break
        except Exception as error:  # noqa: BLE001 - raised again by __iter__
            self._error = error

    @property
    def has_more(self) -> bool:
        """True if the source may have more messages."""
        return self._error is None and len(self._messages) == CHUNK_MESSAGES

    def __iter__(self) -> Iterator[tuple[bytes | str, V]]:
        yield from self._messages
        if self._error is not None:
            raise self._error
