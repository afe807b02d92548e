"""Counts the failed attempts of one partition's messages, and finds the message that blocks others.
Both are reported to the broker with acks. Pure.

The broker stores the counts, and passes them to the next owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple, TypeVar

from ...protocol.message import Message
from ...protocol.offsets import IntervalSet, Range
from ...protocol.parked import FailingMessage, Failure, failing_message
from ...protocol.text import key_digest

REPORTED_MAX = 1_000
"""The maximum number of messages whose failed attempts are reported in one ack request."""

FAILING_MAX = 1_000
"""The maximum number of messages whose last failure is remembered, so that the oldest can be
reported.
"""

Tries = tuple[tuple[int, int], ...]
_MessageRef = TypeVar("_MessageRef", int, tuple[int, int])


class _LastFailure(NamedTuple):
    """The last failure of a message, and since when the message has been failing."""

    key: bytes
    since_ms: int
    failure: Failure
    running_ms: int | None = None
    """How many milliseconds its handler has been hanging; None if it is not."""


class FailedTries:
    """Tracks the failed attempts of messages that are not acked."""

    def __init__(self) -> None:
        self._unreported: dict[int, int] = {}
        self.earlier_tries: dict[int, int] = {}
        """The failed attempts under earlier grants, by offset, of messages that are not pulled
        yet.
        """
        self._failing: dict[int, _LastFailure] = {}
        """The last failure of each message that waits for a retry or is hanging, by offset."""
        self._redriven: dict[tuple[int, int], _LastFailure] = {}
        """The same for redriven messages, by (id of the partition that stores the message,
        offset).
        """

    def __bool__(self) -> bool:
        """Return True if there are failed attempts to report to the broker."""
        return bool(self._unreported)

    def load_earlier(self, earlier_tries: Iterable[tuple[int, int]]) -> None:
        """Load the failed attempts that the broker reports when the partition is acquired."""
        self.earlier_tries = dict(earlier_tries)

    def add_earlier_tries(self, messages: Iterable[Message]) -> None:
        """Add the attempts under earlier grants to those of messages that have just been pulled."""
        if self.earlier_tries:
            for message in messages:
                message.attempt += self.earlier_tries.pop(message.offset, 0)

    def record_failure(self, message: Message, failure: Failure) -> None:
        """Record that the current attempt of a message failed."""
        self._unreported[message.offset] = message.attempt
        self.record_blocking(message, failure)

    def record_blocking(self, message: Message, failure: Failure) -> None:
        """Record why a message blocks others, without counting a failed attempt."""
        _record(self._failing, message.offset, message.key, failure)

    def record_hang(self, message: Message, failure: Failure, running_ms: int) -> bool:
        """Record how long a message has been hanging. Return True if it was not known to hang."""
        return _record(self._failing, message.offset, message.key, failure, running_ms)

    def report_redriven_hang(
        self, source: int, message: Message, failure: Failure, running_ms: int
    ) -> bool:
        """Record that a redriven message is hanging; see `record_hang`."""
        return _record(self._redriven, (source, message.offset), message.key, failure, running_ms)

    def report_redriven_failure(self, source: int, message: Message, failure: Failure) -> None:
        """Record that a redriven message failed; its attempts are counted elsewhere."""
        _record(self._redriven, (source, message.offset), message.key, failure)

    def clear_redriven(self, source: int, offset: int) -> None:
        """Drop a redriven message that is handled, or no longer in a handler."""
        self._redriven.pop((source, offset), None)

    def remove(self, ranges: Iterable[Range]) -> None:
        """Drop messages that are handled or set aside."""
        failing = self._failing
        if not failing:
            return
        removed = list(ranges)
        if sum(end - start for start, end in removed) <= len(failing):
            for start, end in removed:
                for offset in range(start, end):
                    failing.pop(offset, None)
            return
        intervals = IntervalSet(removed)
        for offset in [offset for offset in failing if offset in intervals]:
            del failing[offset]

    def oldest(self) -> FailingMessage | None:
        """Return the oldest failing or hanging message, or a redriven one if there is no other."""
        source = None
        if self._failing:
            offset = min(self._failing)
            last_failure = self._failing[offset]
        elif self._redriven:
            source, offset = reference = min(self._redriven)
            last_failure = self._redriven[reference]
        else:
            return None
        return failing_message(
            offset,
            last_failure.failure,
            key_digest=key_digest(last_failure.key),
            since_ms=last_failure.since_ms,
            source=source,
            running_ms=last_failure.running_ms,
        )

    def report_with(self, ranges: tuple[Range, ...]) -> tuple[Tries, FailingMessage | None]:
        """Return what the next request reports in addition to its acks of `ranges`:
        `next_unreported`, and then `oldest` without these ranges.
        """
        if not (self._unreported or self._failing or self._redriven):
            return (), None
        failed = self.next_unreported()
        self.remove(ranges)
        return failed, self.oldest()

    def next_unreported(self) -> Tries:
        """Return unreported failed attempts, at most as many as a request may contain."""
        return tuple(islice(self._unreported.items(), REPORTED_MAX)) if self._unreported else ()

    def mark_reported(self, tries: Tries) -> None:
        """Drop failed attempts that the broker has stored."""
        for offset, attempts in tries:
            if self._unreported.get(offset) == attempts:
                del self._unreported[offset]


def _record(
    failing: dict[_MessageRef, _LastFailure],
    reference: _MessageRef,
    key: bytes,
    failure: Failure,
    running_ms: int | None = None,
) -> bool:
    """Record a failure. Return True if it is the message's first one, or the message was not known
    to hang.
    """
    previous = failing.get(reference)
    if previous is None and len(failing) >= FAILING_MAX:
        return False
    since_ms = failure.at_ms - (running_ms or 0) if previous is None else previous.since_ms
    failing[reference] = _LastFailure(key, since_ms, failure, running_ms)
    return previous is None or previous.running_ms is None
