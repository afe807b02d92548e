"""Until when a session may do what: its phase, its lease, and the hand-over. Pure.

    ACQUIRING ⇄ SERVING ─ stopped, lapsed, fenced ─▶ STOPPING ─ nothing in hand, flushed ─▶ ENDED

    phase       handlers start                pulls   acks
    ACQUIRING   once it was acquired before   no      once it was acquired before
    SERVING     yes                           yes     yes
    STOPPING    no                            no      yes, unless it is fenced
    ENDED       no                            no      no

Invariants
    No handler starts at or after the end of the lease, and a lease that has ended is not renewed:
    another consumer may have the messages. A fence is final.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from ...protocol.ids import MAX_I64

NEVER = MAX_I64


class HeldLease(NamedTuple):
    """What requests name a session by."""

    partition_id: int
    group: str
    session: str
    """The id of the consumer's session at the metaserver; "" for a broadcast consumer."""
    token: int
    """The fencing token; 0 for a broadcast consumer."""


class SessionPhase(enum.Enum):
    """What a session does."""

    ACQUIRING = enum.auto()
    """The fence must be raised at the broker, for the first time or after a failed pull."""
    SERVING = enum.auto()
    STOPPING = enum.auto()
    """The partition is handed over: running handlers end, and acks are flushed."""
    ENDED = enum.auto()


class Tenure:
    """
    The lease of one session; all times are boot-clock milliseconds.

    Args:
        epoch_ms: the calendar's time at 0 of the boot clock, in milliseconds since 1970.
        may_release: False: the hand-over waits for the program's callbacks before it flushes.
    """

    __slots__ = (
        "cancel_ms",
        "epoch_ms",
        "fence",
        "flush_until_ms",
        "is_acquired",
        "is_paused",
        "lease",
        "may_release",
        "phase",
        "until_ms",
    )

    def __init__(self, lease: HeldLease, epoch_ms: int, *, may_release: bool = True) -> None:
        self.lease = lease
        self.epoch_ms = epoch_ms
        self.phase = SessionPhase.ACQUIRING
        self.until_ms = 0
        """The end of the lease."""
        self.is_acquired = False
        """True once the broker has raised the fence, and its parked keys are known."""
        self.is_paused = False
        self.may_release = may_release
        self.fence: int | None = None
        """The higher token that the broker has seen, 0 if it is unknown; None: not fenced."""
        self.cancel_ms = NEVER
        """When running handlers are cancelled, or before, at the end of the lease; NEVER: they are
        not, or have been.
        """
        self.flush_until_ms = NEVER
        """When the session ends, whatever is not flushed."""

    @property
    def is_live(self) -> bool:
        """True while the session is not being handed over."""
        return self.phase is SessionPhase.SERVING or self.phase is SessionPhase.ACQUIRING

    @property
    def cancel_due_ms(self) -> int:
        """When running handlers are cancelled, as long as the lease is not renewed."""
        return NEVER if self.cancel_ms == NEVER else min(self.cancel_ms, self.until_ms)

    def may_hand_out(self, now_ms: int) -> bool:
        """Return True if a handler may start."""
        phase = self.phase
        return (
            now_ms < self.until_ms
            and self.is_acquired
            and not self.is_paused
            and (phase is SessionPhase.SERVING or phase is SessionPhase.ACQUIRING)
        )

    @property
    def may_ack(self) -> bool:
        """True if the broker takes acks."""
        return self.is_acquired and self.fence is None and self.phase is not SessionPhase.ENDED

    def renew(self, until_ms: int, now_ms: int) -> None:
        """Extend the lease, unless it has ended."""
        if self.fence is None and (now_ms < self.until_ms or not self.until_ms):
            self.until_ms = until_ms
