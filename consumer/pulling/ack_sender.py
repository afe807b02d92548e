"""Reports to a partition's broker which offsets are handled, and how often the others failed.

    done, failed, begin ─▶ due ─▶ linger ─▶ ACK ─▶ durable: the cursor rises, waiters continue
                            ▲                │ failed: sent again, after a pause
                            ╰── every third of the ttl, empty, to renew the pull lock; in a shared
                                group, every sixth of the time in flight, to renew messages

A request is sent by the timer of its linger, and confirmed as its answer arrives, without a task.
The task of the sender waits meanwhile: it opens channels, and handles every error, and every answer
that needs a wait.

Invariants
    A request that fails loses nothing: its acks are in the next one.
    One request is under way at a time.
    A wait for acks makes a request due.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from ...protocol.clock import TICK_S, TICKED_S_MIN, at_a_tick
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
"""The most, in seconds, by which timers end earlier than a sum of times requires."""
ANY = -1
"""An offset that is in every request."""


class AckedPartition(Protocol):
    """A pull client, as seen by a sender of acks."""

    broker: BrokerClient
    """The client of the partition's broker."""
    boot_ns: Callable[[], int]
    renewal_ms: float
    """Milliseconds between two requests that renew the messages with handlers."""
    respects_range_limit: bool
    """True if pulls stop while the broker takes no more ranges above the cursor."""

    @property
    def log_name(self) -> str:
        """Return subject, partition and group, for log lines."""
        ...

    @property
    def holds_fence(self) -> bool:
        """Return True while the broker has the fence, and the lease has not ended."""
        ...

    @property
    def is_idle(self) -> bool:
        """Return True while the broker is known to have acks of all pulled messages, and a pull
        waits.
        """
        ...

    def held(self) -> list[Message]:
        """Return the messages that the next request renews."""
        ...

    def renewed(self, messages: list[Message], sent_ns: int) -> None:
        """Note that a request made at `sent_ns` has renewed messages."""
        ...

    def acked_to(self, answer: Acked) -> None:
        """Note that acks are durable."""
        ...

    def note_unanswered(self, error: KeylaneError) -> None:
        """Note why a call of the partition failed."""
        ...

    def knows_parked(self, version: int) -> bool:
        """Return True if `check_parked` would learn nothing."""
        ...

    async def check_parked(self, version: int) -> None:
        """Fetch the changes of an operator, if the version is newer than the known one."""
        ...


class AckWaiter(NamedTuple):
    """A wait for the ack of a handled offset."""

    offset: int
    future: asyncio.Future[bool]
    """The future that is done with a request that has the offset: True if the ack is durable."""


class AckRequest(NamedTuple):
    """A request, with the steps that follow its answer."""

    ack: Ack
    waiters: list[AckWaiter]
    left_over: bool
    """True if it lacks some of the messages that were handled when it was made."""
    held: list[Message]
    """The messages of a shared group that it renews."""
    sent_ns: int
    """The time at which it was made, on the boot clock."""


class AckSender:
    """
    The acks of one partition under one grant.

    Args:
        who: the owner as named in requests: partition id, group, session and token.
        in_flight: the counter of messages with handlers; it blocks pulls while the broker takes no
            more ranges above the cursor.
    """

    def __init__(
        self,
        partition: AckedPartition,
        who: tuple[int, str, str, int],
        *,
        in_flight: MessagesInFlight,
        settings: ConsumerSettings,
        rng: random.Random,
    ) -> None:
        self.handled = AckQueue()
        self.tries = FailedTries()
        self.is_due = False
        """True if a request is to be sent; it is read for every handled message."""
        self._linger_s = settings.ack_linger_ms / 1000 if settings.ack is AckMode.LINGERING else 0
        self.each = settings.ack is AckMode.EACH
        """True if the next message of a key waits for the ack of the previous one."""
        self.hurries = False
        """True if requests are sent without a linger."""
        self._begun: dict[int, int] = {}
        """The crashes of a suspect that begins, by its offset, until the broker has them."""
        self._partition = partition
        self._who = who
        self._in_flight = in_flight
        self._settings = settings
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._pauses = settings.backoff.pauses(rng)
        """The pauses between requests that fail."""
        self._troubles = LogFilter()
        self._waiters: list[AckWaiter] = []
        """The waits of `durable` for the next request."""
        self._idle_s = min(settings.ttl_ms / 3, partition.renewal_ms) / 1000
        self._sent_s = self._loop.time()
        """The time at which the last request was made."""
        self._trouble: asyncio.Future[int | None] | None = None
        """
        The future for which the task waits while requests are sent without the task.

        Its result is a version of parked messages to fetch, or None if the task has to send the
        next request.
        """
        self._timer: asyncio.Handle | None = None
        """The timer of the linger."""
        self._renewal: asyncio.Handle
        """The timer of the request that renews the pull lock."""
        self._under_way: AckRequest | None = None
        """The request that was sent without the task."""
        self._calling: Calling | None = None
        self._ended = False

    def send_soon(self) -> None:
        """Send a request once its linger has passed."""
        self.is_due = True
        if self._timer is not None or self._trouble is None or self._under_way is not None:
            return
        loop = self._loop
        if self.hurries:
            self._timer = loop.call_soon(self._send_next)
        elif not self._linger_s:
            self._timer = loop.call_soon(self._send_now)
        else:
            now_s = loop.time()
            self._timer = loop.call_at(now_s + linger_s(self._linger_s, now_s), self._send_now)

    def linger_no_more(self) -> None:
        """Send now what is due, and later requests without a linger, because others wait for the
        end of the partition.
        """
        self._linger_s = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._loop.call_soon(self._send_now)

    def failed(self, message: Message, failure: Failure) -> None:
        """Have the broker record how often a message has failed, and show why."""
        self.tries.failed(message, failure)
        self.send_soon()

    def hangs(self, message: Message, why: Failure, running_ms: int) -> None:
        """Have the broker show for how long a message has been with its handler or the program."""
        if self.tries.hangs(message, why, running_ms):
            self.send_soon()  # later figures are in the requests that renew the pull lock

    async def answered(self, offset: int, *, ask: bool = True) -> bool:
        """
        Wait for the broker's answer to the ack of a handled offset, and of all lower ones that were
        handled earlier.

        Args:
            ask: whether to make a request due; False: wait for the next one that something else
                makes due.

        Returns:
            True if the ack is durable; False if the broker takes no more ranges now, or the
            partition was handed over.
        """
        if self._ended:
            return offset not in self.handled
        waiter = AckWaiter(offset, self._loop.create_future())
        self._waiters.append(waiter)
        if ask and not self.is_due:
            self.send_soon()
        return await waiter.future

    async def durable(self, offset: int) -> bool:
        """
        Wait until the ack of a handled offset is durable, even while the broker takes no more
        ranges.

        Returns:
            False if it never will be: the partition was handed over.
        """
        durable = offset not in self.handled or await self.answered(offset)
        while not durable and not self._ended:
            durable = await self.answered(offset, ask=False)  # every request has the lowest ranges
        return durable

    async def begin(self, offset: int, crashes: int) -> None:
        """
        Wait until the broker has durably recorded that a suspect begins.

        Args:
            crashes: the crashes of which it is accused if this process ends before it does.
        """
        self._begun[offset] = crashes
        while offset in self._begun:
            self.send_soon()
            if not await self.answered(ANY):
                await asyncio.sleep(self._settings.backoff.wait_ms(1, self._rng) / 1000)

    async def run(self) -> None:
        """Send acks until the task is cancelled. Raises FencedError."""
        self._renewal = self._loop.call_later(self._idle_s, self._renew)
        try:
            while True:
                try:
                    version = await self._without_task()
                    if version is None:
                        await self._send()
                        self._note_recovered()
                    else:
                        await self._partition.check_parked(version)
                except FencedError:
                    raise
                except KeylaneError as error:
                    self._partition.note_unanswered(error)
                    now_ms = self._partition.boot_ns() // 1_000_000
                    if line := self._troubles.met(error.message, now_ms):
                        log.info("%s: cannot send acks: %s", self._partition.log_name, line)
                    await asyncio.sleep(self._pauses.next_ms() / 1000)
        finally:
            self._renewal.cancel()

    def _note_recovered(self) -> None:
        """Note that a request was answered."""
        self._pauses.reset()
        if failures := self._troubles.over(self._partition.boot_ns() // 1_000_000):
            log.info("%s: acks are stored again, after %s", self._partition.log_name, failures)

    def _renew(self) -> None:
        """Send a request if none was made for a third of the ttl; an empty one only renews the pull
        lock.
        """
        now_s = self._loop.time()
        left_s = self._sent_s + self._idle_s - now_s
        if left_s < (CLOCK_S if self._idle_s < TICKED_S_MIN else TICK_S):
            left_s = self._idle_s
            partition, idle = self._partition, not (self.handled or self.tries or self._begun)
            if idle and partition.is_idle:
                left_s *= 2  # its pull holds the lock for a ttl from now on, or from its answer
            elif partition.holds_fence:
                self.send_soon()
                if self._timer is not None:  # a linger may be longer than the ttl
                    self._timer.cancel()
                    self._timer = self._loop.call_soon(self._send_now)
        self._renewal = self._loop.call_at(at_a_tick(left_s, now_s), self._renew)

    async def flush(self) -> None:
        """Send all acks that the broker takes. Raises KeylaneError."""
        while (self.handled or self.tries) and await self._send():
            pass

    def end(self) -> None:
        """End the waits for acks that will not be sent."""
        self._ended = True
        for waiter in self._waiters:
            release([waiter], durable=waiter.offset not in self.handled)

    # ── without a task ────────────────────────────────────────────────────────────────────────────
    async def _without_task(self) -> int | None:
        """
        Let the timers send requests until one needs the task.

        Returns:
            The newer version of the parked messages if there is one; None if the task must send the
            next request.

        Raises:
            KeylaneError: a request failed.
        """
        self._trouble = self._loop.create_future()
        if self.is_due:
            self.send_soon()
        try:
            return await self._trouble
        finally:
            self._trouble = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            calling = self._calling
            self._calling = None
            if calling is not None:
                calling.cancel()
            request = self._under_way
            self._under_way = None
            if request is not None:
                self._take_back(request)

    def _send_next(self) -> None:
        """Send a request in the next turn of the event loop, because a task that was woken by
        handled messages may add to it.
        """
        self._timer = self._loop.call_soon(self._send_now)

    def _send_now(self) -> None:
        """Send a request; its linger has passed."""
        self._timer = None
        trouble = self._trouble
        if trouble is None or trouble.done():
            return
        try:
            if not self._begin_request():
                trouble.set_result(None)
        except Exception as error:  # noqa: BLE001 - the task decides
            _fail(trouble, error)

    def _begin_request(self) -> bool:
        """Send a request without the task, and return False if the task has to send it. The task
        gets an exception of the request.
        """
        channel = self._partition.broker.live_channel
        if channel is None:
            return False
        self._under_way = request = self._request()
        timeout_ms = self._settings.call_timeout_ms
        calling = channel.begin(request.ack, timeout_ms=timeout_ms, on_answer=self._answered)
        if self._under_way is request:
            self._calling = calling
        return True

    def _answered(self, calling: Calling) -> None:
        """Take the answer to the request that is under way, or its error."""
        request = self._under_way
        self._under_way = None
        self._calling = None
        trouble = self._trouble
        if request is None:
            return
        if trouble is None or trouble.done():
            self._take_back(request)
            return
        try:
            answer, _ = calling.result()
            assert isinstance(answer, Acked)
            self._confirmed(request, answer)
            if self._pauses.failures:
                self._note_recovered()
            if not self._partition.knows_parked(answer.parked_version):
                trouble.set_result(answer.parked_version)
        except OverloadedError as error:
            self._refused(request, error)
        except Exception as error:  # noqa: BLE001 - the task decides
            self._take_back(request)
            _fail(trouble, error)
        if self.is_due:
            self.send_soon()

    # ── requests ──────────────────────────────────────────────────────────────────────────────────
    async def _send(self) -> bool:
        """
        Send one request with the handled offsets, or an empty one that only renews the pull lock.

        Returns:
            False if the broker keeps no more ranges above the cursor; the other acks wait for those
            of older messages.
        """
        request = self._request()
        try:
            answer, _ = await self._partition.broker.call(request.ack)
        except OverloadedError as error:
            return self._refused(request, error)
        except BaseException:
            self._take_back(request)
            raise
        assert isinstance(answer, Acked)
        self._confirmed(request, answer)
        await self._partition.check_parked(answer.parked_version)
        return True

    def _request(self) -> AckRequest:
        """Return the next request; all that is due is in it, or in a later one."""
        self.is_due = False
        self._sent_s = self._loop.time()
        ranges = self.handled.take()
        waiters = self._waiters
        self._waiters = []
        failed, oldest = self.tries.told_with(ranges)
        begun = tuple(self._begun.items()) if self._begun else ()
        partition = self._partition
        held, sent_ns = partition.held(), partition.boot_ns()
        ack = Ack(*self._who, ranges, failed, oldest, begun)
        if held:
            ack = replace(
                ack, held=tuple(ranges_of(held)), in_flight_ms=self._settings.in_flight_ms
            )
        return AckRequest(ack, waiters, self.handled.left_over, held, sent_ns)

    def _take_back(self, request: AckRequest) -> None:
        """Put the contents of this request into the next one, because it is unknown whether the
        broker has them.
        """
        self.is_due = True
        self._waiters = request.waiters + self._waiters

    def _confirmed(self, request: AckRequest, answer: Acked) -> None:
        """Note that the broker has a request durably."""
        self.handled.confirmed()
        if request.held:
            self._partition.renewed(request.held, request.sent_ns)
        if request.ack.failed:
            self.tries.told(request.ack.failed)
        for offset, _ in request.ack.begun:
            del self._begun[offset]
        if not self.handled.at_range_limit:
            self._in_flight.unblock()
        if self.handled or self.tries:
            self.is_due = True
        self._partition.acked_to(answer)
        self._waiters = release_durable(request) + self._waiters

    def _refused(self, request: AckRequest, error: OverloadedError) -> bool:
        """Note that the broker keeps no more ranges, and return True if a request with fewer can
        help.
        """
        self._partition.note_unanswered(error)  # the broker has answered
        release(request.waiters, durable=False)  # each waiter decides whether it continues to wait
        if not self.handled.at_range_limit:
            name = self._partition.log_name
            log.warning("%s: acks wait for older messages to be acked: %s", name, error.message)
        if self._partition.respects_range_limit:
            self._in_flight.block()
        fewer = self.handled.refused()
        if fewer:
            self.is_due = True
        return fewer


def linger_s(longest_s: float, now_s: float) -> float:
    """
    Return the seconds for which a request lingers: up to the next multiple of `longest_s`.

    So the requests of all partitions of an event loop that arise within `longest_s` share a write
    to the socket, and a sync of the broker's disk.
    """
    return longest_s - now_s % longest_s if longest_s else 0.0


def release(waiters: Iterable[AckWaiter], *, durable: bool) -> None:
    """End waits for acks."""
    for _, future in waiters:
        if not future.done():
            future.set_result(durable)


def release_durable(request: AckRequest) -> list[AckWaiter]:
    """End the waits for the contents of an accepted request, and return those for what is left
    over, which is higher.
    """
    if not request.left_over:
        release(request.waiters, durable=True)
        return []
    end = request.ack.ranges[-1][1]
    release((waiter for waiter in request.waiters if waiter.offset < end), durable=True)
    return [waiter for waiter in request.waiters if waiter.offset >= end]


def _fail(trouble: asyncio.Future[int | None], error: Exception) -> None:
    if not trouble.done():
        trouble.set_exception(error)
        trouble.exception()  # marks it as retrieved: the task may have been cancelled
