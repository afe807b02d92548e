"""A pull client as its parts see it: its lease, how far its partition is pulled and acked, and what it is told."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ...protocol.backoff import Pauses
from ...protocol.clock import Clock
from ...protocol.errors import KeylaneError
from ...protocol.frames import Acked
from ...protocol.log_filter import LogFilter
from ...protocol.message import Message
from ...protocol.parked import Failure
from ...rpc.client import BrokerClient
from ...rpc.connections import Connections
from ...rpc.home import Home
from ..delivery.pulled_batch import PulledBatch
from ..log_names import partition_name
from ..parking.key_parking import KeyParking
from ..pull_room import RoomShare
from ..settings import ConsumerSettings
from ..unreached import NO_CONNECTION
from .fetch_offsets import FetchOffsets
from .lifetime import ANSWERED, Lifetime
from .messages_in_flight import MessagesInFlight
from .progress import Position, PullProgress
from .pull_chain import PullChain
from .pull_gate import PAUSED, PullGate
from .pull_owner import PullOwner

log = logging.getLogger("keylane.consumer")
WARN_AFTER = 8
"""Failures of pulls in a row, after about 5 s of pauses."""


class PullViews(ABC):
    """What is read of a pull client, and what it is told by those that it is made of."""

    broker: BrokerClient
    """The client of the partition's broker."""
    broker_group: str
    """That of the partition."""
    deadline_ns: int
    """No handler starts after it."""
    group: str
    queue: int
    logic_start: int
    partition_id: int
    exclusive: bool
    respects_range_limit: bool
    codec: Any
    owner: PullOwner
    note_failed: Callable[[Message, Failure], None]
    """Has the broker keep how often a message has failed, and show why."""
    note_hangs: Callable[[Message, Failure, int], None]
    """Has the broker show that a message has been with its handler, or the program, for a number of milliseconds."""
    boot_ns: Callable[[], int]
    renewal_ms: float
    """Milliseconds between two requests that renew what handlers have."""
    life: Lifetime
    gate: PullGate
    parking: KeyParking
    _acking: asyncio.Task[None]
    _acks: Any
    """An AckSender."""
    _carefully: asyncio.Task[None] | None
    _pulling: asyncio.Task[None]
    _room: RoomShare
    _careful: Any
    """A CarefulHandOut, or None."""
    _chain: PullChain
    _clock: Clock
    _connections: Connections
    _in_flight: MessagesInFlight
    _offsets: FetchOffsets
    _progress: PullProgress
    _settings: ConsumerSettings
    _subject: str
    _troubles: LogFilter
    _pauses: Pauses
    no_connection_since_ms: int | None = None
    """Since when no call of the partition has got at its broker, by the boot clock; None: the last one did."""

    def note_unanswered(self, error: KeylaneError) -> None:
        """Note why a call of the partition failed."""
        if not isinstance(error, NO_CONNECTION):
            self.no_connection_since_ms = None
        elif self.no_connection_since_ms is None:
            self.no_connection_since_ms = self._clock.boot_ms()

    @property
    def has_connection(self) -> bool:
        """Whether the last call of the partition got at its broker; False also before the first."""
        return self.no_connection_since_ms is None and self.life.state in ANSWERED

    def _note_pull_failed(self, error: KeylaneError) -> None:
        """Show why nothing is pulled; after WARN_AFTER failures in a row the log has it as a warning."""
        self.waiting_for = error.message
        self.note_unanswered(error)
        level = self._trouble_level
        if line := self._troubles.met(error.message, self._clock.boot_ms(), level):
            log.log(level, "%s: %s", self.log_name, line)

    def _note_recovered(self) -> None:
        """Note that a pull has succeeded after others that failed."""
        level = self._trouble_level
        self._pauses.reset()
        if failures := self._troubles.over(self._clock.boot_ms(), logging.INFO, logging.WARNING):
            log.log(level, "%s: pulls succeed again, after %s", self.log_name, failures)

    @property
    def _trouble_level(self) -> int:
        return logging.WARNING if self._pauses.failures >= WARN_AFTER else logging.INFO

    @property
    def log_name(self) -> str:
        """Subject, partition and group, for log lines."""
        return partition_name(self._subject, self.partition_id, self.group)

    @property
    def fenced(self) -> bool:
        """True once the broker has seen a higher token."""
        return self.life.fenced

    @property
    def lapsed(self) -> bool:
        """True once the right to the partition is lost for good: fenced, or past the end of the lease."""
        return self.life.lapsed(self._clock.boot_ms())

    @property
    def left_ms(self) -> int:
        """Milliseconds until the lease ends."""
        return self.life.left_ms(self._clock.boot_ms())

    @property
    def renewed_ms(self) -> int:
        """The boot time at which the last heartbeat that renewed the lease was sent."""
        return self.life.lease_until_ms - self._settings.ttl_ms + self._settings.margin_ms

    @property
    def cursor(self) -> int:
        """The offset below which the broker has an ack of every message."""
        return self._offsets.cursor

    @property
    def acked_to_end(self) -> bool:
        """True when the partition is sealed, and its group has acked it to the end."""
        return self._offsets.drained

    @property
    def drained(self) -> bool:
        """True when it is acked to the end, and no parked message is with handlers."""
        return self._offsets.drained and not self.parking.busy

    @property
    def has_messages_out(self) -> bool:
        """True while a message is with a handler, or waits for one or for its next try."""
        return self._in_flight.count > 0

    @property
    def is_careful(self) -> bool:
        """True while messages that may have ended the process of an earlier owner are handled one at a time."""
        return not (self._careful is None or self._careful.is_over)

    @property
    def home(self) -> Home:
        """Where the consumer is open: one for each consumer."""
        return self._connections.home

    @property
    def has_parked(self) -> bool:
        """True if messages may be parked on the partition."""
        return self.parking.has_parked

    def knows_parked(self, version: int) -> bool:
        """True if `check_parked` has nothing to learn."""
        return version <= self.parking.version

    @property
    def paused(self) -> bool:
        """True while the user has paused the partition."""
        return PAUSED in self.gate.reasons

    @property
    def position(self) -> Position:
        """How far the partition is pulled and acked."""
        offsets = self._offsets
        return self._progress.position(offsets.next_offset, offsets.cursor, self._clock.wall_ns())

    @property
    def next_offset(self) -> int:
        """The first offset that is not pulled."""
        return self._offsets.next_offset

    @property
    def missed(self) -> int:
        """As `FetchOffsets.missed`."""
        return self._offsets.missed

    @property
    def outstanding(self) -> int:
        """Messages handed out and not yet handled or forgotten."""
        return self._in_flight.count

    async def wait_handled(self) -> None:
        """Wait until every message handed out is handled or forgotten."""
        await self._in_flight.wait_until_empty()

    @property
    def sealed(self) -> bool:
        """True if the partition ends: those that continue it wait until the group has acked all of it."""
        return self._offsets.end_offset is not None

    @property
    def holds_fence(self) -> bool:
        """True while the broker has the fence, and the lease has not ended."""
        return self._offsets.begun and not self.lapsed

    @property
    def is_idle(self) -> bool:
        """
        True while the broker is known to have acks of all that was pulled, and a pull waits.

        The broker holds the pull lock for the time of the pull.  What is parked is acked by that: the next ack tells it.
        """
        offsets = self._offsets
        return (
            self._chain.is_under_way
            and not self.has_messages_out
            and offsets.cursor >= offsets.next_offset
        )

    # ── an end without a hand-over ───────────────────────────────────────────────────────────────────
    def abandon(self) -> None:
        """End what is left of it, without a word to the broker: its hand-over has failed.  A second call changes nothing."""
        self._cancel_tasks()
        self._acks.end()
        self._room.leave()

    def _cancel_tasks(self) -> list[asyncio.Task[None]]:
        tasks = [self._pulling, self._acking, *self.parking.stop()]
        if self._carefully is not None:
            tasks.append(self._carefully)
        for task in tasks:
            task.cancel()
        return tasks

    # ── what handlers have ───────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def held(self) -> list[Message]:
        """The messages that the next request renews."""

    @abstractmethod
    def renewed(self, messages: list[Message], sent_ns: int) -> None:
        """Note that a request made at `sent_ns` has renewed messages."""

    # ── what it is told ──────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def acked_to(self, answer: Acked) -> None:
        """Note that acks are durable."""

    async def check_parked(self, version: int) -> None:
        """Learn what an operator has changed, if a version of the broker's is newer than the one that is known."""
        await self.parking.check(version)

    @abstractmethod
    def done(self, offset: int) -> None:
        """Note that the message at `offset` is handled."""

    @abstractmethod
    def forget(self, count: int) -> None:
        """Note that `count` of the messages handed out will not be handled here."""

    @abstractmethod
    def blocks(self, message: Message, failure: Failure) -> None:
        """Have the broker show why a message holds others up, with the next ack."""

    @abstractmethod
    def park(self, message: Message, failure: Failure, waiting: list[Message]) -> None:
        """Set a message aside that failed too often, with those of its key that wait behind it."""

    @abstractmethod
    def bury(self, message: Message, failure: Failure) -> None:
        """Set a message aside alone: later ones of its key go on."""

    @abstractmethod
    def retry(self, message: Message, failure: Failure, pause_ms: int) -> None:
        """Set a message aside alone until its next try, in `pause_ms`: later ones of its key go on."""

    @abstractmethod
    def divert(self, messages: list[Message]) -> list[Message]:
        """Park those of messages that are counted as handed out whose keys are parked; returns the others."""

    @abstractmethod
    def leave_out_parked(self, batch: PulledBatch) -> None:
        """Park the rows of a batch, which are counted as handed out, whose keys are parked."""

    @abstractmethod
    def give(self, messages: list[Message]) -> None:
        """Give messages to handlers that are counted as handed out already."""
