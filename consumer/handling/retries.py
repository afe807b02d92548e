"""Failed messages that wait for their next try, and which of them may be tried now.  Pure.

    wait ─▶ waiting, by the time of the next try ─▶ take ─▶ under way ─begin─▶ running ─▶ end
                       ╰─▶ drop

Invariants
    A message that waits holds no worker.
    At most a quarter of the workers, and at least one, try again at once.  A try that runs for longer than `LONG_NS`
    holds a worker, and no longer a place among these: others are tried beside it.
    While other messages wait, the tries take no more than 1/SHARE of the workers' time; one goes at a time, or one for
    each SHARE workers.  For tries that take long the share is larger: no pause between them is longer than PAUSE_MAX_NS.
"""

from __future__ import annotations

import heapq

from ...protocol.message import Message

SHARE = 40
WORKERS_PER_TRY = 4
LONG_NS = 10_000_000_000
BURST_NS = 10_000_000
"""Tries may use so much of their time early, so that quick ones are not held apart by timers."""
PAUSE_MAX_NS = 30_000_000_000


class Retries:
    """The failed messages of one consumer; every time is nanoseconds of the boot clock."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._waiting: list[tuple[int, int, Message]] = []
        self._number = 0
        self._under_way: dict[int, int] = {}
        """By id of the message: when its try began; 0 before."""
        self._owed_until_ns = 0
        """Until then the workers' time belongs to other messages, for the tries that ran."""

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, message: Message, due_ns: int) -> None:
        """`message` failed, and is tried again at `due_ns` at the earliest."""
        self._number += 1
        heapq.heappush(self._waiting, (due_ns, self._number, message))

    def take(self, now_ns: int, *, others_wait: bool) -> list[Message]:
        """Those to try now, the longest due first; they are under way until `end`."""
        waiting, taken = self._waiting, []
        while waiting and self._free_at_ns(now_ns, others_wait=others_wait) <= now_ns:
            message = heapq.heappop(waiting)[2]
            self._under_way[id(message)] = 0
            taken.append(message)
        return taken

    def next_ns(self, now_ns: int, *, others_wait: bool) -> int | None:
        """When to `take` again, if no try ends before; None if only an end can make a difference."""
        free_at_ns = self._free_at_ns(now_ns, others_wait=others_wait) if self._waiting else NEVER
        return None if free_at_ns == NEVER else free_at_ns

    def _free_at_ns(self, now_ns: int, *, others_wait: bool) -> int:
        """When the first of those that wait may be tried."""
        free_at_ns = self._waiting[0][0]
        if others_wait:
            free_at_ns = max(free_at_ns, self._owed_until_ns - BURST_NS)
        share = SHARE if others_wait else WORKERS_PER_TRY
        held = [began for began in self._under_way.values() if not 0 < began <= now_ns - LONG_NS]
        if len(held) >= max(1, self._concurrency // share):
            begun = [began for began in held if began]
            free_at_ns = max(free_at_ns, min(begun) + LONG_NS) if begun else NEVER
        return free_at_ns

    def begin(self, message: Message, now_ns: int) -> None:
        """A worker tries `message` now."""
        self._under_way[id(message)] = now_ns

    def end(self, message: Message, now_ns: int) -> None:
        """The try of `message` ended, or will not begin."""
        began_ns = self._under_way.pop(id(message), 0)
        if began_ns:
            owed_ns = (now_ns - began_ns) * SHARE // self._concurrency
            owed_until_ns = max(self._owed_until_ns, began_ns) + owed_ns
            self._owed_until_ns = min(owed_until_ns, now_ns + PAUSE_MAX_NS)

    def drop(self, partition_id: int) -> list[Message]:
        """Forget what waits of a partition; what is under way goes on."""
        dropped = [entry[2] for entry in self._waiting if entry[2].partition_id == partition_id]
        if dropped:
            self._waiting = [
                entry for entry in self._waiting if entry[2].partition_id != partition_id
            ]
            heapq.heapify(self._waiting)
        return dropped


NEVER = 1 << 63
