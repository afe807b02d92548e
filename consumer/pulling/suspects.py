"""Chooses, among messages that may have ended the process of an earlier owner, the one that is
handled next, and how. Pure.

    put ─▶ waiting, by offset ─▶ next ─┬─ CAREFUL     begun durably, alone, and waited for
                                       ├─ PLAIN       it waits for a failed one of its key
                                       ╰─ SET_ASIDE   its process ended too often
    is_over ─▶ rest: handed out as any other

Invariants
    Messages leave in the order of their offsets, and nothing overtakes a suspect. Only a message
    that was begun durably, with no other suspect beside it, is accused when a process ends. The
    ends that made it a suspect count as one, if nothing was begun then: one end more sets it aside.
    The careful part ends after CAREFUL_MAX messages or CAREFUL_MS, but not before an accused
    message. Messages that were not reached are suspects again after a further crash, nearer to the
    front.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable

from ...protocol.message import Message
from ..settings import FailurePolicy

CRASHES_MAX = 2
"""The number of processes of whose end a message is accused before it is set aside."""
CAREFUL_MAX = 1_000
CAREFUL_MS = 30_000


class SuspectStep(enum.Enum):
    """The way in which a message is handled."""

    CAREFUL = enum.auto()
    PLAIN = enum.auto()
    SET_ASIDE = enum.auto()


class SuspectQueue:
    """
    The messages of one partition while some of them may be suspects; every time is milliseconds of
    the boot clock.

    Args:
        upto: the end offset of the suspects, which are all messages below it.
        begun: (offset, crashes) of the accused messages.
        policy: the treatment of a message that failed, or ended its process, too often.
        tries_max: the number of failed tries and crashes, together, after which a crash is the last
            one.
    """

    def __init__(
        self,
        upto: int,
        begun: Iterable[tuple[int, int]],
        *,
        now_ms: int,
        policy: FailurePolicy,
        tries_max: int,
    ) -> None:
        self._upto = upto
        self.crashes = dict(begun)
        """The crashes of each accused message, by offset."""
        self._last_accused = max(self.crashes, default=-1)
        self._any_ended_it = not self.crashes
        """True if nothing was begun when the process ended: it may have been any suspect, and
        others only if none is accused.
        """
        self.until_ms = now_ms + CAREFUL_MS
        """The boot time, in milliseconds, at which the careful part ends, except for accused
        messages.
        """
        self._sets_aside = policy is not FailurePolicy.BLOCK
        self._tries_max = tries_max
        self._waiting: deque[Message] = deque()
        self._count = 0
        self._failed: dict[bytes, int] = {}
        """The offset of the last message that left, by the key of a message that failed and waits
        for its next try.
        """

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, messages: Iterable[Message]) -> None:
        """Add messages, by offset."""
        for message in messages:
            crashes = self.crashes.get(message.offset, 0)
            if crashes:
                message.attempt += crashes
            self._waiting.append(message)

    def is_over(self, next_offset: int, now_ms: int) -> bool:
        """Return True if no careful step is left; `next_offset` is the first offset that is not
        pulled.
        """
        first = self._waiting[0].offset if self._waiting else next_offset
        enough = first >= self._upto or self._count >= CAREFUL_MAX or now_ms >= self.until_ms
        return enough and first > self._last_accused

    def next(self) -> tuple[Message, SuspectStep] | None:
        """Take the next message, or None if it is not pulled yet."""
        if not self._waiting:
            return None
        message = self._waiting.popleft()
        crashes = self.crashes.get(message.offset, 0)
        too_often = crashes >= CRASHES_MAX or message.attempt > self._tries_max
        if self._sets_aside and crashes and too_often:
            return message, SuspectStep.SET_ASIDE
        if message.key and message.key in self._failed:
            self._failed[message.key] = message.offset
            return message, SuspectStep.PLAIN
        self._count += 1
        return message, SuspectStep.CAREFUL

    def alone_crashes(self, offset: int) -> int:
        """Return the crashes of which a message is accused if the process ends while it is begun
        alone.
        """
        return self.beside_crashes(offset) + (self._any_ended_it and offset < self._upto)

    def beside_crashes(self, offset: int) -> int:
        """Return the same while others run beside it: any of these may have caused the
        earlier end.
        """
        return self.crashes.get(offset, 0) + 1

    def failed(self, message: Message) -> None:
        """Note that a message waits for its next try: later ones of its key wait for it."""
        if message.key:
            self._failed.setdefault(message.key, message.offset)

    def ended(self, offset: int) -> None:
        """Note that a message is handled, or set aside."""
        if self._failed:
            self._failed = {key: last for key, last in self._failed.items() if last != offset}

    def rest(self) -> list[Message]:
        """Take all messages that are left."""
        messages = list(self._waiting)
        self._waiting.clear()
        return messages
