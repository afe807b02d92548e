"""Messages that a consumer group has set aside: the terms, the limits, and the changes of a
partition's parked messages. Pure.

    failed too often ─▶ Park ─▶ parked, with all later messages of its key ─▶ Redrive (operator)
                                   ▲                                             │
                                   ╰────── failed again ◀── handled in order ◀───╯
                                                                   ╰─▶ Unpark, each ─▶ Free: the
                                                                       key is like any other

A parked message is acked: the cursor passes it. Its key is kept, and the place of its bytes. A
change has the same form in the frame that requests it and in the record that makes it durable.

Words
    key         an order key; b"": messages without one; None: dead letters, of any key; a number:
                messages that wait for retry
    loose       messages of all but order keys, which wait for nothing and hold nothing back
    dead key    a key for which there was no room among the parked ones: it is kept with all its
                messages, in their order, as dead letters
    for retry   messages of any key that failed that number of times, and are tried again when due;
                a negative number: the next try has begun, alone, because it may end its process
    source      the partition that stores a message: the group's own, or an ancestor of it
    adopted     an ancestor's parked messages became those of its children, before the children
                handed anything out
    edited      an operator has replaced the value of a parked message
    frozen      the parked messages of a sealed partition that its children have adopted: nothing
                changes them any more
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ..errors import KeylaneError
from ..offsets import Range

ParkKey = bytes | int | None
RETRIED = 0
"""Key of dead letters that an operator has selected to be handled again; other dead letters stay.
"""
LOOSE: tuple[ParkKey, ...] = (b"", None, RETRIED)
"""Loose keys that operators see; numbers are loose too: `is_loose`."""

FAILURE_KIND_CHARS_MAX = 200
FAILURE_TEXT_CHARS_MAX = 1_000
PARKED_KEYS_MAX = 10_000
"""Most keys that a group may have parked on one partition, and most dead keys. A consumer fetches
all of them when it begins.
"""
PARKED_MESSAGES_MAX = 1_000_000
"""Most messages that a group may have parked on one partition, at 16 bytes of the broker's memory
each; and most dead letters.
"""
PARKED_ROWS_MAX = 5_000
"""Most ranges of offsets in one request or answer."""
EDITS_MAX = 1_000
"""Most edited messages that a group may have parked on one partition; a child may adopt more."""
EDITS_BYTES_MAX = 16 << 20
"""Most bytes of their values and properties, which the broker keeps in memory."""
FAILURE_RUNS_MAX = 100_000
"""
Most runs of messages without an order in one loose key, each with one failure and one time, at 40
bytes of the broker's memory each. Beyond that, the oldest neighbours are reported with the later
of their times, and finally without details.
"""
FAULTS_MAX = 10_000
"""Most different failures of messages without an order that are kept for a group on a partition;
beyond that, the texts of the oldest are dropped.
"""
FAULT_CHARS_MAX = 1 << 20
"""Most characters of their texts, with the same rule."""
PARKED_PAGE_BYTES = 1 << 19
"""Approximate bytes of one page of parked messages; the page ends after the key that exceeds it."""


class ParkState(enum.StrEnum):
    """State of a key: its messages wait for an operator, parked or as dead letters, or are handled
    again.
    """

    PARKED = "parked"
    REDRIVING = "redriving"
    DEAD = "dead"


class Failure(Struct, frozen=True, array_like=True):
    """The last failure of a message, reported by the consumer that handled it."""

    kind: Annotated[str, Meta(max_length=FAILURE_KIND_CHARS_MAX)]
    """Name of the error's class."""
    text: Annotated[str, Meta(max_length=FAILURE_TEXT_CHARS_MAX)]
    client: Annotated[str, Meta(max_length=FAILURE_KIND_CHARS_MAX)]
    """Name of the consumer."""
    at_ms: int
    """Time by the consumer's calendar, in milliseconds since 1970."""
    attempts: int


class Fault(Struct, frozen=True, array_like=True):
    """The part of a failure that several messages may share; fields are those of Failure."""

    kind: str
    text: str
    client: str
    attempts: int


# ── changes ───────────────────────────────────────────────────────────────────────────────────────
class Park(Struct, frozen=True, array_like=True, tag=1):
    """
    Park messages of the partition itself, which are acked by this.

    With a failure the key is parked from now on, whatever its state was. Without one it is already
    parked, and these messages follow its others.
    """

    key: ParkKey
    ranges: tuple[Range, ...]
    failure: Failure | None = None
    token: int = 0
    """Token of the owner, if it still has the messages handled, so that the key is parked only when
    its process ends.
    """


class DeadLetterKey(Struct, frozen=True, array_like=True, tag=12):
    """Like Park, for an order key without room among the parked ones: it is a dead key from now on,
    with all its messages.
    """

    key: bytes
    ranges: tuple[Range, ...]
    failure: Failure | None = None


class ParkOrDeadLetter(Struct, frozen=True, array_like=True, tag=13):
    """Park if there is room, else bury messages of an order key, and park others as dead letters.
    Only requests contain it.
    """

    key: ParkKey
    ranges: tuple[Range, ...]
    failure: Failure | None = None


class Unpark(Struct, frozen=True, array_like=True, tag=2):
    """Messages of `source` that were parked are handled, or were skipped by an operator."""

    key: ParkKey
    source: int
    ranges: tuple[Range, ...]


class Free(Struct, frozen=True, array_like=True, tag=3):
    """A redriven key has no more parked messages: its messages are handed out like any others."""

    key: ParkKey


class FailAgain(Struct, frozen=True, array_like=True, tag=14):
    """Parked messages of `source` without an order were handled again and have failed again: they
    stay.
    """

    key: ParkKey
    source: int
    ranges: tuple[Range, ...]
    failure: Failure


class Shift(Struct, frozen=True, array_like=True, tag=11):
    """
    Messages of `source` that wait for retry now count as tried `to` times, or are given up: `to` is
    None.

    To RETRIED: dead letters, or parked messages without a key, will be handled again.
    """

    key: ParkKey
    to: int | None
    source: int
    ranges: tuple[Range, ...]
    failure: Failure | None = None
    """Failure of the last try; None: the try has begun."""


class Redrive(Struct, frozen=True, array_like=True, tag=4):
    """Handle the messages of a key again, the oldest first."""

    key: ParkKey


class EditedMessage(Struct, frozen=True, array_like=True):
    """The value with which an operator replaces that of a parked message; the key stays, and so
    does the original in the log.
    """

    source: int
    offset: int
    value: bytes
    properties: bytes
    """Packed properties, with EDITED_PROPERTY."""


class Edit(Struct, frozen=True, array_like=True, tag=10):
    """Replace value and properties of a parked message when it is handled again."""

    key: ParkKey
    message: EditedMessage


class FailureMark(Struct, frozen=True, array_like=True):
    """The failure of parked messages `[start, end)` of `source`; a time of 0 is not known."""

    source: int
    start: int
    end: int
    since_ms: int
    """Time when they were set aside, by the broker's calendar, in milliseconds since 1970."""
    at_ms: int
    """Time of the last failure, by the consumer's calendar, in milliseconds since 1970."""
    fault: int
    """Index of their failure in `faults`; -1: it is not known."""
    next_ms: int = 0
    """Time of the next try that their owner reported, in milliseconds since 1970."""


class AdoptedKey(Struct, frozen=True, array_like=True):
    """A key, or a part of a large one, with its parked messages as (source, start, end), the oldest
    first.
    """

    key: ParkKey
    state: ParkState
    since_ms: int
    failure: Failure | None
    rows: tuple[tuple[int, int, int], ...]
    edits: tuple[EditedMessage, ...] = ()
    """Edits of messages in these rows, or in earlier ones."""
    faults: tuple[Fault, ...] = ()
    marks: tuple[FailureMark, ...] = ()
    """Failures of messages without an order in these rows, or in earlier ones."""
    token: int = 0
    """Same meaning as in Park. Children leave it out, because no owner of the parent has messages
    with handlers any more.
    """


class Adopt(Struct, frozen=True, array_like=True, tag=5):
    """Take over a part of what a parent has parked; `last` marks the last part."""

    parent: int
    keys: tuple[AdoptedKey, ...]
    last: bool
    sources: tuple[int, ...] = ()
    """Ancestors that keep messages for what is parked; they are notified when none of it needs them
    any more.
    """
    passed: tuple[tuple[int, int], ...] = ()
    """
    (logical partition, offset), for parent 0: children need messages of the partition itself from
    there on, though it was reset. The logical partition is -1 for messages without an order.
    """
    children_tell: bool = False
    """True for parent 0 if children keep what they took over though the partition was reset, and
    notify the ancestors.
    """


class Freeze(Struct, frozen=True, array_like=True, tag=6):
    """The children of the partition take over its parked messages, so it accepts no more
    changes.
    """


class Unneeded(Struct, frozen=True, array_like=True, tag=8):
    """A child no longer needs anything of this frozen partition, for keys in the logical partitions
    `[start, end)`.
    """

    start: int
    end: int
    loose: bool
    """True if it does not need messages without an order either."""


class AncestorTold(Struct, frozen=True, array_like=True, tag=9):
    """An ancestor was notified that none of its messages is needed."""

    source: int


class Clear(Struct, frozen=True, array_like=True, tag=7):
    """Forget everything that is parked except messages of `kept`, because an operator has set the
    group's progress.
    """

    kept: tuple[int, ...] = ()
    """
    Ancestors that are not part of the reset, so their messages stay parked. Children that have
    begun to take them over may not have all of them.
    """


ParkChange = (
    Park
    | DeadLetterKey
    | Unpark
    | Free
    | Redrive
    | Adopt
    | Freeze
    | Clear
    | Unneeded
    | AncestorTold
    | Edit
    | Shift
    | FailAgain
)
AskedChange = ParkChange | ParkOrDeadLetter
"""The changes that a request may contain."""


def is_loose(key: ParkKey) -> bool:
    """Return True if messages of this key wait for nothing, and hold nothing back."""
    return not isinstance(key, bytes) or not key


_changes = msgspec.msgpack.Decoder(list[AskedChange])
_keys = msgspec.msgpack.Decoder(list[AdoptedKey])
encode_parked = msgspec.msgpack.Encoder().encode


def decode_changes(data: bytes | memoryview) -> list[AskedChange]:
    """Return the changes of a request. Raises msgspec.MsgspecError."""
    changes: list[AskedChange] = _changes.decode(data)
    return changes


def decode_adopted(data: bytes | memoryview) -> list[AdoptedKey]:
    """Return the keys of an ancestor's answer. Raises msgspec.MsgspecError."""
    keys: list[AdoptedKey] = _keys.decode(data)
    return keys


def failure_of(error: BaseException, *, client: str, at_ms: int, attempts: int) -> Failure:
    """Return the record of an error; its texts are cut to their limits, and keylane's advice is
    left out.
    """
    try:
        text: Any = error.message if isinstance(error, KeylaneError) else str(error)
    except Exception:  # noqa: BLE001 - the error is a user's, and so is its __str__
        text = "its text cannot be made"
    return Failure(
        type(error).__qualname__[:FAILURE_KIND_CHARS_MAX],
        text.encode(errors="replace").decode()[:FAILURE_TEXT_CHARS_MAX],
        client[:FAILURE_KIND_CHARS_MAX],
        at_ms,
        attempts,
    )


CRASHED = "crashed"
"""Kind of the failure of a message that ended the processes of its consumers."""


def crash_of(times: str, *, at_ms: int, attempts: int) -> Failure:
    """Return the record of a message that ended the process of its consumer, about which nothing
    else is known.
    """
    text = f"the process of its consumer ended while it was handled, {times}"
    return Failure(CRASHED, text, "", at_ms, attempts)


def nack_of(*, client: str, at_ms: int, attempts: int) -> Failure:
    """Return the record of a message that a program without a handler gave back."""
    text = "the program gave the message back"
    return Failure("nack", text, client[:FAILURE_KIND_CHARS_MAX], at_ms, attempts)


def passed_over_of(*, client: str, at_ms: int, attempts: int) -> Failure:
    """Return the record of a shared group's message that a program without a handler did not ack in
    time.
    """
    text = "the program took the next message and did not ack this one within in_flight_ms"
    return Failure("not acked", text, client[:FAILURE_KIND_CHARS_MAX], at_ms, attempts)
