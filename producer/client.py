"""The producer: `send` queues a message at once and returns a future of its receipt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from functools import partial
from threading import get_ident
from types import TracebackType
from typing import Any, Generic, Self, cast, overload

import xxhash

from ..protocol.address import addresses_of
from ..protocol.batch import BYTES_PER_MESSAGE
from ..protocol.codecs.by_subject import checked_codecs, encode_for
from ..protocol.codecs.codec import Codec, V
from ..protocol.errors import (
    ClosedError,
    ConfigError,
    DeliveryTimeoutError,
    GivenUpError,
    InvalidRequestError,
    KeyHaltedError,
    KeylaneError,
    PartlyQueuedError,
    QueueFullError,
)
from ..protocol.ids import check_name
from ..protocol.limits import KEY_BYTES_MAX
from ..protocol.message import TableReceipt, check_message_size, pack_properties
from ..protocol.routing import OrderStrategy
from ..protocol.text import counted
from ..rpc.client import MetaClient
from ..rpc.connections import Connections, clean_up
from ..rpc.environment import Environment
from ..rpc.home import NO_THREAD
from .arguments import (
    checked_partitioner,
    checked_settings,
    checked_strategy,
    checked_timeout,
    refuse_text,
)
from .executor import Executor
from .identity import Identity
from .outgoing_batch import OutgoingBatch
from .placing import LogicQueue, chosen_place
from .scheduled.sending import LaterSending, ScheduledCancels, ScheduledFuture
from .send_budget import ProducerStats, SendBudget
from .send_future import BatchFuture, OverLimitFuture, SendFuture
from .sender import SubjectSender
from .settings import ProducerSettings
from .waiting_keys import WaitingMessages, producer_stats, waiting_messages

log = logging.getLogger("keylane.producer")
NOT_OPEN = "the producer is not open; use: async with Producer(...)"
NO_LIMIT = 1 << 62  # bytes: more than any queue has
_hash = xxhash.xxh3_64_intdigest


class Producer(ScheduledCancels, Generic[V]):
    """
    Sends messages; messages with the same key are stored in the order of their `send` calls.

        async with Producer("127.0.0.1:7000") as producer:
            receipt = await producer.send("flights", b"...", key=b"UA-N14228")

    `send` queues a message and returns at once; the future that it returns is awaited for the receipt.  `flush` waits
    until all that was sent is stored, and leaving the block does so too.

    While more than `queue_bytes` are queued, `await producer.send(...)` waits as long as that takes.  A `send` that is
    not awaited cannot wait: the queue takes one further message of each task, of at most 64 tasks; every other `send`
    raises QueueFullError.

    A producer works in the event loop and the process that opened it; elsewhere its calls raise OtherLoopError and
    ForkedError.  A producer made before a fork may be opened in each process, and a closed one may be opened again: each
    opening has a new producer id, and no message of an earlier one.
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
        _environment: Environment | None = None,
    ) -> None:
        """
        Make a producer; `async with` opens it.

        Args:
            meta: `host:port` of a metaserver; of several, an iterable of texts or one text with commas.
            order_strategy: what each subject must have, "strict" or "best_tried"; messages to a subject with the other
                one fail with a StrategyMismatchError.  None: either.
            partitioner: called with the key of each message (b"": no key) that is sent without `queue`, in place of the
                hash: it returns a logical partition, 0 to 1023, or the LogicQueue of a static subject.  Messages for
                the same logical partition or queue are stored in the order of their `send` calls.
            codec: encodes the values that `send` and `send_all` are given, as JsonCodec(Order) does; or codecs by subject:
                annotate that producer as `Producer[Any]`; subjects without a codec take bytes.  None: all do.
            settings: sizes of batches and of the queue, in bytes; time-outs, in milliseconds.
            wait_s: seconds for which opening waits for a metaserver that is still starting; 0: it asks once.

        Raises:
            ConfigError: an argument that cannot work.
        """
        self._addresses = addresses_of(meta)
        self._order_strategy = checked_strategy(order_strategy)
        self._partitioner = checked_partitioner(partitioner)
        self._hashing: object = partitioner
        """The `queue` of a message that goes by the hash of its key: None, or nothing if there is a partitioner."""
        self._codec = checked_codecs(codec)
        self._settings = checked_settings(settings)
        self._batch_bytes = self._settings.batch_bytes
        self._queue_bytes = self._settings.queue_bytes
        self._large_bytes = self._settings.large_bytes
        self._batch_count = self._settings.batch_count
        self._timeout_ms = self._settings.delivery_timeout_ms
        self._environment = _environment or Environment()
        self._connections = Connections(
            self._environment.network, timeout_ms=self._settings.call_timeout_ms, what="producer",
            wait_s=wait_s,
        )  # fmt: skip
        self._home = self._connections.home
        self._clock = self._environment.clock
        self._now_ns = self._clock.wall_ns
        self._identity: Identity | None = None
        self._senders: dict[str, SubjectSender] = {}
        self._of_parent: dict[str, SubjectSender] = {}
        """In a forked child, the senders of the parent; kept, so that the parent's tasks are not finalized here."""
        self._open, self._thread = False, NO_THREAD
        self._ending: asyncio.Task[None] | None = None
        self._meta: MetaClient | None = None
        self._budget = SendBudget(self._settings.queue_bytes)

    def __repr__(self) -> str:
        return f"<Producer at {', '.join(self._addresses)}, {self._home.state}>"

    async def __aenter__(self) -> Self:
        """
        Connect to a metaserver.

        Raises:
            NotSentError, OutcomeUnknownError: no metaserver answers, after `wait_s`; it may be opened again.
            AlreadyOpenError: the producer is open, or still closing.
        """
        network = self._connections.open(on_fork=self._forked)
        meta = MetaClient(network, self._addresses, timeout_ms=self._settings.call_timeout_ms)
        self._begin(meta)
        await self._connections.wait_for(meta)
        try:
            await meta.health()
        except BaseException:
            await clean_up(self._connections.close())
            raise
        self._open = True
        return self

    def _begin(self, meta: MetaClient) -> None:
        """Set the state of a new opening; no state of an earlier one is kept, and none that a fork copied."""
        self._meta = meta
        self._thread = get_ident() if self._codec is None else NO_THREAD  # where values are bytes
        self._rng = self._environment.new_rng()
        self._identity = Identity(self._environment.draw_identity)
        self._senders = {}
        self._budget = SendBudget(self._settings.queue_bytes)
        self._scheduled = LaterSending(
            meta, encode=self._encoded, broker_at=self._connections.broker_at, draw=self._environment.draw_identity,
            order_strategy=self._order_strategy, settings=self._settings, clock=self._clock, rng=self._rng,
        )  # fmt: skip
        self._ending = None

    def __del__(self) -> None:
        """Log messages that were given up and never reported, because the producer was never closed."""
        if getattr(self, "_open", False) and self._home.here:
            self._log_unreported("never closed")

    def _forked(self) -> None:
        """In a forked child, leave the queued messages to the parent; `send` finds no sender."""
        self._of_parent, self._senders = self._senders, {}

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(flush=kind is None)

    @overload
    def send(
        self, subject: str, value: V, *, key: bytes = b"", deliver_at: None = None,
        properties: Mapping[str, str | bytes] | None = None, tags: Collection[str] = (),
        queue: int | None = None, timeout_ms: int | None = None,
    ) -> SendFuture: ...  # fmt: skip
    @overload
    def send(
        self, subject: str, value: V, *, key: bytes = b"", deliver_at: datetime | int,
        properties: Mapping[str, str | bytes] | None = None, tags: Collection[str] = (),
        queue: int | None = None, timeout_ms: int | None = None,
    ) -> ScheduledFuture: ...  # fmt: skip
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
    ) -> SendFuture | ScheduledFuture:
        """
        Queue a message, behind those of its key that were sent before.

        Args:
            subject: an existing subject, or one that the metaserver creates for its first message (`auto_create`).
            value: bytes, or a value for the codec; with key and properties at most what the subject takes (1 MiB).
            key: the order key, up to 1,024 bytes; none means any partition, and no order.
            deliver_at: a broker keeps the message until then: a datetime with a time zone, or milliseconds since 1970,
                at most 366 days ahead.  Only for a message without a key.  The future is of a ScheduledReceipt.
            properties: text to text or bytes, up to 64 KiB packed.
            tags: texts without commas, which `message.tags` has; they count as a property, "keylane.tags".
            queue: the logic queue of a static subject in which the message is stored, whatever its key.  The messages
                of a queue are stored in the order of their `send` calls; those of a key that is sent to several
                queues have no order.  None: by the key, or by the producer's partitioner.
            timeout_ms: a message that is not acked by then is given up with a DeliveryTimeoutError, and nothing newer of
                its key is sent until `resume`.  None: `delivery_timeout_ms` of the settings.

        Returns:
            A future: `await` it for the Receipt; an unknown subject raises there, and a limit that was not known here.

        Raises:
            MessageTooLargeError, InvalidRequestError, InvalidNameError, CodecError: nothing was queued.
            DeliverAtError, DeliverAtKeyError: an impossible time, or one with a key; nothing was sent.
            QueueUnknownError, SubjectNotStaticError: no such logic queue; nothing was queued.  The future of a message
                that is sent before the first route raises it.
            QueueFullError: not awaited while the queue is full; nothing was queued.  `await producer.drain()` first.
            KeyHaltedError: an older message of the key timed out; nothing was queued.  `resume` first.
            ClosedError, ForkedError, OtherLoopError: not open, or not here.
        """
        if deliver_at is not None or self._budget.bytes >= self._queue_bytes:
            again = partial(self.send, subject, value, key=key, properties=properties, tags=tags)
            return self._send_aside(partial(again, queue=queue, timeout_ms=timeout_ms), deliver_at)
        try:
            sender = self._senders[subject]
        except (KeyError, TypeError):  # the first message of the subject, or not a name
            sender = self._new_sender(subject)
        if get_ident() != self._thread:  # two threads would corrupt a batch; or there is a codec
            value = self._encoded(subject, value)
        if type(value) is not bytes or type(key) is not bytes:
            refuse_text(value=value, key=key)
        data: bytes = value  # type: ignore[assignment]
        packed = pack_properties(properties, tags) if properties or tags else b""
        size = len(data) + len(key) + len(packed)
        if size > KEY_BYTES_MAX and (size > sender.message_bytes_max or len(key) > KEY_BYTES_MAX):
            check_message_size(len(key), len(data), len(packed), sender.message_bytes_max)
        timeout_ms = self._timeout_ms if timeout_ms is None else checked_timeout(timeout_ms)
        if queue is not self._hashing:  # a queue or a partitioner chooses the place
            self._home.check()
            place = chosen_place(queue, self._partitioner, key)
            return sender.send_to(place, key, data, packed, self._now_ns(), timeout_ms)
        if key:
            logical = _hash(key) & 1023
            executor = sender.table[logical]
        else:
            logical = self._rng.getrandbits(10)
            executor = sender.keyless[logical]
        if executor is None:
            self._home.check()
            return sender.hold(key, data, packed, self._now_ns(), timeout_ms)
        reordered = sender.careful and sender.check(executor, key, logical)
        # `OutgoingBatch.add`, written out: a producer spends most of its time here.
        batch = executor.open
        values = batch.values
        index = len(values)
        if not index or size > self._large_bytes:
            batch = self._begin_batch(executor, size)
            values = batch.values
            index = len(values)
        values.append(data)
        batch.keys.append(key)
        batch.times.append(self._now_ns())
        if packed or batch.properties is not None:
            batch.add_properties(index, packed)
        if reordered or timeout_ms:
            sender.annotate(batch, index, reordered=reordered, timeout_ms=timeout_ms)
        batch.size = filled = batch.size + size + BYTES_PER_MESSAGE
        if not index:
            executor.started()
        elif filled >= self._batch_bytes or index + 1 >= self._batch_count:
            executor.roll()
        return BatchFuture(batch, index)

    def _encoded(self, subject: str, value: Any) -> Any:
        """The bytes of a value for a subject with a codec; other values as they are.  Raises CodecError."""
        self._home.check_thread()
        return encode_for(self._codec, subject, value)

    def _send_encoded(self, subject: str, data: bytes, *, key: bytes) -> SendFuture:
        """As `send`, of bytes that no codec shall encode."""
        thread, self._thread = self._thread, get_ident()
        try:
            return self.send(subject, cast(V, data), key=key)
        finally:
            self._thread = thread

    def _begin_batch(self, executor: Executor, size: int) -> OutgoingBatch:
        """The batch that a message of this size begins."""
        self._home.check()  # once for each batch, because it costs a third of a send
        if size > self._large_bytes:
            executor.roll()
        return executor.open

    def _send_aside(
        self, send: partial[SendFuture], deliver_at: datetime | int | None
    ) -> SendFuture | ScheduledFuture:
        """Send a message for later, or queue one over the limit, which raises QueueFullError if this task may not."""
        self._home.check()
        if deliver_at is not None:
            if not self._open or self._scheduled is None:
                raise ClosedError(NOT_OPEN)
            return self._scheduled.send(*send.args, **send.keywords, deliver_at=deliver_at)
        budget, task = self._budget, asyncio.current_task()
        if not budget.may_exceed(task):
            raise QueueFullError(queued_bytes=budget.bytes)
        limit, self._queue_bytes = self._queue_bytes, NO_LIMIT
        try:
            future = send()
        finally:
            self._queue_bytes = limit
        budget.exceeded(task)
        return OverLimitFuture(future._batch, future._index, budget, task)

    def _new_sender(self, subject: str) -> SubjectSender:
        self._home.check()
        if not self._open or self._meta is None or self._identity is None:
            raise ClosedError(NOT_OPEN)
        check_name("subject", subject)
        sender = self._senders[subject] = SubjectSender(
            subject, order_strategy=self._order_strategy, meta=self._meta,
            broker_at=self._connections.broker_at, identity=self._identity, settings=self._settings,
            clock=self._clock, rng=self._rng, budget=self._budget, on_dead=self._forget,
        )  # fmt: skip
        return sender

    def _forget(self, sender: SubjectSender) -> None:
        if self._senders.get(sender.subject) is sender:
            del self._senders[sender.subject]

    async def drain(self) -> None:
        """
        If the queue is full, wait until half of it is free.

        Raises:
            ForkedError, OtherLoopError: the producer is open in another process or event loop.
        """
        self._home.check_not_elsewhere()
        await self._budget.wait_for_room()
        if self._scheduled is not None:
            await self._scheduled.wait_for_room()

    def resume(self, error: DeliveryTimeoutError | KeyHaltedError) -> None:
        """
        Take messages of a key again that was halted when a message timed out; no effect if the key is not halted.

        Args:
            error: as the future of a message of that key raised it.

        Newer messages of the key that were not sent have failed with a KeyHaltedError: send them again in order, the
        oldest first.  A message whose error has the `fate` UNKNOWN may be stored, or may be stored later, before them.

        Raises:
            ForkedError, OtherLoopError: the producer is open in another process or event loop.
        """
        self._home.check_not_elsewhere()
        if not isinstance(error, DeliveryTimeoutError | KeyHaltedError):
            raise InvalidRequestError(
                f"resume takes the DeliveryTimeoutError or KeyHaltedError of a message, not {error!r:.60}"
            )
        sender = self._senders.get(error.subject or "")
        if sender is not None:
            sender.resume(error.key or b"")

    async def send_all(
        self, subject: str, messages: Iterable[tuple[bytes, V]], *, await_every: int = 1_000
    ) -> int:
        """
        Queue messages as fast as there is room, then `flush`.

        Args:
            messages: pairs `(key, value)`; a message without a key has the key b"".
            await_every: how many messages are queued before other tasks may run.

        Returns:
            The number of messages, all of them stored.

        Raises:
            PartlyQueuedError: `send` refused a message, or `messages` raised or gave an element that is no pair.
                The messages before it are queued, and no later one.
            InvalidRequestError: `await_every` is no positive whole number; nothing is queued.
            GivenUpError: as of `flush`.
        """
        if type(await_every) is not int or await_every < 1:
            raise InvalidRequestError(f"await_every is 1 or more, not {await_every!r:.40}")
        count = await self._queue_all(subject, messages, await_every, 0)
        await self.flush()
        return count

    async def _queue_all(
        self, subject: str, messages: Iterable[tuple[bytes, V]], await_every: int, count: int
    ) -> int:
        """Queue messages behind `count` others; returns the number of all.  Raises PartlyQueuedError."""
        budget, full = self._budget, self._queue_bytes
        try:
            for key, value in messages:
                if budget.bytes >= full:
                    await budget.wait_for_room()
                self.send(subject, value, key=key)
                count += 1
                if not count % await_every:
                    await asyncio.sleep(0)
        except Exception as error:
            why = error.message if isinstance(error, KeylaneError) else repr(error)
            text = f"{counted(count, 'message was', 'messages were')} queued, the next was not: {why:.200}"
            raise PartlyQueuedError(text, queued=count) from error
        return count

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
        Send each row of Arrow data as a message, and wait until all are stored; needs pyarrow and numpy.

        Rows of a key keep their order, also behind messages that were sent before.  A `send` of a key during the call may
        be stored between rows of the key: await this call first where that matters.  Rows are hashed, grouped and
        encoded by column, several times as fast as `send`.

        Args:
            source: a pyarrow Table, RecordBatch or RecordBatchReader, or what has `__arrow_c_stream__`, as frames of
                polars and pandas have.  A RecordBatchReader is read as it is sent.
            value: the column of the values, of bytes or text, which no codec encodes; a null cannot be sent.
            key: the column of the order keys; a null or empty one means no key.  None: no row has a key.
            partial: leave out rows that cannot be sent, in place of a RowsRefusedError.

        Returns:
            How many rows are stored, and which were left out.

        Raises:
            RowsRefusedError: rows cannot be sent: nothing of the source was sent; of a RecordBatchReader, the record
                batches before are stored or on their way.
            RowsGivenUpError: rows were given up after the first were queued; it says how many are stored.
            InvalidRequestError: `source` is no Arrow data, or has no such column of bytes or text; nothing was sent.
            SubjectUnknownError, StrategyMismatchError: nothing was sent.
            ConfigError: pyarrow or numpy is not installed, or the producer has a partitioner.
            ClosedError, ForkedError, OtherLoopError: not open, or not here.
        """
        if self._partitioner is not None:
            raise ConfigError(
                "send_arrow goes by the hash of the keys; use a producer without a partitioner"
            )
        from .tables.arrow import ArrowSource, TableSending  # pyarrow is an extra

        rows = ArrowSource(source, key=key, value=value)

        self._home.check()
        return await TableSending(
            sender=self._senders.get(subject) or self._new_sender(subject),
            send=lambda value, key: self._send_encoded(subject, value, key=key),
            drain=self.drain,
            draw=self._rng.getrandbits,
            now_ns=self._now_ns,
            settings=self._settings,
        ).send(rows, partial=partial)

    async def flush(self) -> None:
        """
        Wait until every message that was sent is stored or given up.

        Raises:
            GivenUpError: since the last flush, messages were given up whose futures were not awaited.  It has their
                number, the number of those that may be stored, and the first cause.
            ForkedError, OtherLoopError: the producer is open in another process or event loop.
        """
        self._home.check_not_elsewhere()
        for sender in self._senders.values():
            sender.roll()
        await self._all_settled()
        error = self._unreported()
        if error is not None:
            raise error

    async def _all_settled(self) -> None:
        await self._budget.wait_until_empty()
        if self._scheduled is not None:
            await self._scheduled.settled()

    def _unreported(self) -> GivenUpError | None:
        """The error of messages that were given up and not awaited; None without any."""
        later = None if self._scheduled is None else self._scheduled.unreported()
        return self._budget.unreported() or later

    @property
    def stats(self) -> ProducerStats:
        """Counts since the producer was opened."""
        return producer_stats(self._budget, self._senders.values())

    def waiting(self, *, limit: int = 100) -> WaitingMessages:
        """
        List the messages that are neither stored nor given up, by key: since when, why, and what helps.

        It takes about a second for a million messages; nothing is sent meanwhile.

        Args:
            limit: list at most this many keys, those that wait longest.

        Raises:
            InvalidRequestError: `limit` is no positive whole number.
            ForkedError, OtherLoopError: the producer is open in another process or event loop.
        """
        self._home.check_not_elsewhere()
        if type(limit) is not int or limit < 1:
            raise InvalidRequestError(f"limit is 1 or more, not {limit!r:.40}")
        return waiting_messages(self._senders.values(), limit)

    async def close(self, *, flush: bool = True) -> None:
        """
        Close the producer; messages that are not acked within `close_timeout_ms` are given up.

        In a forked child it does nothing: the parent uses the producer.

        Args:
            flush: wait for the queued messages; without it they are given up at once.

        Raises:
            GivenUpError: as of `flush`, messages given up now included; without `flush` they are logged instead.
            OtherLoopError: the producer was opened in another event loop.
        """
        if not self._home.here:
            return
        self._home.check()
        if not self._open:
            if self._ending is not None:  # the task that began to close was cancelled
                await asyncio.shield(self._ending)
            return
        try:
            if flush:
                async with asyncio.timeout(self._settings.close_timeout_ms / 1000):
                    for sender in self._senders.values():
                        sender.roll()
                    await self._all_settled()
        except TimeoutError:
            pass
        except BaseException:
            flush = False  # this error is raised, so messages given up are logged
            raise
        finally:
            self._open = False
            if self._ending is None:
                self._ending = asyncio.create_task(self._end(), name="closing")
            try:
                await asyncio.shield(self._ending)
            except asyncio.CancelledError:
                self._ending.add_done_callback(lambda _: self._log_unreported())
                raise
            if not flush:
                self._log_unreported()
        error = self._unreported()
        if error is not None:
            raise error

    def _log_unreported(self, why: str = "closed") -> None:
        """Log the number of messages that were given up and not awaited, where no error can tell it."""
        error = self._unreported()
        if error is not None:
            log.warning("%s: %s", why, error.message)

    async def _end(self) -> None:
        """Give up the messages that are left.  A task of its own, so that a cancelled `close` does not stop it."""
        senders, self._senders = list(self._senders.values()), {}
        for sender in senders:
            await sender.close()
        if self._scheduled is not None:
            await self._scheduled.close()
        await self._connections.close()
