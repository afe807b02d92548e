"""Hands out suspects one at a time, each after its broker has durably recorded that it is about to
be handled, so that a crash can be attributed to a single message.

    pulled ─▶ SuspectQueue ─▶ recorded as begun ─▶ handed out ─▶ acked, failed, or set aside
        ─▶ the next one ─▶ … ─▶ the remaining messages, all at once

Meanwhile, the partition hands out no other message, and the consumer hands out no suspect of
another partition. Other messages of other partitions are not affected.
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
from ...protocol.parked import Failure, crash_failure
from ...protocol.text import counted
from ..delivery.client_delivery import ClientDelivery, DeliveryClient
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
"""The minimum time to wait for a suspect, in milliseconds, even if the careful phase ends
earlier.
"""


class CarefulClient(DeliveryClient, Protocol):
    """The interface of a pull client to its careful hand-out."""

    owner: PullOwner
    gate: PullGate
    parking: KeyParking

    @property
    def log_name(self) -> str:
        """The subject, partition and group, for log lines."""
        ...

    @property
    def next_offset(self) -> int:
        """The first offset that has not been pulled."""
        ...

    def blocks(self, message: Message, failure: Failure) -> None:
        """Report, with the next ack, why a message blocks others."""
        ...

    def park_later_messages(self, messages: list[Message]) -> list[Message]:
        """Park messages in flight whose keys are parked, and return the others."""
        ...

    def park_rows_of_parked_keys(self, batch: PulledBatch) -> None:
        """Park the batch's in-flight rows whose keys are parked, and remove them from it."""
        ...

    def hand_out_counted(self, messages: list[Message]) -> None:
        """Pass messages that are already counted as in flight to handlers."""
        ...


class CarefulDelivery(ClientDelivery):
    """
    Hands out one partition's messages until those that may have killed a process are handled.

    Args:
        acks: the ack sender, which reports to the broker which message is about to be handled.
        answer: the broker's answer to the acquisition, which lists the suspects.
    """

    __slots__ = (
        "_acks",
        "_acquired",
        "_pulled",
        "_clock",
        "_columns",
        "_suspect_done",
        "_suspect_offset",
        "_takes_messages",
        "_queue",
        "_settings",
        "_undecoded",
        "has_priority",
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
        self._pulled = asyncio.Event()
        self._suspect_done = asyncio.Event()
        """Set when the message that was started last is handled, has failed, or is set aside."""
        self._suspect_offset = -1
        """The offset of the message that was started last."""
        self._undecoded: list[PulledBatch] = []
        self._takes_messages = False
        """True once it is known that the program takes messages; until then batches are kept
        undecoded.
        """
        self._columns: ColumnSuspects | None = None
        """The suspects, once it is known that the program takes Arrow batches."""
        self._acquired = answer
        self.is_over = False
        """True once messages are handed out as they are pulled."""
        self.has_priority = True
        """True if lanes take its messages ahead of all others, so that a suspect reaches a handler
        soon, no matter how many messages of other partitions are waiting. False after the wait for
        a suspect was given up, because no later message of its key may overtake it.
        """

    @staticmethod
    def has_suspects(answer: Acquired) -> bool:
        """Return True if an acquired partition needs a careful hand-out."""
        return answer.suspects_upto > answer.cursor or bool(answer.begun)

    def put(self, messages: list[Message]) -> None:
        """Add messages that have just been pulled."""
        self._queue.put(messages)
        self._pulled.set()

    def put_batch(self, batch: PulledBatch) -> None:
        """Add a batch that has just been pulled and is not decoded."""
        if self._takes_messages:
            try:
                messages = batch.messages()
            except CorruptBatchError as error:
                # The batch counts as pulled, so later messages would be handled without it.
                self.client.owner.fail(error)
                return
            self.put(messages)
        elif self._columns is not None:
            self._put_columns(self._columns, batch)
            self._pulled.set()
        else:
            self._undecoded.append(batch)

    async def run(self) -> None:
        """Hand out messages one at a time until no suspect is left, then all others."""
        client, upto = self.client, self._acquired.suspects_upto
        log.warning(
            "%s: the two previous owners ended without a hand-over; %s handled one at a time, "
            "for up to %d s, because one message may have killed both",
            client.log_name,
            counted(max(upto - client.cursor, 1), "message is", "messages are"),
            CAREFUL_MS // 1_000,
        )
        self._takes_messages = await self.client.owner.takes_messages()
        undecoded = self._undecoded
        self._undecoded = []
        if not self._takes_messages:
            await self._run_columns(undecoded)
            return
        for batch in undecoded:
            self.put(batch.messages())
        self._acks.skips_linger = True
        try:
            while not self._queue.is_over(self.client.next_offset, self._clock.boot_ms()):
                self._pulled.clear()
                step = self._queue.next()
                if step is None:
                    await self._pulled.wait()
                else:
                    await self._run_step(*step)
        finally:
            self._acks.skips_linger = False
        self.is_over = True
        self._hand_out(self._queue.take_remaining())

    def stop(self) -> None:
        """Stop handing out; the caller cancels the task."""
        self.is_over = True
        undecoded = self._undecoded
        self._undecoded = []
        if self._columns is not None:
            undecoded += self._columns.take_remaining()
        waiting = sum(batch.count for batch in undecoded) + len(self._queue.take_remaining())
        self.client.discard_in_flight(waiting)

    # ── Arrow data ────────────────────────────────────────────────────────────────────────────────
    async def _run_columns(self, undecoded: list[PulledBatch]) -> None:
        """Hand out Arrow data in parts, as `run` does for messages."""
        client, answer = self.client, self._acquired
        now_ms = self._clock.boot_ms()
        columns = self._columns = ColumnSuspects(answer.suspects_upto, answer.begun, now_ms=now_ms)
        for batch in undecoded:
            self._put_columns(columns, batch)
        self._acks.skips_linger = True
        try:
            while not columns.is_over(client.next_offset, self._clock.boot_ms()):
                self._pulled.clear()
                part = columns.next()
                if part is None:
                    await self._pulled.wait()
                else:
                    await self._try_part(part, columns.until_ms)
        finally:
            self._acks.skips_linger = False
        self.is_over = True
        for batch in columns.take_remaining():
            client.owner.hand_out_batch(batch)

    def _put_columns(self, columns: ColumnSuspects, batch: PulledBatch) -> None:
        self.client.park_rows_of_parked_keys(batch)
        columns.put(batch)

    async def _try_part(self, part: SuspectPart, until_ms: int) -> None:
        """Hand out a part alone, and wait until it has ended or the careful phase is over."""
        client = self.client
        current_in_flight = False
        try:
            if client.gate.reasons:
                await client.gate.wait_open()
            if part.crashes:
                self._report_suspect(part.batches[0].messages()[0], part.crashes)
            async with client.owner.alone.acquire(CAREFUL_MS / 1000):
                await self._acks.begin(part.last, part.crashes + 1)
                self._suspect_done.clear()
                self._suspect_offset = part.last
                current_in_flight = True
                for batch in part.batches:
                    client.owner.hand_out_batch(batch)
                await self._wait_for_end(until_ms)
        finally:
            if not current_in_flight:
                client.discard_in_flight(part.count)

    def mark_range_handled(self, start: int, end: int) -> None:
        """Record that the messages `[start, end)` are handled."""
        if start <= self._suspect_offset < end:
            self._suspect_done.set()

    # ── messages ──────────────────────────────────────────────────────────────────────────────────
    def _report_suspect(self, message: Message, crashes: int, suffix: str = "") -> None:
        """Report a message whose process died while handling it alone, in the log and to the
        broker.
        """
        log.warning(
            "%s: the process of its consumer ended while it was handled, %s%s",
            message_name(message),
            counted(crashes, "time"),
            suffix,
        )
        self.client.blocks(message, self._crash(message, crashes))

    def _crash(self, message: Message, crashes: int) -> Failure:
        """Return the failure to record for a message that has killed its process."""
        times, now_ms = counted(crashes, "time"), self._clock.wall_ms()
        return crash_failure(times, at_ms=now_ms, attempts=message.attempt - 1)

    async def _wait_for_end(self, until_ms: int) -> None:
        remaining_ms = until_ms - self._clock.boot_ms()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(remaining_ms, LONG_MS) / 1000):
                await self._suspect_done.wait()

    async def _run_step(self, message: Message, step: SuspectStep) -> None:
        crashes = self._queue.crashes.get(message.offset, 0)
        if crashes:
            suffix = "; it is set aside" if step is SuspectStep.SET_ASIDE else ""
            self._report_suspect(message, crashes, suffix)
        if step is SuspectStep.SET_ASIDE:
            self._set_aside(message, crashes)
        elif step is SuspectStep.PLAIN or message.key in self.client.parking.keys:
            message.delivery = self  # so that its end unblocks its key
            has_priority = self.has_priority
            self.has_priority = False
            self._hand_out([message])
            self.has_priority = has_priority
        else:
            await self._try_alone(message)

    async def _try_alone(self, message: Message) -> None:
        client, queue, offset = self.client, self._queue, message.offset
        message.delivery = self
        current_in_flight = False
        try:
            if client.gate.reasons:
                await client.gate.wait_open()
            async with client.owner.alone.acquire(CAREFUL_MS / 1000):
                await self._acks.begin(offset, queue.crashes_if_alone(offset))
                self._suspect_done.clear()
                self._suspect_offset = offset
                current_in_flight = True
                if not self._hand_out([message]):
                    return  # its key has been parked
                await self._wait_for_end(queue.until_ms)
                self.has_priority &= self._suspect_done.is_set()
                crashes = queue.crashes_if_shared(offset)
                if not self._suspect_done.is_set() and crashes < queue.crashes_if_alone(offset):
                    await self._acks.begin(offset, crashes)
        finally:
            if not current_in_flight:
                client.discard_in_flight(1)

    def _set_aside(self, message: Message, crashes: int) -> None:
        failure = self._crash(message, crashes)
        if message.key and self._settings.on_failure is FailurePolicy.PARK:
            self.client.park(message, failure, [])
        else:
            self.client.dead_letter(message, failure)

    def _hand_out(self, messages: list[Message]) -> bool:
        """Hand out messages, but park those of parked keys instead. Return True if any were handed
        out.
        """
        remaining = self.client.park_later_messages(messages)
        if remaining:
            self.client.hand_out_counted(remaining)
        return bool(remaining)

    # ── the Delivery interface ─────────────────────────────────────────────────────────────────
    def mark_handled(self, offset: int) -> None:
        """Ack the message at `offset`, which is handled."""
        super().mark_handled(offset)
        self._note_ended(offset)

    def discard_in_flight(self, count: int) -> None:
        """Stop counting `count` messages that will not be handled here, because the lease ends."""
        super().discard_in_flight(count)
        self._suspect_done.set()

    def report_failure(self, message: Message, failure: Failure) -> None:
        """Report a failed attempt to the broker: the message did not kill the process."""
        super().report_failure(message, failure)
        self._queue.block_key(message)
        if message.offset == self._suspect_offset:
            self._suspect_done.set()

    def park(self, message: Message, failure: Failure, waiting: list[Message]) -> None:
        """Park the key of a message that failed too often, together with the later messages of its
        key in `waiting`.
        """
        super().park(message, failure, waiting)
        self._note_ended(message.offset)

    def dead_letter(self, message: Message, failure: Failure) -> None:
        """Make a message a dead letter; later messages of its key continue."""
        super().dead_letter(message, failure)
        self._note_ended(message.offset)

    def retry(self, message: Message, failure: Failure, pause_ms: int) -> None:
        """Set a message aside for a retry in `pause_ms`; later messages of its key continue."""
        super().retry(message, failure, pause_ms)
        self._note_ended(message.offset)

    def _note_ended(self, offset: int) -> None:
        """Record that the message at `offset` is handled, has failed, or is set aside."""
        self._queue.unblock_key(offset)
        if offset == self._suspect_offset:
            self._suspect_done.set()
