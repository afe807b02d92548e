"""The bodies of the call that protects messages of a partition from retention. Pure.

A hold belongs to a job. It protects the messages from an offset on, and expires after its ttl
unless it is renewed by the job.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..ids import MAX_I64

HOLD_TTL_MS_MAX = 86_400_000
"""The maximum ttl in milliseconds: one day. The hold of a dead job can fill a disk for that
long.
"""
HOLDS_PER_PARTITION_MAX = 16
Offset = Annotated[int, Meta(ge=0, le=MAX_I64)]
TtlMs = Annotated[int, Meta(ge=0, le=HOLD_TTL_MS_MAX)]


class SetHold(Struct, frozen=True, kw_only=True):
    """Protect the messages of a partition from an offset on. Repeating the call only renews the
    hold.
    """

    job: str
    """The job to which the hold belongs. A later hold of the same job replaces this one."""
    from_offset: Offset = 0
    ttl_ms: TtlMs
    """The time until the hold expires unless it is renewed, in milliseconds; 0 ends the hold."""


class HoldView(Struct, frozen=True, kw_only=True):
    """A hold that has not expired."""

    job: str
    from_offset: int
    """The offset of the first protected message."""
    ttl_ms: int
    left_ms: int
    """The time until it expires unless it is renewed, in milliseconds."""


class Held(Struct, frozen=True, kw_only=True):
    """The response to SetHold: the durable holds of the partition, and its stored offsets."""

    partition_id: int
    first_offset: int
    next_offset: int
    holds: tuple[HoldView, ...] = ()
