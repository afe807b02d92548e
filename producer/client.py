"""The producer: `send` queues a message immediately, and returns a future for its receipt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from types import TracebackType
from typing import Any, Generic, Never, Self

from ..protocol.address import parse_addresses
from ..protocol.codecs.codec import Codec, V
from ..protocol.errors import (
    ClosedError,
    ConfigError,
    DeliveryError,
    DeliveryTimeoutError,
    GivenUpError,
    InvalidRequestError,
    KeyHaltedError,
    KeylaneError,
    MissingExtraError,
    Reason,
)
from ..protocol.http.tls_settings import TlsSettings
from ..protocol.message import TableReceipt
from ..protocol.routing import OrderStrategy
from ..protocol.scheduled.receipt import CancelOutcome, ScheduledReceipt
from ..protocol.settings import (
    check_no_call_problems,
    flag_problems,
    names_missing_address,
    refuse_unknown_arguments,
)
from ..protocol.text import counted, format_seconds
from ..rpc.client import MetaClient
from ..rpc.connections import clean_up, finish_despite_cancel
from ..rpc.environment import Environment
from ..rpc.operating.client_counts import PRODUCERS
from ..rpc.race import shield, start_closing_task
from .placing import LogicQueue
from .send_budget import ProducerStats
from .sender import SubjectSender
from .sending import MessageSender, add_send_advice
from .settings import (
    ARGUMENT_HINTS,
    METHOD_HINTS,
    ProducerSettings,
    parse_strategy,
)
from .waiting_keys import WaitingMessages, build_stats, list_waiting_messages

log = logging.getLogger("keylane.producer")
CHUNK_COUNT_FIRST, CHUNK_COUNT_MAX = 8, 512
CHUNK_BYTES = 32 * 1024
"""The approximate size, in bytes, of the chunks that `send_all` takes from its iterable."""
QUIET_CLOSE_S = 1.0
"""The number of seconds after which `close` logs what it waits for."""


class Producer(MessageSender[V], Generic[V]):
    """
    Sends messages. Messages with the same key are stored in the order of their `send` calls.

        async with Producer("127.0.0.1:7000") as producer:
            receipt = await producer.send("orders", b"paid", key="customer-7")

    `send` queues a message and returns immediately; await the returned future to get the receipt.
    `flush` waits until everything that was sent is stored; so does leaving the block, also by an
    exception, for at most `close_timeout_ms`. What is given up is then in a GivenUpError, or in the
    log if the block raised an exception of its own.

    While more than `queue_bytes` are queued, `await producer.send(...)` waits until there is room.
    A `send` that is not awaited cannot wait: the full queue accepts one more message from each of
    at most 64 tasks, and every other `send` raises QueueFullError.

    A producer works only in the event loop and the process that opened it; its calls raise
    UsageError in any other. A producer created before a fork may be opened in each process, and a
    closed one may be opened again: each opening has a new producer id and starts with an empty
    queue.
    """

    _method_hints = METHOD_HINTS

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
        _environment: Environment | None = None,
        **others: Never,
    ) -> None:
        """
        Create a producer; `async with` opens it.

        Args:
            meta: `host:port` of a metaserver; for several metaservers, an iterable of strings or
                one comma-separated string.
            order_strategy: the strategy that each subject must have, "strict" or "best_tried";
                messages to a subject with the other strategy fail with a ConflictError. None:
                either strategy is accepted.
            partitioner: replaces the hash of the key. It is called with the key (b"": no key) of
                each message that is sent without `queue`, and returns a logical partition, 0 to
                1023, or the LogicQueue of a static subject. Messages for the same logical partition
                or queue are stored in the order of their `send` calls.
            codec: encodes the values passed to `send` and `send_all`, for example JsonCodec(Order).
                A mapping gives a codec for each subject; annotate such a producer as
                `Producer[Any]`. Subjects without a codec take bytes. None: no subject has a codec.
            settings: the sizes of batches and of the queue in bytes, timeouts in milliseconds, and
                more.
            wait_s: how many seconds opening waits for a metaserver that is still starting; 0: a
                single attempt.
            tls: the certificate authority of the servers; None: the environment variable
                KEYLANE_TLS_CA, or no TLS.
            token: the token for a cluster with access control; None: read from the file that
                KEYLANE_TOKEN_FILE names, or from KEYLANE_TOKEN.
            others: rejected.

        Raises:
            ConfigError: an argument is invalid.
            TypeError: an argument is unknown; the error names the one to use instead.
        """
        refuse_unknown_arguments("Producer", others, ProducerSettings, ARGUMENT_HINTS)
        super().__init__(
            order_strategy=parse_strategy(order_strategy),
            partitioner=partitioner,
            codec=codec,
            settings=settings,
            wait_s=wait_s,
            tls=tls,
            token=token,
            environment=_environment,
        )
        self._addresses = parse_addresses(meta)
        self._parent_senders: dict[str, SubjectSender] = {}
        """In a forked child, references to the parent's senders, which prevent the parent's tasks
        from being finalized in the child.
        """
        self._close_task: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        """Set when opening has succeeded or failed."""

    def __repr__(self) -> str:
        return f"<Producer at {', '.join(self._addresses)}, {self._loop_binding.state}>"

    async def __aenter__(self) -> Self:
        """
        Connect to a metaserver.

        Raises:
            NotSentError, OutcomeUnknownError: no metaserver replied within `wait_s`; the producer
                may be opened again.
            UsageError: the producer is already open, or still closing.
            ClosedError: `close` was called while the producer was opening.
        """
        network = self._connections.open(on_fork=self._on_fork)
        meta = MetaClient(network, self._addresses, timeout_ms=self._settings.call_timeout_ms)
        self._begin_opening(meta)
        self._close_task = None
        self._opened = asyncio.Event()
        try:
            await self._connections.wait_for(meta, meta.health)
            if not self._connections.wanted:
                raise ClosedError("the producer was closed while it was opened")
            self._open = True
            PRODUCERS.begin((), self._budget.counts)
        except BaseException:
            await clean_up(self._connections.close)
            raise
        finally:
            self._opened.set()
        return self

    def __del__(self) -> None:
        """Log the unreported given-up messages of a producer that was never closed."""
        if getattr(self, "_open", False) and self._loop_binding.is_open_here:
            self._log_unreported("never closed")

    def _on_fork(self) -> None:
        """Drop the senders in a forked child; the parent still sends their queued messages."""
        self._parent_senders = self._remove_senders()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        add_send_advice(error)
        try:
            await super().__aexit__(kind, error, trace)
        except GivenUpError as given_up:
            if error is None:
                raise
            log.warning("closed: %s", given_up.message)  # the block's own error is raised

    async def drain(self) -> None:
        """
        If a quarter of the queue or less is free, wait until half of it is.

        A loop that calls this every few hundred messages never fills the queue.

        Raises:
            UsageError: the producer is open in another process or event loop.
        """
        self._loop_binding.check_not_elsewhere()
        await self._budget.wait_for_capacity()
        if self._scheduled is not None:
            await self._scheduled.wait_for_capacity()

    def resume(self, error: DeliveryTimeoutError | KeyHaltedError) -> None:
        """
        Accept messages again for a key that was halted because a message timed out. This does
        nothing if the key is not halted.

        Args:
            error: the error raised by the future of a message with that key.

        Newer messages of the key that had not been sent have failed with a KeyHaltedError: send
        them again, oldest first. A message whose error has the `fate` UNKNOWN may already be
        stored, or may still be stored before them.

        Raises:
            InvalidRequestError: `error` is of another type.
            UsageError: the producer is open in another process or event loop.
        """
        self._loop_binding.check_not_elsewhere()
        if not isinstance(error, DeliveryTimeoutError | KeyHaltedError):
            raise InvalidRequestError(
                f"resume takes the DeliveryTimeoutError or KeyHaltedError of a message, not "
                f"{error!r:.60}"
            )
        sender = self._senders.get(error.subject or "")
        if sender is not None:
            sender.resume(error.key or b"")

    async def send_all(
        self, subject: str, messages: Iterable[tuple[bytes | str, V]], *, await_every: int = 1_000
    ) -> int:
        """
        Queue messages as fast as the queue has room, and then `flush`.

        Args:
            messages: pairs `(key, value)`, as in `send`; a message without a key has the key b"".
                Up to 512 are read ahead, so after an error or a cancellation, more may have been
                taken from an iterator than were queued.
            await_every: the number of messages after which other tasks get a chance to run.

        Returns:
            The number of messages, all of which are stored.

        Raises:
            DeliveryError: `send` refused a message, or `messages` raised an exception or yielded
                something other than a pair. The earlier messages are queued; the later ones are
                not.
            InvalidRequestError: `await_every` is not a positive whole number; nothing is queued.
            GivenUpError: see `flush`.
        """
        if type(await_every) is not int or await_every < 1:
            raise InvalidRequestError(f"await_every is 1 or more, not {await_every!r:.40}")
        count = await self._queue_all(subject, messages, await_every, 0)
        await self.flush()
        return count

    async def _queue_all(
        self, subject: str, messages: Iterable[tuple[bytes | str, V]], await_every: int, count: int
    ) -> int:
        """Queue messages after `count` earlier ones, and return the total.

        Raises:
            DeliveryError: see `send_all`.
        """
        budget, chunk_count = self._budget, CHUNK_COUNT_FIRST
        try:
            iterator = iter(messages)
            while True:
                chunk: list[tuple[bytes | str, V]] = []
                failure: Exception | None = None
                try:  # `extend` keeps the elements before an error
                    chunk.extend(
                        islice(iterator, min(chunk_count, await_every - count % await_every))
                    )
                except Exception as error:  # noqa: BLE001 - raised after the chunk is queued
                    failure = error
                if budget.full:
                    await budget.wait_for_capacity()
                chunk_bytes = self._queue_chunk(subject, chunk)
                if chunk_bytes:
                    count += len(chunk)
                    chunk_count = min(CHUNK_COUNT_MAX, CHUNK_BYTES * len(chunk) // chunk_bytes + 1)
                else:
                    chunk_count = CHUNK_COUNT_FIRST
                    for pair in chunk:
                        key, value = _key_and_value(pair)
                        if budget.full:
                            await budget.wait_for_capacity()
                        self.send(subject, value, key=key)
                        count += 1
                if failure is not None:
                    raise failure
                if not chunk:
                    return count
                if not count % await_every:
                    await asyncio.sleep(0)
        except Exception as error:
            reason = error.message if isinstance(error, KeylaneError) else repr(error)
            text = (
                f"{counted(count, 'message was', 'messages were')} queued; the next one was "
                f"refused: {reason:.200}"
            )
            raise DeliveryError(Reason.PARTLY_QUEUED, text, queued=count) from error

    async def send_arrow(
        self,
        subject: str,
        source: Any,
        *,
        value: str,
        key: str | None = None,
        partial: bool = False,
    ) -> TableReceipt:
        """
        Send each row of Arrow data as a message, and wait until all are stored; needs pyarrow and
        numpy.

        Rows of a key keep their order, and follow messages of the key that were sent earlier. A
        message sent during the call may be stored between rows of its key; if that matters, await
        this call first. Rows are hashed, grouped and encoded by column, which is several times
        faster than `send`.

        Args:
            source: a pyarrow Table, RecordBatch or RecordBatchReader, or an object with
                `__arrow_c_stream__`, such as a frame of polars or pandas. A RecordBatchReader is
                read while its rows are sent.
            value: the name of the value column, which contains bytes or text. Values are not
                encoded by a codec, and a null cannot be sent.
            key: the name of the column with the order keys; null, or empty bytes, mean no key, and
                a row with an empty text cannot be sent. None: no row has a key.
            partial: True: skip rows that cannot be sent, instead of raising a TableError.

        Returns:
            The number of stored rows, and the rows that were skipped.

        Raises:
            TableError: rows cannot be sent, in which case nothing was sent, except for the earlier
                record batches of a RecordBatchReader; a RecordBatchReader raised an exception,
                which is the cause, after earlier rows were sent; or queued rows were given up. The
                error contains the number of stored rows.
            InvalidRequestError: `source` is not Arrow data, or does not have these columns with
                bytes or text; nothing was sent.
            SubjectUnknownError, ConflictError: the subject does not exist, or has another order
                strategy; nothing was sent.
            MissingExtraError: pyarrow or numpy is not installed.
            ConfigError: the producer has a partitioner.
            ClosedError, UsageError: the producer is not open, or not open in this process and event
                loop.
        """
        check_no_call_problems(flag_problems(partial=partial))
        if self._partitioner is not None:
            raise ConfigError(
                "send_arrow uses the hash of the keys; use a producer without a partitioner"
            )
        try:
            from .tables.arrow import ArrowSource, TableSender
        except ModuleNotFoundError as error:
            raise MissingExtraError.of(error, "send_arrow", "arrow") from error
        rows = ArrowSource(source, key=key, value=value)

        self._loop_binding.check()
        return await TableSender(
            sender=self._senders.get(subject) or self._create_sender(subject),
            send=lambda value, key: self._send_encoded(subject, value, key=key),
            drain=self.drain,
            draw_bits=self._rng.getrandbits,
            now_ns=self._now_ns,
            settings=self._settings,
        ).send(rows, partial=partial)

    async def cancel(self, receipt: ScheduledReceipt) -> CancelOutcome:
        """
        Durably cancel a message that was sent with `deliver_at`. Repeated calls are harmless.

        Returns:
            CANCELED; DELIVERED if the message was already stored in its subject; DROPPED if its
            subject was deleted or does not accept messages of its size.

        Raises:
            NotFoundError: the broker does not know the message, or no longer knows it.
            BusyError: the message is being delivered to a subject that does not respond; try again.
            NotSentError, OutcomeUnknownError: the broker that keeps the message does not respond.
            ClosedError: the producer is not open, or was closed during the call.
            UsageError: the producer is open in another process or event loop.
        """
        self._loop_binding.check()
        assert self._scheduled is not None
        return await self._scheduled.cancel(receipt)

    async def flush(self) -> None:
        """
        Wait until every message that was sent is stored or given up.

        Raises:
            GivenUpError: messages whose futures were not awaited have been given up since the last
                flush. The error contains their number, how many of them may be stored, and the
                first cause.
            UsageError: the producer is open in another process or event loop.
        """
        self._loop_binding.check_not_elsewhere()
        self._queue_open_batches()
        await self._wait_until_settled()
        error = self._take_unreported_error()
        if error is not None:
            raise error

    def _queue_open_batches(self) -> bool:
        """Close the open batches so that they are sent. Return True if any message is unsettled."""
        for sender in self._senders.values():
            sender.queue_open_batches()
        return self._budget.messages > 0 or (
            self._scheduled is not None and not self._scheduled.is_empty
        )

    async def _wait_until_settled(self) -> None:
        await self._budget.wait_until_empty()
        if self._scheduled is not None:
            await self._scheduled.wait_until_settled()

    def _take_unreported_error(self) -> GivenUpError | None:
        """Return the error for given-up messages that were not awaited, if there are any."""
        scheduled = None if self._scheduled is None else self._scheduled.take_unreported_error()
        return self._budget.take_unreported_error() or scheduled

    @property
    def stats(self) -> ProducerStats:
        """The counts since the producer was opened."""
        waited_ms = self._connections.throttled_ms
        return build_stats(self._budget, self._senders.values(), throttled_ms=waited_ms)

    def waiting(self, *, limit: int = 100) -> WaitingMessages:
        """
        List the messages that are neither stored nor given up, by key, with the time of the oldest
        one, the reason for the wait, and advice.

        Scheduled messages that no broker has accepted yet are included. Listing a million messages
        takes about a second, during which nothing is sent.

        Args:
            limit: the maximum number of keys to list; those that have waited longest come first.

        Raises:
            InvalidRequestError: `limit` is not a positive whole number.
            UsageError: the producer is open in another process or event loop.
        """
        self._loop_binding.check_not_elsewhere()
        if type(limit) is not int or limit < 1:
            raise InvalidRequestError(f"limit is 1 or more, not {limit!r:.40}")
        scheduled = () if self._scheduled is None else self._scheduled.list_waiting()
        return list_waiting_messages(self._senders.values(), limit, scheduled=scheduled)

    async def close(self, *, flush: bool = True) -> None:
        """
        Close the producer, giving up messages that are not acked within `close_timeout_ms`.

        This does nothing in a forked child, because the parent is using the producer.

        Args:
            flush: wait for the queued messages; False gives them up immediately.

        Raises:
            GivenUpError: see `flush`; this includes messages given up by this call. With
                `flush=False`, they are logged instead.
            InvalidRequestError: `flush` is neither True nor False; the producer stays open.
            UsageError: the producer was opened in another event loop.
        """
        check_no_call_problems(flag_problems(flush=flush))
        if not self._loop_binding.is_open_here:
            return
        self._loop_binding.check()
        if not self._open:
            if self._close_task is not None:  # the task that called `close` was cancelled
                await shield(self._close_task)
            else:  # another task is opening it
                self._connections.request_close()
                await self._opened.wait()
            return
        loop, limit_ms = asyncio.get_running_loop(), self._settings.close_timeout_ms
        waiting_line = loop.call_later(QUIET_CLOSE_S, self._log_waiting, limit_ms)
        try:
            if flush:
                async with asyncio.timeout(limit_ms / 1000):
                    while self._queue_open_batches():  # other tasks may send during the wait
                        await self._wait_until_settled()
        except TimeoutError:
            pass
        except BaseException:
            flush = False  # this error is raised, so messages given up are logged
            raise
        finally:
            waiting_line.cancel()
            self._open = False
            if self._close_task is None:
                # Remove the senders now: a `send` that runs before the closing task must be
                # refused.
                senders = [*self._remove_senders().values()]
                self._close_task = start_closing_task(self._close_senders(senders), name="closing")
            try:
                await shield(self._close_task)
            except asyncio.CancelledError:
                self._close_task.add_done_callback(lambda _: self._log_unreported())
                raise
            if not flush:
                self._log_unreported()
        error = self._take_unreported_error()
        if error is not None:
            raise error

    def _log_waiting(self, limit_ms: int) -> None:
        """Log what `close` waits for, and why."""
        waiting = self.waiting(limit=1)
        for oldest in waiting.keys:
            log.warning(
                "closing the producer waits up to %s for %s to be stored; the oldest, of subject "
                "%s: %s",
                format_seconds(limit_ms),
                counted(waiting.messages, "message"),
                oldest.subject,
                oldest.reason,
            )

    def _log_unreported(self, reason: str = "closed") -> None:
        """Log the number of given-up messages that were not awaited; for callers that cannot raise
        the error.
        """
        error = self._take_unreported_error()
        if error is not None:
            log.warning("%s: %s", reason, error.message)

    async def _close_senders(self, senders: list[SubjectSender]) -> None:
        """Close the senders and the connections, giving up the remaining messages.

        This runs as a task of its own, so that neither a cancelled `close` nor the shutdown of the
        event loop interrupts it.
        """

        async def close_all() -> None:
            for sender in senders:
                await sender.close()
            if self._scheduled is not None:
                await self._scheduled.close()
            await self._connections.close()

        try:
            await finish_despite_cancel(close_all)
        finally:
            PRODUCERS.end(self._budget.counts)


def _key_and_value(pair: object) -> tuple[Any, Any]:
    """Unpack a pair. Without this check, `bytes` of length two would unpack into two integers.

    Raises:
        InvalidRequestError: `pair` is not a tuple or list of two elements.
    """
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        return pair[0], pair[1]
    raise InvalidRequestError(
        f"messages are pairs of a key and a value, as (b'customer-7', b'paid'), not {pair!r:.40}"
    )
