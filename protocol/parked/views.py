"""What brokers answer about parked messages: to their owner in frames, to people over HTTP.
Pure.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from .changes import Failure, Fault, ParkKey, ParkState


class ParkedKeyRow(Struct, frozen=True, array_like=True):
    """A parked key as its owner needs it."""

    key: ParkKey
    state: ParkState
    messages: int


class ParkedView(Struct, frozen=True, kw_only=True):
    """A parked key for people; without `key_hex`: dead letters, or what waits for retry; with "":
    messages without a key.
    """

    key_hex: str | None
    state: ParkState
    messages: int
    since_ms: int
    """When its first message was parked, by the broker's calendar."""
    failure: Failure | None
    first_source: int
    """The partition that has the first message; the offset in it is `first_offset`."""
    first_offset: int
    tries: int | None = None
    """
    Messages of any key that wait for retry have failed so often; None: these do not wait for retry.

    0: dead letters that an operator has chosen to be handled again.
    """
    next_ms: int | None = None
    """When the next of them is tried again, as their owner said, milliseconds since 1970; None: not
    known.
    """


class ParkedList(Struct, frozen=True, kw_only=True):
    """A page of what a group has parked on a partition; further ones begin after the last key of
    this one.
    """

    partition_id: int
    group: str
    frozen: bool
    """The children of the partition have taken these over: change them there."""
    keys: list[ParkedView]
    more: bool


ParkedDetail = tuple[int, int, int, int]
"""
How the messages of a row failed: since when they are set aside, when they failed last, the place of
their failure in `faults`, when they are tried again.  A time that is 0 is not known, and a place of
-1.
"""


class ParkedOffsets(Struct, frozen=True, kw_only=True):
    """The first parked messages of a key, as (source, start, end), oldest first."""

    rows: list[tuple[int, int, int]]
    messages: int
    """All of them."""
    edited: list[tuple[int, int]] = []
    """(source, offset) of those in these rows that were edited."""
    details: list[ParkedDetail] = []
    """How the messages of each row failed, if the request asks from a place on, and they are
    without an order.
    """
    faults: list[Fault] = []
    more: bool = False
    """There are messages behind these, if the request asks from a place on."""


class ChangeParkedKey(Struct, frozen=True, kw_only=True):
    """An operator's change of one parked key: redriven, or some of its messages skipped."""

    group: str
    key_hex: str | None
    skip: list[tuple[int, int, int]] | None = None
    """Messages to skip, as (source, start, end); None: redrive the key."""
    retry: list[tuple[int, int, int]] | None = None
    """Messages without an order to handle again, in the same way; the others stay.  Without
    `skip`.
    """


_rows = msgspec.msgpack.Decoder(list[ParkedKeyRow])


def decode_key_rows(data: bytes | memoryview) -> list[ParkedKeyRow]:
    """The keys of an answer.  Raises msgspec.MsgspecError."""
    rows: list[ParkedKeyRow] = _rows.decode(data)
    return rows
