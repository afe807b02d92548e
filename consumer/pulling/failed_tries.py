"""Counts how often messages of one partition failed, and finds the one that holds others up, to
report both to the broker with the acks. Pure.

The broker keeps the numbers, and gives them to the next owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple, TypeVar

from ...protocol.message import Message
from ...protocol.offsets import IntervalSet, Range
from ...protocol.parked import FailingMessage, Failure, failing_message
from ...protocol.text import key_digest

TOLD_MAX = 1_000
"""The largest number of messages whose failed tries are reported in one request of acks."""

FAILING_MAX = 1_000
"""The largest number of messages whose reason to hold others up is kept, so that the oldest can be
reported.
"""

Tries = tuple[tuple[int, int], ...]
_Place = TypeVar("_Place", int, tuple[int, int])


class _LastFailure(NamedTuple):
    key: bytes
    since_ms: int
    failure: Failure
    running_ms: int | None = None
    """The milliseconds for which the message has been hanging; None if it does not hang."""


class FailedTries:
    """The (offset, number of failed tries) of messages that are not acked."""

    def __init__(self) -> None:
        self._untold: dict[int, int] = {}
        self.earlier: dict[int, int] = {}
        """The failed tries under earlier grants, of messages that are not pulled yet."""
        self._failing: dict[int, _LastFailure] = {}
        """The last failure of a message that waits for its next try or hangs, by offset."""
        self._redriven: dict[tuple[int, int], _LastFailure] = {}
        """The same for a parked message that is handled again, by (partition that stores it,
        offset).
        """

    def __bool__(self) -> bool:
        """Return True if some failed tries are not yet reported to the broker."""
        return bool(self._untold)

    def begin(self, earlier: Iterable[tuple[int, int]]) -> None:
        """Note the failed tries that the broker knows when the partition is acquired."""
        self.earlier = dict(earlier)

    def count_on(self, messages: Iterable[Message]) -> None:
        """Continue the attempts of messages that were just pulled after those of earlier grants."""
        if self.earlier:
            for message in messages:
                message.attempt += self.earlier.pop(message.offset, 0)

    def failed(self, message: Message, failure: Failure) -> None:
        """Note that the present attempt of a message failed."""
        self._untold[message.offset] = message.attempt
        self.blocks(message, failure)

    def blocks(self, message: Message, failure: Failure) -> None:
        """Note why a message holds others up, although no try failed."""
        _note(self._failing, message.offset, message.key, failure)

    def hangs(self, message: Message, why: Failure, running_ms: int) -> bool:
        """Note for how long a message has been with its handler or the program, and return True if
        this is new.
        """
        return _note(self._failing, message.offset, message.key, why, running_ms)

    def redriven_hangs(self, source: int, message: Message, why: Failure, running_ms: int) -> bool:
        """Note that a parked message hangs, as `hangs` does for others."""
        return _note(self._redriven, (source, message.offset), message.key, why, running_ms)

    def redriven_failed(self, source: int, message: Message, failure: Failure) -> None:
        """Note that a parked message failed; its tries are those of its parking."""
        _note(self._redriven, (source, message.offset), message.key, failure)

    def redriven_ended(self, source: int, offset: int) -> None:
        """Note that a parked message is handled, or is no longer with handlers."""
        self._redriven.pop((source, offset), None)

    def ended(self, ranges: Iterable[Range]) -> None:
        """Note that messages are handled or set aside, so that they no longer fail."""
        failing = self._failing
        if not failing:
            return
        ended = list(ranges)
        if sum(end - start for start, end in ended) <= len(failing):
            for start, end in ended:
                for offset in range(start, end):
                    failing.pop(offset, None)
            return
        gone = IntervalSet(ended)
        for offset in [offset for offset in failing if offset in gone]:
            del failing[offset]

    def oldest(self) -> FailingMessage | None:
        """Return the oldest message that fails or hangs; a redriven one only if there is no
        other.
        """
        source = None
        if self._failing:
            offset = min(self._failing)
            failed = self._failing[offset]
        elif self._redriven:
            source, offset = place = min(self._redriven)
            failed = self._redriven[place]
        else:
            return None
        return failing_message(
            offset,
            failed.failure,
            key_digest=key_digest(failed.key),
            since_ms=failed.since_ms,
            source=source,
            running_ms=failed.running_ms,
        )

    def told_with(self, ranges: tuple[Range, ...]) -> tuple[Tries, FailingMessage | None]:
        """Return the report of the next request, which acks `ranges`: `next`, and `oldest` once
        these have `ended`.
        """
        if not (self._untold or self._failing or self._redriven):
            return (), None
        failed = self.next()
        self.ended(ranges)
        return failed, self.oldest()

    def next(self) -> Tries:
        """Return failed tries that are not yet reported to the broker, as many as a request
        takes.
        """
        return tuple(islice(self._untold.items(), TOLD_MAX)) if self._untold else ()

    def told(self, tries: Tries) -> None:
        """Note that the broker has these failed tries."""
        for offset, attempts in tries:
            if self._untold.get(offset) == attempts:
                del self._untold[offset]


def _note(
    failing: dict[_Place, _LastFailure],
    place: _Place,
    key: bytes,
    failure: Failure,
    running_ms: int | None = None,
) -> bool:
    """Note a failure, and return True if it is the first one of the message, or its present try is
    the first to hang.
    """
    known = failing.get(place)
    if known is None and len(failing) >= FAILING_MAX:
        return False
    since_ms = failure.at_ms - (running_ms or 0) if known is None else known.since_ms
    failing[place] = _LastFailure(key, since_ms, failure, running_ms)
    return known is None or known.running_ms is None
