"""
Schedules failed messages for their next attempt, and limits how many run at the same time. Pure.

    wait ─▶ waiting, by due time ─▶ take_due ─▶ in flight ─begin─▶ running ─▶ end
                       ├─▶ drop
                       ╰─▶ held while its partition is paused

Invariants
    A waiting message occupies no worker.
    Retries use at most 1/WORKERS_PER_TRY of the workers, but at least one. A retry that runs for
    longer than `LONG_NS` is no longer counted, so that others run beside it. While first attempts
    wait, retries get at most 1/RETRY_TIME_DIVISOR of the workers' time, one at a time for every
    RETRY_TIME_DIVISOR workers.
    Slow retries get more: the pause between two retries never exceeds PAUSE_MAX_NS.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

RETRY_TIME_DIVISOR = 40
WORKERS_PER_TRY = 4
LONG_NS = 10_000_000_000
BURST_NS = 10_000_000
"""How much of their share retries may use in advance, in nanoseconds, so that no timer is needed
between short ones.
"""
PAUSE_MAX_NS = 30_000_000_000


class Retryable(Protocol):
    """A message, or a batch of messages."""

    @property
    def delivery(self) -> Any:
        """The delivery, which has the id of the leased partition."""
        ...


T = TypeVar("T", bound=Retryable)


class Retries(Generic[T]):
    """The failed messages of one consumer; all times are in nanoseconds on the boot clock."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self.waiting: list[tuple[int, int, T]] = []
        """A heap of (due time, sequence number, message)."""
        self._paused: dict[int, list[tuple[int, T]]] = {}
        """The (due time, message) pairs of each paused partition."""
        self._sequence = 0
        self._in_flight: dict[int, int] = {}
        """The start time of each attempt, by `id(message)`; 0 before it starts."""
        self._reserved_until_ns = 0
        """The time until which workers are reserved for first attempts, to compensate for retries
        that ran.
        """

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, message: T, due_ns: int) -> None:
        """Add a failed message; its next attempt is due at `due_ns`."""
        paused = self._paused.get(message.delivery.leased_id) if self._paused else None
        if paused is not None:
            paused.append((due_ns, message))
            return
        self._sequence += 1
        heapq.heappush(self.waiting, (due_ns, self._sequence, message))

    def take_due(self, now_ns: int, *, first_attempts_wait: bool) -> list[T]:
        """
        Remove and return the messages to retry now, the longest overdue first; each is in flight
        until `end`.

        Args:
            first_attempts_wait: True if first attempts of other messages wait for a worker.
        """
        waiting, due = self.waiting, []
        while (
            waiting and self._earliest_ns(now_ns, first_attempts_wait=first_attempts_wait) <= now_ns
        ):
            message = heapq.heappop(waiting)[2]
            self._in_flight[id(message)] = 0
            due.append(message)
        return due

    def next_ns(self, now_ns: int, *, first_attempts_wait: bool) -> int | None:
        """Return when to call `take_due` again unless a retry ends earlier; None if a retry must
        end first.
        """
        earliest_ns = (
            self._earliest_ns(now_ns, first_attempts_wait=first_attempts_wait)
            if self.waiting
            else NEVER
        )
        return None if earliest_ns == NEVER else earliest_ns

    def _earliest_ns(self, now_ns: int, *, first_attempts_wait: bool) -> int:
        """Return when the first waiting message may be retried, or NEVER if a retry must end
        first.
        """
        earliest_ns = self.waiting[0][0]
        if first_attempts_wait:
            earliest_ns = max(earliest_ns, self._reserved_until_ns - BURST_NS)
        workers_per_retry = RETRY_TIME_DIVISOR if first_attempts_wait else WORKERS_PER_TRY
        active = [
            start_ns
            for start_ns in self._in_flight.values()
            if not 0 < start_ns <= now_ns - LONG_NS
        ]
        if len(active) >= max(1, self._concurrency // workers_per_retry):
            started = [start_ns for start_ns in active if start_ns]
            earliest_ns = max(earliest_ns, min(started) + LONG_NS) if started else NEVER
        return earliest_ns

    def begin(self, message: T, now_ns: int) -> None:
        """Record that a worker has started the retry of `message`."""
        self._in_flight[id(message)] = now_ns

    def end(self, message: T, now_ns: int) -> None:
        """Record that the retry of `message` has ended, or will not start."""
        start_ns = self._in_flight.pop(id(message), 0)
        if start_ns:
            reserved_ns = (now_ns - start_ns) * RETRY_TIME_DIVISOR // self._concurrency
            reserved_until_ns = max(self._reserved_until_ns, start_ns) + reserved_ns
            self._reserved_until_ns = min(reserved_until_ns, now_ns + PAUSE_MAX_NS)

    def pause(self, partition_id: int) -> None:
        """Retry no messages of a partition until `resume`."""
        if partition_id not in self._paused:
            waiting = [
                entry for entry in self.waiting if entry[2].delivery.leased_id == partition_id
            ]
            self._remove(lambda message: message.delivery.leased_id == partition_id)
            self._paused[partition_id] = [(due_ns, message) for due_ns, _, message in waiting]

    def resume(self, partition_id: int) -> None:
        """Retry the messages of a partition again as they become due."""
        for due_ns, message in self._paused.pop(partition_id, ()):
            self.add(message, due_ns)

    def drop(self, predicate: Callable[[T], bool]) -> list[T]:
        """Remove and return the waiting messages that match the predicate; retries in flight are
        not affected.
        """
        removed = self._remove(predicate)
        for partition_id, paused in self._paused.items():
            removed += [message for _, message in paused if predicate(message)]
            self._paused[partition_id] = [entry for entry in paused if not predicate(entry[1])]
        return removed

    def _remove(self, predicate: Callable[[T], bool]) -> list[T]:
        removed = [entry[2] for entry in self.waiting if predicate(entry[2])]
        if removed:
            self.waiting = [entry for entry in self.waiting if not predicate(entry[2])]
            heapq.heapify(self.waiting)
        return removed


NEVER = 1 << 63
