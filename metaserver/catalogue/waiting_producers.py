"""Remembers which producers wait for brokers, as they tell when they ask for a route. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from ...protocol.control import WaitingProducer
from ...protocol.errors import InvalidRequestError
from .recent import Recent

_decoder = msgspec.json.Decoder(list[WaitingProducer])


class WaitingProducers:
    """
    The producers that wait for brokers.

    Args:
        now_ms: returns the time by any monotonic clock, in milliseconds.
    """

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._told: Recent[tuple[str, str, str], WaitingProducer] = Recent(now_ms)
        """By subject, producer and broker group."""

    def note(self, subject: str, text: str) -> None:
        """Note what a producer tells: the JSON of a list of WaitingProducer. Raises
        InvalidRequestError.
        """
        try:
            producers: Iterable[WaitingProducer] = _decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise InvalidRequestError(f"waiting: {error!s:.200}") from None
        for each in producers:
            self._told.note((subject, each.client, each.broker_group), each)

    def of(self, subject: str) -> tuple[WaitingProducer, ...]:
        """Return the producers of a subject that wait, those that have waited longest first."""
        found = [each for key, each in self._told.items() if key[0] == subject]
        return tuple(sorted(found, key=lambda each: -each.waiting_ms))
