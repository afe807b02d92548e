"""Brokers' responses about parked messages: in frames to their owner, and over HTTP to operators.
Pure.

FailingMessage reports the message that blocks a consumer group on a partition, because it keeps
failing or its handler does not return.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from .changes import (
    FAILURE_KIND_CHARS_MAX,
    FAILURE_TEXT_CHARS_MAX,
    Failure,
    Fault,
    ParkKey,
    ParkState,
)


class ParkedKeyRow(Struct, frozen=True, array_like=True):
    """The fields of a parked key that the partition's owner needs."""

    key: ParkKey
    state: ParkState
    messages: int


class ParkedView(Struct, frozen=True, kw_only=True):
    """A parked key, for operators. `key_hex` is None for dead letters and for messages that wait
    for a retry, and "" for messages without a key.
    """

    key_hex: str | None
    state: ParkState
    messages: int
    since_ms: int
    """The time at which its first message was parked, by the broker's wall clock, in milliseconds
    since 1970.
    """
    failure: Failure | None
    first_source: int
    """The partition that stores the first message; `first_offset` is the message's offset in it."""
    first_offset: int
    tries: int | None = None
    """
    The number of failed attempts of messages that wait for a retry; None if they do not wait for
    one.

    0 stands for dead letters that an operator has selected for another attempt.
    """
    next_ms: int | None = None
    """The retry time reported by their owner, in milliseconds since 1970; None if unknown."""


class ParkedTotals(Struct, frozen=True, kw_only=True):
    """All that a group has parked on a partition, without what waits for a retry."""

    keys: int
    messages: int
    since_ms: int
    """The time at which the first message was parked, as in `ParkedView`."""
    failure: Failure | None
    """The newest of the keys' failures."""


class ParkedList(Struct, frozen=True, kw_only=True):
    """A page of the keys that a group has parked on a partition. The next page begins after the
    last key of this one.
    """

    partition_id: int
    group: str
    frozen: bool
    """True if the children of the partition adopt, or have adopted, the messages, which can then be
    changed only there.
    """
    keys: list[ParkedView]
    more: bool
    adopted: list[int] | None = None
    """The parents whose parked messages this partition has completely adopted; None if the broker
    does not report them, as before 0.3.
    """
    totals: ParkedTotals | None = None
    """Set on the first page of all keys, unless the broker is older than this field."""


ParkedDetail = tuple[int, int, int, int]
"""Details of a row of failed messages: the time of parking, the time of the last failure, the index
of the failure in `faults`, and the retry time. A time of 0 and an index of -1 mean unknown.
"""


class ParkedOffsets(Struct, frozen=True, kw_only=True):
    """The first parked messages of a key, as (source, start, end), oldest first."""

    rows: list[tuple[int, int, int]]
    messages: int
    """The total number of parked messages of the key."""
    edited: list[tuple[int, int]] = []
    """The edited messages in these rows, as (source, offset)."""
    details: list[ParkedDetail] = []
    """The details of each row, if the request has `after` and the messages are loose."""
    faults: list[Fault] = []
    more: bool = False
    """True if more messages follow. Set only if the request has `after`."""


class ChangeParkedKey(Struct, frozen=True, kw_only=True):
    """An operator's change to one parked key: redrive it, or skip some of its messages."""

    group: str
    key_hex: str | None
    skip: list[tuple[int, int, int]] | None = None
    """The messages to skip, as (source, start, end); None to redrive the key."""
    retry: list[tuple[int, int, int]] | None = None
    """The loose messages to redrive, as (source, start, end). Must not be used together with
    `skip`.
    """


_rows = msgspec.msgpack.Decoder(list[ParkedKeyRow])


def decode_key_rows(data: bytes | memoryview) -> list[ParkedKeyRow]:
    """Decode the payload of ParkedKeys. Raises msgspec.MsgspecError."""
    rows: list[ParkedKeyRow] = _rows.decode(data)
    return rows


KEY_DIGEST_CHARS_MAX = 64

HANGS_MS = 10_000
"""The time after which a handler that has not returned, or a program that has not acked a message,
counts as hanging, in milliseconds.
"""
RUNNING = "running"
"""The `FailingMessage.kind` of a hanging message: the handler has not returned, or the program has
not acked the message.
"""


OTHERS_FAILING_MAX = 3
"""How many failing messages are reported besides the oldest one."""
FAILING_COUNTED_MAX = 1_000
"""The largest number of failing messages of a partition that its owner remembers."""


class FailingMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The oldest failing or hanging message of a partition. Its owner reports it with acks, and the
    broker keeps it in memory.
    """

    offset: int
    key_digest: Annotated[str, Meta(max_length=KEY_DIGEST_CHARS_MAX)]
    """A digest of the key, as in logs. The key itself may be confidential."""
    since_ms: int
    """The time of the first failure, or of the start of the hanging attempt, by the consumer's wall
    clock, in milliseconds since 1970.
    """
    attempts: int
    """The number of failed attempts, including those of earlier owners."""
    kind: Annotated[str, Meta(max_length=FAILURE_KIND_CHARS_MAX)]
    """The class name of its last error, or RUNNING if it hangs."""
    text: Annotated[str, Meta(max_length=FAILURE_TEXT_CHARS_MAX)]
    client: Annotated[str, Meta(max_length=FAILURE_KIND_CHARS_MAX)]
    """The name of the consumer."""
    at_ms: int
    """The time of the last failure, or of the last check that found it hanging. Same unit as
    `since_ms`.
    """
    source: int | None = None
    """The partition that stores it, if it is being redriven; None if it was not parked."""
    running_ms: int | None = None
    """How long the handler or the program had been working on the message at `at_ms`, in
    milliseconds; None if it waits for its next attempt.
    """
    others: Annotated[tuple[FailingMessage, ...], Meta(max_length=OTHERS_FAILING_MAX)] = ()
    """Those other failing or hanging messages of the partition that failed last, the last one
    first.
    """
    others_count: Annotated[int, Meta(ge=0)] | None = None
    """The number of other failing or hanging messages of the partition, of which the owner counts
    up to FAILING_COUNTED_MAX; None if not reported.
    """


def failing_message(
    offset: int,
    failure: Failure,
    *,
    key_digest: str,
    since_ms: int,
    source: int | None = None,
    running_ms: int | None = None,
) -> FailingMessage:
    """Return the report on a message that has been failing or hanging since `since_ms`. `failure`
    is its last failure.
    """
    return FailingMessage(
        offset=offset,
        key_digest=key_digest,
        since_ms=since_ms,
        attempts=failure.attempts,
        kind=failure.kind,
        text=failure.text,
        client=failure.client,
        at_ms=failure.at_ms,
        source=source,
        running_ms=running_ms,
    )


def hanging_failure(description: str, *, client: str, at_ms: int, attempts: int) -> Failure:
    """Return the Failure for a hanging message. `attempts` is the number of earlier failed
    attempts.
    """
    return Failure(RUNNING, description, client[:FAILURE_KIND_CHARS_MAX], at_ms, attempts)
