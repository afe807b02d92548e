"""Answers of brokers about parked messages: to their owner in frames, to people over HTTP.
Pure.

The message that holds up a consumer group on a partition, because it fails and is tried again, or
its handler does not return.
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
    """The fields of a parked key that its owner needs."""

    key: ParkKey
    state: ParkState
    messages: int


class ParkedView(Struct, frozen=True, kw_only=True):
    """A parked key for people; `key_hex` is None for dead letters and messages that wait for retry,
    "" for messages without a key.
    """

    key_hex: str | None
    state: ParkState
    messages: int
    since_ms: int
    """Time when its first message was parked, by the broker's calendar, in milliseconds since 1970.
    """
    failure: Failure | None
    first_source: int
    """Partition that stores the first message; `first_offset` is the offset in it."""
    first_offset: int
    tries: int | None = None
    """
    Number of failed tries of messages that wait for retry; None: these messages do not wait for
    retry.

    0: dead letters that an operator has selected to be handled again.
    """
    next_ms: int | None = None
    """Time of the next try that their owner reported, in milliseconds since 1970; None: not known.
    """


class ParkedList(Struct, frozen=True, kw_only=True):
    """A page of what a group has parked on a partition; the next page begins after the last key of
    this one.
    """

    partition_id: int
    group: str
    frozen: bool
    """True if the children of the partition have taken these over, so that they must be changed
    there.
    """
    keys: list[ParkedView]
    more: bool


ParkedDetail = tuple[int, int, int, int]
"""
Details of a row of failed messages: time when they were set aside, time of the last failure, index
of the failure in `faults`, time of the next try. A time of 0 and an index of -1 are not known.
"""


class ParkedOffsets(Struct, frozen=True, kw_only=True):
    """The first parked messages of a key, as (source, start, end), the oldest first."""

    rows: list[tuple[int, int, int]]
    messages: int
    """Number of all parked messages of the key."""
    edited: list[tuple[int, int]] = []
    """(source, offset) of messages in these rows that were edited."""
    details: list[ParkedDetail] = []
    """Details of each row, if the request names a place to begin at, and the messages have no
    order.
    """
    faults: list[Fault] = []
    more: bool = False
    """True if more messages follow, if the request names a place to begin at."""


class ChangeParkedKey(Struct, frozen=True, kw_only=True):
    """An operator's change of one parked key, which redrives it, or skips some of its messages."""

    group: str
    key_hex: str | None
    skip: list[tuple[int, int, int]] | None = None
    """Messages to skip, as (source, start, end); None: redrive the key."""
    retry: list[tuple[int, int, int]] | None = None
    """Messages without an order to handle again, in the same form; the others stay. Not used
    together with `skip`.
    """


_rows = msgspec.msgpack.Decoder(list[ParkedKeyRow])


def decode_key_rows(data: bytes | memoryview) -> list[ParkedKeyRow]:
    """Return the keys of an answer. Raises msgspec.MsgspecError."""
    rows: list[ParkedKeyRow] = _rows.decode(data)
    return rows


KEY_DIGEST_CHARS_MAX = 64

HANGS_MS = 10_000
"""Milliseconds after which a handler that has not returned counts as hanging; so does a program
that has not acked a message.
"""
RUNNING = "running"
"""Kind of a message that hangs: the handler has not returned, or the program has not acked it."""


class FailingMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The oldest message of a partition that fails or hangs; its owner reports it with the acks,
    and the broker keeps it in memory.
    """

    offset: int
    key_digest: Annotated[str, Meta(max_length=KEY_DIGEST_CHARS_MAX)]
    """Name of the key in logs; the key itself may be private."""
    since_ms: int
    """Time of the first failure, or of the beginning of the try that hangs; milliseconds since 1970
    by the consumer's calendar.
    """
    attempts: int
    """Number of failed tries, including those of earlier owners."""
    kind: Annotated[str, Meta(max_length=FAILURE_KIND_CHARS_MAX)]
    """Name of the class of its last error; RUNNING if it hangs."""
    text: Annotated[str, Meta(max_length=FAILURE_TEXT_CHARS_MAX)]
    client: Annotated[str, Meta(max_length=FAILURE_KIND_CHARS_MAX)]
    """Name of the consumer."""
    at_ms: int
    """Time of the last failure, or time when it was last seen to hang; same unit as `since_ms`."""
    source: int | None = None
    """Partition that stores it, if it was parked and is handled again; None: it was not parked."""
    running_ms: int | None = None
    """Milliseconds that a hanging message had been with the handler or the program at `at_ms`;
    None: it waits for its next try.
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
    """Return a message that failed first at `since_ms`, and last as described by `failure`; or that
    has been hanging since then.
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


def running_of(what: str, *, client: str, at_ms: int, attempts: int) -> Failure:
    """Return the record of a message that hangs; `attempts` is the number of earlier failed
    tries.
    """
    return Failure(RUNNING, what, client[:FAILURE_KIND_CHARS_MAX], at_ms, attempts)
