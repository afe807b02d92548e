"""The keys of a partition that are set aside, and the changes that its broker has not stored. Pure.

    park, unpark, free ─▶ waiting ─▶ take: one request ─▶ confirm: what became durable
                             ▲                │ refuse: no room for more
                             ╰────────────────╯ the other changes alone, then one park at a time

Invariants
    From `park` on no message of the key is handed out, until the broker has stored that it is free.
    The changes of a key are stored in order, and none is lost: a failed request is sent again.
    While the broker has no room for more, changes that make room are still sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ...protocol.message import Message
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
    is_loose,
)
from .ancestors import PartitionAncestors

CHANGES_MAX = 500
"""The largest number of changes in a request, so that its record stays far below the largest batch
even with keys of 1 KiB.
"""
WAITING_MAX = 10_000
"""Nothing is pulled while this many messages wait to be parked."""


class Pending(NamedTuple):
    """A change that the broker has not stored."""

    change: ParkChange
    window: int = 0
    """The number of the window that waits for it; 0: none does."""
    try_at_ms: int = 0
    """The boot time of the next try that it sets; 0: none."""


class PartitionParking:
    """
    The parked keys of one partition, and their unconfirmed changes.

    Args:
        rejects: returns True for a message that the filter leaves out; None: there is no filter.
        has_ancestors: True if the partition has parents.
    """

    __slots__ = (
        "_is_one_at_a_time",
        "_others",
        "_parks",
        "ancestors",
        "failures",
        "freed",
        "in_flight",
        "is_full",
        "keys",
        "listed_version",
        "messages",
        "rejects",
        "releasing",
        "version",
    )

    def __init__(
        self,
        rejects: Callable[[Message], bool] | None = None,
        *,
        has_ancestors: bool = False,
    ) -> None:
        self.rejects = rejects
        self.ancestors = PartitionAncestors(exist=has_ancestors)
        self.keys: set[ParkKey] = set()
        """The keys whose messages are not handed out."""
        self.failures: dict[ParkKey, Failure] = {}
        """Why each key was parked here."""
        self.version = 0
        """The newest version of which the broker has told."""
        self.listed_version = 0
        """The version of the last list."""
        self.releasing: dict[ParkKey, list[Message]] = {}
        """The keys that are being freed, with the messages that have come since."""
        self.freed: set[ParkKey] = set()
        """The keys freed since the last list was asked for, which may still have them."""
        self.messages = 0
        """The number of messages that wait to be parked at the broker."""
        self.is_full = False
        """True if the broker had no room at the last request."""
        self.in_flight: list[Pending] = []
        self._parks: deque[Pending] = deque()
        self._others: deque[Pending] = deque()
        self._is_one_at_a_time = False

    def __bool__(self) -> bool:
        """Return True if a change is not stored yet."""
        return bool(self.in_flight or self._parks or self._others)

    @property
    def has_room(self) -> bool:
        """True if more messages may wait to be parked."""
        return self.messages < WAITING_MAX

    def _unstored_parks(self) -> Iterable[Park]:
        for pending in (*self.in_flight, *self._parks):
            if isinstance(pending.change, Park):
                yield pending.change

    def has_parks_of(self, key: ParkKey) -> bool:
        """Return True if messages of the key wait to be parked."""
        return any(park.key == key for park in self._unstored_parks())

    def ends_redrive(self, key: ParkKey) -> bool:
        """Return True if a failure that ends the key's redrive is not stored yet."""
        return any(
            park.key == key and park.failure is not None and not (is_loose(key) and park.ranges)
            for park in self._unstored_parks()
        )

    def divert(self, messages: list[Message]) -> list[Message]:
        """Park the messages of parked keys, and return the others."""
        keys, kept = self.keys, []
        offsets: dict[bytes, list[int]] = {}
        for message in messages:
            key = message.key
            if key not in keys:
                kept.append(message)
            elif key in self.releasing:
                self.releasing[key].append(message)
            else:
                offsets.setdefault(key, []).append(message.offset)
        for key, later in offsets.items():
            self.park(key, later, None)
        return kept

    def park(
        self,
        key: ParkKey,
        offsets: list[int],
        failure: Failure | None,
        *,
        try_at_ms: int = 0,
        token: int = 0,
        window: int = 0,
    ) -> None:
        """
        Park messages of this partition.

        Args:
            offsets: sorted; empty if the messages are parked already.
            failure: of the first message; None: they follow one that failed.
            try_at_ms: the boot time of the next try, for a message that waits for one.
            token: of the owner whose handlers have the messages meanwhile; 0: none has.
            window: the number of the window that waits for this.
        """
        if isinstance(key, bytes) and key:
            self.keys.add(key)
            if failure is not None:
                self.failures[key] = failure
        self.messages += len(offsets)
        ranges: tuple[Range, ...] = tuple(IntervalSet((each, each + 1) for each in offsets))
        for first in range(0, max(len(ranges), 1), PARKED_ROWS_MAX):
            part = ranges[first : first + PARKED_ROWS_MAX]
            change = Park(key, part, failure if first == 0 else None, token)
            self._parks.append(Pending(change, window, try_at_ms))

    def add(self, change: ParkChange, *, window: int = 0, try_at_ms: int = 0) -> None:
        """Add a change that takes no room."""
        self._others.append(Pending(change, window, try_at_ms))

    def free(self, key: ParkKey) -> None:
        """Free a redriven key of which nothing is parked any more."""
        self.releasing[key] = []
        self.add(Free(key))

    def take(self, *, may_die: bool) -> list[RequestedChange]:
        """Return the changes of the next request; `may_die`: without room, keys become dead."""
        if not self.in_flight:
            while self._others and len(self.in_flight) < CHANGES_MAX:
                self.in_flight.append(self._others.popleft())
            if self._parks and not (self.in_flight and self.is_full):
                self._take_parks()
        changes = [pending.change for pending in self.in_flight]
        return [_or_dead(change) for change in changes] if may_die else list(changes)

    def next_tries(self, partition_id: int) -> list[tuple[int, int, int, int]]:
        """Return the next tries that the request in flight sets, as (tries, source, offset, boot
        time).
        """
        tries = []
        for change, _, at_ms in self.in_flight:
            if not at_ms:
                continue
            if isinstance(change, Park) and isinstance(change.key, int):
                tries.append((change.key, partition_id, change.ranges[0][0], at_ms))
            elif isinstance(change, Shift) and change.to is not None:
                tries.append((change.to, change.source, change.ranges[0][0], at_ms))
        return tries

    def _take_parks(self) -> None:
        left = 1 if self._is_one_at_a_time else CHANGES_MAX - len(self.in_flight)
        rows = 0
        while self._parks and left > 0 and rows < PARKED_ROWS_MAX:
            pending = self._parks.popleft()
            assert isinstance(pending.change, Park)
            rows += len(pending.change.ranges)
            left -= 1
            self.in_flight.append(pending)

    def confirm(self) -> list[Pending]:
        """Drop and return the changes in flight, which the broker has stored."""
        confirmed = self.in_flight
        self.in_flight = []
        for pending in confirmed:
            if isinstance(pending.change, Park):
                self.is_full = self._is_one_at_a_time = False
                self.messages -= sum(end - start for start, end in pending.change.ranges)
        return confirmed

    def name_failures(self) -> bool:
        """
        Give the failure of their key to parks in flight that have none, because the broker does not
        know the key: retention had removed the message that failed. Return False if there are none.
        """
        is_changed = False
        for index, pending in enumerate(self.in_flight):
            change = pending.change
            if isinstance(change, Park) and change.failure is None and change.key in self.failures:
                named = Park(change.key, change.ranges, self.failures[change.key], change.token)
                self.in_flight[index] = pending._replace(change=named)
                is_changed = True
        return is_changed

    def refuse(self) -> bool:
        """Take back the parks in flight, for which the broker has no room. Return True if another
        request may succeed at once.
        """
        parks = [pending for pending in self.in_flight if isinstance(pending.change, Park)]
        self.in_flight = [each for each in self.in_flight if not isinstance(each.change, Park)]
        was_single = self._is_one_at_a_time
        self.is_full = True
        if was_single:  # the broker may have room for another key: one that is parked already
            keys = {pending.change.key for pending in parks if isinstance(pending.change, Park)}
            same = [each for each in self._parks if _key_of(each) in keys]
            others = [each for each in self._parks if _key_of(each) not in keys]
            self._parks = deque([*others, *parks, *same])
        else:
            self._is_one_at_a_time = True
            self._parks.extendleft(reversed(parks))
        return not was_single or bool(self.in_flight)


def _key_of(pending: Pending) -> ParkKey:
    assert isinstance(pending.change, Park)
    return pending.change.key


def _or_dead(change: ParkChange) -> RequestedChange:
    """Return the change that makes a key dead letters without room. A message that waits for a
    retry has no key of its own, and waits for room.
    """
    if isinstance(change, Park) and not isinstance(change.key, int) and not change.token:
        return ParkOrDeadLetter(change.key, change.ranges, change.failure)
    return change
