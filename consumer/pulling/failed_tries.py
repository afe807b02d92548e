"""How often messages of one partition failed: told to the broker with the acks, and known from it under a new grant.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from ...protocol.message import Message

TOLD_MAX = 1_000
"""Messages in one request of acks whose failed tries are told."""

Tries = tuple[tuple[int, int], ...]


class FailedTries:
    """(offset, tries that failed) of messages that are not acked."""

    def __init__(self) -> None:
        self._untold: dict[int, int] = {}
        self._earlier: dict[int, int] = {}
        """Under earlier grants, of messages that were not pulled yet."""

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

    def failed(self, message: Message) -> None:
        """Note that the present attempt of a message failed."""
        self._untold[message.offset] = message.attempt

    def next(self) -> Tries:
        """What the next request tells."""
        return tuple(islice(self._untold.items(), TOLD_MAX)) if self._untold else ()

    def told(self, tries: Tries) -> None:
        """Note that the broker has these."""
        for offset, attempts in tries:
            if self._untold.get(offset) == attempts:
                del self._untold[offset]
