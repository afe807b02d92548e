"""The path of a message from `send` into the open batch of its partition.

    send() ─▶ a plain message: looked up and added
           ─▶ any other: `_send_carefully`, which checks one condition after another

A message is plain if it has only a value and perhaps a key, and nothing interferes: there is no
codec, partitioner, time-out or halted key, the queue is not full, the thread is the right one, and
the message needs no batch of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Generic, TypeVar, cast, overload

import xxhash

from ..protocol.batch import BYTES_PER_MESSAGE
from ..protocol.codecs.by_subject import checked_codecs, encode_for
from ..protocol.codecs.codec import Codec, V
from ..protocol.errors import ClosedError, QueueFullError
from ..protocol.http.tls_settings import TlsSettings
from ..protocol.ids import check_name
from ..protocol.limits import KEY_BYTES_MAX
from ..protocol.message import check_message_size, pack_properties, refuse_text
from ..protocol.routing import OrderStrategy
from ..rpc.client import MetaClient
from ..rpc.connections import Connections
from ..rpc.environment import Environment, environment_of
from ..rpc.home import nowhere, thread_check
from .executor import Executor
from .flight import Turn
from .identity import Identity
from .outgoing_batch import OutgoingBatch
from .placing import LogicQueue, Place, chosen_place
from .scheduled.sending import LaterSending, ScheduledCancels, ScheduledFuture
from .send_budget import SendBudget
from .send_future import BatchFuture, OverLimitFuture, SendFuture
from .sender import NOWHERE, SubjectSender
from .settings import (
    ProducerSettings,
    checked_partitioner,
    checked_settings,
    checked_timeout,
)

UNREAD = -1
"""The value for a clock that was not read in this turn of the event loop."""
NOT_OPEN = "the producer is not open"
_hash = xxhash.xxh3_64_intdigest
_TUPLE, _BYTES = {tuple}, {bytes}


def _columns() -> tuple[list[bytes], list[bytes]]:
    """Return empty columns of keys and values."""
    return [], []


F = TypeVar("F", bound=Callable[..., object])


def named_only(positional: int) -> Callable[[F], F]:
    """
    Show the parameters of a method after the first `positional` ones as keyword-only, although
    Python does not enforce it.

    The parameter that follows the positional ones is not shown: the method refuses any value that
    is passed there.
    """

    def show(method: F) -> F:
        signature = inspect.signature(method)
        by_position, others = [], []
        for number, parameter in enumerate(signature.parameters.values()):
            if number <= positional:  # self is one more
                by_position.append(parameter)
            elif number > positional + 1:
                others.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        shown = signature.replace(parameters=[*by_position, *others])
        method.__signature__ = shown  # type: ignore[attr-defined]  # inspect looks there
        return method

    return show


class _NoSender:
    """The sender of a subject to which nothing was sent yet: no message is plain."""

    plain = NOWHERE
    message_bytes_max = 0


_NO_SENDER = cast(SubjectSender, _NoSender())


class Sending(ScheduledCancels, Generic[V]):
    """The part of a producer that takes messages."""

    def __init__(
        self,
        *,
        order_strategy: OrderStrategy | None,
        partitioner: Callable[[bytes], int | LogicQueue] | None,
        codec: Codec[V] | Mapping[str, Codec[Any]] | None,
        settings: ProducerSettings | None,
        wait_s: float,
        tls: TlsSettings | None,
        token: str | None,
        environment: Environment | None,
    ) -> None:
        self._order_strategy = order_strategy
        self._partitioner = checked_partitioner(partitioner)
        self._codec = checked_codecs(codec)
        self._settings = checked_settings(settings)
        self._timeout_ms = self._settings.delivery_timeout_ms
        self._batch_bytes = self._settings.batch_bytes
        self._batch_count = self._settings.batch_count
        self._large_bytes = self._settings.large_bytes
        self._plain_bytes = min(KEY_BYTES_MAX, self._large_bytes)
        """The largest message, in bytes, that needs neither a check of its key's size nor a batch
        of its own.
        """
        self._given = environment
        self._connections = Connections(
            None if environment is None else environment.network,
            timeout_ms=self._settings.call_timeout_ms,
            what="producer",
            wait_s=wait_s,
            tls=tls,
            token=token,
        )
        self._home = self._connections.home
        self._clock = environment_of(environment).clock
        self._now_ns = self._clock.wall_ns
        self._turn_ns = UNREAD
        self._turn_number = 0
        self._open = False
        self._here: Callable[[], bool] = nowhere
        """A callable that is True in the thread of the opening, if messages can be plain: there is
        no codec, partitioner or time-out.
        """
        self._meta: MetaClient | None = None
        self._identity: Identity | None = None
        self._touched: list[OutgoingBatch] = []
        """The batches with messages of this turn."""
        self._senders: dict[str, SubjectSender] = {}
        self._plain = self._senders
        """The senders in `_senders` that plain messages find; empty while the queue is full."""
        self._budget = SendBudget(self._settings.queue_bytes, self._when_full)

    def _begin(self, meta: MetaClient) -> None:
        """Set the state of a new opening; no state of an earlier opening is kept, and none that a
        fork copied.
        """
        self._meta = meta
        self._loop = asyncio.get_running_loop()
        self._end_turn()
        self._turn = Turn(self._loop, self._end_turn)
        plain = self._codec is None and self._partitioner is None and not self._timeout_ms
        self._here = thread_check() if plain else nowhere
        environment = environment_of(self._given)
        self._clock = environment.clock
        self._now_ns = self._clock.wall_ns
        self._rng: random.Random = environment.new_rng()
        self._draw = self._rng.getrandbits
        self._identity = Identity(environment.draw_identity)
        self._take_senders()
        self._budget = SendBudget(self._settings.queue_bytes, self._when_full)
        self._scheduled = LaterSending(
            meta,
            encode=self._encoded,
            broker_at=self._connections.broker_at,
            draw=environment.draw_identity,
            order_strategy=self._order_strategy,
            settings=self._settings,
            clock=self._clock,
            rng=self._rng,
        )

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
    ) -> SendFuture: ...
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
    ) -> ScheduledFuture: ...
    @named_only(2)
    def send(  # noqa: PLR0917 - passed by name; see `named_only`
        self,
        subject: str,
        value: Any,
        unnamed: None = None,
        key: bytes = b"",
        deliver_at: datetime | int | None = None,
        properties: Mapping[str, str | bytes] | None = None,
        tags: Collection[str] = (),
        queue: int | None = None,
        timeout_ms: int | None = None,
    ) -> SendFuture | ScheduledFuture:
        """
        Queue a message after the earlier messages of its key.

        Args:
            subject: an existing subject, or one that the metaserver creates for its first message
                (`auto_create`).
            value: bytes, or a value for the codec; with key and properties no larger than the
                subject allows (1 MiB).
            key: the order key, up to 1,024 bytes; none means any partition, and no order.
            deliver_at: the time until which a broker keeps the message: a datetime with a time
                zone, or milliseconds since 1970, at most 366 days ahead. Only a message without a
                key may have it. The future gives a ScheduledReceipt.
            properties: text to text or bytes, up to 64 KiB packed.
            tags: texts without commas, which `message.tags` returns; they count as the property
                "keylane.tags".
            queue: the logic queue of a static subject in which the message is stored, whatever its
                key. The messages of a queue are stored in the order of their `send` calls; those
                of a key that is sent to several queues have no order. None: the key, or the
                producer's partitioner, decides.
            timeout_ms: milliseconds after which a message that is not acked is given up with a
                DeliveryTimeoutError; no newer message of its key is sent until `resume`. None:
                `delivery_timeout_ms` of the settings.

        Returns:
            A future: `await` it for the Receipt. An unknown subject, or a limit that was not known
            yet, is raised there.

        Raises:
            MessageTooLargeError, InvalidRequestError, CodecError: the message cannot be sent;
                nothing was queued.
            InvalidRequestError: `deliver_at` is impossible, or the message has a key; nothing was
                sent.
            NotFoundError, ConflictError: there is no such logic queue; nothing was queued. The
                future of a message that is sent before the first route raises it.
            QueueFullError: the call was not awaited while the queue is full; nothing was queued.
                `await producer.drain()` first.
            KeyHaltedError: an older message of the key timed out; nothing was queued. Call
                `resume` first.
            ClosedError, UsageError: the producer is not open, or not open in this process and event
                loop.
        """
        # The parameters are not keyword-only, because Python looks up the default of such a
        # parameter at each call.
        try:
            sender = self._plain[subject]
        except (KeyError, TypeError, ValueError):  # the first message, a full queue, or not a name
            sender = _NO_SENDER
        here = self._here  # called as a method it would be looked up in the class first
        if (
            properties is not None
            or tags
            or timeout_ms is not None
            or queue is not None
            or deliver_at is not None
            or unnamed is not None
            or not here()
            or type(value) is not bytes
            or type(key) is not bytes
        ):
            return self._send_carefully(
                subject, value, unnamed, key, deliver_at, properties, tags, queue, timeout_ms
            )
        size = len(value) + len(key) + BYTES_PER_MESSAGE
        if size > self._plain_bytes and (
            size > self._large_bytes or size > sender.message_bytes_max or len(key) > KEY_BYTES_MAX
        ):
            return self._send_carefully(subject, value, None, key)
        executor = sender.plain[_hash(key) & 1023 if key else self._draw(10)]
        if executor is None:
            return self._send_carefully(subject, value, None, key)
        batch = executor.open
        if size < batch.room:
            return BatchFuture(batch, batch.put(key, value, size))
        batch = self._open_batch(executor)
        index = batch.put(key, value, size)
        self._look(executor, batch)
        return BatchFuture(batch, index)

    def _queue_chunk(self, subject: str, chunk: Sequence[tuple[bytes, V]]) -> int:
        """
        Queue messages as `send` does, but without a future for each; queue none unless all of them
        are plain, small and routed.

        This gives `send_all` 60 % more throughput than a `send` for each message; it would be
        needless if a future cost nothing.

        Returns:
            Their bytes, including their overhead in batches; 0 if nothing was queued.
        """
        sender = self._plain.get(subject)
        if sender is None or not self._here() or set(map(type, chunk)) != _TUPLE:
            return 0
        try:
            keys, values = cast(
                tuple[tuple[bytes, ...], tuple[bytes, ...]], tuple(zip(*chunk, strict=True))
            )
        except ValueError:  # not pairs
            return 0
        if set(map(type, keys)) != _BYTES or set(map(type, values)) != _BYTES:
            return 0
        plain, draw = sender.plain, self._draw
        executors = [plain[_hash(key) & 1023 if key else draw(10)] for key in keys]
        columns: defaultdict[Executor | None, tuple[list[bytes], list[bytes]]] = defaultdict(
            _columns
        )
        its_columns = map(columns.__getitem__, executors)
        for key, value, (its_keys, its_values) in zip(keys, values, its_columns, strict=True):
            its_keys.append(key)
            its_values.append(value)
        sizes = [
            sum(map(len, its_keys)) + sum(map(len, its_values)) + BYTES_PER_MESSAGE * len(its_keys)
            for its_keys, its_values in columns.values()
        ]
        size = sum(sizes)
        if (
            None in columns
            or size > self._large_bytes
            or size > sender.message_bytes_max
            or len(chunk) > self._batch_count
            or max(map(len, keys)) > KEY_BYTES_MAX
        ):
            return 0
        for (executor, (its_keys, its_values)), its_size in zip(
            columns.items(), sizes, strict=True
        ):
            assert executor is not None
            if len(executor.open.values) + len(its_keys) > self._batch_count:
                executor.roll()
            batch = self._open_batch(executor)
            batch.extend(its_keys, its_values, its_size)
            self._look(executor, batch)
        return size

    def _open_batch(self, executor: Executor) -> OutgoingBatch:
        """Return the open batch of an executor, for messages of this turn of the event loop."""
        batch = executor.open
        if batch.turn != self._turn_number:
            is_new = not batch.values
            if is_new and self._turn_ns != UNREAD:
                self._home.check()
                batch.at(self._now_ns())  # its own time, which the others do not take over
            else:
                batch.at(self._time_ns())
            if is_new:
                executor.started()
            batch.turn = self._turn_number
            self._touched.append(batch)
        return batch

    def _look(self, executor: Executor, batch: OutgoingBatch) -> None:
        """Send the open batch if it is full; otherwise grant the room that it has."""
        count_left = self._batch_count - len(batch.values)
        bytes_left = self._batch_bytes - batch.size
        if count_left > 0 and bytes_left > 0:
            batch.grant(min(bytes_left, count_left * BYTES_PER_MESSAGE))
        else:
            executor.filled()

    def _send_carefully(  # noqa: PLR0917 - those of `send`, in its order
        self,
        subject: str,
        value: Any,
        unnamed: object,
        key: bytes,
        deliver_at: datetime | int | None = None,
        properties: Mapping[str, str | bytes] | None = None,
        tags: Collection[str] = (),
        queue: int | None = None,
        timeout_ms: int | None = None,
        *,
        over_limit: bool = False,
    ) -> SendFuture | ScheduledFuture:
        """Send any message, as `send` does; with `over_limit`, also while the queue is full."""
        if unnamed is not None:
            raise TypeError("send takes subject and value by position; the others by name, as key=")
        if deliver_at is not None or (self._budget.full and not over_limit):
            return self._send_aside(
                deliver_at,
                subject,
                value,
                key=key,
                properties=properties,
                tags=tags,
                queue=queue,
                timeout_ms=timeout_ms,
            )
        try:
            sender = self._senders.get(subject)
        except (TypeError, ValueError):  # not a text at all
            sender = None
        if sender is None:  # outside the `except`, so that its errors are not shown as two
            sender = self._new_sender(subject)
        if not self._here():  # two threads would corrupt a batch; or no message is plain
            value = self._encoded(subject, value)
        if type(value) is not bytes or type(key) is not bytes:
            refuse_text(value=value, key=key)
        packed = pack_properties(properties, tags)
        size = len(value) + len(key) + len(packed)
        if size > KEY_BYTES_MAX and (size > sender.message_bytes_max or len(key) > KEY_BYTES_MAX):
            check_message_size(len(key), len(value), len(packed), sender.message_bytes_max)
        timeout_ms = self._timeout_ms if timeout_ms is None else checked_timeout(timeout_ms)
        place: Place | None = None
        if queue is not None or self._partitioner is not None:
            place = chosen_place(queue, self._partitioner, key)
            logical = sender.queue_starts.logical(place)
            executor = sender.table[logical]
        elif key:
            logical = _hash(key) & 1023
            executor = sender.table[logical]
        else:
            logical = self._rng.getrandbits(10)
            executor = sender.keyless[logical]
        if executor is None:
            return sender.hold(key, value, packed, self._time_ns(), timeout_ms, place)
        reordered = sender.careful and sender.check(executor, key, logical)
        if size > self._large_bytes:
            self._home.check()
            executor.roll()
        batch = self._open_batch(executor)
        index = batch.add(key, value, packed, batch.sent_at_ns)
        if place is not None:
            batch.set_place(index, place)
        if reordered or timeout_ms:
            sender.annotate(batch, index, reordered=reordered, timeout_ms=timeout_ms)
        self._look(executor, batch)
        return BatchFuture(batch, index)

    def _encoded(self, subject: str, value: Any) -> Any:
        """Return the bytes of a value for a subject with a codec, or the value itself for other
        subjects. Raises CodecError.
        """
        self._home.check_thread()
        return encode_for(self._codec, subject, value)

    def _send_encoded(self, subject: str, data: bytes, *, key: bytes) -> SendFuture:
        """Send bytes that no codec shall encode, as `send` does."""
        codec = self._codec
        self._codec = None
        try:
            return self.send(subject, cast(V, data), key=key)
        finally:
            self._codec = codec

    def _time_ns(self) -> int:
        """Return the time of this turn of the event loop. The clock is read once for each turn, and
        for each batch.
        """
        self._home.check()  # not for each message, because it costs a third of a send
        if self._turn_ns == UNREAD:
            self._turn_ns = self._now_ns()
            self._turn.begin()
        return self._turn_ns

    def _end_turn(self) -> None:
        self._turn_ns = UNREAD
        self._turn_number += 1
        touched = self._touched
        self._touched = []
        for batch in touched:  # no room is granted any more: the next message has another time
            batch.full_size -= batch.room
            batch.room = 0

    def _send_aside(
        self,
        deliver_at: datetime | int | None,
        subject: str,
        value: Any,
        *,
        key: bytes,
        **named: Any,
    ) -> SendFuture | ScheduledFuture:
        """Send a message for later, or queue one over the limit. Raises QueueFullError if this task
        may not.
        """
        self._home.check()
        if deliver_at is not None:
            if not self._open or self._scheduled is None:
                raise ClosedError(NOT_OPEN)
            return self._scheduled.send(subject, value, key=key, **named, deliver_at=deliver_at)
        budget, task = self._budget, asyncio.current_task()
        if not budget.may_exceed(task):
            raise QueueFullError(queued_bytes=budget.bytes)
        future = self._send_carefully(subject, value, None, key, **named, over_limit=True)
        assert isinstance(future, SendFuture)
        budget.exceeded(task)
        return OverLimitFuture(future._batch, future._index, budget, task)

    def _new_sender(self, subject: str) -> SubjectSender:
        self._home.check()
        if not self._open or self._meta is None or self._identity is None:
            raise ClosedError(NOT_OPEN)
        check_name("subject", subject)
        sender = self._senders[subject] = SubjectSender(
            subject,
            order_strategy=self._order_strategy,
            meta=self._meta,
            broker_at=self._connections.broker_at,
            identity=self._identity,
            settings=self._settings,
            clock=self._clock,
            rng=self._rng,
            budget=self._budget,
            turn=self._turn,
            on_dead=self._forget,
        )
        return sender

    def _take_senders(self) -> dict[str, SubjectSender]:
        """Take all senders out, so that `send` finds none from here on."""
        senders = self._senders
        self._senders = {}
        self._plain = self._senders
        return senders

    def _when_full(self) -> None:
        """Make `send` check each message while the queue is full."""
        self._plain = {} if self._budget.full else self._senders

    def _forget(self, sender: SubjectSender) -> None:
        if self._senders.get(sender.subject) is sender:
            del self._senders[sender.subject]
