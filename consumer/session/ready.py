"""What a session asks of its shell after an event. Pure.

Frames are requests as they are. Each request but the last three is answered by one event; of one
kind a single one is in flight, and windows are read beside each other.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from ...protocol.frames import (
    Ack,
    Acquire,
    AcquireShared,
    ChangeParked,
    ListParked,
    Pull,
    PullShared,
    Read,
    Release,
)
from ...protocol.message import Message
from ...protocol.offsets import Range
from ...protocol.parked import ParkKey, RequestedChange
from .failure import Treatment


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
