"""Holds changes of parked messages that the broker does not have yet, and chooses those of the next
request. Pure.

    park, done, free ─▶ waiting ─▶ take: one request ─▶ confirmed, each with its callback
                           ▲                 │ the broker has no room to park more:
                           ╰─────────────────╯ the rest alone, then one key at a time

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
    ParkOrDeadLetter,
    Shift,
    Unpark,
    is_loose,
)

Confirmed = Callable[[], None]
CHANGES_MAX = 500
"""The number of changes in one request, whose record stays far below the size of a batch, even with
keys of 1 KiB.
"""


@dataclass(slots=True)
class Waiting:
    """A change, and the callback for when it is durable."""

    change: ParkChange
    confirmed: Confirmed
    next_try_ms: int | None = None
    """The time at which the message is tried again, if it waits for retry, in milliseconds since
    1970.
    """


class ParkQueue:
    """The changes of one partition, in their order."""

    def __init__(self) -> None:
        self._parks: deque[Waiting] = deque()
        self._others: deque[Waiting] = deque()
        self._under_way: list[Waiting] = []
        self._messages = 0
        self._full = False
        """True if the broker had no room for the parks of the last request."""
        self._alone = False
        """True if the next request has one park, to find one that the broker takes."""

    def __bool__(self) -> bool:
        return bool(self._parks or self._others or self._under_way)

    @property
    def is_long(self) -> bool:
        """Return True if there are enough changes for a whole request."""
        return len(self._parks) + len(self._others) >= CHANGES_MAX

    @property
    def full(self) -> bool:
        """Return True if the broker had no room at the last request."""
        return self._full

    def parks(self, key: ParkKey) -> bool:
        """Return True if a message of this key is not parked at the broker yet."""
        return any(park.key == key for park in self._waiting_parks())

    def stops(self, key: ParkKey) -> bool:
        """
        Return True if a message of this key has failed and the broker does not have the failure
        yet: it ends the key's redrive.

        For a loose key, only a redriven message counts, because any other changes nothing for the
        redriven ones.
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
        """Return the number of messages that are not parked at the broker yet."""
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
        """Add messages that now wait for another retry, or are dead letters."""
        self._others.append(Waiting(change, confirmed, next_try_ms))

    def add(self, change: ParkChange, confirmed: Confirmed) -> None:
        """Add another change, which neither makes nor takes room."""
        self._others.append(Waiting(change, confirmed))

    def free(self, key: ParkKey, confirmed: Confirmed) -> None:
        """Add a key that has no parked messages any more."""
        self._others.append(Waiting(Free(key), confirmed))

    def take(self) -> list[ParkChange]:
        """Take the changes of the next request, which include those of a failed request."""
        if not self._under_way:
            while self._others and len(self._under_way) < CHANGES_MAX:
                self._under_way.append(self._others.popleft())
            if self._parks and not (self._under_way and self._full):
                self._take_parks()
        return [waiting.change for waiting in self._under_way]

    def next_tries(self, own: int) -> tuple[tuple[int, int, int, int], ...]:
        """
        Return the times of the next tries for messages of the request under way that wait for
        retry, in the form of the frame.

        Args:
            own: the partition, which stores the parked messages.
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
        """Note that the broker has no room for the request's parks: the next request has none, or
        only one.
        """
        parks = [waiting for waiting in self._under_way if isinstance(waiting.change, Park)]
        self._under_way = [w for w in self._under_way if not isinstance(w.change, Park)]
        self._full = True
        if self._alone:  # another key may have room, for example one that is already parked
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
    if len(offsets) == 1:  # the usual case after a parked message
        return ((offsets[0], offsets[0] + 1),)
    return tuple(IntervalSet((offset, offset + 1) for offset in offsets))


def _nothing() -> None:
    pass


def or_bury(change: ParkChange) -> AskedChange:
    """Return the change to request where a key that finds no room is buried; a message that waits
    for retry holds no key, and waits for room.
    """
    if isinstance(change, Park) and not isinstance(change.key, int):
        return ParkOrDeadLetter(change.key, change.ranges, change.failure)
    return change
