"""Messages that a consumer group has set aside: the words, the limits, and the changes of a
partition's parked messages.  Pure.

    handled too often in vain ─▶ Park ─▶ parked, with all later messages of its key ─▶ Redrive (an
        operator's)
                                   ▲                                                        │
                                   ╰──────────── failed again ◀── handled in order ◀────────╯
                                                                       ╰─▶ Unpark, each ─▶ Free: the
                                                                           key is as any other

A parked message is acked: the cursor passes it.  What is kept is its key, and where its bytes lie.
A change is the same in the frame that asks for it and in the record that makes it durable.

Words
    key         an order key; b"": messages without one; None: dead letters, of any key; a number: those that wait for retry
    loose       the messages of all but order keys, which wait for nothing and hold nothing back
    dead key    a key that found no room among the parked ones: it is kept with all its messages, in their order, as dead letters
    for retry   messages of any key that failed that number of times, and are tried again when due; a negative number:
                the next try has begun, alone, because it may end its process
    source      the partition that has the bytes of a message: the group's own, or an ancestor of it
    adopted     an ancestor's parked messages became those of its children, before these handed anything out
    edited      an operator has put another value in the place of a parked message
    frozen      the parked messages of a sealed partition that its children have adopted: nothing changes them any more
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
"""The key of dead letters that an operator has chosen to be handled again; the others stay where
they are.
"""
LOOSE: tuple[ParkKey, ...] = (b"", None, RETRIED)
"""Loose keys that operators know; numbers are loose too: `is_loose`."""

FAILURE_KIND_CHARS_MAX = 200
FAILURE_TEXT_CHARS_MAX = 1_000
PARKED_KEYS_MAX = 10_000
"""Keys that a group may have parked on one partition, and dead keys as well.  A consumer asks for
all when it begins.
"""
PARKED_MESSAGES_MAX = 1_000_000
"""Messages that a group may have parked on one partition: 16 bytes of the broker's memory each; and
dead letters as well.
"""
PARKED_ROWS_MAX = 5_000
"""Ranges of offsets in one request or answer."""
EDITS_MAX = 1_000
"""Edited messages that a group may have parked on one partition; a child may adopt more."""
EDITS_BYTES_MAX = 16 << 20
"""Bytes of their values and properties, which the broker keeps in memory."""
FAILURE_RUNS_MAX = 100_000
"""
Runs of messages without an order of one loose key, each run with one failure, one time: 40 bytes of
the broker's memory each.  Of more, the oldest are told with the later time of two neighbours, and
in the end not at all.
"""
FAULTS_MAX = 10_000
"""Different failures of messages without an order that are kept for a group on a partition; of the
oldest the text is dropped.
"""
FAULT_CHARS_MAX = 1 << 20
"""Characters of their texts, in the same way."""
PARKED_PAGE_BYTES = 1 << 19
"""About the length of one page of parked messages; the page ends behind the key that passes it."""


class ParkState(enum.StrEnum):
    """Whether the messages of a key wait for an operator, as parked ones or as dead letters, or are
    handled again.
    """

    PARKED = "parked"
    REDRIVING = "redriving"
    DEAD = "dead"


class Failure(Struct, frozen=True, array_like=True):
    """The last failure of a message, as the consumer that handled it saw it."""

    kind: Annotated[str, Meta(max_length=FAILURE_KIND_CHARS_MAX)]
    """The name of the error's class."""
    text: Annotated[str, Meta(max_length=FAILURE_TEXT_CHARS_MAX)]
    client: Annotated[str, Meta(max_length=FAILURE_KIND_CHARS_MAX)]
    """The name of the consumer."""
    at_ms: int
    """By the consumer's calendar, milliseconds since 1970."""
    attempts: int


class Fault(Struct, frozen=True, array_like=True):
    """What failures of several messages may have in common; fields as of Failure."""

    kind: str
    text: str
    client: str
    attempts: int


# ── changes ───────────────────────────────────────────────────────────────────────────────────────
class Park(Struct, frozen=True, array_like=True, tag=1):
    """
    Park messages of the partition itself, which are acked by this.

    With a failure the key is parked from now on, whatever it was before.  Without one it is parked
    already, and these messages came behind the others.
    """

    key: ParkKey
    ranges: tuple[Range, ...]
    failure: Failure | None = None
    token: int = 0
    """Of the owner, if it has the messages handled all the same, so that the key is parked only
    when its process ends.
    """


class Bury(Struct, frozen=True, array_like=True, tag=12):
    """As Park, of an order key that finds no room among the parked ones: it is a dead key from now
    on, with all its messages.
    """

    key: bytes
    ranges: tuple[Range, ...]
    failure: Failure | None = None


class ParkOrBury(Struct, frozen=True, array_like=True, tag=13):
    """In requests alone: Park if there is room, else Bury; of messages without an order, else Park
    as dead letters.
    """

    key: ParkKey
    ranges: tuple[Range, ...]
    failure: Failure | None = None


class Unpark(Struct, frozen=True, array_like=True, tag=2):
    """Messages of `source` that were parked are handled, or skipped by an operator."""

    key: ParkKey
    source: int
    ranges: tuple[Range, ...]


class Free(Struct, frozen=True, array_like=True, tag=3):
    """A redriven key has no parked message any more: its messages are handed out as any other."""

    key: ParkKey


class FailAgain(Struct, frozen=True, array_like=True, tag=14):
    """Messages of `source` without an order, which were parked and are handled again, have failed
    again: they stay.
    """

    key: ParkKey
    source: int
    ranges: tuple[Range, ...]
    failure: Failure


class Shift(Struct, frozen=True, array_like=True, tag=11):
    """
    Messages of `source` that wait for retry are counted as tried so often now, or given up: `to` is
    None.

    To RETRIED: dead letters, or parked messages without a key, that are handled again.
    """

    key: ParkKey
    to: int | None
    source: int
    ranges: tuple[Range, ...]
    failure: Failure | None = None
    """Of the last try; None: it has begun."""


class Redrive(Struct, frozen=True, array_like=True, tag=4):
    """Have the messages of a key handled again, the oldest first."""

    key: ParkKey


class EditedMessage(Struct, frozen=True, array_like=True):
    """What an operator has put in the place of a parked message; the key stays, and so does the
    original in the log.
    """

    source: int
    offset: int
    value: bytes
    properties: bytes
    """Packed, with EDITED_PROPERTY."""


class Edit(Struct, frozen=True, array_like=True, tag=10):
    """Have another value and other properties handled in the place of a parked message."""

    key: ParkKey
    message: EditedMessage


class FailureMark(Struct, frozen=True, array_like=True):
    """How parked messages `[start, end)` of `source` failed; a time that is 0 is not known."""

    source: int
    start: int
    end: int
    since_ms: int
    """When they were set aside, by the broker's calendar."""
    at_ms: int
    """When they failed last, by the consumer's calendar."""
    fault: int
    """The place of their failure in `faults`; -1: it is not known."""
    next_ms: int = 0
    """When they are tried again, as their owner said."""


class AdoptedKey(Struct, frozen=True, array_like=True):
    """A key, or a part of a large one, with its parked messages as (source, start, end), oldest
    first.
    """

    key: ParkKey
    state: ParkState
    since_ms: int
    failure: Failure | None
    rows: tuple[tuple[int, int, int], ...]
    edits: tuple[EditedMessage, ...] = ()
    """Of messages in these rows, or in earlier ones."""
    faults: tuple[Fault, ...] = ()
    marks: tuple[FailureMark, ...] = ()
    """How messages of these rows, or of earlier ones, failed, if they are without an order."""
    token: int = 0
    """As of Park.  Children leave it out: an owner of the parent has nothing with handlers any
    more.
    """


class Adopt(Struct, frozen=True, array_like=True, tag=5):
    """Take over a part of what a parent has parked; `last`: this was all of it."""

    parent: int
    keys: tuple[AdoptedKey, ...]
    last: bool
    sources: tuple[int, ...] = ()
    """Ancestors that keep messages for what is parked: they are told when nothing of it needs them
    any more.
    """
    passed: tuple[tuple[int, int], ...] = ()
    """
    Of parent 0, (logical partition, offset): children need messages of the partition itself from
    there on, though it was reset. The logical partition is -1 for those without an order.
    """
    children_tell: bool = False
    """Of parent 0: children keep what they took over though the partition was reset, and they tell
    the ancestors.
    """


class Freeze(Struct, frozen=True, array_like=True, tag=6):
    """The children of the partition take its parked messages over: it takes no change any more."""


class Unneeded(Struct, frozen=True, array_like=True, tag=8):
    """A child needs nothing of this frozen partition any more, of keys in the logical partitions
    `[start, end)`.
    """

    start: int
    end: int
    loose: bool
    """Nor of messages that have no order."""


class AncestorTold(Struct, frozen=True, array_like=True, tag=9):
    """An ancestor was told that nothing of it is needed."""

    source: int


class Clear(Struct, frozen=True, array_like=True, tag=7):
    """Forget what is parked, all of it but messages of `kept`: an operator has set the group's
    progress.
    """

    kept: tuple[int, ...] = ()
    """
    Ancestors that the reset leaves out: their messages stay parked.  Children that have begun to
    take them over may not have all of them.
    """


ParkChange = (
    Park
    | Bury
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
AskedChange = ParkChange | ParkOrBury
"""What a request may say."""


def is_loose(key: ParkKey) -> bool:
    """True if messages of this key wait for nothing, and hold nothing back."""
    return not isinstance(key, bytes) or not key


_changes = msgspec.msgpack.Decoder(list[AskedChange])
_keys = msgspec.msgpack.Decoder(list[AdoptedKey])
encode_parked = msgspec.msgpack.Encoder().encode


def decode_changes(data: bytes | memoryview) -> list[AskedChange]:
    """The changes of a request.  Raises msgspec.MsgspecError."""
    changes: list[AskedChange] = _changes.decode(data)
    return changes


def decode_adopted(data: bytes | memoryview) -> list[AdoptedKey]:
    """The keys of an ancestor's answer.  Raises msgspec.MsgspecError."""
    keys: list[AdoptedKey] = _keys.decode(data)
    return keys


def failure_of(error: BaseException, *, client: str, at_ms: int, attempts: int) -> Failure:
    """What is kept of an error; its texts are cut to their limits, and advice of keylane is left
    out.
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
"""The type of the failure of a message that ended the processes of its consumers."""


def crash_of(times: str, *, at_ms: int, attempts: int) -> Failure:
    """What is kept of a message that ended the process of its consumer; no consumer could say
    more.
    """
    text = f"the process of its consumer ended while it was handled, {times}"
    return Failure(CRASHED, text, "", at_ms, attempts)


def nack_of(*, client: str, at_ms: int, attempts: int) -> Failure:
    """What is kept of a message that a program without a handler gave back."""
    text = "the program gave the message back"
    return Failure("nack", text, client[:FAILURE_KIND_CHARS_MAX], at_ms, attempts)


def passed_over_of(*, client: str, at_ms: int, attempts: int) -> Failure:
    """What is kept of a message of a shared group that a program without a handler did not ack in
    time.
    """
    text = "the program took the next message and did not ack this one within in_flight_ms"
    return Failure("not acked", text, client[:FAILURE_KIND_CHARS_MAX], at_ms, attempts)
