"""What happens to a session, and what it asks of its shell in return. Pure.

    event: of the metaserver, the broker, the dispatch or the operator ─▶ step ─▶ Ready: requests,
        messages to hand out, lines for the log, the next time

The broker's answers without a payload are events as they are: Acquired, Acked, ParkedChanged and
Released of `protocol/frames.py`; frames are requests as they are. Each request is answered by one
event, except CancelHandlers, LeaveTurn and FindBroker; of one kind a single one is in flight, and
windows are read beside each other.

Events for each message are not tracked by the garbage collector. Others are: one that has an error
would form a cycle with the frames of its trace.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from msgspec import Struct

from ...protocol.errors import KeylaneError
from ...protocol.frames import (
    Ack,
    Acked,
    Acquire,
    Acquired,
    AcquireShared,
    ChangeParked,
    ListParked,
    ParkedChanged,
    Pull,
    PullShared,
    Read,
    Release,
    Released,
)
from ...protocol.message import Message
from ...protocol.offsets import Range
from ...protocol.parked import Failure, ParkedKeyRow, ParkKey, RequestedChange
from ..settings import ConsumerSettings
from .failure import Treatment
from .lanes import ColumnPart, Unopened


class SendChanges(Struct, frozen=True):
    """Have the broker store changes of parked messages: `frame` with them as its payload."""

    frame: ChangeParked
    changes: tuple[RequestedChange, ...]


class ReadWindow(Struct, frozen=True):
    """Read messages of a window from where they are stored, with the edits of operators."""

    number: int
    key: ParkKey
    source: int
    ranges: tuple[Range, ...]
    """The messages, for a retry; (): the first `count` ones of the key."""
    count: int
    passed_over: tuple[tuple[int, int], ...] = ()
    """The offsets below which messages of a source are left out, as (source, offset)."""
    first_row: int = 0
    """How many rows at the front of the key are handled or passed over."""


class LeaveAncestor(Struct, frozen=True):
    """Tell the partition `source` that this one needs none of its parked messages any more, unless
    it is gone. Answer: AncestorLeft.
    """

    source: int


class TakeTurn(Struct, frozen=True):
    """Wait until no other partition of the consumer has a suspect in hand. Answer: TurnTaken."""


class LeaveTurn(Struct, frozen=True):
    """Let another partition have the turn."""


class FindBroker(Struct, frozen=True):
    """Look where the broker of the partition is now: a read has failed."""


class CancelHandlers(Struct, frozen=True):
    """Cancel the handlers that have messages of the partition."""


Request = (
    Acquire
    | AcquireShared
    | Pull
    | PullShared
    | Read
    | Ack
    | ListParked
    | Release
    | SendChanges
    | ReadWindow
    | LeaveAncestor
    | TakeTurn
    | LeaveTurn
    | FindBroker
    | CancelHandlers
)


class NoteKind(enum.StrEnum):
    """What the log says of a partition."""

    LAPSED = "its lease has ended"
    FENCED = "its broker has seen a newer fencing token"
    WANTED = "its broker has another owner waiting"
    MISSED = "messages were removed before the group got them"
    CRASHED = "a message ended the process of its consumer"
    CAREFUL = "messages are handed out one at a time, because one may have ended two processes"
    LOST = "the lease ended while messages were acked: no handler gets them"
    RANGE_LIMIT = "acks wait for older messages to be acked"
    PROTECTED = (
        "its redriven messages are parked again before they are handled, because the last owner "
        "ended without handing over; if this one does too, they stay parked, as crashed"
    )
    GONE = "parked messages were removed by retention, and are given up"
    NO_REDRIVES = "this consumer cannot redrive parked messages"


class Note(Struct, frozen=True):
    """A line for the log, which the shell limits and words."""

    kind: NoteKind
    offset: int = -1
    count: int = 0
    """How many messages; of one that ended processes, how often."""
    message: Message | None = None
    """The message that ended processes."""
    is_set_aside: bool = False
    key: bytes = b""
    """The key of PROTECTED."""


class FailureOutcome(Struct, frozen=True, gc=False):
    """What becomes of a message whose try has failed, for the log of the dispatch."""

    message: Message
    treatment: Treatment
    pause_ms: int | None = None
    """The milliseconds until the next try; None: there is none without an operator."""
    returned: tuple[Message, ...] = ()
    """Later messages of its key that the program had, and that were taken back with it."""


class Ready(Struct, gc=False):
    """What the shell does next."""

    requests: tuple[Request, ...]
    hand_out: list[Message]
    """For one worker, in this order."""
    has_more: bool
    """True if a further `WorkWanted` may bring something."""
    wait_until_ms: int
    """When the shell sends a `Tick`, unless it calls earlier."""
    notes: tuple[Note | FailureOutcome, ...]


class LeaseGranted(Struct, frozen=True):
    """The lease ends at this boot time: its first grant, or a renewal."""

    until_ms: int


class SettingsStored(Struct, frozen=True):
    """Other settings apply, because an operator has stored a policy for the group."""

    settings: ConsumerSettings


class Pulled(Struct, frozen=True):
    """Batches in the order of their offsets, which are not opened."""

    batches: Sequence[Unopened]
    upto: int
    """The offset after the last message of the answer, or after what was left out."""
    end_offset: int
    """The offset after the partition's last message."""
    is_sealed: bool = False
    parked_version: int = 0
    left_out: tuple[Range, ...] = ()
    """Ranges without a wanted tag."""
    has_more: bool = False
    """True if another answer to the same pull follows."""


class FlightsPulled(Struct, frozen=True):
    """Messages of a shared group, which are in flight here from `sent_ms` on."""

    batches: Sequence[Unopened]
    ranges: tuple[Range, ...]
    sent_ms: int
    cursor: int
    end_offset: int
    is_sealed: bool = False
    crashes: tuple[tuple[int, int], ...] = ()
    tries: tuple[tuple[int, int], ...] = ()


class KeysListed(Struct, frozen=True):
    """The parked keys of the partition, and, in the first list, what waits for a retry."""

    version: int
    rows: Sequence[ParkedKeyRow]
    aside: Sequence[tuple[int, int, int, int]] = ()
    """(tries, source, start, end)"""
    unneeded_ancestors: Sequence[int] = ()
    """Partitions that keep messages for the group, of which none is parked any more."""


class AncestorLeft(Struct, frozen=True):
    """An ancestor was told that none of its messages is needed, or is gone."""

    source: int


class WindowRead(Struct, frozen=True):
    """Messages of a window; without any, and without `gone`, its key has none left."""

    number: int
    messages: list[Message]
    gone: Sequence[tuple[int, int, int]] = ()
    """(source, start, end) of messages that retention has removed."""
    left: Sequence[Range] = ()
    """For a retry, what was not read yet."""
    first_row: int = 0
    """How many rows of the key were passed over before those that were read."""


class SourceUnreadable(Struct, frozen=True):
    """The first messages of a window cannot be read: their source does not answer, or is damaged
    there.
    """

    number: int
    source: int
    upto: int | None = None
    """The offset after what is damaged; None: nothing of the source can be read now."""
    first_row: int = 0
    """How many rows of the key were passed over before these."""


class CallFailed(Struct, frozen=True):
    """A request was not answered, or was refused."""

    request: Request
    error: KeylaneError


class OperatorChanged(Struct, frozen=True):
    """The version of the parked messages has risen."""

    version: int


class WorkWanted(Struct, frozen=True):
    """A worker takes up to `count` messages, of which up to `retries` may be later tries; in
    batches, one batch.
    """

    count: int
    retries: int = 1
    run: int = 0
    """How many messages it would take as a run; 0: it takes none."""
    together: bool = False
    """True if it takes several messages of a key at once."""


class WorkersFree(Struct, frozen=True):
    """So many messages can begin in free workers of the consumer; if negative, so many wait for a
    worker. A shared group's session pulls accordingly.
    """

    count: int


class RunEnded(Struct, frozen=True):
    """Of the messages of the run, the first `done` are handled."""

    done: int
    has_next: bool = False
    """True if the next one is in its handler, which waits, or has failed; the others go back."""


class RunSpread(Struct, frozen=True):
    """The program acks or returns the messages of the run one by one."""


class MessagesHandled(Struct, frozen=True, gc=False):
    """Handlers have returned."""

    messages: Sequence[Message]
    """Of a batch all, as they were handed out."""
    wanted: int = 0
    """How many messages the workers take next."""


class MessageFailed(Struct, frozen=True, gc=False):
    """A handler has failed, or a program has given a message back."""

    message: Message
    failure: Failure
    asked_ms: int | None = None
    """The pause that was asked for."""
    is_asked: bool = False
    """True if another try was asked for, and nothing failed."""
    holds_key: bool = False
    """True if later messages of its key wait for it also in a shared group."""


class BatchFailed(Struct, frozen=True, gc=False):
    """The handler of a batch has failed."""

    messages: list[Message]
    failure: Failure
    asked_ms: int | None = None
    is_asked: bool = False
    """True if another try was asked for, and nothing failed."""


class MessagesLeft(Struct, frozen=True, gc=False):
    """A program goes on without having acked messages of a shared group: they are not renewed."""

    messages: Sequence[Message]


class MessageExpired(Struct, frozen=True, gc=False):
    """A message of a shared group was not acked in time: its broker hands it out again."""

    message: Message
    failure: Failure


class AckedLate(Struct, frozen=True):
    """Messages of a shared group are acked after their time."""

    offsets: Sequence[int]


class ColumnsWanted(Struct, frozen=True):
    """The program takes the next rows as columns: `KeyLanes.columns.in_hand`, if there are any."""


class ColumnsHandled(Struct, frozen=True, gc=False):
    """The program has acked its part."""

    part: ColumnPart


class ColumnsReturned(Struct, frozen=True, gc=False):
    """The program has given its part back, for at least `wait_ms`."""

    part: ColumnPart
    wait_ms: int = 0
    is_try: bool = True
    """False if the part never reached the program."""


class ColumnsCut(Struct, frozen=True):
    """The program has only the rows of its part that are below `end`."""

    end: int


class MessageHangs(Struct, frozen=True, gc=False):
    """A message, or the first one of a batch, has been in its handler or with the program for
    long.
    """

    message: Message
    failure: Failure
    """What operators read: that it has not returned, and after how many failed tries."""
    running_ms: int
    is_failed_try: bool = False
    """True once it has been in a thread, which cannot be cancelled, for longer than a handler
    may.
    """


class MessagesReturned(Struct, frozen=True, gc=False):
    """Messages of which no try counts: their handler did not start, or was cancelled for a
    hand-over.
    """

    messages: list[Message]


class Paused(Struct, frozen=True):
    """The program pauses the partition, or resumes it."""

    is_paused: bool


class Stopped(Struct, frozen=True):
    """The partition is to be handed over; its handlers have `grace_ms`."""

    grace_ms: int


class ReleaseAllowed(Struct, frozen=True):
    """The callbacks of the program have returned: flush and release."""


class TurnTaken(Struct, frozen=True):
    """No other suspect of the consumer is in hand."""


class Tick(Struct, frozen=True):
    """Time has passed."""


Event = (
    LeaseGranted
    | SettingsStored
    | Acquired
    | Acked
    | ParkedChanged
    | Released
    | Pulled
    | FlightsPulled
    | KeysListed
    | AncestorLeft
    | WindowRead
    | SourceUnreadable
    | CallFailed
    | OperatorChanged
    | WorkWanted
    | WorkersFree
    | RunEnded
    | RunSpread
    | MessagesHandled
    | MessageFailed
    | BatchFailed
    | MessagesLeft
    | MessageExpired
    | AckedLate
    | ColumnsWanted
    | ColumnsHandled
    | ColumnsReturned
    | ColumnsCut
    | MessageHangs
    | MessagesReturned
    | Paused
    | Stopped
    | ReleaseAllowed
    | TurnTaken
    | Tick
)
