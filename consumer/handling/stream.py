"""
Messages for `async for`: one queue, no handlers, acks by hand.

A partition that goes to another consumer waits for the acks of what was taken of it: for `handover_ms` in any case,
and then for as long as the user does not come for the next message, because he may be at work on what he has.  What
was passed over without an ack by then comes again, and so does at once, when the consumer closes, all that was not acked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from ...protocol.clock import Clock
from ...protocol.message import Message
from ...protocol.text import counted
from ..pulling.pull_client import PullClient
from .log_throttle import LogThrottle

log = logging.getLogger("keylane.consumer")

MESSAGES_PER_TURN = 256
NOBODY_MS = 10_000
"""A consumer without a handler whose first message nobody takes for so long was perhaps meant to have one."""
NOBODY_REPEAT_MS = 600_000
PATIENCE_MS = 5_000
"""A partition that has to go, and that its user keeps for longer than this after `handover_ms`, is worth a word."""


class Stream:
    """
    Hands messages out one by one, in the order of their offsets within each partition.

    `check()` raises where the user waits in another event loop than the consumer's.
    """

    def __init__(self, *, clock: Clock, handover_ms: int, check: Callable[[], None]) -> None:
        self._check = check
        self._waiting: deque[Message] = deque()
        self._boot_ns = clock.boot_ns
        self._handover_ms = handover_ms
        self._work = asyncio.Event()
        self._asked = asyncio.Event()
        """Set while the user waits for a message; else his own code runs, and what he took may be in it."""
        self._left = MESSAGES_PER_TURN
        self._error: BaseException | None = None
        self._closed = False
        self._in_hand: Message | None = None
        """What the body of the loop was given last, while it runs."""
        self._seen: Message | None = None
        """What it was in when it was last looked at, and since when."""
        self._seen_ms = 0
        self._idle_since_ms: int | None = None
        """Since when messages wait, and nobody has come for a first one."""
        self._iterated = False
        self._log_throttle = LogThrottle(runner="body of the loop", done="is left by the loop")
        self._leaving = asyncio.Event()

    def put(self, messages: list[Message]) -> None:
        """Add messages of one partition."""
        self._waiting.extend(messages)
        self._work.set()

    async def next(self) -> Message:
        """The next message whose lease has not ended.  Raises StopAsyncIteration after close, OtherLoopError."""
        if not self._waiting:
            self._check()
        self._asked.set()
        self._iterated = True
        self._in_hand = None
        try:
            self._in_hand = await self._next()
            return self._in_hand
        finally:
            self._asked.clear()

    async def _next(self) -> Message:
        while True:
            self._left -= 1
            if not self._left:
                self._left = MESSAGES_PER_TURN
                await asyncio.sleep(0)
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            if not self._waiting:
                self._work.clear()
                await self._work.wait()
                continue
            message = self._waiting.popleft()
            client: PullClient = message.delivery  # type: ignore[assignment]
            if self._boot_ns() < client.deadline_ns:
                client.taken(message)
                return message
            client.forget(1)

    async def quiesce(self, client: PullClient) -> None:
        """
        Forget what waits of `client`'s partition, and wait for the user to be through with what he has of it.

        He is when all of it is acked, or, `handover_ms` later or once the lease has ended, when he comes for the
        next message; and at once after `leave`.
        """
        kept = deque(
            one
            for one in self._waiting
            if one.delivery.client is not client  # type: ignore[union-attr]
        )
        client.forget(len(self._waiting) - len(kept))
        self._waiting = kept
        ends: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(client.settled()),
            asyncio.ensure_future(self._leaving.wait()),
        ]
        try:
            until_ms = self._boot_ns() // 1_000_000 + self._handover_ms
            while (left_ms := min(until_ms - self._boot_ns() // 1_000_000, client.left_ms)) > 0:
                if await _one_of(ends, left_ms):  # the lease may have been renewed meanwhile
                    return
            if await _one_of(ends, 0) or self._asked.is_set():
                return
            ends.append(asyncio.ensure_future(self._asked.wait()))
            if not await _one_of(ends, PATIENCE_MS):
                log.warning(
                    "partition %d is wanted elsewhere, and %d of its messages are taken and not acked; it is not "
                    "handed over before they are, or the next message is asked for",
                    client.partition_id, client.outstanding,
                )  # fmt: skip
                await _one_of(ends, None)
        finally:
            for one in ends:
                one.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def finish(self) -> None:
        """Hand out nothing more, and wait until the loop's body asks for the next message, `handover_ms` at most."""
        self._closed = True
        self._work.set()
        if self._asked.is_set():
            return
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await _one_of([asked], self._handover_ms)
        finally:
            asked.cancel()

    def look(self) -> None:
        """Call it every second or so: tells of a body that runs for long."""
        now_ms = self._boot_ns() // 1_000_000
        if self._in_hand is not None and self._in_hand is self._seen:
            telling = self._log_throttle.running(self._seen, self._seen_ms, now_ms)
        else:
            telling = None if self._seen is None else self._log_throttle.stopped(self._seen, now_ms)
            self._seen, self._seen_ms = self._in_hand, now_ms
        if telling is not None:
            log.warning("%s", telling.text)
        if self._waiting and not self._iterated:
            self._tell_of_nobody(now_ms)

    def _tell_of_nobody(self, now_ms: int) -> None:
        if self._idle_since_ms is None:
            self._idle_since_ms = now_ms
        elif now_ms - self._idle_since_ms >= NOBODY_MS:
            self._idle_since_ms = now_ms + NOBODY_REPEAT_MS
            log.warning(
                "a consumer has no handler and nobody iterates over it: there wait %s of %s, and its partitions "
                "are nobody else's; give it handler=, or use: async for message in consumer",
                counted(len(self._waiting), "message"), self._waiting[0].subject,
            )  # fmt: skip

    def leave(self) -> None:
        """The consumer closes, so nobody is left to ack: no hand-over waits for what was taken any more."""
        self._leaving.set()

    def fail(self, error: BaseException) -> None:
        """End the iteration with `error`."""
        self._error = error
        self._work.set()

    async def close(self) -> None:
        """End the iteration."""
        self._closed = True
        self._waiting.clear()
        self._work.set()


async def _one_of(ends: Collection[asyncio.Future[Any]], within_ms: int | None) -> bool:
    """Wait for one of `ends`; False if none came in time."""
    timeout_s = None if within_ms is None else within_ms / 1000
    done, _ = await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)
