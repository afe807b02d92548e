"""Decides in which order and how messages are handled that may have killed an earlier owner's
process. Pure.

    put ─▶ waiting, by offset ─▶ next ─┬─ CAREFUL     recorded as begun, run alone, waited for
                                       ├─ PLAIN       behind a failed message of its key
                                       ╰─ SET_ASIDE   has killed its process too often
    is_over ─▶ take_remaining: handed out like any others

Invariants
    Messages leave in offset order, and nothing overtakes a suspect. When a process ends, only a
    message that was durably recorded as begun, with no other suspect beside it, is accused. If
    nothing was recorded then, the crashes that made it a suspect count as one, and one more sets it
    aside. The careful part ends after CAREFUL_MAX messages or CAREFUL_MS, but not before an accused
    message. Messages that were not reached are suspects again after the next crash, nearer to the
    front.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable

from ...protocol.message import Message
from ..settings import FailurePolicy

CRASHES_MAX = 2
"""The number of crashes after which an accused message is set aside."""
CAREFUL_MAX = 1_000
CAREFUL_MS = 30_000


class SuspectStep(enum.Enum):
    """How a message is to be handled."""

    CAREFUL = enum.auto()
    PLAIN = enum.auto()
    SET_ASIDE = enum.auto()


class SuspectQueue:
    """
    Queues the messages of one partition while some may be suspects; times are boot-clock
    milliseconds.

    Args:
        upto: the end offset of the suspects: all messages below it are suspects.
        begun: (offset, crashes) of the accused messages.
        policy: the treatment of a message that failed, or killed its process, too often.
        tries_max: the number of failed tries and crashes together after which no further crash is
            risked.
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
        self._last_reported = max(self.crashes, default=-1)
        self._cause_unknown = not self.crashes
        """True if nothing was recorded as begun: any suspect may have killed the process."""
        self.until_ms = now_ms + CAREFUL_MS
        """The boot time, in milliseconds, at which the careful part ends, except for accused
        messages.
        """
        self._sets_aside = policy is not FailurePolicy.BLOCK
        self._tries_max = tries_max
        self._waiting: deque[Message] = deque()
        self._count = 0
        self._blocked_keys: dict[bytes, int] = {}
        """The last offset that left the queue for each key whose failed message waits for a
        retry.
        """

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, messages: Iterable[Message]) -> None:
        """Add messages, sorted by offset."""
        for message in messages:
            crashes = self.crashes.get(message.offset, 0)
            if crashes:
                message.attempt += crashes
            self._waiting.append(message)

    def is_over(self, next_offset: int, now_ms: int) -> bool:
        """Return True if no careful step remains. `next_offset` is the first offset not pulled
        yet.
        """
        first = self._waiting[0].offset if self._waiting else next_offset
        limit_reached = first >= self._upto or self._count >= CAREFUL_MAX or now_ms >= self.until_ms
        return limit_reached and first > self._last_reported

    def next(self) -> tuple[Message, SuspectStep] | None:
        """Pop the next message; None if it is not pulled yet."""
        if not self._waiting:
            return None
        message = self._waiting.popleft()
        crashes = self.crashes.get(message.offset, 0)
        is_exhausted = crashes >= CRASHES_MAX or message.attempt > self._tries_max
        if self._sets_aside and crashes and is_exhausted:
            return message, SuspectStep.SET_ASIDE
        if message.key and message.key in self._blocked_keys:
            self._blocked_keys[message.key] = message.offset
            return message, SuspectStep.PLAIN
        self._count += 1
        return message, SuspectStep.CAREFUL

    def crashes_if_alone(self, offset: int) -> int:
        """Return the message's crash count if the process ends while it runs alone."""
        return self.crashes_if_shared(offset) + (self._cause_unknown and offset < self._upto)

    def crashes_if_shared(self, offset: int) -> int:
        """Return its crash count while others run beside it: one of them may have caused the
        earlier crash.
        """
        return self.crashes.get(offset, 0) + 1

    def block_key(self, message: Message) -> None:
        """Hold back later messages of the key of a failed message until it ends."""
        if message.key:
            self._blocked_keys.setdefault(message.key, message.offset)

    def unblock_key(self, offset: int) -> None:
        """Release the keys for which the message at `offset` was the last one: it is handled or set
        aside.
        """
        if self._blocked_keys:
            self._blocked_keys = {
                key: last for key, last in self._blocked_keys.items() if last != offset
            }

    def take_remaining(self) -> list[Message]:
        """Pop all messages."""
        messages = list(self._waiting)
        self._waiting.clear()
        return messages
