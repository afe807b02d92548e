"""How often messages of one partition failed, and why the oldest did: told to the broker with the acks.  Pure.

The broker keeps the numbers, and gives them to the next owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from ...protocol.message import Message
from ...protocol.offsets import IntervalSet, Range
from ...protocol.parked import FailingMessage, Failure, failing_message
from ...protocol.text import key_digest

TOLD_MAX = 1_000
"""Messages in one request of acks whose failed tries are told."""

FAILING_MAX = 1_000
"""Messages whose last failure is kept, to tell that of the oldest."""

Tries = tuple[tuple[int, int], ...]


class _LastFailure(NamedTuple):
    key: bytes
    since_ms: int
    failure: Failure


class FailedTries:
    """(offset, tries that failed) of messages that are not acked."""

    def __init__(self) -> None:
        self._untold: dict[int, int] = {}
        self._earlier: dict[int, int] = {}
        """Under earlier grants, of messages that were not pulled yet."""
        self._failing: dict[int, _LastFailure] = {}
        """Offset → the last failure of a message that waits for its next try."""

    def __bool__(self) -> bool:
        """True if the broker was not told of some."""
        return bool(self._untold)

    def begin(self, earlier: Iterable[tuple[int, int]]) -> None:
        """Note what the broker knows when the partition is acquired."""
        self._earlier = dict(earlier)

    def count_on(self, messages: Iterable[Message]) -> None:
        """Have the attempts of messages that were just pulled begin behind those of earlier grants."""
        if self._earlier:
            for message in messages:
                message.attempt += self._earlier.pop(message.offset, 0)

    def failed(self, message: Message, failure: Failure) -> None:
        """Note that the present attempt of a message failed."""
        self._untold[message.offset] = message.attempt
        known = self._failing.get(message.offset)
        if known is not None or len(self._failing) < FAILING_MAX:
            since_ms = failure.at_ms if known is None else known.since_ms
            self._failing[message.offset] = _LastFailure(message.key, since_ms, failure)

    def ended(self, ranges: Iterable[Range]) -> None:
        """Note that messages are handled or set aside: they fail no longer."""
        if self._failing:
            gone = IntervalSet(ranges)
            for offset in [offset for offset in self._failing if offset in gone]:
                del self._failing[offset]

    def oldest(self) -> FailingMessage | None:
        """The oldest message that fails."""
        if not self._failing:
            return None
        offset = min(self._failing)
        failed = self._failing[offset]
        digest = key_digest(failed.key)
        return failing_message(offset, failed.failure, key_digest=digest, since_ms=failed.since_ms)

    def next(self) -> Tries:
        """What the next request tells."""
        return tuple(islice(self._untold.items(), TOLD_MAX)) if self._untold else ()

    def told(self, tries: Tries) -> None:
        """Note that the broker has these."""
        for offset, attempts in tries:
            if self._untold.get(offset) == attempts:
                del self._untold[offset]
