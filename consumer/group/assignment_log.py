"""Logs what becomes of a consumer's partitions: which ones it has, which leases it lost and why,
and how far it is behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable

from ...protocol.clock import Clock
from ...protocol.control import Grant
from ...protocol.errors import KeylaneError, UnreachableError
from ...rpc.race import start_task
from ..progress import Position
from ..session_shell import SessionShell
from ..settings import ConsumerSettings
from .broadcast import Broadcast
from .log_lines import (
    FENCED,
    SESSION_ENDED,
    WAITS,
    AssignmentLines,
    EndCause,
    Losses,
    Stalls,
    lapse_reason,
    source_text,
    unanswered_text,
    waiting_text,
)
from .membership import Membership

log = logging.getLogger("keylane.consumer")


class AssignmentLog:
    """Logs for one consumer."""

    def __init__(
        self, membership: Membership | Broadcast, clock: Clock, settings: ConsumerSettings
    ) -> None:
        self._membership = membership
        self._name = membership.member.name
        self._clock = clock
        self._settings = settings
        self._stalls = Stalls()
        self._losses = Losses()
        self._lines = AssignmentLines()
        self._waiting_task: asyncio.Task[None] | None = None
        """Asks which members own the partitions, for a log line."""

    def note_start(self, grant: Grant) -> None:
        """Note from whom a partition comes."""
        self._lines.note_start(int(grant.partition.partition_id), source_text(grant.previous))

    def note_end(self, client: SessionShell, cause: EndCause) -> None:
        """Note why a partition is handed over."""
        self._lines.note_end(client.partition_id, cause)
        if not cause.is_loss:
            return
        reason = FENCED if cause is EndCause.FENCED else SESSION_ENDED
        if cause is EndCause.LAPSED:
            now_ms = self._clock.boot_ms()
            reason = lapse_reason(
                silent_ms=now_ms - client.renewed_ms,
                stalled_ms=self._stalls.total_ms(client.renewed_ms, now_ms),
            )
        tenure = client.state.tenure
        self._losses.add(client.partition_id, tenure.lease.token, reason, fence=tenure.fence or 0)

    async def sleep(self, limit_ms: int, each_ms: int) -> None:
        """Sleep until the next multiple of `each_ms` on the boot clock, for at most `limit_ms`, and
        log if the event loop wakes the caller much too late.
        """
        now_ms, settings = self._clock.boot_ms(), self._settings
        # Align the checks of all consumers on the machine, so that one wake-up of the processor
        # serves many.
        sleep_ms = min(limit_ms, each_ms - now_ms % each_ms)
        self._stalls.record_sleep(now_ms, sleep_ms)
        await asyncio.sleep(sleep_ms / 1000)
        now_ms = self._clock.boot_ms()
        late_ms = self._stalls.record_wake(now_ms)
        text = self._stalls.line(
            late_ms, now_ms, ttl_ms=settings.ttl_ms, margin_ms=settings.margin_ms
        )
        if text and self._membership.member.group:  # a broadcast consumer has no leases
            log.warning("%s: %s", self._name, text)

    def log_losses(self, *, last: bool = False) -> None:
        """Log which leases were lost."""
        for text in self._losses.take_lines(self._clock.boot_ms(), last=last):
            log.warning("%s %s", self._name, text)

    def log_lag(self, positions: Collection[Position]) -> None:
        """Log how far the consumer is behind, if that is far."""
        messages = sum(position.lag_messages for position in positions)
        seconds = max((position.lag_s for position in positions), default=0.0)
        if text := self._lines.format_lag(messages, seconds, self._clock.boot_ms()):
            log.info("%s %s", self._name, text)

    def log_partitions(self, ids: Collection[int], waiting_for: str) -> None:
        """
        Log which partitions the consumer has, if they have changed.

        Args:
            ids: the ids; they may change while the metaserver is asked who has the partitions.
            waiting_for: what a suspended consumer without a partition waits for; "" otherwise.
        """
        waits_for = f"it waits for {waiting_for}" if waiting_for else WAITS
        text = self._lines.format_partitions(ids, self._clock.boot_ms(), waits_for)
        if not text or not log.isEnabledFor(logging.INFO):
            return
        if waiting_for or ids or not isinstance(self._membership, Membership):
            log.info("%s %s", self._name, text)
            return
        self.close()
        self._waiting_task = start_task(
            self._log_waiting(self._membership, ids, text), name="log waiting"
        )

    async def _log_waiting(self, membership: Membership, ids: Iterable[int], text: str) -> None:
        """Log why the consumer has no partition, and what the metaserver reports about the other
        members.
        """
        try:
            waits_for = waiting_text(await membership.group(), membership.member.client)
        except UnreachableError as error:
            waits_for = unanswered_text(error)
        except KeylaneError:
            waits_for = WAITS
        if not ids:
            log.info("%s %s", self._name, text.replace(WAITS, waits_for))

    def close(self) -> None:
        """Ask the metaserver no more."""
        if self._waiting_task is not None:
            self._waiting_task.cancel()
