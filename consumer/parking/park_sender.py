"""Sends the changes of a partition's parked messages to its broker, in order, until they are
durable.

    park, done, free ─▶ ParkQueue ─▶ ChangeParked ─▶ durable: confirmed
                            ▲             │ failed: sent again; no room: with fewer, then waits
                            ╰─────────────╯

Invariant
    Messages that the broker has no room to park stay here, not acked; pulls wait while there are
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
from ...protocol.parked import AskedChange, FailAgain, Failure, ParkKey, Shift, encode_parked
from .context import ParkContext
from .park_queue import ParkQueue, or_bury

log = logging.getLogger("keylane.consumer")

WAITING_MAX = 10_000
"""The largest number of messages that wait to be parked at the broker; their values are not
kept.
"""

NextTries = tuple[tuple[int, int, int, int], ...]


class ParkSender:
    """The changes of one partition that are not durable yet."""

    def __init__(self, context: ParkContext) -> None:
        self._context = context
        self._queue = ParkQueue()
        self._due = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        """The event that is set when a request is durable."""

    @property
    def busy(self) -> bool:
        """Return True while a change is not durable."""
        return bool(self._queue)

    @property
    def has_room(self) -> bool:
        """Return True if more messages may wait to be parked."""
        return self._queue.messages < WAITING_MAX

    async def wait_for_room(self) -> None:
        """Wait while too many messages wait to be parked."""
        while not self.has_room:
            self._room.clear()
            await self._room.wait()

    def parks(self, key: ParkKey) -> bool:
        """Return True if messages of this key wait to be parked."""
        return self._queue.parks(key)

    def stops(self, key: ParkKey) -> bool:
        """Return True if a message of this key has failed and waits to be parked, which ends the
        key's redrive.
        """
        return self._queue.stops(key)

    # ── changes ───────────────────────────────────────────────────────────────────────────────────
    def park(
        self,
        key: ParkKey,
        offsets: list[int],
        failure: Failure | None,
        confirmed: Callable[[], None] | None = None,
        *,
        next_try_ms: int | None = None,
    ) -> None:
        """
        Park messages of a key.

        Args:
            offsets: the sorted offsets, of the partition itself; none if they are already parked
                there.
            failure: the failure of the first of them; None: they follow one that failed.
            confirmed: called when they are parked durably.
            next_try_ms: the time at which the message is tried again, if it waits for retry, in
                milliseconds since 1970.
        """
        self._queue.park(key, offsets, failure, confirmed, next_try_ms=next_try_ms)
        self._send_soon()

    def unpark(
        self, key: ParkKey, source: int, start: int, end: int, confirmed: Callable[[], None]
    ) -> None:
        """Take redriven messages `[start, end)` of a source out: they are handled, or no longer
        stored.
        """
        self._queue.unpark(key, source, start, end, confirmed)
        self._send_soon()

    def shift(
        self, change: Shift, confirmed: Callable[[], None], *, next_try_ms: int | None = None
    ) -> None:
        """Let messages wait for another retry, or become dead letters."""
        self._queue.shift(change, confirmed, next_try_ms=next_try_ms)
        self._send_soon()

    def fail_again(self, change: FailAgain, confirmed: Callable[[], None]) -> None:
        """Keep parked messages without an order parked that failed again."""
        self._queue.add(change, confirmed)
        self._send_soon()

    def free(self, key: ParkKey, confirmed: Callable[[], None]) -> None:
        """End the parking of a key that has no parked messages left."""
        self._queue.free(key, confirmed)
        self._send_soon()

    # ── requests ──────────────────────────────────────────────────────────────────────────────────
    async def first_rows(self, key: ParkKey, count: int, *, first: int = 0) -> ParkedRows:
        """Return the places of parked messages of a key, after its first `first` ranges."""
        context = self._context
        answer, _ = await context.client.broker.call(ReadParked(*context.who, key, count, first))
        assert isinstance(answer, ParkedRows)
        return answer

    async def put_edits_in(
        self, key: ParkKey, edited: Collection[tuple[int, int]], messages: Iterable[Message]
    ) -> None:
        """Replace messages by their versions that an operator has edited; `edited` has their
        sources and offsets.
        """
        context = self._context
        number, group = context.who[:2]
        for message in messages:
            source, offset = message.partition_id, message.offset
            if (source, offset) in edited:
                ask = ReadEdited(number, group, key, source, offset)
                answer, value = await context.client.broker.call(ask)
                assert isinstance(answer, ParkedEdited)
                if answer.properties is not None:
                    message.value = bytes(value)
                    message.packed_properties = answer.properties

    async def send_now(self, changes: Iterable[AskedChange], next_tries: NextTries = ()) -> int:
        """Make durable changes that do not wait for others, and return the broker's version. Raises
        KeylaneError.
        """
        context = self._context
        payload = encode_parked(list(changes))
        ask = ChangeParked(*context.who, next_tries)
        answer, _ = await context.client.broker.call(ask, payload)
        assert isinstance(answer, ParkedChanged)
        return answer.parked_version

    def _send_soon(self) -> None:
        self._due.set()
        if self._sending is None:
            self._sending = self._context.spawn(self._run, "park")

    async def _run(self) -> None:
        pauses = self._context.settings.backoff.pauses(self._context.rng)
        troubles = LogFilter()
        linger_s = self._context.settings.ack_linger_ms / 1000
        while True:
            await self._due.wait()
            await asyncio.sleep(linger_s)
            self._due.clear()
            try:
                while self._queue:
                    await self._send()
                    pauses.reset()
                    self._context.log_recovery(troubles, "parked messages")
                    if self._queue and not self._queue.is_long and not self._queue.full:
                        await asyncio.sleep(linger_s)  # for others that arrive meanwhile
                self._context.client.settled()
            except FencedError:
                raise
            except KeylaneError as error:
                full = error.reason is Reason.PARK_FULL
                level = logging.WARNING if full else logging.INFO
                self._context.log_failure(troubles, "parked messages", error, level)
                self._due.set()
                await asyncio.sleep(pauses.next_ms() / 1000)

    async def _send(self) -> None:
        """
        Send one request.

        Raises:
            OverloadedError: the broker can park no more now; try again in a while.
            KeylaneError: the request failed, and may be sent again.
        """
        changes = self._queue.take()
        try:
            buries = self._context.owner.buries_when_full
            asked = [or_bury(change) for change in changes] if buries else changes
            await self.send_now(asked, self._queue.next_tries(self._context.partition_id))
        except OverloadedError as error:
            if error.reason is not Reason.PARK_FULL:
                raise
            waited = self._queue.full and len(changes) == 1
            self._queue.refused()
            if waited:
                raise
        except StaleRouteError as error:
            if error.reason is not Reason.PARK_MOVED:
                raise
            # The children have them: the changes left here have no effect any more.
            self._queue.confirmed()
        else:
            self._queue.confirmed()
        self._room.set()

    async def flush(self) -> None:
        """Send all remaining changes; those for which the broker has no room are left out."""
        while self._queue:
            try:
                await self._send()
            except OverloadedError as error:
                if error.reason is not Reason.PARK_FULL:
                    raise
                return
