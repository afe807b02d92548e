"""Bodies of the call that holds messages of a partition against retention.  Pure.

A hold is a job's: it expires a ttl after it was set or renewed last, and keeps the messages from an
offset on until then.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..ids import MAX_I64

HOLD_TTL_MS_MAX = 86_400_000
"""A day.  A job that lives renews its hold; what a dead one holds may fill a disk for so long."""
HOLDS_PER_PARTITION_MAX = 16
Offset = Annotated[int, Meta(ge=0, le=MAX_I64)]
TtlMs = Annotated[int, Meta(ge=0, le=HOLD_TTL_MS_MAX)]


class SetHold(Struct, frozen=True, kw_only=True):
    """Hold the messages of a partition from an offset on, or renew that.  A repeat only renews
    it.
    """

    job: str
    """Whose hold it is; a later hold of the same job takes its place."""
    from_offset: Offset = 0
    ttl_ms: TtlMs
    """How long it lasts without being renewed; 0 ends it."""


class HoldView(Struct, frozen=True, kw_only=True):
    """A hold that has not expired."""

    job: str
    from_offset: int
    """Retention removes no message from this offset on."""
    ttl_ms: int
    left_ms: int
    """Time left until it expires, unless it is renewed."""


class Held(Struct, frozen=True, kw_only=True):
    """The holds of a partition, durable, with the offsets that are stored."""

    partition_id: int
    first_offset: int
    next_offset: int
    holds: tuple[HoldView, ...] = ()
