"""Everything that a consumer knows of one partition under one token: one value. Pure.

    Tenure           until when it may do what: its phase, its lease, the hand-over
    SuspectMessages  what may have ended the process of an earlier owner
    Intake, Calls    how much is pulled, and which requests are in flight

    phase       handlers start                pulls   acks
    ACQUIRING   once it was acquired before   no      once it was acquired before
    SERVING     yes                           yes     yes
    STOPPING    no                            no      yes, unless it is fenced
    ENDED       no                            no      no

    ACQUIRING ⇄ SERVING ─ stopped, lapsed, fenced ─▶ STOPPING ─ nothing in hand, flushed ─▶ ENDED

    suspects: next message ─▶ TURN: no other suspect of the consumer runs ─▶ BEGINNING: recorded
        durably ─▶ ALONE: in hand ─▶ ACKING ─▶ the next message ─▶ … ─▶ over: messages are handed
        out freely         ╰─ it takes too long ─▶ PASSED_OVER: it is accused of less ─▶ over

Only `step` changes a session.

Invariants
    No handler starts at or after the end of the lease, and a lease that has ended is not renewed:
    another consumer may have the messages. A fence is final.
    While there are suspects, the partition has one message in hand, in the order of the offsets.
    When a process ends, only a message that was recorded as begun, with nothing beside it, is
    accused. What has ended two processes while it was alone is set aside, unless the policy blocks.
    This ends after CAREFUL_MAX messages or CAREFUL_MS, but not before an accused message.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...protocol.backoff import Backoff
from ...protocol.message import Message
from ...protocol.offsets import AckedOffsets
from ...protocol.routing import ConsumeStrategy
from ..settings import AckMode, ConsumerSettings
from .events import FailureOutcome, Note, Request
from .lanes import BatchFill, ColumnPart, KeyLanes, PartitionBatches, PartitionColumns
from .offsets import NEVER, Flights, HeldLease, PendingAcks, PullOffsets, PullSize
from .parking import CAREFUL_MS, PartitionAncestors, PartitionParking, RedriveWindows


class SessionPhase(enum.Enum):
    """What a session does."""

    ACQUIRING = enum.auto()
    """The fence must be raised at the broker, for the first time or after a failed pull."""
    SERVING = enum.auto()
    STOPPING = enum.auto()
    """The partition is handed over: running handlers end, and acks are flushed."""
    ENDED = enum.auto()


ASK_PERCENT = 30
"""What is left of a lease, as a percentage of its ttl, when its broker is asked for a promise.
Heartbeats that are answered renew the lease earlier.
"""
ASKS_PER_TTL = 6
PROMISES_PER_TTL = 2
"""A promise lasts for the ttl divided by this number."""


@dataclass(slots=True, eq=False)
class Tenure:
    """The lease of one session; all times are boot-clock milliseconds."""

    lease: HeldLease
    epoch_ms: int
    """The calendar's time at 0 of the boot clock, in milliseconds since 1970."""
    may_release: bool = field(kw_only=True, default=True)
    """False: the hand-over waits for the program's callbacks before it flushes."""
    phase: SessionPhase = SessionPhase.ACQUIRING
    until_ms: int = 0
    """The end of the lease, or of the broker's promise if that is later."""
    granted_until_ms: int = 0
    """The end of the lease, as the metaserver renewed it."""
    asked_ms: int = -NEVER
    """When the broker was last asked for a promise."""
    is_acquired: bool = False
    """True once the broker has raised the fence, and its parked keys are known."""
    is_paused: bool = False
    fence: int | None = None
    """The higher token that the broker has seen, 0 if it is unknown; None: not fenced."""
    cancel_ms: int = NEVER
    """When running handlers are cancelled, or before, at the end of the lease; NEVER: they are not,
    or have been.
    """
    flush_until_ms: int = NEVER
    """When the session ends, whatever is not flushed."""

    @property
    def is_live(self) -> bool:
        """True while the session is not being handed over."""
        return self.phase is SessionPhase.SERVING or self.phase is SessionPhase.ACQUIRING

    def keeps(self, now_ms: int) -> bool:
        """Return True if what a worker gives back is handed out again here; otherwise the next
        owner has it.
        """
        return self.is_live and now_ms < self.until_ms

    @property
    def cancel_due_ms(self) -> int:
        """When running handlers are cancelled, as long as the lease is not renewed."""
        return NEVER if self.cancel_ms == NEVER else min(self.cancel_ms, self.until_ms)

    def may_hand_out(self, now_ms: int) -> bool:
        """Return True if a handler may start."""
        phase = self.phase
        return (
            now_ms < self.until_ms
            and self.is_acquired
            and not self.is_paused
            and (phase is SessionPhase.SERVING or phase is SessionPhase.ACQUIRING)
        )

    @property
    def may_ack(self) -> bool:
        """True if the broker takes acks."""
        return self.is_acquired and self.fence is None and self.phase is not SessionPhase.ENDED

    def renew(self, until_ms: int, now_ms: int) -> None:
        """Extend the lease, unless it has ended."""
        if self._may_extend(now_ms):
            promised_until_ms = self.until_ms if self.until_ms > self.granted_until_ms else 0
            self.granted_until_ms = until_ms
            self.until_ms = max(until_ms, promised_until_ms)

    def extend(self, until_ms: int, now_ms: int) -> None:
        """Let handlers run until the end of a broker's promise, unless the lease has ended."""
        if self._may_extend(now_ms):
            self.until_ms = max(self.until_ms, until_ms)

    def _may_extend(self, now_ms: int) -> bool:
        return self.fence is None and (now_ms < self.until_ms or not self.until_ms)

    def promise_due_ms(self, ttl_ms: int) -> int:
        """Return when to ask the broker for a promise: when heartbeats have failed for so long that
        ASK_PERCENT of the ttl are left, and then ASKS_PER_TTL times per ttl.
        """
        first_ms = self.granted_until_ms - ttl_ms * ASK_PERCENT // 100
        return max(first_ms, self.asked_ms + ttl_ms // ASKS_PER_TTL)


CRASHES_MAX = 2
"""After this many ended processes an accused message is set aside."""
CAREFUL_MAX = 1_000
LONG_MS = 1_000
"""A suspect is waited for at least this long, even if the state would end earlier."""


class SuspectPhase(enum.Enum):
    """Where the present suspect is."""

    NONE = enum.auto()
    TURN = enum.auto()
    """It waits for the consumer's turn."""
    BEGINNING = enum.auto()
    """The broker records that it begins."""
    ALONE = enum.auto()
    """A worker has it."""
    PASSED_OVER = enum.auto()
    """It takes too long: the broker records that others are in hand beside it."""
    ACKING = enum.auto()
    """It is handled, and its ack is not durable."""


NOT_BEGUN = frozenset({SuspectPhase.TURN, SuspectPhase.BEGINNING})


class SuspectMessages:
    """
    The suspects of one partition.

    Args:
        upto: messages below this offset are suspects.
        begun: (offset, crashes) of accused messages.
    """

    __slots__ = (
        "_count",
        "_has_no_record",
        "_last_accused",
        "_upto",
        "crashes",
        "message",
        "phase",
        "since_ms",
        "until_ms",
    )

    def __init__(self, upto: int, begun: Iterable[tuple[int, int]], now_ms: int) -> None:
        self._upto = upto
        self.crashes = dict(begun)
        """The crashes of each accused message, by offset."""
        self._last_accused = max(self.crashes, default=-1)
        self._has_no_record = not self.crashes
        self.until_ms = now_ms + CAREFUL_MS
        """When the state ends, except for accused messages."""
        self._count = 0
        self.phase = SuspectPhase.NONE
        self.message: Message | ColumnPart | None = None
        """The present suspect."""
        self.since_ms = 0
        """When it was handed out."""

    def is_over(self, first: int, now_ms: int, *, first_queued: int) -> bool:
        """
        Return True if no message is to be handed out alone.

        Args:
            first: the lowest offset that may be handed out, or is not pulled.
            first_queued: the lowest one that waits for a failed message of its key.
        """
        if min(first, first_queued) >= self._upto or self._is_at_limit(now_ms):
            return first > self._last_accused
        return False

    def _is_at_limit(self, now_ms: int) -> bool:
        return self._count >= CAREFUL_MAX or now_ms >= self.until_ms

    @property
    def deadline_ms(self) -> int:
        """Until when the present suspect is waited for."""
        return max(self.until_ms, self.since_ms + LONG_MS)

    def begin(self, message: Message | ColumnPart) -> None:
        """Make a message the present suspect, which waits for the consumer's turn."""
        self.message = message
        self.phase = SuspectPhase.TURN
        self._count += 1

    def end(self) -> None:
        """End the present suspect."""
        self.message = None
        self.phase = SuspectPhase.NONE

    def is_present(self, message: Message | ColumnPart) -> bool:
        """Return True if the message is the present suspect."""
        return self.message is message

    @property
    def crashes_if_begun(self) -> int:
        """The crash count to record before the present suspect begins. Rows that are in hand
        together count as one end: the next owner hands them out in smaller parts.
        """
        assert self.message is not None
        if isinstance(self.message, ColumnPart):
            return self.message.crashes + 1
        return self.crashes_if_alone(self.message.offset)

    @property
    def crashes_if_shared(self) -> int:
        """The crash count of the present suspect if the process ends with others in hand beside it:
        one of them may have made it a suspect.
        """
        assert self.message is not None
        if isinstance(self.message, ColumnPart):
            return self.crashes_if_begun
        return self.crashes.get(self.message.offset, 0) + 1

    def crashes_if_alone(self, offset: int) -> int:
        """Return the crash count of a message if the process ends while it runs alone. If nothing
        was recorded before, the crashes that made it a suspect count as one.
        """
        return self.crashes.get(offset, 0) + 1 + (self._has_no_record and offset < self._upto)


NEVER_FULL = -1


@dataclass(slots=True, eq=False)
class CallSlot:
    """Whether a request of a kind is in flight, and when the next one may be sent."""

    is_in_flight: bool = False
    begun_ms: int = 0
    """When the last one was sent."""
    not_before_ms: int = 0
    failures: int = 0

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


@dataclass(slots=True, eq=False)
class Calls:
    """The kinds of requests of which one is in flight at a time."""

    acquire: CallSlot = field(default_factory=CallSlot)
    pull: CallSlot = field(default_factory=CallSlot)
    ack: CallSlot = field(default_factory=CallSlot)
    change: CallSlot = field(default_factory=CallSlot)
    list_keys: CallSlot = field(default_factory=CallSlot)
    leave: CallSlot = field(default_factory=CallSlot)
    release: CallSlot = field(default_factory=CallSlot)

    def each(self) -> Iterator[CallSlot]:
        """Yield the slots that back off; a release is tried once."""
        yield from (self.acquire, self.pull, self.ack, self.change, self.list_keys, self.leave)


@dataclass(slots=True, eq=False)
class Intake:
    """How much of a partition was pulled and has not ended here."""

    is_superfluous: Callable[[Message], bool] | None
    held: int = 0
    """The number of messages."""
    resume_at: int = NEVER_FULL
    """From the limit on, the number at which pulls go on: half of the limit."""
    earlier_tries: dict[int, int] = field(default_factory=dict)
    """The failed tries under earlier owners, by offset, of messages that are not opened."""

    def has_room(self, limit: int) -> bool:
        """Return True if more messages may be pulled."""
        if self.held >= limit:
            self.resume_at = limit // 2
        elif self.held <= self.resume_at:
            self.resume_at = NEVER_FULL
        return self.resume_at == NEVER_FULL


class Taking(NamedTuple):
    """How messages are taken from a session."""

    in_batches: bool = False
    """True: a handler gets up to `max_records` messages at once."""
    by_hand: bool = False
    """True: a program takes messages and acks them itself."""
    by_column: bool = False
    """True: the program takes rows as columns."""


ONE_BY_ONE = Taking()


class LocalAcks(NamedTuple):
    """What a broadcast consumer keeps of a partition beyond its sessions."""

    acked: AckedOffsets
    """Its acks, which the session adds to."""
    is_superfluous: Callable[[Message], bool] | None = None
    """Returns True for a row whose original message was handled; None: there are no such rows."""


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
        broadcast: for a broadcast consumer; None: for a group.
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
        taking: Taking = ONE_BY_ONE,
        broadcast: LocalAcks | None = None,
        has_callbacks: bool = False,
    ) -> None:
        is_shared = settings.consume_strategy is ConsumeStrategy.SHARED
        self.settings = settings
        self.rng = rng
        self.tenure = Tenure(lease, epoch_ms, may_release=not has_callbacks)
        self.intake = Intake(broadcast and broadcast.is_superfluous)
        self.offsets = PullOffsets()
        self.acks = PendingAcks()
        batches = (
            PartitionBatches(settings.max_records, BatchFill(settings.max_wait_ms))
            if taking.in_batches
            else None
        )
        self.lanes = KeyLanes(
            is_ordered=not is_shared,
            batches=batches,
            columns=PartitionColumns() if taking.by_column else None,
        )
        self.parking = PartitionParking(rejects, PartitionAncestors(exist=has_ancestors))
        self.redrives = RedriveWindows(is_allowed=redrives_here)
        self.flights = Flights(
            settings.in_flight_ms, PullSize(by_hand=taking.by_hand), is_shared=is_shared
        )
        self.suspects: SuspectMessages | None
        self.is_plain: bool
        """True if a message that is handed out or handled needs nothing but its key and its
        offset.
        """
        self.set_suspects(None)
        self.calls = Calls()
        self.output = Output()
        if broadcast is not None:
            self.offsets.begin_with(broadcast.acked)
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


@dataclass(slots=True, eq=False)
class Output:
    """What the events of a step have asked for, until `Ready` takes it."""

    requests: list[Request] = field(default_factory=list)
    hand_out: list[Message] = field(default_factory=list)
    notes: list[Note | FailureOutcome] = field(default_factory=list)
