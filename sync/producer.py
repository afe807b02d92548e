"""The blocking producer: it runs a `keylane.Producer` on an event loop in a thread of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from typing import Any, Generic, Never, Protocol, Self, TypeVar, overload

from ..producer import (
    LogicQueue,
    Producer,
    ProducerSettings,
    ProducerStats,
    ScheduledFuture,
    SendFuture,
)
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
from ..protocol.settings import flag_problems, refuse_call
from ..rpc.home import NonCopyable
from .loop_thread import AtProcessEnd, LoopThread

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
F = TypeVar("F")
CHUNK = 1_000
"""Number of messages that `send_all` passes to the other thread at once."""


class _Outcome(Protocol[R_co]):
    """The future of a message."""

    def __await__(self) -> Generator[Any, None, R_co]: ...

    def done(self) -> bool: ...

    def result(self) -> R_co: ...

    @property
    def cancel(self) -> Any: ...


class _OnItsWay(Generic[R]):
    def __init__(self, thread: LoopThread, future: _Outcome[R]) -> None:
        self._thread = thread
        self._future = future

    def result(self, timeout_s: float | None = None, *, timeout: float | None = None) -> R:
        """
        Wait until the message is stored, scheduled or given up; the producer may be closed.

        Args:
            timeout_s: seconds to wait; None to wait as long as it takes.
            timeout: the same, under the name that `concurrent.futures` has for it.

        Raises:
            TimeoutError: the time is over, and the producer continues to send the message.
            InvalidRequestError: `timeout_s` is no number of seconds, or both names are given.
            KeylaneError: the message was given up; its `fate` says whether it may be stored.
        """
        if timeout is not None:
            if timeout_s is not None:
                raise InvalidRequestError("timeout is another name of timeout_s: give one of them")
            timeout_s = timeout
        try:
            return self._thread.run(self._receipt, timeout_s)
        except ClosedError:
            if not self._future.done():
                raise
            return self._future.result()

    async def _receipt(self) -> R:
        return await self._future

    def done(self) -> bool:
        """Return True once the message is stored, scheduled or given up."""
        return self._future.done()

    @property
    def cancel(self) -> Any:
        """Raise AttributeError with a text that says what to use instead, so `hasattr` is False."""
        return self._future.cancel

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'done' if self.done() else 'pending'}>"


class SentMessage(_OnItsWay[Receipt]):
    """A message that `send` has queued; `result` waits for its receipt."""


class ScheduledMessage(_OnItsWay[ScheduledReceipt]):
    """A message that was sent with `deliver_at`; `result` waits for the receipt, which
    `Producer.cancel` takes.
    """


class SyncProducer(NonCopyable, Generic[V]):
    """
    Sends messages from programs without an event loop, and from notebooks next to their own.

        with Producer("127.0.0.1:7000") as producer:
            receipt = producer.send("orders", b"paid", key=b"customer-7").result()

    The producer works like `keylane.Producer`, whose calls it makes on a thread of its own. Any
    thread may call it: the messages of a key are stored in the order in which the calls of `send`
    return. Each `send` passes to that thread and back; `send_all` passes once for a thousand
    messages.

    The end of the block waits until everything is stored. In a notebook, `producer =
    Producer(...).open()` opens the producer for several cells; it is closed by `close()`, or when
    the program or its process of `multiprocessing` ends. A process that ends by a signal or
    `os._exit`, like uvicorn and the workers of Celery and RQ, does not close it, and queued
    messages are lost: call `result`, `flush` or `close` first.
    """

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
            ConfigError, TypeError
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
        self._thread = LoopThread("producer", end=partial(self._producer.close, flush=False))
        self._at_end = AtProcessEnd(self.close)

    def __repr__(self) -> str:
        return f"<sync {self._producer!r:.200}>".replace("<sync <", "<sync ").replace(">>", ">")

    # ── life ──────────────────────────────────────────────────────────────────────────────────────
    def open(self) -> Self:
        """
        Start the thread, connect to a metaserver, and return the producer.

        Raises:
            NotSentError, OutcomeUnknownError: no metaserver has answered within `wait_s`; `open`
                may be called again.
            UsageError: the producer is open, or was opened before a fork.
        """
        self._thread.start()
        try:
            self._thread.run(self._producer.__aenter__)
        except BaseException:
            self._thread.stop()
            raise
        self._at_end.on()
        return self

    def close(self, *, flush: bool = True) -> None:
        """
        Close the producer; do nothing if it is closed, or in a forked child.

        Args:
            flush: wait for the queued messages; if False, they are given up at once.

        Raises:
            GivenUpError: messages were given up, as `flush` reports it, or by this call.
            InvalidRequestError: `flush` is neither True nor False; the producer stays open.
            UsageError: a codec or a partitioner of this producer made the call; the producer
                stays open.
        """
        refuse_call(flag_problems(flush=flush))
        if self._thread.state != "open":
            self._thread.stop()  # it may be closing, or its event loop may have ended by itself
            self._at_end.off()
            return
        self._thread.check_caller()
        try:
            with contextlib.suppress(ClosedError):  # another thread has closed it meanwhile
                self._thread.run(partial(self._producer.close, flush=flush))
        finally:
            self._thread.stop()
            self._at_end.off()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(flush=kind is None)

    # ── sending ───────────────────────────────────────────────────────────────────────────────────
    @overload
    def send(
        self,
        subject: str,
        value: V,
        *,
        key: bytes = b"",
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
        key: bytes = b"",
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
        key: bytes = b"",
        deliver_at: datetime | int | None = None,
        properties: Mapping[str, str | bytes] | None = None,
        tags: Collection[str] = (),
        queue: int | None = None,
        timeout_ms: int | None = None,
    ) -> SentMessage | ScheduledMessage:
        """
        Queue a message, with the arguments of `keylane.Producer.send`; wait while the queue is
        full.

        Returns:
            The queued message: its `result()` waits for the Receipt, or with `deliver_at` for the
            ScheduledReceipt. If `result` is never called, `flush` and `close` report messages that
            were given up.

        Raises:
            KeylaneError: an error of `keylane.Producer.send`, except QueueFullError; nothing was
                queued.
            UsageError: a codec or a partitioner of this producer made the call.
        """
        if deliver_at is not None:

            def later(at: datetime | int = deliver_at) -> ScheduledFuture:
                return self._producer.send(
                    subject,
                    value,
                    key=key,
                    deliver_at=at,
                    properties=properties,
                    tags=tags,
                    queue=queue,
                    timeout_ms=timeout_ms,
                )

            return ScheduledMessage(self._thread, self._thread.run(partial(self._queued, later)))

        def send() -> SendFuture:
            return self._producer.send(
                subject,
                value,
                key=key,
                properties=properties,
                tags=tags,
                queue=queue,
                timeout_ms=timeout_ms,
            )

        return SentMessage(self._thread, self._thread.run(partial(self._queued, send)))

    async def _queued(self, send: Callable[[], F]) -> F:
        await self._producer.drain()
        return send()

    def cancel(self, receipt: ScheduledReceipt) -> CancelOutcome:
        """Cancel the delivery of a message that was sent with `deliver_at`, as
        `keylane.Producer.cancel` does.
        """
        return self._thread.run(partial(self._producer.cancel, receipt))

    def send_all(self, subject: str, messages: Iterable[tuple[bytes, V]]) -> int:
        """
        Queue messages as fast as there is room, then `flush`; return the number of messages, all of
        which are stored.

        Args:
            messages: pairs `(key, value)`; the caller's thread iterates over them.

        Raises:
            DeliveryError, GivenUpError: see `keylane.Producer.send_all`.
            InvalidRequestError: `messages` cannot be iterated; nothing was queued.
        """
        if not isinstance(messages, Iterable):
            raise InvalidRequestError(
                f"messages are pairs (key, value), as [(b'customer-7', b'paid')], not "
                f"{messages!r:.60}"
            )
        source, count, more = iter(messages), 0, True
        while more:
            chunk = _Chunk(source)
            more = chunk.full
            count = self._thread.run(
                partial(self._producer._queue_all, subject, chunk, CHUNK, count)
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
        """Send each row of Arrow data as a message, as `keylane.Producer.send_arrow` does, and wait
        until all are stored.
        """

        async def sent() -> TableReceipt:
            return await self._producer.send_arrow(
                subject, source, value=value, key=key, partial=partial
            )

        return self._thread.run(sent)

    def flush(self, timeout_s: float | None = None) -> None:
        """
        Wait until every message that was sent is stored or given up.

        Raises:
            GivenUpError: since the last flush, messages were given up whose `result` was not
                called.
            InvalidRequestError: `timeout_s` is no number of seconds.
            TimeoutError: it takes longer than `timeout_s` seconds.
        """
        self._thread.run(self._producer.flush, timeout_s)

    def resume(self, error: DeliveryTimeoutError | KeyHaltedError) -> None:
        """Accept messages of a halted key again, as `keylane.Producer.resume` does."""

        async def resumed() -> None:
            self._producer.resume(error)

        self._thread.run(resumed)

    @property
    def stats(self) -> ProducerStats:
        """The counts since the producer was opened; raises ClosedError."""

        async def counts() -> ProducerStats:
            return self._producer.stats

        return self._thread.run(counts)

    def waiting(self, *, limit: int = 100) -> WaitingMessages:
        """List the messages that are neither stored nor given up, as `keylane.Producer.waiting`
        does.
        """

        async def listed() -> WaitingMessages:
            return self._producer.waiting(limit=limit)

        return self._thread.run(listed)


class _Chunk(Generic[V]):
    """Up to CHUNK messages of a source; if the source raised an error, the iteration ends with
    it.
    """

    def __init__(self, source: Iterator[tuple[bytes, V]]) -> None:
        self._messages: list[tuple[bytes, V]] = []
        self._error: Exception | None = None
        try:
            for message in source:
                self._messages.append(message)
                if len(self._messages) == CHUNK:
                    break
        except Exception as error:  # noqa: BLE001 - raised in its place
            self._error = error

    @property
    def full(self) -> bool:
        """True if the source may have more messages."""
        return self._error is None and len(self._messages) == CHUNK

    def __iter__(self) -> Iterator[tuple[bytes, V]]:
        yield from self._messages
        if self._error is not None:
            raise self._error
