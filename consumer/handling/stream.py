"""
Messages for `async for`: one queue, no handlers, acks by the user.

The hand-over of a partition waits until the messages taken of it are acked: for `handover_ms` in any case, and then for
as long as the loop body runs, as it may still be working on them.  Messages passed over without an ack by then are
redelivered.  When the consumer closes, unacked messages are redelivered at once.

A message that the user gives back is handed out again, and later messages of its key wait for it: `Nacked`.

Invariant
    While a task that took messages runs and any of them is not acked, no other task gets a message: it might be the next
    one of the same key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from ...protocol.clock import Clock
from ...protocol.errors import OtherTaskError
from ...protocol.message import Message
from ...protocol.text import counted
from ...rpc.race import Race
from ..pulling.pull_client import PullClient, client_of
from .log_throttle import LogThrottle
from .nacked import Nacked
from .not_acked import wait_ms_of

log = logging.getLogger("keylane.consumer")

MESSAGES_PER_TURN = 256
NOT_ITERATED_MS = 10_000
"""Log a warning if messages wait for this long and the consumer, which has no handler, is never iterated."""
NOT_ITERATED_REPEAT_MS = 600_000
HANDOVER_WARN_MS = 5_000
"""Log a warning if the loop body delays a hand-over by more than this after `handover_ms`."""


class Stream:
    """
    Hands messages out one by one, in the order of their offsets within each partition.

    Args:
        handover_ms: the time that acks of taken messages have in any case when their partition is handed over.
        check: raises if the caller runs in another event loop than the consumer.
    """

    def __init__(self, *, clock: Clock, handover_ms: int, check: Callable[[], None]) -> None:
        self._check = check
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None
        """The task that iterates: the last one that asked for a message."""
        self._clients: set[PullClient] = set()
        """The clients whose messages came here, until they are handed over."""
        self._waiting: deque[Message] = deque()
        self._nacked = Nacked()
        self._boot_ns = clock.boot_ns
        self._handover_ms = handover_ms
        self._work = asyncio.Event()
        self._asked = asyncio.Event()
        """Set while the user waits for a message; otherwise the loop body runs, with the messages taken."""
        self._turn_left = MESSAGES_PER_TURN
        self._error: BaseException | None = None
        self._closed = False
        self._in_hand: Message | None = None
        """The message that the loop body was given last, while it runs."""
        self._seen: Message | None = None
        """`_in_hand` at the last check; `_seen_ms` says since when."""
        self._seen_ms = 0
        self._idle_since_ms: int | None = None
        """The boot milliseconds since which messages wait and no iteration takes them; None while none wait so."""
        self._iterated = False
        self._log_throttle = LogThrottle(runner="body of the loop", done="is left by the loop")
        self._leaving = asyncio.Event()

    def put(self, messages: list[Message]) -> None:
        """Add messages of one partition."""
        if messages:
            self._clients.add(messages[0].delivery.client)  # type: ignore[union-attr]
            self._waiting.extend(messages)
        self._work.set()

    async def next(self) -> Message:
        """
        The next message whose lease has not ended.

        Raises:
            StopAsyncIteration: the consumer is closed.
            OtherLoopError: it was opened in another event loop.
            OtherTaskError: another task iterates.
        """
        task = asyncio.current_task(self._loop)
        if task is not self._task or self._asked.is_set():
            self._take_over(task)
        if not self._waiting:
            self._check()
        self._asked.set()
        self._iterated = True
        self._in_hand = None
        try:
            while True:
                self._turn_left -= 1
                if not self._turn_left:
                    self._turn_left = MESSAGES_PER_TURN
                    await asyncio.sleep(0)
                if self._error is not None:
                    raise self._error
                if self._closed:
                    raise StopAsyncIteration
                message = self._nacked.take(self._boot_ns()) if self._nacked else None
                if message is not None:
                    client_of(message).in_lanes.add(message.offset)
                elif self._waiting:
                    message = self._waiting.popleft()
                    if self._nacked and self._nacked.hold(message):
                        continue
                else:
                    await self._wait_for_work()
                    continue
                client: PullClient = message.delivery  # type: ignore[assignment]
                if self._boot_ns() < client.deadline_ns:
                    client.taken(message)
                    self._in_hand = message
                    return message
                client.forget(1)
                if self._nacked:
                    self.acked_again(message)
        finally:
            self._asked.clear()

    async def _wait_for_work(self) -> None:
        """Wait for a message to arrive, or to be due again."""
        self._work.clear()
        due_ns = self._nacked.next_ns()
        left_s = None if due_ns is None else max(0.0, (due_ns - self._boot_ns()) / 1e9)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._work.wait()

    # ── messages given back ──────────────────────────────────────────────────────────────────────────
    def nack(self, message: Message, after_s: float) -> None:
        """Hand a message out again in `after_s`, and later ones of its key only once it is acked.  Raises ConfigError."""
        wait_ms = wait_ms_of(after_s)
        message.attempt += 1
        self._nacked.nack(message, self._boot_ns() + wait_ms * 1_000_000)
        self._work.set()

    def acked_again(self, message: Message) -> None:
        """Let the next message of a lane be handed out."""
        if self._nacked.acked(message):
            self._work.set()

    def _take_over(self, task: asyncio.Task[Any] | None) -> None:
        """
        Let `task` iterate in place of the task that iterated before.

        A task of `next` alone, as `asyncio.wait_for` makes one on Python 3.11, takes a message for the task that awaits it.

        Raises:
            OtherLoopError: the consumer was opened in another event loop.
            OtherTaskError: another task waits for a message, or it runs and has not acked a message that it took.
        """
        self._check()
        if self._asked.is_set():
            raise OtherTaskError("another task waits for the next message of this consumer")
        if self._task is not None and not self._task.done():
            if task is not None and getattr(task.get_coro(), "cr_code", None) is _NEXT:
                return
            here = len(self._waiting) + self._nacked.waiting
            unacked = sum(client.outstanding for client in self._clients) - here
            if unacked:
                raise OtherTaskError(
                    f"another task iterates over this consumer: it took {counted(unacked, 'message')} "
                    "that it has not acked",
                    unacked=unacked,
                )
        self._task = task

    async def quiesce(self, client: PullClient) -> None:
        """
        Forget the waiting messages of `client`'s partition, and wait until the user is done with the taken ones.

        That is when all of them are acked; or when the user asks for the next message after `handover_ms`, or after the
        end of the lease; or after `leave`.
        """
        kept = deque(
            message
            for message in self._waiting
            if message.delivery.client is not client  # type: ignore[union-attr]
        )
        given_back = self._nacked.drop(client.partition_id)
        client.forget(len(self._waiting) - len(kept) + given_back)
        self._waiting = kept
        try:
            await self._wait_for_acks(client)
        finally:
            self._clients.discard(client)

    async def _wait_for_acks(self, client: PullClient) -> None:
        async with Race() as race:
            race.start(client.wait_handled())
            race.start(self._leaving.wait())
            until_ms = self._boot_ns() // 1_000_000 + self._handover_ms
            while (left_ms := min(until_ms - self._boot_ns() // 1_000_000, client.left_ms)) > 0:
                if await race.first(left_ms):  # the lease may have been renewed meanwhile
                    return
            if await race.first(0) or self._asked.is_set():
                return
            race.start(self._asked.wait())
            if not await race.first(HANDOVER_WARN_MS):
                log.warning(
                    "partition %d is wanted elsewhere, and %d of its messages are taken and not acked; it is "
                    "handed over once they are acked or the next message is asked for",
                    client.partition_id, client.outstanding,
                )  # fmt: skip
                await race.first()

    async def finish(self) -> None:
        """Hand out nothing more, and wait for the loop body to ask for the next message, `handover_ms` at most."""
        self._closed = True
        self._work.set()
        if self._asked.is_set():
            return
        async with Race() as race:
            race.start(self._asked.wait())
            await race.first(self._handover_ms)

    def look(self) -> None:
        """Log a loop body that runs for long, or a consumer that is never iterated.  Call it every second or so."""
        now_ms = self._boot_ns() // 1_000_000
        if self._in_hand is not None and self._in_hand is self._seen:
            line = self._log_throttle.running(self._seen, self._seen_ms, now_ms)
        else:
            line = None if self._seen is None else self._log_throttle.stopped(self._seen, now_ms)
            self._seen, self._seen_ms = self._in_hand, now_ms
        if line is not None:
            log.warning("%s", line.text)
        if self._waiting and not self._iterated:
            self._warn_not_iterated(now_ms)

    def _warn_not_iterated(self, now_ms: int) -> None:
        if self._idle_since_ms is None:
            self._idle_since_ms = now_ms
        elif now_ms - self._idle_since_ms >= NOT_ITERATED_MS:
            self._idle_since_ms = now_ms + NOT_ITERATED_REPEAT_MS
            log.warning(
                "a consumer has no handler and is not iterated: %s of %s wait, and no other consumer gets "
                "its partitions; give it handler=, or use: async for message in consumer",
                counted(len(self._waiting), "message"), self._waiting[0].subject,
            )  # fmt: skip

    def leave(self) -> None:
        """The consumer closes, and takes no more acks: no hand-over waits for taken messages any more."""
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


_NEXT = Stream.next.__code__
