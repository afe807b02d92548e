"""Hands suspects out one at a time, each once its broker has durably recorded that it begins, so
that a crash accuses one message.

    pulled ─▶ SuspectQueue ─▶ begun, durable ─▶ handed out ─▶ acked, failed, or set aside ─▶ the
        next one ─▶ … ─▶ the rest, at once

Meanwhile no other message of the partition is handed out, and no suspect of another partition of
the consumer; other messages of other partitions are not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

from ...protocol.clock import Clock
from ...protocol.errors import CorruptBatchError
from ...protocol.frames import Acquired
from ...protocol.message import Message
from ...protocol.parked import Failure, crash_of
from ...protocol.text import counted
from ..delivery.client_delivery import ClientDelivery, DeliveringClient
from ..delivery.pulled_batch import PulledBatch
from ..log_names import message_name
from ..parking.key_parking import KeyParking
from ..settings import ConsumerSettings, FailurePolicy
from .ack_sender import AckSender
from .column_suspects import ColumnSuspects, SuspectPart
from .pull_gate import PullGate
from .pull_owner import PullOwner
from .suspects import CAREFUL_MS, SuspectQueue, SuspectStep

log = logging.getLogger("keylane.consumer")


LONG_MS = 1_000
"""The least time, in milliseconds, for which a suspect is waited for; otherwise the wait lasts
until the careful part ends.
"""


class CarefulClient(DeliveringClient, Protocol):
    """The further methods of a pull client that a careful hand-out needs."""

    owner: PullOwner
    gate: PullGate
    parking: KeyParking

    @property
    def log_name(self) -> str:
        """Return subject, partition and group, for log lines."""
        ...

    @property
    def next_offset(self) -> int:
        """Return the first offset that is not pulled."""
        ...

    def blocks(self, message: Message, failure: Failure) -> None:
        """Have the broker show, with the next ack, why a message holds others up."""
        ...

    def divert(self, messages: list[Message]) -> list[Message]:
        """Park the messages whose keys are parked, among those that are counted as handed out, and
        return the others.
        """
        ...

    def leave_out_parked(self, batch: PulledBatch) -> None:
        """Park the rows of a batch whose keys are parked; they are counted as handed out."""
        ...

    def give(self, messages: list[Message]) -> None:
        """Give messages that are already counted as handed out to handlers."""
        ...


class CarefulHandOut(ClientDelivery):
    """
    The messages of one partition until those that may have ended a process are handled.

    Args:
        acks: the sender of acks, which reports to the broker which message begins.
    """

    __slots__ = (
        "_acks",
        "_answer",
        "_arrived",
        "_clock",
        "_columns",
        "_ended",
        "_offset",
        "_opens",
        "_queue",
        "_settings",
        "_stored",
        "goes_first",
        "is_over",
    )

    client: CarefulClient

    def __init__(
        self,
        client: CarefulClient,
        acks: AckSender,
        answer: Acquired,
        *,
        settings: ConsumerSettings,
        clock: Clock,
    ) -> None:
        super().__init__(client)
        self._acks = acks
        self._settings = settings
        self._clock = clock
        self._queue = SuspectQueue(
            answer.suspects_upto,
            answer.begun,
            now_ms=clock.boot_ms(),
            policy=settings.failure_policy,
            tries_max=settings.tries_max,
        )
        self._arrived = asyncio.Event()
        self._ended = asyncio.Event()
        """The event that is set when the message that was begun last is handled, has failed, or is
        set aside.
        """
        self._offset = -1
        """The offset of that message."""
        self._stored: list[PulledBatch] = []
        self._opens = False
        """True once it is known that the program takes messages; until then batches are kept as
        they were stored.
        """
        self._columns: ColumnSuspects | None = None
        """The suspects, once it is known that the program takes Arrow data."""
        self._answer = answer
        self.is_over = False
        """True if messages may be handed out as they are pulled."""
        self.goes_first = True
        """True if lanes take its messages before all others, so that a suspect that was begun is
        soon with a handler, however many messages of other partitions wait. It is False once a
        suspect was not waited for, because no later one of its key may overtake it.
        """

    @staticmethod
    def has_suspects(answer: Acquired) -> bool:
        """Return True if a partition that is acquired has to be handled carefully."""
        return answer.suspects_upto > answer.cursor or bool(answer.begun)

    def put(self, messages: list[Message]) -> None:
        """Take messages that were just pulled."""
        self._queue.put(messages)
        self._arrived.set()

    def put_batch(self, batch: PulledBatch) -> None:
        """Take a batch that was just pulled and is not opened."""
        if self._opens:
            try:
                messages = batch.messages()
            except CorruptBatchError as error:
                # The batch counts as pulled: later messages would be handled without it.
                self.client.owner.fail(error)
                return
            self.put(messages)
        elif self._columns is not None:
            self._put_columns(self._columns, batch)
            self._arrived.set()
        else:
            self._stored.append(batch)

    async def run(self) -> None:
        """Hand everything out until no suspect is left."""
        client, upto = self.client, self._answer.suspects_upto
        log.warning(
            "%s: the two previous consumers ended without handing over; %s handled one at a time, "
            "for up to %d s, because one message may have ended both",
            client.log_name,
            counted(max(upto - client.cursor, 1), "message is", "messages are"),
            CAREFUL_MS // 1_000,
        )
        self._opens = await self.client.owner.takes_messages()
        stored = self._stored
        self._stored = []
        if not self._opens:
            await self._run_columns(stored)
            return
        for batch in stored:
            self.put(batch.messages())
        self._acks.hurries = True
        try:
            while not self._queue.is_over(self.client.next_offset, self._clock.boot_ms()):
                self._arrived.clear()
                step = self._queue.next()
                if step is None:
                    await self._arrived.wait()
                else:
                    await self._take(*step)
        finally:
            self._acks.hurries = False
        self.is_over = True
        self._give(self._queue.rest())

    def stop(self) -> None:
        """Hand nothing more out; the task is cancelled."""
        self.is_over = True
        stored = self._stored
        self._stored = []
        if self._columns is not None:
            stored += self._columns.rest()
        waiting = sum(batch.count for batch in stored) + len(self._queue.rest())
        self.client.forget(waiting)

    # ── Arrow data ────────────────────────────────────────────────────────────────────────────────
    async def _run_columns(self, stored: list[PulledBatch]) -> None:
        """Hand out batches that the program takes as Arrow data, in parts, as `run` does for
        messages.
        """
        client, answer = self.client, self._answer
        now_ms = self._clock.boot_ms()
        columns = self._columns = ColumnSuspects(answer.suspects_upto, answer.begun, now_ms=now_ms)
        for batch in stored:
            self._put_columns(columns, batch)
        self._acks.hurries = True
        try:
            while not columns.is_over(client.next_offset, self._clock.boot_ms()):
                self._arrived.clear()
                part = columns.next()
                if part is None:
                    await self._arrived.wait()
                else:
                    await self._try_part(part, columns.until_ms)
        finally:
            self._acks.hurries = False
        self.is_over = True
        for batch in columns.rest():
            client.owner.hand_out_batch(batch)

    def _put_columns(self, columns: ColumnSuspects, batch: PulledBatch) -> None:
        self.client.leave_out_parked(batch)
        columns.put(batch)

    async def _try_part(self, part: SuspectPart, until_ms: int) -> None:
        client = self.client
        handed = False
        try:
            if client.gate.reasons:
                await client.gate.passed()
            if part.crashes:
                self._accuse(part.batches[0].messages()[0], part.crashes)
            async with client.owner.alone.taken(CAREFUL_MS / 1000):
                await self._acks.begin(part.last, part.crashes + 1)
                self._ended.clear()
                self._offset = part.last
                handed = True
                for batch in part.batches:
                    client.owner.hand_out_batch(batch)
                await self._wait_for_end(until_ms)
        finally:
            if not handed:
                client.forget(part.count)

    def done_range(self, start: int, end: int) -> None:
        """Note that the messages `[start, end)` are handled."""
        if start <= self._offset < end:
            self._ended.set()

    # ── messages ──────────────────────────────────────────────────────────────────────────────────
    def _accuse(self, message: Message, crashes: int, then: str = "") -> None:
        """Name a message whose process ended while it was handled alone, in the log and at its
        broker.
        """
        log.warning(
            "%s: the process of its consumer ended while it was handled, %s%s",
            message_name(message),
            counted(crashes, "time"),
            then,
        )
        self.client.blocks(message, self._crash(message, crashes))

    def _crash(self, message: Message, crashes: int) -> Failure:
        times, now_ms = counted(crashes, "time"), self._clock.wall_ms()
        return crash_of(times, at_ms=now_ms, attempts=message.attempt - 1)

    async def _wait_for_end(self, until_ms: int) -> None:
        left_ms = until_ms - self._clock.boot_ms()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(left_ms, LONG_MS) / 1000):
                await self._ended.wait()

    async def _take(self, message: Message, step: SuspectStep) -> None:
        crashes = self._queue.crashes.get(message.offset, 0)
        if crashes:
            ends = step is SuspectStep.SET_ASIDE
            self._accuse(message, crashes, "; it is set aside" if ends else "")
        if step is SuspectStep.SET_ASIDE:
            self._set_aside(message, crashes)
        elif step is SuspectStep.PLAIN or message.key in self.client.parking.keys:
            message.delivery = self  # its end lets a later one of its key begin carefully
            self.goes_first, first = False, self.goes_first
            self._give([message])
            self.goes_first = first
        else:
            await self._try_alone(message)

    async def _try_alone(self, message: Message) -> None:
        client, queue, offset = self.client, self._queue, message.offset
        message.delivery = self
        handed = False
        try:
            if client.gate.reasons:
                await client.gate.passed()
            async with client.owner.alone.taken(CAREFUL_MS / 1000):
                await self._acks.begin(offset, queue.alone_crashes(offset))
                self._ended.clear()
                self._offset = offset
                handed = True
                if not self._give([message]):
                    return  # its key was parked meanwhile
                await self._wait_for_end(queue.until_ms)
                self.goes_first &= self._ended.is_set()
                beside = queue.beside_crashes(offset)
                if not self._ended.is_set() and beside < queue.alone_crashes(offset):
                    await self._acks.begin(offset, beside)
        finally:
            if not handed:
                client.forget(1)

    def _set_aside(self, message: Message, crashes: int) -> None:
        failure = self._crash(message, crashes)
        if message.key and self._settings.on_failure is FailurePolicy.PARK:
            self.client.park(message, failure, [])
        else:
            self.client.bury(message, failure)

    def _give(self, messages: list[Message]) -> bool:
        """Hand messages out like any others, except those of parked keys, which are parked, and
        return True if any are left.
        """
        left = self.client.divert(messages)
        if left:
            self.client.give(left)
        return bool(left)

    # ── as a delivery of messages ─────────────────────────────────────────────────────────────────
    def done(self, offset: int) -> None:
        """Note that the message at `offset` is handled."""
        super().done(offset)
        self._end(offset)

    def forget(self, count: int) -> None:
        """Note that `count` of the messages will not be handled here, because the lease ends."""
        super().forget(count)
        self._ended.set()

    def note_failed(self, message: Message, failure: Failure) -> None:
        """Have the broker record how often a message has failed: it did not end its process."""
        super().note_failed(message, failure)
        self._queue.failed(message)
        if message.offset == self._offset:
            self._ended.set()

    def park(self, message: Message, failure: Failure, waiting: list[Message]) -> None:
        """Set a message aside that failed too often, with those of its key that wait after it."""
        super().park(message, failure, waiting)
        self._end(message.offset)

    def bury(self, message: Message, failure: Failure) -> None:
        """Set a message aside alone, so that later ones of its key continue."""
        super().bury(message, failure)
        self._end(message.offset)

    def retry(self, message: Message, failure: Failure, pause_ms: int) -> None:
        """Set a message aside alone until its next try, so that later ones of its key continue."""
        super().retry(message, failure, pause_ms)
        self._end(message.offset)

    def _end(self, offset: int) -> None:
        self._queue.ended(offset)
        if offset == self._offset:
            self._ended.set()
