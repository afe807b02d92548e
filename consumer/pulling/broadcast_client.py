"""Consumes a partition for one client alone: messages are read without a lease, and acks stay in
this process.

    READ ─▶ hand out ─▶ handled ─▶ ack queue ─▶ `AckedOffsets` of the consumer
      ▲                                            │
      ╰──────────────── nothing new ───────────────╯

Invariant
    The broker has no state of it: no fence, no pull lock, no cursor, and so no retention that
    waits.
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
"""The pauses between reads that bring nothing, where a broker does not wait."""


class LocalAcks(AckSender):
    """The acks of one partition, which are kept in this process."""

    def __init__(
        self,
        partition: BroadcastClient,
        acked: AckedOffsets,
        *,
        in_flight: MessagesInFlight,
        settings: ConsumerSettings,
        rng: random.Random,
    ) -> None:
        who = (partition.partition_id, "", "", 0)
        super().__init__(partition, who, in_flight=in_flight, settings=settings, rng=rng)
        self._acked = acked
        self._client = partition

    def failed(self, message: Message, failure: Failure) -> None:
        """Keep nothing of a failed try, which ends with this process."""

    def hangs(self, message: Message, why: Failure, running_ms: int) -> None:
        """Do nothing: no broker is notified, and the log already has it."""

    def _begin_request(self) -> bool:
        self._keep()
        return True

    async def _send(self) -> bool:
        self._keep()
        return True

    def _keep(self) -> None:
        request = self._request()
        try:
            for start, end in request.ack.ranges:
                self._acked.add(start, end)
            self.handled.confirmed()
            self._client.acked_locally(self._acked.cursor)
        except BaseException:
            self._take_back(request)
            raise
        self._waiters = release_durable(request) + self._waiters
        if request.left_over:
            self.send_soon()


class BroadcastClient(PullClient):
    """
    Reads one partition for a consumer that gets every message.

    Args:
        acked: the handled offsets of the partition: they are continued, and stay when this client
            ends.
        refresh: looks up the addresses of brokers again.
        needs_no: returns True for a message that was already handled as the message of which it was
            made; None: there are none.
        others: see `PullClient`.
    """

    token_is_single_use = False
    respects_range_limit = False

    def __init__(
        self,
        *,
        acked: AckedOffsets,
        refresh: Callable[[], None],
        needs_no: Callable[[Message], bool] | None = None,
        **others: Any,
    ) -> None:
        self._acked_here = acked
        self._needs_no = needs_no
        self._refresh = refresh
        super().__init__(**others)
        self._idle = IDLE.pauses(self._rng)

    def _new_sender(self) -> AckSender:
        return LocalAcks(
            self,
            self._acked_here,
            in_flight=self._in_flight,
            settings=self._settings,
            rng=self._rng,
        )

    def acked_locally(self, cursor: int) -> None:
        """Note that all messages below `cursor` are handled."""
        self._acked_to(cursor)

    async def _acquire(self) -> None:
        if self._offsets.begun:
            self._refresh()  # a request has failed: perhaps the broker has moved
        else:
            acked = self._acked_here
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
            # No next token would change this, as it would for the owner of a lease: only the
            # broker's own folder does.
            raise NotSentError(
                f"its broker stores less than was read there, and {MAYBE_OLDER_COPY}: "
                f"{error.message}"
            ) from error
        assert isinstance(answer, Batches)
        self._progress.end_offset = answer.next_offset
        await self._wait_while_held()
        for start, header in batch_starts(payload):
            if self._needs_no is not None:
                self._leave_out(self._decode(payload, start, header, self), self._needs_no)
            self._open_batch(payload, start, header)
            await asyncio.sleep(0)
        if answer.sealed:
            self._sealed_at(answer.next_offset)
        elif payload:
            self._idle.reset()
        elif self._clock.boot_ms() - began_ms < max(
            wait_ms // 2, IDLE.first_ms
        ):  # by a broker that does not wait
            await asyncio.sleep(self._idle.next_ms() / 1000)

    def _leave_out(self, rows: list[Message], needs_no: Callable[[Message], bool]) -> None:
        """Count rows as handled if their messages were handled."""
        next_offset = self._offsets.next_offset
        for row in rows:
            if row.offset >= next_offset and needs_no(row):
                self._offsets.leave_out(row.offset, row.offset + 1)
                self._acked_here.add(row.offset, row.offset + 1)
        self.acked_locally(self._acked_here.cursor)

    def _skip_removed(self, error: OffsetOutOfRangeError) -> None:
        first_offset = error.first_offset or 0
        start = self._offsets.next_offset
        missed = self._offsets.skip_removed(first_offset)
        self._acked_here.add(start, first_offset)
        log.warning(
            "%s: %s removed before a broadcast consumer got them; it continues at offset %d",
            self.log_name,
            counted(missed, "message was", "messages were"),
            first_offset,
        )

    async def _release(self) -> None:
        """Do nothing, because nothing is locked."""
