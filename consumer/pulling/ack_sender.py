"""Sends a partition's acks and failed attempts to its broker.

    done, failed, begin ─▶ due ─▶ linger ─▶ ACK ─▶ durable: the cursor rises, waiters continue
                            ▲                │ failed: retry after a pause
                            ╰── every third of the ttl, an empty request renews the pull lock; in a
                                shared group, every sixth of in_flight_ms, it renews messages

To avoid task switches, the linger timer sends requests, and callbacks handle their replies.
Meanwhile the sender's task waits; it opens channels, and handles errors and the replies for which
something must be awaited.

Invariants
    A failed request loses nothing: the next one contains its acks. One request is in flight at a
    time. Waiting for acks makes a request due.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from ...protocol.clock import ALIGNED_S_MIN, TICK_S, round_to_tick
from ...protocol.errors import FencedError, KeylaneError, OverloadedError
from ...protocol.frames import Ack, Acked
from ...protocol.log_filter import LogFilter
from ...protocol.message import Message
from ...protocol.parked import Failure
from ...rpc.client import BrokerClient
from ...rpc.network import Calling
from ..settings import AckMode, ConsumerSettings
from .acks import AckQueue, ranges_of
from .failed_tries import FailedTries
from .messages_in_flight import MessagesInFlight

log = logging.getLogger("keylane.consumer")
CLOCK_S = 0.001
"""The tolerance, in seconds, for timers that fire slightly early."""
ANY = -1
"""Stands for any offset, and so matches every request."""


class AckedPartition(Protocol):
    """The interface of a pull client to its ack sender."""

    broker: BrokerClient
    """The client of the partition's broker."""
    boot_ns: Callable[[], int]
    renewal_ms: float
    """The interval, in milliseconds, between requests that renew the messages in handlers."""
    respects_range_limit: bool
    """True if pulling stops while the broker cannot accept more ranges above the cursor."""

    @property
    def log_name(self) -> str:
        """The subject, partition and group, for log lines."""
        ...

    @property
    def holds_fence(self) -> bool:
        """True while the broker has the fence and the lease has not ended."""
        ...

    @property
    def is_idle(self) -> bool:
        """True while the broker has acks for all pulled messages and a pull is waiting there."""
        ...

    def messages_to_renew(self) -> list[Message]:
        """Return the messages that the next request renews."""
        ...

    def extend_in_flight(self, messages: list[Message], sent_ns: int) -> None:
        """Restart the time in flight of messages that a request sent at `sent_ns` has renewed."""
        ...

    def apply_ack_reply(self, answer: Acked) -> None:
        """Apply the broker's reply to an ack request."""
        ...

    def record_call_error(self, error: KeylaneError) -> None:
        """Record whether a failed call reached the broker."""
        ...

    def is_parked_current(self, version: int) -> bool:
        """Return True if `check_parked` would have no effect."""
        ...

    async def check_parked(self, version: int) -> None:
        """Fetch an operator's changes to parked messages, if `version` is newer than the known
        version.
        """
        ...


class AckWaiter(NamedTuple):
    """Waits for the ack of a handled offset."""

    offset: int
    future: asyncio.Future[bool]
    """Done when a request that contains the offset has succeeded (True) or was refused (False)."""


class AckRequest(NamedTuple):
    """A request, with the data needed to handle its reply."""

    ack: Ack
    waiters: list[AckWaiter]
    is_partial: bool
    """True if it does not contain all messages handled when it was built."""
    renewed_messages: list[Message]
    """In a shared group, the messages that it renews."""
    sent_ns: int
    """The time at which it was built, on the boot clock."""


class AckSender:
    """
    Sends the acks of one partition under one grant.

    Args:
        lease: the partition id, group, session and token, as in requests.
        in_flight: the counter of messages in flight, which blocks pulls while the broker cannot
            accept more ranges above the cursor.
    """

    def __init__(
        self,
        partition: AckedPartition,
        lease: tuple[int, str, str, int],
        *,
        in_flight: MessagesInFlight,
        settings: ConsumerSettings,
        rng: random.Random,
    ) -> None:
        self.handled = AckQueue()
        self.tries = FailedTries()
        self.is_due = False
        """True if a request is due; read for every handled message."""
        self._linger_s = settings.ack_linger_ms / 1000 if settings.ack is AckMode.LINGERING else 0
        self.acks_each = settings.ack is AckMode.EACH
        """True if the next message of a key waits for the previous one's ack."""
        self.skips_linger = False
        """True if requests are sent without a linger."""
        self._begun: dict[int, int] = {}
        """The crash count of each suspect that is about to be handled, by offset, until the broker
        has stored it.
        """
        self._partition = partition
        self._lease = lease
        self._in_flight = in_flight
        self._settings = settings
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._pauses = settings.backoff.pauses(rng)
        """The pauses between failed requests."""
        self._failure_log = LogFilter()
        self._waiters: list[AckWaiter] = []
        """The waiters for the next request."""
        self._idle_s = min(settings.ttl_ms / 3, partition.renewal_ms) / 1000
        self._sent_s = self._loop.time()
        """The time of the event loop's clock at which the last request was built."""
        self._wake_task: asyncio.Future[int | None] | None = None
        """
        Wakes the task, which waits while timers send requests.

        The result is a version of parked messages to fetch, or None if the task must send the next
        request.
        """
        self._timer: asyncio.Handle | None = None
        """The linger timer."""
        self._renewal: asyncio.Handle
        """The timer of the next request that renews the pull lock."""
        self._in_flight_request: AckRequest | None = None
        """The request in flight that a timer sent."""
        self._in_flight_call: Calling | None = None
        self._ended = False

    def send_soon(self) -> None:
        """Send a request after lingering."""
        self.is_due = True
        if (
            self._timer is not None
            or self._wake_task is None
            or self._in_flight_request is not None
        ):
            return
        loop = self._loop
        if self.skips_linger:
            self._timer = loop.call_soon(self._send_next)
        elif not self._linger_s:
            self._timer = loop.call_soon(self._send_now)
        else:
            now_s = loop.time()
            self._timer = loop.call_at(now_s + linger_s(self._linger_s, now_s), self._send_now)

    def stop_lingering(self) -> None:
        """Send this and later requests without lingering, because other members are waiting for the
        partition to be drained.
        """
        self._linger_s = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._loop.call_soon(self._send_now)

    def record_failure(self, message: Message, failure: Failure) -> None:
        """Report a message's failed attempt to the broker."""
        self.tries.record_failure(message, failure)
        self.send_soon()

    def record_hang(self, message: Message, failure: Failure, running_ms: int) -> None:
        """Report to the broker that a message is hanging in its handler or in the program."""
        if self.tries.record_hang(message, failure, running_ms):
            self.send_soon()  # later durations are sent with the requests that renew the pull lock

    async def wait_for_ack_reply(self, offset: int, *, ask: bool = True) -> bool:
        """
        Wait for the broker's reply to the acks of a handled offset and of all lower handled ones.

        Args:
            ask: True: make a request due; False: wait for the next one.

        Returns:
            True if the ack is durable; False if the broker cannot accept more ranges now, or the
            partition was handed over.
        """
        if self._ended:
            return offset not in self.handled
        waiter = AckWaiter(offset, self._loop.create_future())
        self._waiters.append(waiter)
        if ask and not self.is_due:
            self.send_soon()
        return await waiter.future

    async def wait_until_durable(self, offset: int) -> bool:
        """
        Wait until the ack of a handled offset is durable, even while the broker cannot accept more
        ranges.

        Returns:
            True if it is durable; False if it never will be, because the partition was handed over.
        """
        durable = offset not in self.handled or await self.wait_for_ack_reply(offset)
        while not durable and not self._ended:
            # Every request contains the lowest ranges.
            durable = await self.wait_for_ack_reply(offset, ask=False)
        return durable

    async def begin(self, offset: int, crashes: int) -> None:
        """
        Wait until the broker has durably recorded that a suspect message is about to be handled.

        Args:
            crashes: the crash count to store if this process dies before the message is handled.
        """
        self._begun[offset] = crashes
        while offset in self._begun:
            self.send_soon()
            if not await self.wait_for_ack_reply(ANY):
                await asyncio.sleep(self._settings.backoff.wait_ms(1, self._rng) / 1000)

    async def run(self) -> None:
        """Send acks until the task is cancelled. Raises FencedError."""
        self._renewal = self._loop.call_later(self._idle_s, self._renew_if_idle)
        try:
            while True:
                try:
                    version = await self._send_from_timers()
                    if version is None:
                        await self._send()
                        self._log_recovery()
                    else:
                        await self._partition.check_parked(version)
                except FencedError:
                    raise
                except KeylaneError as error:
                    self._partition.record_call_error(error)
                    now_ms = self._partition.boot_ns() // 1_000_000
                    if text := self._failure_log.count_failure(error.message, now_ms):
                        log.info("%s: cannot send acks: %s", self._partition.log_name, text)
                    await asyncio.sleep(self._pauses.next_pause_ms() / 1000)
        finally:
            self._renewal.cancel()

    def _log_recovery(self) -> None:
        """Reset the backoff after a successful request, and log the recovery."""
        self._pauses.reset()
        if failures := self._failure_log.end_failures(self._partition.boot_ns() // 1_000_000):
            log.info("%s: acks are stored again, after %s", self._partition.log_name, failures)

    def _renew_if_idle(self) -> None:
        """Send a request, even an empty one, if none was sent for a third of the ttl, to renew the
        pull lock.
        """
        now_s = self._loop.time()
        delay_s = self._sent_s + self._idle_s - now_s
        if delay_s < (CLOCK_S if self._idle_s < ALIGNED_S_MIN else TICK_S):
            delay_s = self._idle_s
            partition, idle = self._partition, not (self.handled or self.tries or self._begun)
            if idle and partition.is_idle:
                delay_s *= 2  # the waiting pull keeps the lock for another ttl
            elif partition.holds_fence:
                self.send_soon()
                if self._timer is not None:  # a linger may be longer than the ttl
                    self._timer.cancel()
                    self._timer = self._loop.call_soon(self._send_now)
        self._renewal = self._loop.call_at(round_to_tick(delay_s, now_s), self._renew_if_idle)

    async def flush(self) -> None:
        """Send all acks that the broker accepts. Raises KeylaneError."""
        while (self.handled or self.tries) and await self._send():
            pass

    def end(self) -> None:
        """Stop, and release the waiters for acks that will not be sent."""
        self._ended = True
        for waiter in self._waiters:
            release([waiter], durable=waiter.offset not in self.handled)

    # ── sent by timers ────────────────────────────────────────────────────────────────────────────
    async def _send_from_timers(self) -> int | None:
        """
        Let the timers send requests until a request needs the task.

        Returns:
            The version of the parked messages if it is newer than the known one; None if the task
            must send the next request.

        Raises:
            KeylaneError: a request failed.
        """
        self._wake_task = self._loop.create_future()
        if self.is_due:
            self.send_soon()
        try:
            return await self._wake_task
        finally:
            self._wake_task = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            calling = self._in_flight_call
            self._in_flight_call = None
            if calling is not None:
                calling.cancel()
            request = self._in_flight_request
            self._in_flight_request = None
            if request is not None:
                self._requeue(request)

    def _send_next(self) -> None:
        """Send a request in the next iteration of the event loop, so that tasks that are already
        awake can add to it.
        """
        self._timer = self._loop.call_soon(self._send_now)

    def _send_now(self) -> None:
        """Send a request, after its linger."""
        self._timer = None
        wake_task = self._wake_task
        if wake_task is None or wake_task.done():
            return
        try:
            if not self._begin_request():
                wake_task.set_result(None)
        except Exception as error:  # noqa: BLE001 - the task decides
            _fail(wake_task, error)

    def _begin_request(self) -> bool:
        """Send a request. Return False if the task must send it, because no channel is open."""
        channel = self._partition.broker.live_channel
        if channel is None:
            return False
        self._in_flight_request = request = self._request()
        timeout_ms = self._settings.call_timeout_ms
        calling = channel.begin(request.ack, timeout_ms=timeout_ms, on_answer=self._on_reply)
        if self._in_flight_request is request:
            self._in_flight_call = calling
        return True

    def _on_reply(self, calling: Calling) -> None:
        """Handle the reply to the request in flight, or its error."""
        request = self._in_flight_request
        self._in_flight_request = None
        self._in_flight_call = None
        wake_task = self._wake_task
        if request is None:
            return
        if wake_task is None or wake_task.done():
            self._requeue(request)
            return
        try:
            answer, _ = calling.result()
            assert isinstance(answer, Acked)
            self._on_success(request, answer)
            if self._pauses.failures:
                self._log_recovery()
            if not self._partition.is_parked_current(answer.parked_version):
                wake_task.set_result(answer.parked_version)
        except OverloadedError as error:
            self._on_range_limit(request, error)
        except Exception as error:  # noqa: BLE001 - the task decides
            self._requeue(request)
            _fail(wake_task, error)
        if self.is_due:
            self.send_soon()

    # ── requests ──────────────────────────────────────────────────────────────────────────────────
    async def _send(self) -> bool:
        """
        Send one request with the handled offsets; an empty one renews the pull lock.

        Returns:
            False if the broker cannot accept more ranges above the cursor; the remaining acks then
            wait for those of older messages.
        """
        request = self._request()
        try:
            answer, _ = await self._partition.broker.call(request.ack)
        except OverloadedError as error:
            return self._on_range_limit(request, error)
        except BaseException:
            self._requeue(request)
            raise
        assert isinstance(answer, Acked)
        self._on_success(request, answer)
        await self._partition.check_parked(answer.parked_version)
        return True

    def _request(self) -> AckRequest:
        """Build the next request. If some ranges do not fit, another request becomes due."""
        self.is_due = False
        self._sent_s = self._loop.time()
        ranges = self.handled.take()
        waiters = self._waiters
        self._waiters = []
        failed, oldest = self.tries.report_with(ranges)
        begun_suspects = tuple(self._begun.items()) if self._begun else ()
        partition = self._partition
        renewed_messages, sent_ns = partition.messages_to_renew(), partition.boot_ns()
        ack = Ack(*self._lease, ranges, failed, oldest, begun_suspects)
        if renewed_messages:
            ack = replace(
                ack,
                held=tuple(ranges_of(renewed_messages)),
                in_flight_ms=self._settings.in_flight_ms,
            )
        return AckRequest(ack, waiters, self.handled.is_partial, renewed_messages, sent_ns)

    def _requeue(self, request: AckRequest) -> None:
        """Requeue a request's contents, because it is unknown whether the broker has them."""
        self.is_due = True
        self._waiters = request.waiters + self._waiters

    def _on_success(self, request: AckRequest, answer: Acked) -> None:
        """Handle the success of a request, whose contents the broker has stored durably."""
        self.handled.confirm()
        if request.renewed_messages:
            self._partition.extend_in_flight(request.renewed_messages, request.sent_ns)
        if request.ack.failed:
            self.tries.mark_reported(request.ack.failed)
        for offset, _ in request.ack.begun:
            del self._begun[offset]
        if not self.handled.at_range_limit:
            self._in_flight.unblock()
        if self.handled or self.tries:
            self.is_due = True
        self._partition.apply_ack_reply(answer)
        self._waiters = release_durable(request) + self._waiters

    def _on_range_limit(self, request: AckRequest, error: OverloadedError) -> bool:
        """Handle a refusal because the broker cannot accept more ranges. Return True if a request
        with fewer ranges may succeed.
        """
        self._partition.record_call_error(error)  # the broker was reached
        release(request.waiters, durable=False)  # each waiter decides whether to wait again
        if not self.handled.at_range_limit:
            name = self._partition.log_name
            log.warning("%s: acks wait for older messages to be acked: %s", name, error.message)
        if self._partition.respects_range_limit:
            self._in_flight.block()
        may_succeed = self.handled.shrink_request()
        if may_succeed:
            self.is_due = True
        return may_succeed


def linger_s(longest_s: float, now_s: float) -> float:
    """
    Return how many seconds a request lingers: until the next multiple of `longest_s`.

    All partitions in an event loop then share one write to the socket, and one sync of the broker's
    disk.
    """
    return longest_s - now_s % longest_s if longest_s else 0.0


def release(waiters: Iterable[AckWaiter], *, durable: bool) -> None:
    """Resolve the waiters' futures."""
    for _, future in waiters:
        if not future.done():
            future.set_result(durable)


def release_durable(request: AckRequest) -> list[AckWaiter]:
    """Resolve the waiters of a successful request. Return those whose higher offsets it did not
    contain.
    """
    if not request.is_partial:
        release(request.waiters, durable=True)
        return []
    end = request.ack.ranges[-1][1]
    release((waiter for waiter in request.waiters if waiter.offset < end), durable=True)
    return [waiter for waiter in request.waiters if waiter.offset >= end]


def _fail(wake_task: asyncio.Future[int | None], error: Exception) -> None:
    if not wake_task.done():
        wake_task.set_exception(error)
        wake_task.exception()  # mark it as retrieved, because the task may be cancelled
