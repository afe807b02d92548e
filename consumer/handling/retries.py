"""Holds failed messages that wait for their next try, and decides which may be tried now. Pure.

    wait ─▶ waiting, by the time of the next try ─▶ take ─▶ under way ─begin─▶ running ─▶ end
                       ├─▶ drop
                       ╰─▶ held, while its partition is paused

Invariants
    A waiting message occupies no worker.
    At most 1/WORKERS_PER_TRY of the workers, and at least one, are on retries at the same time. A
    retry that runs for longer than `LONG_NS` is not counted any more, so that others are tried
    beside it. While first tries wait, retries get at most 1/SHARE of the workers' time, one at a
    time for each SHARE workers. Slow retries get more: no pause between retries is longer than
    PAUSE_MAX_NS.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

SHARE = 40
WORKERS_PER_TRY = 4
LONG_NS = 10_000_000_000
BURST_NS = 10_000_000
"""The part of their share, in nanoseconds, that retries may use in advance, so that quick ones are
not separated by timers.
"""
PAUSE_MAX_NS = 30_000_000_000


class Tried(Protocol):
    """A message, or a batch of them."""

    @property
    def delivery(self) -> Any:
        """Return the delivery, which knows the partition under whose lease it is handled."""
        ...


T = TypeVar("T", bound=Tried)


class Retries(Generic[T]):
    """The failed messages of one consumer; every time is nanoseconds of the boot clock."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self.waiting: list[tuple[int, int, T]] = []
        """A heap of (time of the next try, number, message)."""
        self._held: dict[int, list[tuple[int, T]]] = {}
        """The time of the next try and the message, by partition that is paused."""
        self._number = 0
        self._under_way: dict[int, int] = {}
        """The time at which the try of a message began, by `id(message)`; 0 before it began."""
        self._owed_until_ns = 0
        """The time until which the workers' time belongs to first tries, in return for the retries
        that ran.
        """

    def __len__(self) -> int:
        return len(self.waiting)

    def wait(self, message: T, due_ns: int) -> None:
        """Add a message that failed; its next try is at `due_ns` at the earliest."""
        held = self._held.get(message.delivery.leased_id) if self._held else None
        if held is not None:
            held.append((due_ns, message))
            return
        self._number += 1
        heapq.heappush(self.waiting, (due_ns, self._number, message))

    def take(self, now_ns: int, *, others_wait: bool) -> list[T]:
        """
        Take the messages to try now, the longest due first; each is under way until `end`.

        Args:
            others_wait: whether first tries of other messages are waiting for a worker.
        """
        waiting, taken = self.waiting, []
        while waiting and self._free_at_ns(now_ns, others_wait=others_wait) <= now_ns:
            message = heapq.heappop(waiting)[2]
            self._under_way[id(message)] = 0
            taken.append(message)
        return taken

    def next_ns(self, now_ns: int, *, others_wait: bool) -> int | None:
        """Return the time to call `take` again unless a try ends earlier; None if a try must end
        first.
        """
        free_at_ns = self._free_at_ns(now_ns, others_wait=others_wait) if self.waiting else NEVER
        return None if free_at_ns == NEVER else free_at_ns

    def _free_at_ns(self, now_ns: int, *, others_wait: bool) -> int:
        """Return the time at which the first waiting message may be tried; NEVER if not before a
        try ends.
        """
        free_at_ns = self.waiting[0][0]
        if others_wait:
            free_at_ns = max(free_at_ns, self._owed_until_ns - BURST_NS)
        share = SHARE if others_wait else WORKERS_PER_TRY
        counted = [began for began in self._under_way.values() if not 0 < began <= now_ns - LONG_NS]
        if len(counted) >= max(1, self._concurrency // share):
            begun = [began for began in counted if began]
            free_at_ns = max(free_at_ns, min(begun) + LONG_NS) if begun else NEVER
        return free_at_ns

    def begin(self, message: T, now_ns: int) -> None:
        """Note that a worker begins to try `message`."""
        self._under_way[id(message)] = now_ns

    def end(self, message: T, now_ns: int) -> None:
        """Note that the try of `message` ended, or will not begin."""
        began_ns = self._under_way.pop(id(message), 0)
        if began_ns:
            owed_ns = (now_ns - began_ns) * SHARE // self._concurrency
            owed_until_ns = max(self._owed_until_ns, began_ns) + owed_ns
            self._owed_until_ns = min(owed_until_ns, now_ns + PAUSE_MAX_NS)

    def pause(self, partition_id: int) -> None:
        """Try no message of a partition until `resume`."""
        if partition_id not in self._held:
            waiting = [
                entry for entry in self.waiting if entry[2].delivery.leased_id == partition_id
            ]
            self._take_out(lambda message: message.delivery.leased_id == partition_id)
            self._held[partition_id] = [(due_ns, message) for due_ns, _, message in waiting]

    def resume(self, partition_id: int) -> None:
        """Try the messages of a partition again, each once it is due."""
        for due_ns, message in self._held.pop(partition_id, ()):
            self.wait(message, due_ns)

    def drop(self, ours: Callable[[T], bool]) -> list[T]:
        """Forget and return the waiting messages that are `ours`; tries under way are not
        affected.
        """
        dropped = self._take_out(ours)
        for partition_id, held in self._held.items():
            dropped += [message for _, message in held if ours(message)]
            self._held[partition_id] = [each for each in held if not ours(each[1])]
        return dropped

    def _take_out(self, ours: Callable[[T], bool]) -> list[T]:
        taken = [entry[2] for entry in self.waiting if ours(entry[2])]
        if taken:
            self.waiting = [entry for entry in self.waiting if not ours(entry[2])]
            heapq.heapify(self.waiting)
        return taken


NEVER = 1 << 63
