"""Everything that a consumer knows of one partition under one token: one value. Pure.

Only `step` changes it. Its parts are values of their own, in files of their own; this one says what
belongs together.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from ...protocol.backoff import Backoff
from ...protocol.message import Message
from ...protocol.offsets import AckedOffsets
from ...protocol.routing import ConsumeStrategy
from ..settings import AckMode, ConsumerSettings
from .acks import PendingAcks
from .batches import PartitionBatches
from .flights import Flights
from .lanes import KeyLanes
from .offsets import PullOffsets
from .parking import PartitionParking
from .ready import FailureOutcome, Note, Request
from .redrive import RedriveWindows
from .stored import PartitionColumns
from .suspects import SuspectMessages
from .tenure import HeldLease, SessionPhase, Tenure

NEVER_FULL = -1


class CallSlot:
    """Whether a request of a kind is in flight, and when the next one may be sent."""

    __slots__ = ("begun_ms", "failures", "is_in_flight", "not_before_ms")

    def __init__(self) -> None:
        self.is_in_flight = False
        self.begun_ms = 0
        """When the last one was sent."""
        self.not_before_ms = 0
        self.failures = 0

    def begin(self, now_ms: int) -> bool:
        """Return True if a request may be sent, and record that it is."""
        if self.is_in_flight or now_ms < self.not_before_ms:
            return False
        self.is_in_flight = True
        self.begun_ms = now_ms
        return True

    def end(self) -> None:
        """Record an answer."""
        self.is_in_flight = False
        self.failures = self.not_before_ms = 0

    def fail(self, backoff: Backoff, rng: random.Random, now_ms: int) -> None:
        """Record a failure; the next request waits."""
        self.is_in_flight = False
        self.failures += 1
        self.not_before_ms = now_ms + backoff.wait_ms(self.failures, rng)


class Calls:
    """The kinds of requests of which one is in flight at a time."""

    __slots__ = ("ack", "acquire", "change", "every", "leave", "list_keys", "pull", "release")

    def __init__(self) -> None:
        self.acquire = CallSlot()
        self.pull = CallSlot()
        self.ack = CallSlot()
        self.change = CallSlot()
        self.list_keys = CallSlot()
        self.leave = CallSlot()
        self.release = CallSlot()
        self.every = (
            self.acquire,
            self.pull,
            self.ack,
            self.change,
            self.list_keys,
            self.leave,
            self.release,
        )


class Intake:
    """How much of a partition was pulled and has not ended here."""

    __slots__ = ("earlier_tries", "held", "is_superfluous", "resume_at")

    def __init__(self, is_superfluous: Callable[[Message], bool] | None) -> None:
        self.is_superfluous = is_superfluous
        self.held = 0
        """The number of messages."""
        self.resume_at = NEVER_FULL
        """From the limit on, the number at which pulls go on: half of the limit."""
        self.earlier_tries: dict[int, int] = {}
        """The failed tries under earlier owners, by offset, of messages that are not opened."""

    def has_room(self, limit: int) -> bool:
        """Return True if more messages may be pulled."""
        if self.held >= limit:
            self.resume_at = limit // 2
        elif self.held <= self.resume_at:
            self.resume_at = NEVER_FULL
        return self.resume_at == NEVER_FULL


class PartitionSession:
    """
    The state of one partition under one token.

    Args:
        lease: partition id, group, session and token.
        rng: for the pauses.
        epoch_ms: the calendar's time at 0 of the boot clock, in milliseconds since 1970.
        rejects: the filter, for messages of parked keys; None: all are wanted.
        redrives_here: False if this consumer cannot handle redriven messages.
        has_ancestors: True if the partition has parents.
        in_batches: True: a handler gets up to `max_records` messages at once.
        by_hand: True: a program takes messages and acks them itself.
        by_column: True: the program takes rows as columns.
        acked: for a broadcast consumer, its acks of the partition, which the session adds to.
        is_superfluous: for a broadcast consumer, returns True for a row whose original message was
            handled; None: there are no such rows.
        has_callbacks: True: a hand-over waits for `ReleaseAllowed` before it flushes.
    """

    __slots__ = (
        "acks",
        "calls",
        "flights",
        "intake",
        "is_plain",
        "lanes",
        "next_timer_ms",
        "offsets",
        "output",
        "parking",
        "redrives",
        "rng",
        "settings",
        "suspects",
        "tenure",
    )

    def __init__(
        self,
        lease: HeldLease,
        settings: ConsumerSettings,
        rng: random.Random,
        *,
        epoch_ms: int = 0,
        rejects: Callable[[Message], bool] | None = None,
        redrives_here: bool = True,
        has_ancestors: bool = False,
        in_batches: bool = False,
        by_hand: bool = False,
        by_column: bool = False,
        acked: AckedOffsets | None = None,
        is_superfluous: Callable[[Message], bool] | None = None,
        has_callbacks: bool = False,
    ) -> None:
        is_shared = settings.consume_strategy is ConsumeStrategy.SHARED
        self.settings = settings
        self.rng = rng
        self.tenure = Tenure(lease, epoch_ms, may_release=not has_callbacks)
        self.intake = Intake(is_superfluous)
        self.offsets = PullOffsets()
        self.acks = PendingAcks()
        batches = (
            PartitionBatches(settings.max_records, settings.max_wait_ms) if in_batches else None
        )
        self.lanes = KeyLanes(
            is_ordered=not is_shared,
            batches=batches,
            columns=PartitionColumns() if by_column else None,
        )
        self.parking = PartitionParking(rejects, has_ancestors=has_ancestors)
        self.redrives = RedriveWindows(is_allowed=redrives_here)
        self.flights = Flights(settings.in_flight_ms, is_shared=is_shared, by_hand=by_hand)
        self.suspects: SuspectMessages | None
        self.is_plain: bool
        """True if a message that is handed out or handled needs nothing but its key and its
        offset.
        """
        self.set_suspects(None)
        self.calls = Calls()
        self.output = Output()
        if settings.broadcast:
            self.offsets.begin_with(AckedOffsets() if acked is None else acked)
            self.tenure.phase = SessionPhase.SERVING
            self.tenure.is_acquired = True
        self.next_timer_ms = 0
        """The time of the last `Ready`; earlier if an ack is due earlier."""

    @property
    def partition_id(self) -> int:
        """The partition's id."""
        return self.tenure.lease[0]

    def make_ack_due(self, at_ms: int) -> None:
        """Make an ack request due at `at_ms` or earlier."""
        self.acks.due_ms = min(self.acks.due_ms, at_ms)
        self.next_timer_ms = min(self.next_timer_ms, at_ms)

    def let_acks_linger(self, now_ms: int) -> None:
        """Make an ack request due at the next multiple of the linger, so that all partitions share
        one write to the socket, and one sync of the broker's disk.
        """
        linger_ms = self.settings.ack_linger_ms
        self.make_ack_due(now_ms + linger_ms - now_ms % linger_ms if linger_ms else now_ms)

    def set_suspects(self, suspects: SuspectMessages | None) -> None:
        """Begin or end the state in which messages are handed out alone."""
        self.suspects = suspects
        self.is_plain = (
            suspects is None
            and self.settings.ack is AckMode.LINGERING
            and not self.flights.is_shared
            and self.lanes.batches is None
            and self.lanes.columns is None
        )

    @property
    def may_be_bundled(self) -> bool:
        """True if workers may take messages before one of them is free: no worker waits for their
        acks, and they are not kept from other consumers of a shared group.
        """
        return self.settings.ack is AckMode.LINGERING and not self.flights.is_shared

    @property
    def count_waiting(self) -> int:
        """The number of messages of a shared group that wait for a worker."""
        lanes = self.lanes
        acked_first = len(self.acks.awaited) if self.settings.ack is AckMode.BEFORE else 0
        return self.intake.held - lanes.count_in_hand - lanes.count_retrying - acked_first

    @property
    def is_drained(self) -> bool:
        """True once the partition is sealed, its group has acked it to the end, and no parked
        message is in hand.
        """
        return self.offsets.is_acked_to_end and not self.parking and not self.redrives

    @property
    def is_idle(self) -> bool:
        """True while the broker has acks of all that was pulled, and a pull waits there, which
        keeps the pull lock and brings changes by operators. A shared group's pull brings none.
        """
        offsets, acks = self.offsets, self.acks
        return (
            self.calls.pull.is_in_flight
            and not self.flights.is_shared
            and not self.intake.held
            and offsets.cursor >= offsets.next_offset
            and not (acks.handled or acks.tries or acks.begun)
        )

    @property
    def has_ended(self) -> bool:
        """True once the session does nothing any more."""
        return self.tenure.phase is SessionPhase.ENDED


class Output:
    """What the events of a step have asked for, until `Ready` takes it."""

    __slots__ = ("hand_out", "notes", "requests")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.hand_out: list[Message] = []
        self.notes: list[Note | FailureOutcome] = []
