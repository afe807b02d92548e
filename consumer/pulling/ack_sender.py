"""Tells a partition's broker which offsets are handled, and how often the others failed.

    done, failed ─▶ due ─▶ linger ─▶ ACK ─▶ durable: the cursor rises, waiters go on
                     ▲                │ failed: again, after a pause
                     ╰── every third of the ttl, with nothing, to renew the pull lock

A request that fails loses nothing: its acks are in the next one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Protocol

from ...protocol.errors import FencedError, KeylaneError, OverloadedError
from ...protocol.frames import Ack, Acked
from ...protocol.message import Message
from ...rpc.client import BrokerClient
from ..settings import AckMode, ConsumerSettings
from .acks import AckQueue
from .failed_tries import FailedTries
from .messages_in_flight import MessagesInFlight

log = logging.getLogger("keylane.consumer")


class AckedPartition(Protocol):
    """What this needs of its pull client."""

    respects_range_limit: bool

    @property
    def broker(self) -> BrokerClient:
        """The client of the partition's broker."""
        ...

    @property
    def holds_fence(self) -> bool:
        """True while the broker has the fence, and the lease has not ended."""
        ...

    def acked_to(self, answer: Acked) -> None:
        """Note that acks are durable."""
        ...

    async def check_parked(self, version: int) -> None:
        """Learn what an operator has changed, if a version of the broker's is newer than the one that is known."""
        ...


class AckSender:
    """
    The acks of one partition under one grant.

    Args:
        who: partition id, group, session and token, as requests name the owner.
        in_flight: pulls wait while the broker takes no more ranges above the cursor.
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
        """True while `_due` is set; cheaper to read for every handled message."""
        self._linger_s = settings.ack_linger_ms / 1000 if settings.ack is AckMode.LINGERING else 0
        self.each = settings.ack is AckMode.EACH
        """The next message of a key waits for the ack of the one before."""
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

    def failed(self, message: Message) -> None:
        """Have the broker keep how often a message has failed."""
        self.tries.failed(message)
        self.send_soon()

    async def durable(self) -> bool:
        """
        Wait until the acks of all that was handled before are durable.

        Returns:
            False if they are not: the broker takes no more ranges now, or the partition was handed over.
        """
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return await waiter

    async def run(self) -> None:
        """Send acks until cancelled.  Raises FencedError."""
        pauses = self._settings.backoff.pauses(self._rng)
        idle_s = self._settings.ttl_ms / 3000
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    await self._due.wait()
                await asyncio.sleep(self._linger_s)
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
        try:
            answer, _ = await self._partition.broker.call(Ack(*self._who, ranges, failed))
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


def _release(waiters: list[asyncio.Future[bool]], *, durable: bool) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(durable)
