"""The parked messages of a consumer group: terms, limits, and the changes that brokers apply and
store. Pure.

    failed too often ─▶ Park ─▶ parked, with all later messages of its key ─▶ Redrive (operator)
                                   ▲                                             │
                                   ╰────── failed again ◀── handled in order ◀───╯
                                                                   ╰─▶ Unpark, each ─▶ Free: the
                                                                       key is like any other

A parked message is acked: the cursor passes it. The broker keeps its key, and the source and offset
of its bytes. A change is encoded in the same way in the frame that requests it and in the stored
record.

Words
    key         an order key; b"": messages without one; None: dead letters, of any key; a number:
                messages that wait for retry
    loose       messages under a key that is not an order key: they are independent of each other
    displaced   messages whose key is not in the range of their source, because their sender chose
                the partition: as loose messages do, they pass to the child with the first logical
                partition of its parent
    dead key    a key that exceeded the limit of parked keys: it is kept with all its messages, in
                their order, as dead letters
    for retry   messages of any key that failed that number of times, and are retried when due; a
                negative number: the next attempt is running in isolation, because it may crash its
                process
    source      the partition that stores a message: the group's own, or an ancestor of it
    adopted     an ancestor's parked messages became those of its children, before the children
                handed anything out
    edited      an operator has replaced the value of a parked message
    frozen      the parked messages of a sealed partition that its children have adopted: they no
                longer change
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
"""The key of dead letters that an operator has selected for another attempt."""
LOOSE: tuple[ParkKey, ...] = (b"", None, RETRIED)
"""The loose keys that operators see. Numbers are loose keys, too; see `is_loose`."""

FAILURE_KIND_CHARS_MAX = 200
FAILURE_TEXT_CHARS_MAX = 1_000
PARKED_KEYS_MAX = 10_000
"""The maximum number of parked keys of a group on one partition, and of dead keys. A consumer
fetches all of them when it starts.
"""
PARKED_MESSAGES_MAX = 1_000_000
"""The maximum number of parked messages of a group on one partition, and of dead letters. Each
takes 16 bytes of the broker's memory.
"""
PARKED_ROWS_MAX = 5_000
"""The maximum number of ranges of offsets in one request or response."""
EDITS_MAX = 1_000
"""The maximum number of edited messages of a group on one partition. A child may adopt more."""
EDITS_BYTES_MAX = 16 << 20
"""The maximum total size of their values and properties, which the broker keeps in memory, in
bytes.
"""
FAILURE_RANGES_MAX = 100_000
"""Maximum number of runs of messages with the same failure and time in one loose key, at 40 bytes
of the broker's memory each. Beyond that, the oldest neighbouring runs are merged under the later
time, and finally lose their details.
"""
FAULTS_MAX = 10_000
"""The maximum number of distinct failures of loose messages that are kept for a group on a
partition. Beyond that, the texts of the oldest are dropped.
"""
FAULT_CHARS_MAX = 1 << 20
"""The maximum total length of their texts, in characters. Beyond that, the oldest texts are
dropped, too.
"""
PARKED_PAGE_BYTES = 1 << 19
"""The approximate size of one page of parked messages in bytes. The page ends after the key that
exceeds it.
"""


class ParkState(enum.StrEnum):
    """The state of a key. PARKED and DEAD: its messages wait for an operator. REDRIVING: they are
    being handled again.
    """

    PARKED = "parked"
    REDRIVING = "redriving"
    DEAD = "dead"


class Failure(Struct, frozen=True, array_like=True):
    """The last failure of a message, as reported by the consumer that handled it."""

    kind: Annotated[str, Meta(max_length=FAILURE_KIND_CHARS_MAX)]
    """The name of the error's class."""
    text: Annotated[str, Meta(max_length=FAILURE_TEXT_CHARS_MAX)]
    client: Annotated[str, Meta(max_length=FAILURE_KIND_CHARS_MAX)]
    """The name of the consumer."""
    at_ms: int
    """The time by the consumer's wall clock, in milliseconds since 1970."""
    attempts: int


class Fault(Struct, frozen=True, array_like=True):
    """The part of a Failure that several messages can share."""

    kind: str
    text: str
    client: str
    attempts: int


# ── changes ───────────────────────────────────────────────────────────────────────────────────────
class Park(Struct, frozen=True, array_like=True, tag=1):
    """
    Park messages of the partition itself, which also acks them.

    With a failure, the key becomes parked, whatever its state was. Without one, the key is already
    parked, and these messages are appended to it.
    """

    key: ParkKey
    ranges: tuple[Range, ...]
    failure: Failure | None = None
    token: int = 0
    """The token of the owner, if its handlers are still working on the messages. The key then
    counts as parked only once the owner's process has ended.
    """


class DeadLetterKey(Struct, frozen=True, array_like=True, tag=12):
    """Park an order key that exceeds the limit of parked keys: it becomes a dead key, with all its
    messages.
    """

    key: bytes
    ranges: tuple[Range, ...]
    failure: Failure | None = None


class ParkOrDeadLetter(Struct, frozen=True, array_like=True, tag=13):
    """Park within the limits. Beyond them, apply DeadLetterKey to an order key, and park loose
    messages as dead letters. Used only in requests.
    """

    key: ParkKey
    ranges: tuple[Range, ...]
    failure: Failure | None = None


class Unpark(Struct, frozen=True, array_like=True, tag=2):
    """Parked messages of `source` have been handled, or have been skipped by an operator."""

    key: ParkKey
    source: int
    ranges: tuple[Range, ...]


class Free(Struct, frozen=True, array_like=True, tag=3):
    """A redriven key has no more parked messages, so its messages are delivered like those of any
    other key.
    """

    key: ParkKey


class FailAgain(Struct, frozen=True, array_like=True, tag=14):
    """Loose messages of `source` failed again when they were redriven. They remain parked."""

    key: ParkKey
    source: int
    ranges: tuple[Range, ...]
    failure: Failure


class Shift(Struct, frozen=True, array_like=True, tag=11):
    """
    Move messages of `source` that wait for a retry to `to` attempts, or to the dead letters (None).

    A move to RETRIED means that dead letters, or parked messages without a key, are to be handled
    again.
    """

    key: ParkKey
    to: int | None
    source: int
    ranges: tuple[Range, ...]
    failure: Failure | None = None
    """The failure of the last attempt; None if the attempt has begun."""


class Redrive(Struct, frozen=True, array_like=True, tag=4):
    """Handle the messages of a key again, oldest first."""

    key: ParkKey


class EditedMessage(Struct, frozen=True, array_like=True):
    """The value with which an operator replaces the value of a parked message. The key does not
    change, and neither does the original in the log.
    """

    source: int
    offset: int
    value: bytes
    properties: bytes
    """The packed properties, including EDITED_PROPERTY."""


class Edit(Struct, frozen=True, array_like=True, tag=10):
    """Replace the value and properties of a parked message when it is handled again."""

    key: ParkKey
    message: EditedMessage


class FailureMark(Struct, frozen=True, array_like=True):
    """The failure of the parked messages `[start, end)` of `source`. A time of 0 means unknown."""

    source: int
    start: int
    end: int
    since_ms: int
    """The time at which they were parked, by the broker's wall clock, in milliseconds since
    1970.
    """
    at_ms: int
    """The time of the last failure, by the consumer's wall clock, in milliseconds since 1970."""
    fault: int
    """The index of their failure in `faults`; -1 if unknown."""
    retry_at_ms: int = 0
    """Time of the next attempt, as their owner reported it, in milliseconds since 1970."""


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
    """The edits of messages in these rows or in earlier ones."""
    faults: tuple[Fault, ...] = ()
    marks: tuple[FailureMark, ...] = ()
    """The failures of loose messages in these rows or in earlier ones."""
    token: int = 0
    """The same as in Park. Children omit it, because the owners of the parent no longer have any
    running handlers.
    """
    is_displaced: bool = False
    """True if the messages of these rows are displaced. A descendant whose range contains the key
    could not tell otherwise.
    """


class Adopt(Struct, frozen=True, array_like=True, tag=5):
    """Adopt a part of a parent's parked messages. `last` marks the last part."""

    parent: int
    keys: tuple[AdoptedKey, ...]
    last: bool
    sources: tuple[int, ...] = ()
    """The ancestors that keep the bytes of parked messages. They are notified when these are no
    longer needed.
    """
    passed: tuple[tuple[int, int], ...] = ()
    """For parent 0, (logical partition, offset): although the partition was reset, children need
    its messages from this offset on. The logical partition is -1 for loose and displaced messages.
    """
    children_notify_ancestors: bool = False
    """True for parent 0 if children keep the messages that they adopted, although the partition was
    reset. They then notify the ancestors.
    """


class Freeze(Struct, frozen=True, array_like=True, tag=6):
    """The children of the partition adopt its parked messages, so it does not accept any more
    changes.
    """


class AncestorReleased(Struct, frozen=True, array_like=True, tag=8):
    """A child no longer needs parked messages of this frozen partition, for keys in the logical
    partitions `[range_start, range_end)`.
    """

    range_start: int
    range_end: int
    includes_loose: bool
    """True if it does not need loose and displaced messages either."""


class AncestorNotified(Struct, frozen=True, array_like=True, tag=9):
    """An ancestor has been notified that none of its messages is needed any longer."""

    source: int


class Clear(Struct, frozen=True, array_like=True, tag=7):
    """Remove all parked messages, except those from `kept`, because an operator has reset the
    group.
    """

    kept: tuple[int, ...] = ()
    """The ancestors that are not part of the reset, so that their messages remain parked. Children
    may have adopted only some of them so far.
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
    | AncestorReleased
    | AncestorNotified
    | Edit
    | Shift
    | FailAgain
)
RequestedChange = ParkChange | ParkOrDeadLetter
"""The changes that a request may contain."""


def is_loose(key: ParkKey) -> bool:
    """Return True if messages under this key are independent of each other."""
    return not isinstance(key, bytes) or not key


_changes = msgspec.msgpack.Decoder(list[RequestedChange])
_keys = msgspec.msgpack.Decoder(list[AdoptedKey])
encode_parked = msgspec.msgpack.Encoder().encode


def decode_changes(data: bytes | memoryview) -> list[RequestedChange]:
    """Return the changes of a request. Raises msgspec.MsgspecError."""
    changes: list[RequestedChange] = _changes.decode(data)
    return changes


def decode_adopted(data: bytes | memoryview) -> list[AdoptedKey]:
    """Return the keys in an ancestor's answer. Raises msgspec.MsgspecError."""
    keys: list[AdoptedKey] = _keys.decode(data)
    return keys


def failure_of(error: BaseException, *, client: str, at_ms: int, attempts: int) -> Failure:
    """Return the Failure for an error. Texts are truncated to their limits, and hints are
    omitted.
    """
    try:
        text: Any = error.message if isinstance(error, KeylaneError) else str(error)
    except Exception:  # noqa: BLE001 - the error is a user's, and so is its __str__
        text = "its text is not available"
    return Failure(
        type(error).__qualname__[:FAILURE_KIND_CHARS_MAX],
        text.encode(errors="replace").decode()[:FAILURE_TEXT_CHARS_MAX],
        client[:FAILURE_KIND_CHARS_MAX],
        at_ms,
        attempts,
    )


CRASHED = "crashed"
"""The `Failure.kind` of a message that crashed the processes of its consumers."""


def crash_failure(times: str, *, at_ms: int, attempts: int) -> Failure:
    """Return the Failure for a message that crashed the process of its consumer, when no further
    details are known.
    """
    text = f"the process of its consumer ended while it was handled, {times}"
    return Failure(CRASHED, text, "", at_ms, attempts)


def nack_failure(*, client: str, at_ms: int, attempts: int) -> Failure:
    """Return the Failure for a message that was given back by a program without a handler."""
    text = "the program gave the message back"
    return Failure("nack", text, client[:FAILURE_KIND_CHARS_MAX], at_ms, attempts)


def ack_timeout_failure(*, client: str, at_ms: int, attempts: int) -> Failure:
    """Return the Failure for a shared group's message that was not acked in time by a program
    without a handler.
    """
    text = "the program took the next message and did not ack this one within in_flight_ms"
    return Failure("not acked", text, client[:FAILURE_KIND_CHARS_MAX], at_ms, attempts)
