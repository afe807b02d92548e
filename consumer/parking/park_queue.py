"""Queues changes of parked messages until the broker has stored them, and builds requests. Pure.

    park, unpark, free ─▶ waiting ─▶ take: one request ─▶ confirm: call the callbacks
                             ▲                 │ the broker is full: send the other
                             ╰─────────────────╯ changes alone, then one park at a time

Invariants
    Messages of a key are parked in order, and none is lost: a failed request is sent again. While
    the broker cannot park more messages, changes that free space are still sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ...protocol.offsets import IntervalSet, Range
from ...protocol.parked import (
    PARKED_ROWS_MAX,
    Failure,
    Free,
    Park,
    ParkChange,
    ParkKey,
    ParkOrDeadLetter,
    RequestedChange,
    Shift,
    Unpark,
    is_loose,
)

Callback = Callable[[], None]
CHANGES_MAX = 500
"""The maximum number of changes in one request, so that its record stays far below the maximum size
of a batch, even with keys of 1 KiB.
"""


@dataclass(slots=True)
class PendingChange:
    """A change, with a callback that is called once the change is durable."""

    change: ParkChange
    on_durable: Callback
    next_try_ms: int | None = None
    """The time of the message's next attempt, in milliseconds since 1970; None if it is not waiting
    for one.
    """


class ParkQueue:
    """Queues the changes of one partition, in order."""

    def __init__(self) -> None:
        self._parks: deque[PendingChange] = deque()
        self._changes: deque[PendingChange] = deque()
        self._in_flight: list[PendingChange] = []
        self._messages = 0
        self._full = False
        """True if the broker could not park the messages of the last request."""
        self._one_at_a_time = False
        """True if the next request contains a single park, to find one that the broker accepts."""

    def __bool__(self) -> bool:
        return bool(self._parks or self._changes or self._in_flight)

    @property
    def is_long(self) -> bool:
        """True if there are enough changes for a full request."""
        return len(self._parks) + len(self._changes) >= CHANGES_MAX

    @property
    def full(self) -> bool:
        """True if the broker could not park any more messages at the last request."""
        return self._full

    def has_parks_of(self, key: ParkKey) -> bool:
        """Return True if messages of this key are waiting to be parked at the broker."""
        return any(park.key == key for park in self._waiting_parks())

    def ends_redrive(self, key: ParkKey) -> bool:
        """
        Return True if a failure that ends the key's redrive is waiting to be sent to the broker.

        For a loose key, only the failure of a redriven message counts.
        """
        return any(
            park.key == key and park.failure is not None and not (is_loose(key) and park.ranges)
            for park in self._waiting_parks()
        )

    def _waiting_parks(self) -> list[Park]:
        pending = [*self._in_flight, *self._parks]
        return [waiting.change for waiting in pending if isinstance(waiting.change, Park)]

    @property
    def messages(self) -> int:
        """The number of messages that are waiting to be parked at the broker."""
        return self._messages

    def park(
        self,
        key: ParkKey,
        offsets: list[int],
        failure: Failure | None,
        on_durable: Callback | None = None,
        *,
        next_try_ms: int | None = None,
    ) -> None:
        """Add messages to park; `offsets` are sorted."""
        self._messages += len(offsets)
        ranges = _ranges(offsets)
        for first in range(0, max(len(ranges), 1), PARKED_ROWS_MAX):
            part = ranges[first : first + PARKED_ROWS_MAX]
            change = Park(key, part, failure if first == 0 else None)
            self._parks.append(PendingChange(change, on_durable or _do_nothing, next_try_ms))

    def unpark(self, key: ParkKey, source: int, start: int, end: int, on_durable: Callback) -> None:
        """Add redriven messages, which are handled."""
        self._changes.append(PendingChange(Unpark(key, source, ((start, end),)), on_durable))

    def reschedule(
        self, change: Shift, on_durable: Callback, *, next_try_ms: int | None = None
    ) -> None:
        """Add messages that get another retry or become dead letters."""
        self._changes.append(PendingChange(change, on_durable, next_try_ms))

    def add(self, change: ParkChange, on_durable: Callback) -> None:
        """Add a change that neither takes nor frees space."""
        self._changes.append(PendingChange(change, on_durable))

    def release_key(self, key: ParkKey, on_durable: Callback) -> None:
        """Queue the release of a key that has no parked messages left."""
        self._changes.append(PendingChange(Free(key), on_durable))

    def take(self) -> list[ParkChange]:
        """Return the changes for the next request. After a failure, these are the changes of the
        failed request.
        """
        if not self._in_flight:
            while self._changes and len(self._in_flight) < CHANGES_MAX:
                self._in_flight.append(self._changes.popleft())
            if self._parks and not (self._in_flight and self._full):
                self._take_parks()
        return [waiting.change for waiting in self._in_flight]

    def next_tries(self, partition_id: int) -> tuple[tuple[int, int, int, int], ...]:
        """
        Return the next attempts in the request in flight, in the form that the frame uses.

        Args:
            partition_id: the id of this partition.
        """
        tries = []
        for waiting in self._in_flight:
            change, next_try_ms = waiting.change, waiting.next_try_ms
            if next_try_ms is None:
                continue
            if isinstance(change, Park) and isinstance(change.key, int):
                tries.append((change.key, partition_id, change.ranges[0][0], next_try_ms))
            elif isinstance(change, Shift) and change.to is not None:
                tries.append((change.to, change.source, change.ranges[0][0], next_try_ms))
        return tuple(tries)

    def _take_parks(self) -> None:
        """Move waiting parks into the next request, as many as fit."""
        count = 1 if self._one_at_a_time else CHANGES_MAX - len(self._in_flight)
        rows = 0
        while self._parks and count > 0 and rows < PARKED_ROWS_MAX:
            waiting = self._parks.popleft()
            assert isinstance(waiting.change, Park)
            rows += len(waiting.change.ranges)
            count -= 1
            self._in_flight.append(waiting)

    def confirm(self) -> None:
        """Drop the changes in flight, which are now durable, and call their callbacks."""
        confirmed = self._in_flight
        self._in_flight = []
        if any(isinstance(waiting.change, Park) for waiting in confirmed):
            self._full = self._one_at_a_time = False
        for waiting in confirmed:
            if isinstance(waiting.change, Park):
                for start, end in waiting.change.ranges:
                    self._messages -= end - start
            waiting.on_durable()

    def requeue_parks(self) -> None:
        """Requeue the parks in flight, because the broker cannot park any more: the next request
        contains none of them, or one.
        """
        parks = [waiting for waiting in self._in_flight if isinstance(waiting.change, Park)]
        self._in_flight = [
            change for change in self._in_flight if not isinstance(change.change, Park)
        ]
        self._full = True
        if (
            self._one_at_a_time
        ):  # the broker may accept another key, for example one that is already parked
            keyed = {change.change.key for change in parks if isinstance(change.change, Park)}
            same_key = [
                change
                for change in self._parks
                if isinstance(change.change, Park) and change.change.key in keyed
            ]
            other_parks = [
                change
                for change in self._parks
                if not (isinstance(change.change, Park) and change.change.key in keyed)
            ]
            self._parks = deque([*other_parks, *parks, *same_key])
        else:
            self._one_at_a_time = True
            self._parks.extendleft(reversed(parks))


def _ranges(offsets: list[int]) -> tuple[Range, ...]:
    if len(offsets) == 1:  # the usual case after a parked message
        return ((offsets[0], offsets[0] + 1),)
    return tuple(IntervalSet((offset, offset + 1) for offset in offsets))


def _do_nothing() -> None:
    pass


def allow_dead_letter(change: ParkChange) -> RequestedChange:
    """Return the change that turns a key's messages into dead letters if the broker cannot park any
    more. A message that waits for a retry has no parked key, and waits for space instead.
    """
    if isinstance(change, Park) and not isinstance(change.key, int):
        return ParkOrDeadLetter(change.key, change.ranges, change.failure)
    return change
