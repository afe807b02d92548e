"""The messages that may have ended the process of an earlier owner: each is handed out alone. Pure.

    next message ─▶ TURN: no other suspect of the consumer runs ─▶ BEGINNING: recorded durably
        ─▶ ALONE: in hand ─▶ ACKING ─▶ the next message ─▶ … ─▶ over: messages are handed out freely
                        ╰─ it takes too long ─▶ PASSED_OVER: it is accused of less ─▶ over

Invariants
    While the state lasts, the partition has one message in hand, in the order of the offsets.
    When a process ends, only a message that was recorded as begun, with nothing beside it, is
    accused. What has ended two processes while it was alone is set aside, unless the policy blocks.
    The state ends after CAREFUL_MAX messages or CAREFUL_MS, but not before an accused message.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from ...protocol.message import Message
from .stored import ColumnPart

CRASHES_MAX = 2
"""After this many ended processes an accused message is set aside."""
CAREFUL_MAX = 1_000
CAREFUL_MS = 30_000
LONG_MS = 1_000
"""A suspect is waited for at least this long, even if the state would end earlier."""


class SuspectPhase(enum.Enum):
    """Where the present suspect is."""

    NONE = enum.auto()
    TURN = enum.auto()
    """It waits for the consumer's turn."""
    BEGINNING = enum.auto()
    """The broker records that it begins."""
    ALONE = enum.auto()
    """A worker has it."""
    PASSED_OVER = enum.auto()
    """It takes too long: the broker records that others are in hand beside it."""
    ACKING = enum.auto()
    """It is handled, and its ack is not durable."""


NOT_BEGUN = frozenset({SuspectPhase.TURN, SuspectPhase.BEGINNING})


class SuspectMessages:
    """
    The suspects of one partition.

    Args:
        upto: messages below this offset are suspects.
        begun: (offset, crashes) of accused messages.
    """

    __slots__ = (
        "_count",
        "_has_no_record",
        "_last_accused",
        "_upto",
        "crashes",
        "message",
        "phase",
        "since_ms",
        "until_ms",
    )

    def __init__(self, upto: int, begun: Iterable[tuple[int, int]], now_ms: int) -> None:
        self._upto = upto
        self.crashes = dict(begun)
        """The crashes of each accused message, by offset."""
        self._last_accused = max(self.crashes, default=-1)
        self._has_no_record = not self.crashes
        self.until_ms = now_ms + CAREFUL_MS
        """When the state ends, except for accused messages."""
        self._count = 0
        self.phase = SuspectPhase.NONE
        self.message: Message | ColumnPart | None = None
        """The present suspect."""
        self.since_ms = 0
        """When it was handed out."""

    def is_over(self, first: int, now_ms: int, *, first_queued: int) -> bool:
        """
        Return True if no message is to be handed out alone.

        Args:
            first: the lowest offset that may be handed out, or is not pulled.
            first_queued: the lowest one that waits for a failed message of its key.
        """
        if min(first, first_queued) >= self._upto or self._is_at_limit(now_ms):
            return first > self._last_accused
        return False

    def _is_at_limit(self, now_ms: int) -> bool:
        return self._count >= CAREFUL_MAX or now_ms >= self.until_ms

    @property
    def deadline_ms(self) -> int:
        """Until when the present suspect is waited for."""
        return max(self.until_ms, self.since_ms + LONG_MS)

    def begin(self, message: Message | ColumnPart) -> None:
        """Make a message the present suspect, which waits for the consumer's turn."""
        self.message = message
        self.phase = SuspectPhase.TURN
        self._count += 1

    def end(self) -> None:
        """End the present suspect."""
        self.message = None
        self.phase = SuspectPhase.NONE

    def is_present(self, message: Message | ColumnPart) -> bool:
        """Return True if the message is the present suspect."""
        return self.message is message

    @property
    def crashes_if_begun(self) -> int:
        """The crash count to record before the present suspect begins. Rows that are in hand
        together count as one end: the next owner hands them out in smaller parts.
        """
        assert self.message is not None
        if isinstance(self.message, ColumnPart):
            return self.message.crashes + 1
        return self.crashes_if_alone(self.message.offset)

    @property
    def crashes_if_shared(self) -> int:
        """The crash count of the present suspect if the process ends with others in hand beside it:
        one of them may have made it a suspect.
        """
        assert self.message is not None
        if isinstance(self.message, ColumnPart):
            return self.crashes_if_begun
        return self.crashes.get(self.message.offset, 0) + 1

    def crashes_if_alone(self, offset: int) -> int:
        """Return the crash count of a message if the process ends while it runs alone. If nothing
        was recorded before, the crashes that made it a suspect count as one.
        """
        return self.crashes.get(offset, 0) + 1 + (self._has_no_record and offset < self._upto)
