"""The producer: `send` queues a message at once and returns a future of its receipt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from types import TracebackType
from typing import Any, Generic, Never, Self

from ..protocol.address import addresses_of
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
from ..protocol.settings import flag_problems, refuse_call, refuse_unknown_arguments
from ..protocol.text import counted
from ..rpc.client import MetaClient
from ..rpc.connections import clean_up, finish_despite_cancel
from ..rpc.environment import Environment
from ..rpc.race import shield, start_closing_task
from .placing import LogicQueue
from .send_budget import ProducerStats
from .sender import SubjectSender
from .sending import Sending
from .settings import (
    ARGUMENT_HINTS,
    ProducerSettings,
    checked_strategy,
)
from .waiting_keys import WaitingMessages, producer_stats, waiting_messages

log = logging.getLogger("keylane.producer")
CHUNK_COUNT_FIRST, CHUNK_COUNT_MAX = 8, 512
CHUNK_BYTES = 32 * 1024
"""`send_all` takes messages from its iterable in chunks of about this many bytes."""


class Producer(Sending[V], Generic[V]):
    """
    Sends messages; messages with the same key are stored in the order of their `send` calls.

        async with Producer("127.0.0.1:7000") as producer:
            receipt = await producer.send("orders", b"paid", key=b"customer-7")

    `send` queues a message and returns at once; await the future that it returns to get the
    receipt. `flush` waits until everything that was sent is stored; leaving the block does the
    same.

    While more than `queue_bytes` are queued, `await producer.send(...)` waits until there is room.
    A `send` that is not awaited cannot wait: the queue then takes one further message from each
    task, for at most 64 tasks, and every other `send` raises QueueFullError.

    A producer works in the event loop and the process that opened it; elsewhere its calls raise
    UsageError. A producer made before a fork may be opened in each process, and a closed one may
    be opened again: each opening has a new producer id, and keeps no message of an earlier opening.
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
        _environment: Environment | None = None,
        **others: Never,
    ) -> None:
        """
        Make a producer; `async with` opens it.

        Args:
            meta: `host:port` of a metaserver; for several metaservers, an iterable of texts or one
                text with commas.
            order_strategy: what each subject must have, "strict" or "best_tried"; messages to a
                subject with the other one fail with a ConflictError. None: either strategy is
                accepted.
            partitioner: called with the key of each message (b"": no key) that is sent without
                `queue`, in place of the hash: it returns a logical partition, 0 to 1023, or the
                LogicQueue of a static subject. Messages for the same logical partition or queue
                are stored in the order of their `send` calls.
            codec: encodes the values that `send` and `send_all` are given, for example
                JsonCodec(Order). A mapping gives a codec for each subject: annotate that producer
                as `Producer[Any]`. Subjects without a codec take bytes. None: no subject has a
                codec.
            settings: sizes of batches and of the queue, in bytes; time-outs, in milliseconds.
            wait_s: seconds that the opening waits for a metaserver that is still starting; 0: it
                asks once.
            tls: the authority of the servers' certificates; None: KEYLANE_TLS_CA of the
                environment, or no TLS.
            token: the token for a cluster with access control; None: KEYLANE_TOKEN_FILE names its
                file, or KEYLANE_TOKEN has it.
            others: not accepted.

        Raises:
            ConfigError: an argument that cannot work.
            TypeError: an unknown argument; the error names the argument to use in its place.
        """
        refuse_unknown_arguments("Producer", others, ProducerSettings, ARGUMENT_HINTS)
        super().__init__(
            order_strategy=checked_strategy(order_strategy),
            partitioner=partitioner,
            codec=codec,
            settings=settings,
            wait_s=wait_s,
            tls=tls,
            token=token,
            environment=_environment,
        )
        self._addresses = addresses_of(meta)
        self._of_parent: dict[str, SubjectSender] = {}
        """In a forked child, the senders of the parent; they are kept so that the parent's tasks
        are not finalized in the child.
        """
        self._ending: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        """The event is set when the opening has ended, whether it succeeded or failed."""

    def __repr__(self) -> str:
        return f"<Producer at {', '.join(self._addresses)}, {self._home.state}>"

    async def __aenter__(self) -> Self:
        """
        Connect to a metaserver.

        Raises:
            NotSentError, OutcomeUnknownError: no metaserver answered within `wait_s`; the producer
                may be opened again.
            UsageError: the producer is already open, or still closing.
            ClosedError: `close` was called meanwhile.
        """
        network = self._connections.open(on_fork=self._forked)
        meta = MetaClient(network, self._addresses, timeout_ms=self._settings.call_timeout_ms)
        self._begin(meta)
        self._ending = None
        self._opened = asyncio.Event()
        try:
            await self._connections.wait_for(meta, meta.health)
            if not self._connections.wanted:
                raise ClosedError("the producer was closed while it was opened")
            self._open = True
        except BaseException:
            await clean_up(self._connections.close)
            raise
        finally:
            self._opened.set()
        return self

    def __del__(self) -> None:
        """Log messages that were given up and never reported because the producer was never
        closed.
        """
        if getattr(self, "_open", False) and self._home.here:
            self._log_unreported("never closed")

    def _forked(self) -> None:
        """In a forked child, leave the queued messages to the parent: `send` finds no sender."""
        self._of_parent = self._take_senders()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(flush=kind is None)

    async def drain(self) -> None:
        """
        Wait until half of the queue is free, if a quarter or less is free now.

        A loop that calls this every few hundred messages never meets a full queue.

        Raises:
            UsageError: the producer is open in another process or event loop.
        """
        self._home.check_not_elsewhere()
        await self._budget.wait_for_room()
        if self._scheduled is not None:
            await self._scheduled.wait_for_room()

    def resume(self, error: DeliveryTimeoutError | KeyHaltedError) -> None:
        """
        Accept messages again for a key that was halted because a message timed out. This has no
        effect if the key is not halted.

        Args:
            error: the error that the future of a message of that key raised.

        Newer messages of the key that were not yet sent have failed with a KeyHaltedError: send
        them again in order, the oldest first. A message whose error has the `fate` UNKNOWN may be
        stored, or may be stored later, before them.

        Raises:
            UsageError: the producer is open in another process or event loop.
        """
        self._home.check_not_elsewhere()
        if not isinstance(error, DeliveryTimeoutError | KeyHaltedError):
            raise InvalidRequestError(
                f"resume takes the DeliveryTimeoutError or KeyHaltedError of a message, not "
                f"{error!r:.60}"
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
            messages: pairs `(key, value)`; a message without a key has the key b"". Up to 512 are
                taken before they are queued, so after an error or a cancelled call more may have
                been taken from an iterator than were queued.
            await_every: the number of messages that are queued before other tasks may run.

        Returns:
            The number of messages, all of them stored.

        Raises:
            DeliveryError: `send` refused a message, or `messages` raised or yielded an element that
                is not a pair. The messages before it are queued, and no later message is.
            InvalidRequestError: `await_every` is not a positive whole number; nothing is queued.
            GivenUpError: see `flush`.
        """
        if type(await_every) is not int or await_every < 1:
            raise InvalidRequestError(f"await_every is 1 or more, not {await_every!r:.40}")
        count = await self._queue_all(subject, messages, await_every, 0)
        await self.flush()
        return count

    async def _queue_all(
        self, subject: str, messages: Iterable[tuple[bytes, V]], await_every: int, count: int
    ) -> int:
        """Queue messages after `count` earlier ones, and return the total number. Raises
        DeliveryError.
        """
        budget, chunk_count = self._budget, CHUNK_COUNT_FIRST
        try:
            iterator = iter(messages)
            while True:
                chunk: list[tuple[bytes, V]] = []
                failure: Exception | None = None
                try:  # `extend` keeps the elements before an error
                    chunk.extend(
                        islice(iterator, min(chunk_count, await_every - count % await_every))
                    )
                except Exception as error:  # noqa: BLE001 - raised below, in its place
                    failure = error
                if budget.full:
                    await budget.wait_for_room()
                chunk_bytes = self._queue_chunk(subject, chunk)
                if chunk_bytes:
                    count += len(chunk)
                    chunk_count = min(CHUNK_COUNT_MAX, CHUNK_BYTES * len(chunk) // chunk_bytes + 1)
                else:
                    chunk_count = CHUNK_COUNT_FIRST
                    for pair in chunk:
                        key, value = _key_and_value(pair)
                        if budget.full:
                            await budget.wait_for_room()
                        self.send(subject, value, key=key)
                        count += 1
                if failure is not None:
                    raise failure
                if not chunk:
                    return count
                if not count % await_every:
                    await asyncio.sleep(0)
        except Exception as error:
            why = error.message if isinstance(error, KeylaneError) else repr(error)
            text = (
                f"{counted(count, 'message was', 'messages were')} queued; the next one was "
                f"refused: {why:.200}"
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

        Rows of a key keep their order, also after messages that were sent earlier. A `send` of a
        key during the call may be stored between rows of the key: where that matters, await this
        call first. Rows are hashed, grouped and encoded by column, several times as fast as
        `send`.

        Args:
            source: a pyarrow Table, RecordBatch or RecordBatchReader, or an object with
                `__arrow_c_stream__`, such as a frame of polars or pandas. A RecordBatchReader is
                read while its rows are sent.
            value: the column of the values, of bytes or text, which no codec encodes; a null cannot
                be sent.
            key: the column of the order keys; a null or empty one means no key. None: no row has a
                key.
            partial: leave out rows that cannot be sent, instead of raising a TableError.

        Returns:
            The number of stored rows, and the rows that were left out.

        Raises:
            TableError: rows cannot be sent. Nothing of the source was sent; for a
                RecordBatchReader, the earlier record batches are stored or on their way.
            TableError: a RecordBatchReader raised an exception, which is the cause, before its end;
                the earlier rows were sent, and the error says how many are stored.
            TableError: rows were given up after the first were queued; it says how many are stored.
            InvalidRequestError: `source` is not Arrow data, or has no such column of bytes or text;
                nothing was sent.
            SubjectUnknownError, ConflictError: nothing was sent.
            MissingExtraError: pyarrow or numpy is not installed.
            ConfigError: the producer has a partitioner.
            ClosedError, UsageError: the producer is not open, or not open in this process and event
                loop.
        """
        refuse_call(flag_problems(partial=partial))
        if self._partitioner is not None:
            raise ConfigError(
                "send_arrow goes by the hash of the keys; use a producer without a partitioner"
            )
        try:
            from .tables.arrow import ArrowSource, TableSending
        except ModuleNotFoundError as error:
            raise MissingExtraError.of(error, "send_arrow", "arrow") from error
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
            GivenUpError: messages whose futures were not awaited have been given up since the last
                flush. The error has their number, the number that may be stored, and the first
                cause.
            UsageError: the producer is open in another process or event loop.
        """
        self._home.check_not_elsewhere()
        self._roll()
        await self._all_settled()
        error = self._unreported()
        if error is not None:
            raise error

    def _roll(self) -> bool:
        """Start to send everything that is queued, and return whether anything is not settled
        yet.
        """
        for sender in self._senders.values():
            sender.roll()
        return self._budget.messages > 0 or (
            self._scheduled is not None and not self._scheduled.empty
        )

    async def _all_settled(self) -> None:
        await self._budget.wait_until_empty()
        if self._scheduled is not None:
            await self._scheduled.settled()

    def _unreported(self) -> GivenUpError | None:
        """Return the error for messages that were given up and not awaited; None if there are
        none.
        """
        later = None if self._scheduled is None else self._scheduled.unreported()
        return self._budget.unreported() or later

    @property
    def stats(self) -> ProducerStats:
        """Return counts since the producer was opened."""
        waited_ms = self._connections.throttled_ms
        return producer_stats(self._budget, self._senders.values(), throttled_ms=waited_ms)

    def waiting(self, *, limit: int = 100) -> WaitingMessages:
        """
        List the messages that are neither stored nor given up, by key: since when and why they
        wait, and what helps.

        Messages for a later delivery that no broker keeps yet are listed too. A million messages
        take about a second, during which nothing is sent.

        Args:
            limit: the largest number of keys to list; those that wait longest are listed.

        Raises:
            InvalidRequestError: `limit` is not a positive whole number.
            UsageError: the producer is open in another process or event loop.
        """
        self._home.check_not_elsewhere()
        if type(limit) is not int or limit < 1:
            raise InvalidRequestError(f"limit is 1 or more, not {limit!r:.40}")
        later = () if self._scheduled is None else self._scheduled.waiting()
        return waiting_messages(self._senders.values(), limit, later=later)

    async def close(self, *, flush: bool = True) -> None:
        """
        Close the producer, and give up messages that are not acked within `close_timeout_ms`.

        In a forked child it does nothing: the parent uses the producer.

        Args:
            flush: whether to wait for the queued messages; otherwise they are given up at once.

        Raises:
            GivenUpError: see `flush`; messages given up by this call are included. Without `flush`
                they are logged instead.
            InvalidRequestError: `flush` is neither True nor False; the producer stays open.
            UsageError: the producer was opened in another event loop.
        """
        refuse_call(flag_problems(flush=flush))
        if not self._home.here:
            return
        self._home.check()
        if not self._open:
            if self._ending is not None:  # the task that began to close was cancelled
                await shield(self._ending)
            else:  # another task opens it
                self._connections.request_close()
                await self._opened.wait()
            return
        try:
            if flush:
                async with asyncio.timeout(self._settings.close_timeout_ms / 1000):
                    while self._roll():  # other tasks may send during the wait
                        await self._all_settled()
        except TimeoutError:
            pass
        except BaseException:
            flush = False  # this error is raised, so messages given up are logged
            raise
        finally:
            self._open = False
            if self._ending is None:
                # The senders are taken out here: a task that runs before the ending task is
                # refused, and queues nothing more.
                senders = [*self._take_senders().values()]
                self._ending = start_closing_task(self._end(senders), name="closing")
            try:
                await shield(self._ending)
            except asyncio.CancelledError:
                self._ending.add_done_callback(lambda _: self._log_unreported())
                raise
            if not flush:
                self._log_unreported()
        error = self._unreported()
        if error is not None:
            raise error

    def _log_unreported(self, why: str = "closed") -> None:
        """Log the number of messages that were given up and not awaited, where no error can report
        it.
        """
        error = self._unreported()
        if error is not None:
            log.warning("%s: %s", why, error.message)

    async def _end(self, senders: list[SubjectSender]) -> None:
        """Give up the messages that `senders` still have. This is a separate task, so that neither
        a cancelled `close` nor the end of the event loop stops it.
        """

        async def end() -> None:
            for sender in senders:
                await sender.close()
            if self._scheduled is not None:
                await self._scheduled.close()
            await self._connections.close()

        await finish_despite_cancel(end)


def _key_and_value(pair: object) -> tuple[Any, Any]:
    """Return the key and the value. Raises InvalidRequestError if `pair` is not a pair; two bytes
    would otherwise unpack into two numbers.
    """
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        return pair[0], pair[1]
    raise InvalidRequestError(
        f"messages are pairs of a key and a value, as (b'customer-7', b'paid'), not {pair!r:.40}"
    )
