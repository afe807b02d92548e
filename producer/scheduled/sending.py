"""Sends and cancels scheduled messages. One broker keeps each message until its delivery time.

If a broker does not respond, the message is sent to the same broker again under the same id, so
that it is kept only once.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping
from datetime import datetime
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from ...protocol.batch import encode_batch
from ...protocol.clock import Clock
from ...protocol.control import Health
from ...protocol.errors import (
    ClosedError,
    DeliveryTimeoutError,
    Fate,
    GivenUpError,
    InternalError,
    InvalidRequestError,
    KeylaneError,
    NotFoundError,
    NotSentError,
    QueueFullError,
    Reason,
    RetryRule,
    StorageError,
    UnreachableError,
)
from ...protocol.frames import CancelScheduled, Schedule, Scheduled, ScheduledCanceled
from ...protocol.ids import NO_PRODUCER, check_name
from ...protocol.limits import MESSAGE_BYTES_MAX
from ...protocol.message import check_message_size, pack_properties, refuse_text
from ...protocol.routing import OrderStrategy, Route
from ...protocol.scheduled.deliver_at import deliver_at_ms
from ...protocol.scheduled.receipt import CancelOutcome, ScheduledReceipt
from ...protocol.text import format_seconds
from ...rpc.client import BrokerClient, MetaClient
from ...rpc.environment import DrawBits
from ...rpc.race import shield, start_task, wait_for_shared
from ...rpc.tracing import add_fields, current_tracing
from ..given_up import GivenUpOutcome, UnreportedMessages
from ..settings import ProducerSettings, check_timeout
from ..waiting import NO_ANSWER, WaitCause, broker_cause, route_cause
from ..waiting_keys import WaitingKey

ID_BYTES = 16
ROUTES_MAX = 1_000
"""The maximum number of cached routes, in addition to those of waiting messages."""
CALLS_MAX = 1_000
"""The maximum number of concurrent calls to one broker. Without it, messages in a burst would time
out and be sent again while the broker is still handling others.
"""


class ScheduledFuture:
    """
    The future outcome of a `send` with `deliver_at`: `await future` returns the ScheduledReceipt,
    or raises the error of the message.

    Cancelling a wait does not withdraw the message, and the future has no `cancel`; use
    `producer.cancel(receipt)`.
    """

    __slots__ = ("_given_up", "_listeners", "_reported", "_task")

    def __init__(self, task: asyncio.Task[ScheduledReceipt]) -> None:
        self._task = task
        self._reported = False
        self._given_up: GivenUpOutcome | None = None
        """The unreported outcome, if the message was given up; otherwise None."""
        self._listeners: dict[Callable[[ScheduledFuture], object], list[Callable[..., object]]] = {}

    def __await__(self) -> Generator[Any, None, ScheduledReceipt]:
        self._mark_reported()
        try:
            return (yield from shield(self._task).__await__())
        except KeylaneError as error:
            raise error.copy() from error.__cause__

    def _mark_reported(self) -> None:
        """Record that the outcome has been reported to the caller."""
        self._reported = True
        given_up = self._given_up
        self._given_up = None
        if given_up is not None:
            given_up.mark_reported(unknown=given_up.doubtful)

    def _give_up(self, error: BaseException, summary: UnreportedMessages) -> None:
        """Count the message as given up, unless the caller is awaiting it."""
        if not self._reported:
            if not isinstance(error, KeylaneError):
                error = InternalError(f"unexpected error in the producer: {error!r:.200}")
            given_up = GivenUpOutcome(error, summary, doubtful=error.fate is Fate.UNKNOWN)
            given_up.add_messages(1, given_up.doubtful)
            self._given_up = given_up

    def done(self) -> bool:
        """Return True once a broker keeps the message or it was given up."""
        return self._task.done()

    def result(self) -> ScheduledReceipt:
        """
        Return the receipt of a message that a broker keeps.

        Raises:
            asyncio.InvalidStateError: the future is not `done` yet.
            KeylaneError: the message was given up; the same error as from `await`.
        """
        if self._task.done():
            self._mark_reported()
        return self._task.result()

    def add_done_callback(self, callback: Callable[[ScheduledFuture], object]) -> None:
        """Call `callback(future)` in the producer's event loop, soon after a broker keeps the
        message or it is given up.
        """

        def call_back(_task: object) -> None:
            callback(self)

        self._listeners.setdefault(callback, []).append(call_back)
        self._task.add_done_callback(call_back)

    def remove_done_callback(self, callback: Callable[[ScheduledFuture], object]) -> int:
        """Remove `callback`, and return how often it had been added."""
        return sum(map(self._task.remove_done_callback, self._listeners.pop(callback, ())))

    def exception(self) -> BaseException | None:
        """
        Return the error of a message that was given up, or None if a broker keeps it.

        Raises:
            asyncio.InvalidStateError: the future is not `done` yet.
        """
        if self._task.done():
            self._mark_reported()
        return self._task.exception()

    @property
    def cancel(self) -> NoReturn:
        """Raise AttributeError with advice, so that `hasattr` returns False."""
        raise AttributeError(
            "cancel a scheduled message with its receipt: producer.cancel(await future)"
        )

    def cancelled(self) -> bool:
        """Return False: the future cannot be cancelled."""
        return False

    def __repr__(self) -> str:
        return f"<ScheduledFuture {'done' if self.done() else 'pending'}>"


class ScheduledSender:
    """Sends scheduled messages during one opening of a producer."""

    def __init__(
        self,
        meta: MetaClient,
        *,
        encode: Callable[[str, Any], Any],
        broker_at: Callable[[str], BrokerClient],
        draw: DrawBits,
        order_strategy: OrderStrategy | None,
        settings: ProducerSettings,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        """
        Args:
            encode: converts a value for a subject to bytes.
        """
        self._meta = meta
        self._encode = encode
        self._broker_at = broker_at
        self._draw = draw
        self._tracing = current_tracing()
        self._order_strategy = order_strategy
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._call_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """A limit on concurrent calls for each broker address, so that a broker that hangs delays
        only its own messages.
        """
        self._routes: dict[str, asyncio.Task[Route]] = {}
        """The last route request of each subject, cached until a call fails."""
        self._health: asyncio.Task[Health] | None = None
        """The last request for broker addresses, shared by concurrent callers."""
        self._bytes = 0
        """The bytes of messages that no broker keeps yet."""
        self._pending: dict[ScheduledFuture, _Attempt] = {}
        self._unreported = UnreportedMessages("scheduled message")
        """Messages given up since the last call to `take_unreported_error`."""

    def send(
        self,
        subject: str,
        value: Any,
        *,
        deliver_at: datetime | int,
        key: bytes = b"",
        properties: Mapping[str, str | bytes] | None = None,
        tags: Collection[str] = (),
        queue: int | None = None,
        timeout_ms: int | None = None,
    ) -> ScheduledFuture:
        """
        Start sending a message. Without a timeout, retry until a broker keeps or refuses it.

        Args:
            timeout_ms: the timeout, in milliseconds; None: the setting `delivery_timeout_ms`, where
                0 means no timeout.

        Raises:
            InvalidRequestError: the message has a key or a logic queue, is not bytes, or has an
                invalid argument; nothing is sent.
            CodecError, MessageTooLargeError: the message cannot be sent; nothing is sent.
            QueueFullError: too many bytes are waiting for brokers; nothing is sent.
        """
        check_name("subject", subject)
        data = self._encode(subject, value)
        if type(data) is not bytes:
            refuse_text(value=data)
        if key:
            raise InvalidRequestError(Reason.DELIVER_AT_KEY)
        limit_ms = self._settings.delivery_timeout_ms
        limit_ms = limit_ms if timeout_ms is None else check_timeout(timeout_ms)
        if queue is not None:
            raise InvalidRequestError(
                "a message for a later delivery has no logic queue: leave out queue or deliver_at"
            )
        packed = pack_properties(properties, tags)
        at_ms = deliver_at_ms(deliver_at, now_ms=self._clock.wall_ms())
        check_message_size(0, len(data), len(packed))
        if self._bytes >= self._settings.queue_bytes:
            raise QueueFullError(queued_bytes=self._bytes)
        trace = None
        if self._tracing is not None:
            trace = self._tracing.begin_send(subject, properties)
            limit_bytes = MESSAGE_BYTES_MAX - len(data)
            packed = add_fields(trace.fields, packed, properties, tags, limit_bytes)
        attempt = _Attempt(subject, len(data) + len(packed), self._clock.wall_ns())
        batch = _encode_batch(data, packed, attempt.sent_at_ns)
        request = Schedule(subject, at_ms, self._draw(8 * ID_BYTES).to_bytes(ID_BYTES))
        task = start_task(
            self._send_until_kept(request, batch, limit_ms, attempt), name="send scheduled"
        )
        future = ScheduledFuture(task)
        self._bytes += len(batch)
        self._pending[future] = attempt

        def on_done(task: asyncio.Task[ScheduledReceipt]) -> None:
            self._bytes -= len(batch)
            del self._pending[future]
            error = None if task.cancelled() else task.exception()
            if error is not None:
                future._give_up(error, self._unreported)
            if trace is not None:
                trace.end(1, error)

        task.add_done_callback(on_done)
        return future

    async def _send_until_kept(
        self, request: Schedule, batch: bytes, timeout_ms: int | None, attempt: _Attempt
    ) -> ScheduledReceipt:
        began_ms = self._clock.boot_ms()
        try:
            async with asyncio.timeout(timeout_ms / 1000 if timeout_ms else None):
                return await self._send_with_retries(request, batch, attempt)
        except TimeoutError:
            waited_text = format_seconds(self._clock.boot_ms() - began_ms)
            error: KeylaneError = DeliveryTimeoutError(
                f"no broker keeps the message for {request.subject} after {waited_text}: "
                f"{attempt.cause.reason}",
                subject=request.subject,
            )
        except KeylaneError as failure:
            error = failure
        except asyncio.CancelledError:
            error = ClosedError(
                f"the producer was closed before a broker kept it: {attempt.cause.reason}"
            )
        raise error.copy(Fate.UNKNOWN) if attempt.doubtful_group else error

    async def _send_with_retries(
        self, request: Schedule, batch: bytes, attempt: _Attempt
    ) -> ScheduledReceipt:
        pauses = self._settings.backoff.pauses(self._rng)
        while True:
            group = ""
            try:
                group, address = await self._choose_broker(request.subject, attempt.doubtful_group)
                call_slots = self._call_slots.get(address)
                if call_slots is None:
                    call_slots = self._call_slots[address] = asyncio.Semaphore(CALLS_MAX)
                async with call_slots:
                    if not attempt.doubtful_group and not self._is_in_route(
                        request.subject, group, address
                    ):
                        continue  # the route changed while this waited for a slot
                    previous_doubtful_group = attempt.doubtful_group
                    attempt.doubtful_group = group
                    try:
                        answer, _ = await self._broker_at(address).call(request, batch)
                    except KeylaneError as error:
                        if error.fate is Fate.NOT_DONE:
                            attempt.doubtful_group = previous_doubtful_group
                        raise
                assert isinstance(answer, Scheduled)
                return ScheduledReceipt(
                    scheduled_id=request.scheduled_id.hex(),
                    subject=request.subject,
                    broker_group=answer.broker_group,
                    deliver_at_ms=request.deliver_at_ms,
                    durable=answer.durable,
                )
            except KeylaneError as error:
                self._routes.pop(request.subject, None)
                may_retry = (
                    isinstance(error, UnreachableError) or error.retry is not RetryRule.NEVER
                )
                if not group and isinstance(error, StorageError):
                    may_retry = True  # the metaserver's disk failed; no broker was called
                if not may_retry or error.reason is Reason.SCHEDULE_FULL:
                    raise
                group = group or error.details.get("broker_group", "")
                attempt.cause = broker_cause(error, group) if group else route_cause(error)
            await asyncio.sleep(pauses.next_pause_ms() / 1000)

    async def _choose_broker(self, subject: str, doubtful_group: str) -> tuple[str, str]:
        """
        Return the broker group to send to, and its address. This is `doubtful_group`, which may
        already keep the message, or else any available one.

        Raises:
            KeylaneError: no broker group is available now, or the request for the subject is
                refused.
        """
        if doubtful_group:
            return doubtful_group, await self._fetch_broker_address(doubtful_group)
        route_task = self._routes.get(subject)
        if route_task is None:
            call = self._meta.route_to_send(subject, order_strategy=self._order_strategy)
            route_task = self._routes[subject] = start_task(call)
            if len(self._routes) > ROUTES_MAX + len(self._pending):
                self._evict_routes()
        route = await wait_for_shared(route_task, "the producer was closed")
        available_brokers = _available_brokers(route)
        if not available_brokers:
            open_partitions = route.open_partitions()
            group = open_partitions[0].broker_group if open_partitions else ""
            raise NotSentError(
                f"no broker of subject {subject!r} is available now", broker_group=group
            )
        return self._rng.choice(available_brokers)

    def _evict_routes(self) -> None:
        """Drop the cached routes of subjects without waiting messages, to bound the cache."""
        waiting = {attempt.subject for attempt in self._pending.values()}
        for subject, route_task in list(self._routes.items()):
            if route_task.done() and subject not in waiting:
                del self._routes[subject]

    def _is_in_route(self, subject: str, broker_group: str, address: str) -> bool:
        """Return True if the cached route of a subject lists the broker at this address."""
        route_task = self._routes.get(subject)
        if (
            route_task is None
            or not route_task.done()
            or route_task.cancelled()
            or route_task.exception() is not None
        ):
            return False
        return (broker_group, address) in _available_brokers(route_task.result())

    async def _fetch_broker_address(self, broker_group: str) -> str:
        """
        Fetch the address of a broker group.

        Raises:
            NotSentError: the broker group is not available.
            NotFoundError: there is no such broker group.
            ClosedError: the producer was closed during the call.
        """
        if self._health is None or self._health.done():
            self._health = start_task(self._meta.health())
        closed_text = "the producer was closed before a metaserver sent the address of the broker"
        brokers = (await wait_for_shared(self._health, closed_text)).details.get("brokers", [])
        for broker in brokers:
            if broker["broker_group"] == broker_group:
                if not broker["available"]:
                    raise NotSentError.of_group(broker_group)
                return str(broker["address"])
        raise NotFoundError(Reason.BROKER_GROUP_UNKNOWN, broker_group=broker_group)

    async def cancel(self, receipt: ScheduledReceipt) -> CancelOutcome:
        """Cancel a scheduled message; see `Producer.cancel`."""
        if not isinstance(receipt, ScheduledReceipt):
            raise InvalidRequestError(
                f"cancel takes the ScheduledReceipt of a message, not {receipt!r:.60}"
            )
        try:
            scheduled_id = bytes.fromhex(receipt.scheduled_id)
        except ValueError:
            raise InvalidRequestError(f"not a valid receipt: {receipt!r:.200}") from None
        broker = self._broker_at(await self._fetch_broker_address(receipt.broker_group))
        answer, _ = await broker.call(CancelScheduled(scheduled_id))
        assert isinstance(answer, ScheduledCanceled)
        return CancelOutcome(answer.outcome)

    def list_waiting(self) -> list[WaitingKey]:
        """List the messages that no broker keeps yet, with one entry for each pair of a subject and
        the broker group that may already keep them.
        """
        entries: defaultdict[tuple[str, str], list[_Attempt]] = defaultdict(list)
        for attempt in self._pending.values():
            entries[attempt.subject, attempt.doubtful_group].append(attempt)
        return [_waiting_key(attempts) for attempts in entries.values()]

    async def wait_for_capacity(self) -> None:
        """Wait until the queue of scheduled messages has room; see
        `SendBudget.wait_for_capacity`.
        """
        if self._bytes * 4 < self._settings.queue_bytes * 3:
            return
        while self._bytes * 2 >= self._settings.queue_bytes:
            tasks = [future._task for future in self._pending]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    @property
    def is_empty(self) -> bool:
        """True if no message waits for a broker."""
        return not self._pending

    async def wait_until_settled(self) -> None:
        """Wait until brokers keep all messages, or they are given up."""
        while self._pending:
            await asyncio.wait([future._task for future in self._pending])
            await asyncio.sleep(0)

    def take_unreported_error(self) -> GivenUpError | None:
        """Return the error for unawaited messages given up since the last call, or None."""
        summary = self._unreported
        self._unreported = UnreportedMessages("scheduled message")
        return summary.build_error()

    async def close(self) -> None:
        """Give up the messages that no broker keeps yet."""
        tasks: list[asyncio.Task[Any]] = [future._task for future in self._pending]
        tasks += self._routes.values()
        if self._health is not None:
            tasks.append(self._health)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _available_brokers(route: Route) -> list[tuple[str, str]]:
    """Return the available broker groups that have open partitions, with their addresses."""
    return [
        (partition.broker_group, partition.address)
        for partition in route.open_partitions()
        if partition.address is not None
    ]


def _encode_batch(value: bytes, packed: bytes, sent_at_ns: int) -> bytes:
    """Encode one scheduled message as the batch in its frame."""
    return encode_batch(
        partition_id=0,
        sent_at_ns=[sent_at_ns],
        keys=[b""],
        values=[value],
        properties=[packed],
        producer_id=NO_PRODUCER,
        producer_epoch=0,
        sequence=0,
    )


class _Attempt:
    """The state of a scheduled message that is being sent."""

    def __init__(self, subject: str, size_bytes: int, sent_at_ns: int) -> None:
        self.subject = subject
        self.size_bytes = size_bytes
        self.sent_at_ns = sent_at_ns
        self.doubtful_group = ""
        """The broker group that may already keep the message, or ""."""
        self.cause = WaitCause(NO_ANSWER)


def _waiting_key(attempts: list[_Attempt]) -> WaitingKey:
    """Return the entry for the messages of one subject; `attempts` are given oldest first."""
    oldest = attempts[0]
    return WaitingKey(
        oldest.subject,
        b"",
        len(attempts),
        sum(attempt.size_bytes for attempt in attempts),
        oldest.sent_at_ns,
        None,
        oldest.doubtful_group or None,
        oldest.cause.reason,
        oldest.cause.advice,
    )
