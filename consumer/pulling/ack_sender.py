"""Tells a partition's broker which offsets are handled, and how often the others failed.

    done, failed, begin ─▶ due ─▶ linger ─▶ ACK ─▶ durable: the cursor rises, waiters go on
                            ▲                │ failed: again, after a pause
                            ╰── every third of the ttl, with nothing, to renew the pull lock

A request that fails loses nothing: its acks are in the next one.
"""

from __future__ import annotations

import asyncio
import logging
import random

from ...protocol.errors import FencedError, KeylaneError, OverloadedError
from ...protocol.frames import Ack, Acked
from ...protocol.message import Message
from ...protocol.parked import Failure
from ..settings import AckMode, ConsumerSettings
from .acks import AckQueue
from .failed_tries import FailedTries
from .messages_in_flight import MessagesInFlight
from .pull_views import PullViews

log = logging.getLogger("keylane.consumer")


class AckSender:
    """
    The acks of one partition under one grant.

    Args:
        who: partition id, group, session and token, as requests name the owner.
        in_flight: pulls wait while the broker takes no more ranges above the cursor.
    """

    def __init__(
        self,
        partition: PullViews,
        who: tuple[int, str, str, int],
        *,
        in_flight: MessagesInFlight,
        settings: ConsumerSettings,
        rng: random.Random,
    ) -> None:
        self.handled = AckQueue()
        self.tries = FailedTries()
        self.is_due = False
        """True while `_due` is set; cheaper to read for every handled message."""
        self._linger_s = settings.ack_linger_ms / 1000 if settings.ack is AckMode.LINGERING else 0
        self.each = settings.ack is AckMode.EACH
        """The next message of a key waits for the ack of the one before."""
        self.hurries = False
        """Requests are sent without a linger."""
        self._begun: dict[int, int] = {}
        """By offset of a suspect that begins, its crashes, until the broker has them."""
        self._partition = partition
        self._who = who
        self._in_flight = in_flight
        self._settings = settings
        self._rng = rng
        self._due = asyncio.Event()
        self._waiters: list[asyncio.Future[bool]] = []
        """Of `durable`: done with the request that has all that was handled before the call."""

    def send_soon(self) -> None:
        """Send a request once its linger has passed."""
        self.is_due = True
        self._due.set()

    def failed(self, message: Message, failure: Failure) -> None:
        """Have the broker keep how often a message has failed, and show why."""
        self.tries.failed(message, failure)
        self.send_soon()

    def hangs(self, message: Message, why: Failure, running_ms: int) -> None:
        """Have the broker show that a message has been with its handler, or the program, for so long."""
        if self.tries.hangs(message, why, running_ms):
            self.send_soon()  # later figures go with the requests that renew the pull lock

    async def durable(self) -> bool:
        """
        Wait until the acks of all that was handled before are durable.

        Returns:
            False if they are not: the broker takes no more ranges now, or the partition was handed over.
        """
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return await waiter

    async def begin(self, offset: int, crashes: int) -> None:
        """
        Wait until the broker has it durably that a suspect begins.

        Args:
            crashes: what it is accused of if this process ends before it does.
        """
        self._begun[offset] = crashes
        while offset in self._begun:
            self.send_soon()
            if not await self.durable():
                await asyncio.sleep(self._settings.backoff.wait_ms(1, self._rng) / 1000)

    async def run(self) -> None:
        """Send acks until cancelled.  Raises FencedError."""
        pauses = self._settings.backoff.pauses(self._rng)
        idle_s = self._settings.ttl_ms / 3000
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    await self._due.wait()
                now_s = asyncio.get_running_loop().time()
                await asyncio.sleep(0 if self.hurries else linger_s(self._linger_s, now_s))
            except TimeoutError:
                if not self._partition.holds_fence:
                    continue
            try:
                await self._send()
                pauses.reset()
            except FencedError:
                raise
            except KeylaneError as error:
                log.info("acks of partition %d: %s", self._who[0], error.message)
                await asyncio.sleep(pauses.next_ms() / 1000)

    async def flush(self) -> None:
        """Send all acks that the broker takes.  Raises KeylaneError."""
        while (self.handled or self.tries) and await self._send():
            pass

    def end(self) -> None:
        """End the waits for acks that will not be sent."""
        _release(self._waiters, durable=not self.handled)

    async def _send(self) -> bool:
        """
        Send one request with the handled offsets, or an empty one that only renews the pull lock.

        Returns:
            False if the broker keeps no more ranges above the cursor; the other acks wait for those of older messages.
        """
        self.is_due = False
        self._due.clear()
        ranges = self.handled.take()
        left_over = self.handled.left_over
        waiters, self._waiters = self._waiters, []
        failed = self.tries.next()
        begun = tuple(self._begun.items()) if self._begun else ()
        self.tries.ended(ranges)
        ack = Ack(*self._who, ranges, failed, self.tries.oldest(), begun)
        try:
            answer, _ = await self._partition.broker.call(ack)
        except OverloadedError as error:
            _release(waiters, durable=False)  # else no worker would be left for the older messages
            return self._refused(error)
        except BaseException:
            self._due.set()
            self._waiters = waiters + self._waiters
            raise
        assert isinstance(answer, Acked)
        self.handled.confirmed()
        self.tries.told(failed)
        for offset, _ in begun:
            del self._begun[offset]
        if not self.handled.at_range_limit:
            self._in_flight.unblock()
        if self.handled or self.tries:
            self._due.set()
        self._partition.acked_to(answer)
        if left_over:
            self._waiters = waiters + self._waiters
        else:
            _release(waiters, durable=True)
        await self._partition.check_parked(answer.parked_version)
        return True

    def _refused(self, error: OverloadedError) -> bool:
        if not self.handled.at_range_limit:
            log.warning("partition %d: acks wait for older ones: %s", self._who[0], error.message)
        if self._partition.respects_range_limit:
            self._in_flight.block()
        fewer = self.handled.refused()
        if fewer:
            self._due.set()
        return fewer


def linger_s(longest_s: float, now_s: float) -> float:
    """
    Seconds for which a request lingers: between half of `longest_s` and all of it.

    It ends at a multiple of that half, so that the requests of all partitions of an event loop share a write to the
    socket, and a sync of the broker's disk.
    """
    half_s = longest_s / 2
    return 2 * half_s - now_s % half_s if half_s else 0.0


def _release(waiters: list[asyncio.Future[bool]], *, durable: bool) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(durable)
