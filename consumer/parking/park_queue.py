"""Changes of parked messages that the broker does not have yet: which go into the next request.
Pure.

    park, done, free ─▶ waiting ─▶ take: one request ─▶ confirmed, each with its callback
                           ▲                 │ the broker has no room to park more: the rest alone, then one key at a time
                           ╰─────────────────╯

Invariants
    Messages of a key are parked in their order, and nothing is left out: a failed request is sent
    again. While nothing more can be parked, changes that make room are sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ...protocol.offsets import IntervalSet, Range
from ...protocol.parked import (
    PARKED_ROWS_MAX,
    AskedChange,
    Failure,
    Free,
    Park,
    ParkChange,
    ParkKey,
    ParkOrBury,
    Shift,
    Unpark,
    is_loose,
)

Confirmed = Callable[[], None]
CHANGES_MAX = 500
"""Changes in one request: a record of them stays far below the size of a batch, with keys of 1
KiB.
"""


@dataclass(slots=True)
class Waiting:
    """A change, and what to call when it is durable."""

    change: ParkChange
    confirmed: Confirmed
    next_try_ms: int | None = None
    """When the message is tried again, if it waits for retry: milliseconds since 1970."""


class ParkQueue:
    """The changes of one partition, in their order."""

    def __init__(self) -> None:
        self._parks: deque[Waiting] = deque()
        self._others: deque[Waiting] = deque()
        self._under_way: list[Waiting] = []
        self._messages = 0
        self._full = False
        """The broker had no room for the parks of the last request."""
        self._alone = False
        """The next request has one park, to find one that the broker takes."""

    def __bool__(self) -> bool:
        return bool(self._parks or self._others or self._under_way)

    @property
    def is_long(self) -> bool:
        """True if there are changes for a whole request."""
        return len(self._parks) + len(self._others) >= CHANGES_MAX

    @property
    def full(self) -> bool:
        """True if the broker had no room when asked last."""
        return self._full

    def parks(self, key: ParkKey) -> bool:
        """True if a message of this key is not parked at the broker yet."""
        return any(park.key == key for park in self._waiting_parks())

    def stops(self, key: ParkKey) -> bool:
        """
        True if a message of this key has failed, and the broker does not have that yet: it ends the
        key's redrive.

        Of a loose key one that was redriven: any other changes nothing for those that are.
        """
        return any(
            park.key == key and park.failure is not None and not (is_loose(key) and park.ranges)
            for park in self._waiting_parks()
        )

    def _waiting_parks(self) -> list[Park]:
        here = [*self._under_way, *self._parks]
        return [waiting.change for waiting in here if isinstance(waiting.change, Park)]

    @property
    def messages(self) -> int:
        """Messages that are not parked at the broker yet."""
        return self._messages

    def park(
        self,
        key: ParkKey,
        offsets: list[int],
        failure: Failure | None,
        confirmed: Confirmed | None = None,
        *,
        next_try_ms: int | None = None,
    ) -> None:
        """Add messages to park, sorted by offset."""
        self._messages += len(offsets)
        ranges = _ranges(offsets)
        for first in range(0, max(len(ranges), 1), PARKED_ROWS_MAX):
            part = ranges[first : first + PARKED_ROWS_MAX]
            change = Park(key, part, failure if first == 0 else None)
            self._parks.append(Waiting(change, confirmed or _nothing, next_try_ms))

    def unpark(self, key: ParkKey, source: int, start: int, end: int, confirmed: Confirmed) -> None:
        """Add redriven messages that are handled."""
        self._others.append(Waiting(Unpark(key, source, ((start, end),)), confirmed))

    def shift(self, change: Shift, confirmed: Confirmed, *, next_try_ms: int | None = None) -> None:
        """Add messages that wait for another retry now, or are dead letters."""
        self._others.append(Waiting(change, confirmed, next_try_ms))

    def add(self, change: ParkChange, confirmed: Confirmed) -> None:
        """Add another change, which makes no room and takes none."""
        self._others.append(Waiting(change, confirmed))

    def free(self, key: ParkKey, confirmed: Confirmed) -> None:
        """Add a key that has no parked messages any more."""
        self._others.append(Waiting(Free(key), confirmed))

    def take(self) -> list[ParkChange]:
        """The changes of the next request; those of a failed request are among them."""
        if not self._under_way:
            while self._others and len(self._under_way) < CHANGES_MAX:
                self._under_way.append(self._others.popleft())
            if self._parks and not (self._under_way and self._full):
                self._take_parks()
        return [waiting.change for waiting in self._under_way]

    def next_tries(self, own: int) -> tuple[tuple[int, int, int, int], ...]:
        """
        When the messages of the request under way are tried again that wait for retry, as a frame
        tells it.

        Args:
            own: the partition, which stores what is parked.
        """
        told = []
        for waiting in self._under_way:
            change, at_ms = waiting.change, waiting.next_try_ms
            if at_ms is None:
                continue
            if isinstance(change, Park) and isinstance(change.key, int):
                told.append((change.key, own, change.ranges[0][0], at_ms))
            elif isinstance(change, Shift) and change.to is not None:
                told.append((change.to, change.source, change.ranges[0][0], at_ms))
        return tuple(told)

    def _take_parks(self) -> None:
        count = 1 if self._alone else CHANGES_MAX - len(self._under_way)
        rows = 0
        while self._parks and count > 0 and rows < PARKED_ROWS_MAX:
            waiting = self._parks.popleft()
            assert isinstance(waiting.change, Park)
            rows += len(waiting.change.ranges)
            count -= 1
            self._under_way.append(waiting)

    def confirmed(self) -> None:
        """Note that the request under way is durable."""
        under_way = self._under_way
        self._under_way = []
        if any(isinstance(waiting.change, Park) for waiting in under_way):
            self._full = self._alone = False
        for waiting in under_way:
            if isinstance(waiting.change, Park):
                for start, end in waiting.change.ranges:
                    self._messages -= end - start
            waiting.confirmed()

    def refused(self) -> None:
        """Note that the broker has no room for the request's parks: the next one is without them,
        or has one alone.
        """
        parks = [waiting for waiting in self._under_way if isinstance(waiting.change, Park)]
        self._under_way = [w for w in self._under_way if not isinstance(w.change, Park)]
        self._full = True
        if self._alone:  # another key may have room, as one that is parked already
            keyed = {w.change.key for w in parks if isinstance(w.change, Park)}
            same = [w for w in self._parks if isinstance(w.change, Park) and w.change.key in keyed]
            rest = [
                w for w in self._parks if not (isinstance(w.change, Park) and w.change.key in keyed)
            ]
            self._parks = deque([*rest, *parks, *same])
        else:
            self._alone = True
            self._parks.extendleft(reversed(parks))


def _ranges(offsets: list[int]) -> tuple[Range, ...]:
    if len(offsets) == 1:  # as of most messages behind a parked one
        return ((offsets[0], offsets[0] + 1),)
    return tuple(IntervalSet((offset, offset + 1) for offset in offsets))


def _nothing() -> None:
    pass


def or_bury(change: ParkChange) -> AskedChange:
    """What is asked for where a key that finds no room is buried; what waits for retry holds no
    key, and waits for room.
    """
    if isinstance(change, Park) and not isinstance(change.key, int):
        return ParkOrBury(change.key, change.ranges, change.failure)
    return change
