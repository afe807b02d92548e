"""Remembers which producers wait for brokers, as they tell when they ask for another route. Kept in
memory, for as long as a producer repeats it. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from ...protocol.control import WaitingProducer
from ...protocol.errors import InvalidRequestError

KEPT_MS = 3_000
"""How long a producer is remembered after it has told last, in milliseconds. It repeats it about
twice a second.
"""
REMEMBERED_MAX = 1_000
"""The largest number of waits that are remembered; the oldest are forgotten."""
_decoder = msgspec.json.Decoder(list[WaitingProducer])


class WaitingProducers:
    """
    The producers that wait for brokers.

    Args:
        now_ms: returns the time by any monotonic clock, in milliseconds.
    """

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._told: OrderedDict[tuple[str, str, str], tuple[float, WaitingProducer]] = OrderedDict()
        """By subject, producer and broker group: when it was told, and what."""

    def note(self, subject: str, text: str) -> None:
        """Note what a producer tells: the JSON of a list of WaitingProducer. Raises
        InvalidRequestError.
        """
        try:
            producers: Iterable[WaitingProducer] = _decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise InvalidRequestError(f"waiting: {error!s:.200}") from None
        for each in producers:
            key = subject, each.client, each.broker_group
            self._told[key] = self._now_ms(), each
            self._told.move_to_end(key)
            if len(self._told) > REMEMBERED_MAX:
                self._told.popitem(last=False)

    def of(self, subject: str) -> tuple[WaitingProducer, ...]:
        """Return the producers of a subject that wait, those that have waited longest first."""
        since_ms = self._now_ms() - KEPT_MS
        while self._told and next(iter(self._told.values()))[0] < since_ms:
            self._told.popitem(last=False)
        found = [each for key, (_, each) in self._told.items() if key[0] == subject]
        return tuple(sorted(found, key=lambda each: -each.waiting_ms))
