"""Remembers what was reported lately, for as long as it is repeated. Kept in memory. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
KEPT_MS = 3_000
"""How long something is remembered after its last report, in milliseconds. Clients repeat it about
twice a second.
"""
REMEMBERED_MAX = 1_000
"""The largest number of values that are remembered; the oldest are forgotten."""


class Recent(Generic[K, V]):
    """
    Values by key.

    Args:
        now_ms: returns the time by any monotonic clock, in milliseconds.
    """

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._reported: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def note(self, key: K, value: V) -> None:
        """Remember the newest value of a key."""
        self._reported[key] = self._now_ms(), value
        self._reported.move_to_end(key)
        if len(self._reported) > REMEMBERED_MAX:
            self._reported.popitem(last=False)

    def items(self) -> list[tuple[K, V]]:
        """Return what is remembered, the newest last."""
        since_ms = self._now_ms() - KEPT_MS
        while self._reported and next(iter(self._reported.values()))[0] < since_ms:
            self._reported.popitem(last=False)
        return [(key, value) for key, (_, value) in self._reported.items()]
