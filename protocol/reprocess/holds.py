"""Bodies of the call that holds messages of a partition against retention. Pure.

A hold belongs to a job. It keeps the messages from an offset on, and expires a ttl after it was
last set or renewed.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..ids import MAX_I64

HOLD_TTL_MS_MAX = 86_400_000
"""Longest ttl, one day. A living job renews its hold; the hold of a dead one may fill a disk for
that long.
"""
HOLDS_PER_PARTITION_MAX = 16
Offset = Annotated[int, Meta(ge=0, le=MAX_I64)]
TtlMs = Annotated[int, Meta(ge=0, le=HOLD_TTL_MS_MAX)]


class SetHold(Struct, frozen=True, kw_only=True):
    """Hold the messages of a partition from an offset on. A repeat only renews the hold."""

    job: str
    """Job to which the hold belongs; a later hold of the same job replaces it."""
    from_offset: Offset = 0
    ttl_ms: TtlMs
    """Milliseconds until the hold expires unless it is renewed; 0 ends it."""


class HoldView(Struct, frozen=True, kw_only=True):
    """A hold that has not expired."""

    job: str
    from_offset: int
    """Offset from which on retention removes no message."""
    ttl_ms: int
    left_ms: int
    """Milliseconds until it expires, unless it is renewed."""


class Held(Struct, frozen=True, kw_only=True):
    """The durable holds of a partition, with the offsets that are stored."""

    partition_id: int
    first_offset: int
    next_offset: int
    holds: tuple[HoldView, ...] = ()
