"""Decides in which order and how to handle messages that may have killed an earlier owner's
process. Pure.

    put ─▶ waiting, by offset ─▶ next ─┬─ CAREFUL     recorded as begun, run alone, waited for
                                       ├─ PLAIN       behind a failed message of its key
                                       ╰─ SET_ASIDE   has killed its process too often
    is_over ─▶ take_remaining: handed out like any others

Invariants
    Messages are handed out in offset order, and nothing overtakes a suspect. When a process dies, a
    message is blamed only if it was durably recorded as begun, with no other suspect running beside
    it. If nothing was recorded in the earlier crashes, these count as one, and one more crash sets
    the message aside. The careful phase ends after CAREFUL_MAX messages or CAREFUL_MS, but not
    before a blamed message. Messages that were not reached are suspects again after the next crash,
    nearer to the front.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable

from ...protocol.message import Message
from ..settings import FailurePolicy

CRASHES_MAX = 2
"""The number of crashes after which a blamed message is set aside."""
CAREFUL_MAX = 1_000
CAREFUL_MS = 30_000


class SuspectStep(enum.Enum):
    """How to handle a message."""

    CAREFUL = enum.auto()
    PLAIN = enum.auto()
    SET_ASIDE = enum.auto()


class SuspectQueue:
    """
    Queues the messages of one partition while some may be suspects. Times are in milliseconds on
    the boot clock.

    Args:
        upto: the end offset of the suspects: all messages below it are suspects.
        begun: the (offset, crashes) of each blamed message.
        policy: what to do with a message that failed, or killed its process, too often.
        tries_max: the total number of failed attempts and crashes after which no further crash is
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
        """The number of crashes of each blamed message, by offset."""
        self._last_reported = max(self.crashes, default=-1)
        self._cause_unknown = not self.crashes
        """True if nothing was recorded as begun: any suspect may have killed the process."""
        self.until_ms = now_ms + CAREFUL_MS
        """The boot time, in milliseconds, at which the careful phase ends, except for blamed
        messages.
        """
        self._sets_aside = policy is not FailurePolicy.BLOCK
        self._tries_max = tries_max
        self._waiting: deque[Message] = deque()
        self._count = 0
        self._blocked_keys: dict[bytes, int] = {}
        """For each key whose failed message waits for a retry, the last offset that left the
        queue.
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
        """Return True if the careful phase is over. `next_offset` is the first offset not pulled
        yet.
        """
        first = self._waiting[0].offset if self._waiting else next_offset
        limit_reached = first >= self._upto or self._count >= CAREFUL_MAX or now_ms >= self.until_ms
        return limit_reached and first > self._last_reported

    def next(self) -> tuple[Message, SuspectStep] | None:
        """Pop the next message, or return None if it is not pulled yet."""
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
        """Return the message's crash count for the case that the process dies while the message
        runs alone.
        """
        return self.crashes_if_shared(offset) + (self._cause_unknown and offset < self._upto)

    def crashes_if_shared(self, offset: int) -> int:
        """Return the message's crash count while others run beside it: one of them may have caused
        the earlier crash.
        """
        return self.crashes.get(offset, 0) + 1

    def block_key(self, message: Message) -> None:
        """Hold back later messages of a failed message's key until the message is finished."""
        if message.key:
            self._blocked_keys.setdefault(message.key, message.offset)

    def unblock_key(self, offset: int) -> None:
        """Release the keys whose last message was the one at `offset`, because it is handled or set
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
