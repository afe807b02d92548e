"""Consumes a partition for a broadcast consumer, which reads without a lease and keeps its acks in
this process.

    READ ─▶ hand out ─▶ handled ─▶ ack queue ─▶ `AckedOffsets` of the consumer
      ▲                                            │
      ╰──────────────── nothing new ───────────────╯

Invariant
    The broker keeps no state for the consumer: no fence, no pull lock and no cursor, so it does not
    hold back retention.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

from ...protocol.backoff import Backoff
from ...protocol.batch import batch_starts
from ...protocol.errors import NotSentError, OffsetOutOfRangeError
from ...protocol.frames import Batches, Read
from ...protocol.limits import READ_WAIT_MS
from ...protocol.message import Message
from ...protocol.offsets import AckedOffsets
from ...protocol.parked import Failure
from ...protocol.text import MAYBE_OLDER_COPY, counted
from ..settings import ConsumerSettings
from .ack_sender import AckSender, release_durable
from .messages_in_flight import MessagesInFlight
from .pull_client import PullClient

log = logging.getLogger("keylane.consumer")
IDLE = Backoff(first_ms=10, max_ms=200)
"""The pauses between reads that return nothing, for brokers that do not wait for messages."""


class LocalAcks(AckSender):
    """Applies the acks of one partition to offsets kept in this process, in place of a broker."""

    def __init__(
        self,
        partition: BroadcastClient,
        acked: AckedOffsets,
        *,
        in_flight: MessagesInFlight,
        settings: ConsumerSettings,
        rng: random.Random,
    ) -> None:
        lease = (partition.partition_id, "", "", 0)
        super().__init__(partition, lease, in_flight=in_flight, settings=settings, rng=rng)
        self._acked = acked
        self._client = partition

    def record_failure(self, message: Message, failure: Failure) -> None:
        """Do nothing: failed attempts are not recorded outside this process."""

    def record_hang(self, message: Message, failure: Failure, running_ms: int) -> None:
        """Do nothing: there is no broker to report to, and the hang is already logged."""

    def _begin_request(self) -> bool:
        self._apply()
        return True

    async def _send(self) -> bool:
        self._apply()
        return True

    def _apply(self) -> None:
        request = self._request()
        try:
            for start, end in request.ack.ranges:
                self._acked.add(start, end)
            self.handled.confirm()
            self._client.advance_cursor(self._acked.cursor)
        except BaseException:
            self._requeue(request)
            raise
        self._waiters = release_durable(request) + self._waiters
        if request.is_partial:
            self.send_soon()


class BroadcastClient(PullClient):
    """
    Reads one partition for a broadcast consumer.

    Args:
        acked: the partition's handled offsets, which this client updates, and which outlive it.
        refresh: refreshes the broker addresses.
        is_superfluous: returns True for a replacement row whose original message was already
            handled; None: the partition has no such rows.
        others: see `PullClient`.
    """

    token_is_single_use = False
    respects_range_limit = False

    def __init__(
        self,
        *,
        acked: AckedOffsets,
        refresh: Callable[[], None],
        is_superfluous: Callable[[Message], bool] | None = None,
        **others: Any,
    ) -> None:
        self._acked_offsets = acked
        self._is_superfluous = is_superfluous
        self._refresh = refresh
        super().__init__(**others)
        self._idle_pauses = IDLE.pauses(self._rng)

    def _new_sender(self) -> AckSender:
        return LocalAcks(
            self,
            self._acked_offsets,
            in_flight=self._in_flight,
            settings=self._settings,
            rng=self._rng,
        )

    def advance_cursor(self, cursor: int) -> None:
        """Move the cursor: all messages below it are handled."""
        self._advance_cursor(cursor)

    async def _acquire(self) -> None:
        if self._offsets.begun:
            self._refresh()  # a request failed, so the broker may have moved
        else:
            acked = self._acked_offsets
            self._offsets.begin(acked.cursor, tuple(acked.ranges))

    async def _pull_once(self) -> None:
        await self._wait_while_held()
        await self._wait_for_capacity(self._settings.buffer_messages)
        self.waiting_for = "messages"
        wait_ms, began_ms = min(self._settings.pull_wait_ms, READ_WAIT_MS), self._clock.boot_ms()
        try:
            answer, payload = await self.broker.call(
                Read(
                    self.partition_id,
                    self._offsets.next_offset,
                    self._settings.pull_bytes,
                    wait_ms=wait_ms,
                ),
                wait_ms=wait_ms,
            )
        except OffsetOutOfRangeError as error:
            if self._offsets.next_offset < (error.first_offset or 0):
                raise
            # Unlike with a lease, a new token cannot help; only the broker's data folder can.
            raise NotSentError(
                f"the broker stores less than was read from it, and {MAYBE_OLDER_COPY}: "
                f"{error.message}"
            ) from error
        assert isinstance(answer, Batches)
        self._progress.end_offset = answer.next_offset
        await self._wait_while_held()
        for start, header in batch_starts(payload):
            if self._is_superfluous is not None:
                self._skip_superfluous_rows(
                    self._decode(payload, start, header, self), self._is_superfluous
                )
            self._open_batch(payload, start, header)
            await asyncio.sleep(0)
        if answer.sealed:
            self._set_end(answer.next_offset)
        elif payload:
            self._idle_pauses.reset()
        elif self._clock.boot_ms() - began_ms < max(wait_ms // 2, IDLE.first_ms):
            # This broker does not wait for messages.
            await asyncio.sleep(self._idle_pauses.next_pause_ms() / 1000)

    def _skip_superfluous_rows(
        self, rows: list[Message], is_superfluous: Callable[[Message], bool]
    ) -> None:
        """Count rows as handled if the messages they replace were handled."""
        next_offset = self._offsets.next_offset
        for row in rows:
            if row.offset >= next_offset and is_superfluous(row):
                self._offsets.mark_acked(row.offset, row.offset + 1)
                self._acked_offsets.add(row.offset, row.offset + 1)
        self.advance_cursor(self._acked_offsets.cursor)

    def _skip_removed(self, error: OffsetOutOfRangeError) -> None:
        first_offset = error.first_offset or 0
        start = self._offsets.next_offset
        missed = self._offsets.skip_removed(first_offset)
        self._acked_offsets.add(start, first_offset)
        log.warning(
            "%s: %s removed before a broadcast consumer got them; it continues at offset %d",
            self.log_name,
            counted(missed, "message was", "messages were"),
            first_offset,
        )

    async def _release(self) -> None:
        """Do nothing: there is no pull lock."""
