"""Sends changes of a partition's parked messages to its broker, in order, until they are durable.

    park, unpark, free ─▶ ParkQueue ─▶ ChangeParked ─▶ durable: confirm
                              ▲             │ failed: retry; broker full: send fewer, then wait
                              ╰─────────────╯

Invariant
    Messages that the broker cannot park stay in the queue, unacked. Pulls wait while there are
    WAITING_MAX of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable

from ...protocol.errors import FencedError, KeylaneError, OverloadedError, Reason, StaleRouteError
from ...protocol.frames import (
    ChangeParked,
    ParkedChanged,
    ParkedEdited,
    ParkedRows,
    ReadEdited,
    ReadParked,
)
from ...protocol.log_filter import LogFilter
from ...protocol.message import Message
from ...protocol.parked import FailAgain, Failure, ParkKey, RequestedChange, Shift, encode_parked
from .context import ParkContext
from .park_queue import ParkQueue, allow_dead_letter

log = logging.getLogger("keylane.consumer")

WAITING_MAX = 10_000
"""The maximum number of messages that may wait to be parked; their values are not kept in
memory.
"""

NextTries = tuple[tuple[int, int, int, int], ...]


class ParkSender:
    """Sends the changes of one partition until they are durable."""

    def __init__(self, context: ParkContext) -> None:
        self._context = context
        self._queue = ParkQueue()
        self._due = asyncio.Event()
        self._send_task: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()
        """Set when a request is durable."""

    @property
    def busy(self) -> bool:
        """True while any change is not durable."""
        return bool(self._queue)

    @property
    def has_capacity(self) -> bool:
        """True if more messages may wait to be parked."""
        return self._queue.messages < WAITING_MAX

    async def wait_for_capacity(self) -> None:
        """Wait while too many messages wait to be parked."""
        while not self.has_capacity:
            self._progress.clear()
            await self._progress.wait()

    def has_parks_of(self, key: ParkKey) -> bool:
        """Return True if messages of this key are waiting to be parked."""
        return self._queue.has_parks_of(key)

    def ends_redrive(self, key: ParkKey) -> bool:
        """Return True if a failure that ends the key's redrive is waiting to be sent to the
        broker.
        """
        return self._queue.ends_redrive(key)

    # ── changes ───────────────────────────────────────────────────────────────────────────────────
    def park(
        self,
        key: ParkKey,
        offsets: list[int],
        failure: Failure | None,
        on_durable: Callable[[], None] | None = None,
        *,
        next_try_ms: int | None = None,
    ) -> None:
        """
        Park messages of a key.

        Args:
            offsets: sorted offsets in this partition; empty if the messages are already parked.
            failure: the failure of the first message; None: the messages follow one that failed.
            on_durable: called once the change is durable.
            next_try_ms: the time of the message's next attempt, in milliseconds since 1970; None:
                it is not waiting for one.
        """
        self._queue.park(key, offsets, failure, on_durable, next_try_ms=next_try_ms)
        self._send_soon()

    def unpark(
        self, key: ParkKey, source: int, start: int, end: int, on_durable: Callable[[], None]
    ) -> None:
        """Unpark the messages `[start, end)` of a source, which are handled or no longer stored."""
        self._queue.unpark(key, source, start, end, on_durable)
        self._send_soon()

    def reschedule(
        self, change: Shift, on_durable: Callable[[], None], *, next_try_ms: int | None = None
    ) -> None:
        """Move messages to another retry, or to the dead letters."""
        self._queue.reschedule(change, on_durable, next_try_ms=next_try_ms)
        self._send_soon()

    def record_redrive_failure(self, change: FailAgain, on_durable: Callable[[], None]) -> None:
        """Record that loose messages failed again; they stay parked."""
        self._queue.add(change, on_durable)
        self._send_soon()

    def release_key(self, key: ParkKey, on_durable: Callable[[], None]) -> None:
        """Free a key that has no parked messages left."""
        self._queue.release_key(key, on_durable)
        self._send_soon()

    # ── requests ──────────────────────────────────────────────────────────────────────────────────
    async def fetch_first_rows(self, key: ParkKey, count: int, *, first: int = 0) -> ParkedRows:
        """Return the sources and offsets of a key's parked messages, after its first `first`
        ranges.
        """
        context = self._context
        answer, _ = await context.client.broker.call(ReadParked(*context.lease, key, count, first))
        assert isinstance(answer, ParkedRows)
        return answer

    async def apply_edits(
        self, key: ParkKey, edited: Collection[tuple[int, int]], messages: Iterable[Message]
    ) -> None:
        """Replace the contents of messages that an operator has edited; `edited` contains their
        sources and offsets.
        """
        context = self._context
        partition_id, group = context.lease[:2]
        for message in messages:
            source, offset = message.partition_id, message.offset
            if (source, offset) in edited:
                request = ReadEdited(partition_id, group, key, source, offset)
                answer, value = await context.client.broker.call(request)
                assert isinstance(answer, ParkedEdited)
                if answer.properties is not None:
                    message.value = bytes(value)
                    message.packed_properties = answer.properties

    async def send_now(self, changes: Iterable[RequestedChange], next_tries: NextTries = ()) -> int:
        """Send changes that need not wait for queued ones, and return the broker's version once
        they are durable. Raises KeylaneError.
        """
        context = self._context
        payload = encode_parked(list(changes))
        request = ChangeParked(*context.lease, next_tries)
        answer, _ = await context.client.broker.call(request, payload)
        assert isinstance(answer, ParkedChanged)
        return answer.parked_version

    def _send_soon(self) -> None:
        self._due.set()
        if self._send_task is None:
            self._send_task = self._context.spawn(self._run, "park")

    async def _run(self) -> None:
        pauses = self._context.settings.backoff.pauses(self._context.rng)
        failure_log = LogFilter()
        linger_s = self._context.settings.ack_linger_ms / 1000
        while True:
            await self._due.wait()
            await asyncio.sleep(linger_s)
            self._due.clear()
            try:
                while self._queue:
                    await self._send()
                    pauses.reset()
                    self._context.log_recovery(failure_log, "parked messages")
                    if self._queue and not self._queue.is_long and not self._queue.full:
                        await asyncio.sleep(linger_s)  # collect changes that arrive in the meantime
                self._context.client.check_drained()
            except FencedError:
                raise
            except KeylaneError as error:
                full = error.reason is Reason.PARK_FULL
                level = logging.WARNING if full else logging.INFO
                self._context.log_failure(failure_log, "parked messages", error, level)
                self._due.set()
                await asyncio.sleep(pauses.next_pause_ms() / 1000)

    async def _send(self) -> None:
        """
        Send one request.

        Raises:
            OverloadedError: the broker cannot park any more messages now; retry later.
            KeylaneError: the request failed, and may be retried.
        """
        changes = self._queue.take()
        try:
            requested: Iterable[RequestedChange] = changes
            if self._context.owner.dead_letters_when_full:
                requested = [allow_dead_letter(change) for change in changes]
            await self.send_now(requested, self._queue.next_tries(self._context.partition_id))
        except OverloadedError as error:
            if error.reason is not Reason.PARK_FULL:
                raise
            was_single = self._queue.full and len(changes) == 1
            self._queue.requeue_parks()
            if was_single:
                raise
        except StaleRouteError as error:
            if error.reason is not Reason.PARK_MOVED:
                raise
            # The children have adopted the messages, so these changes have no effect any more.
            self._queue.confirm()
        else:
            self._queue.confirm()
        self._progress.set()

    async def flush(self) -> None:
        """Send all remaining changes, except parks that the broker cannot accept."""
        while self._queue:
            try:
                await self._send()
            except OverloadedError as error:
                if error.reason is not Reason.PARK_FULL:
                    raise
                return
