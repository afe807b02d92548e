"""The partitions that may have something for a worker, in turn, and how much of the workers retries
may take.

offer ─▶ ready ─▶ ask_next: a worker asks ─▶ ready again, if it has more
           ▲        ╰─ only retries, and no room for one; or no worker is free ─▶ held
           ╰──────────── room, or a free worker ◀─────────────────────────────────╯

Invariants
    Retries use at most 1/WORKERS_PER_TRY of the workers, but at least one. A retry that runs for
    longer than LONG_MS is no longer counted, so that others run beside it. While first attempts
    wait, retries get at most 1/TIME_DIVISOR of the workers' time, one at a time for every
    TIME_DIVISOR workers. Slow retries get more: the pause between two never exceeds PAUSE_MAX_MS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from ...protocol.message import Message
from ..session.events import Event, WorkWanted
from ..session.state import PartitionSession

TIME_DIVISOR = 40
WORKERS_PER_TRY = 4
LONG_MS = 10_000
BURST_MS = 10
"""How much of their share retries may use in advance, so that no timer is needed between short
ones.
"""
PAUSE_MAX_MS = 30_000


class OfferingShell(Protocol):
    """What a worker needs of the shell of a partition."""

    partition_id: int
    state: PartitionSession
    begin_until_s: float
    """The time of the boot clock from which no handler may begin; 0.0: none may begin now."""

    def has_expired(self, message: Message) -> bool:
        """Return True if another consumer of a shared group may soon have the message."""
        ...

    def ask(self, event: Event) -> list[Message]:
        """Give the session a worker's event, and return what it hands out."""
        ...

    def feed(self, event: Event) -> None:
        """Give the session an event; what it hands out goes to any worker."""
        ...

    async def wait_quiet(self) -> None:
        """Wait until no worker has a message of the partition, which is being handed over."""
        ...


class RetryShare:
    """The retries that run, by an id that the caller chooses: handed out, begun, ended. Times are
    boot-clock milliseconds.
    """

    __slots__ = ("_concurrency", "_reserved_until_ms", "_started_ms")

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._started_ms: dict[int, int] = {}
        """The start of each retry; 0 before it starts."""
        self._reserved_until_ms = 0
        """The time until which workers are reserved for first attempts, to compensate for retries
        that ran.
        """

    def room(self, now_ms: int, *, first_attempts_wait: bool) -> int:
        """Return how many more retries may be handed out now."""
        if first_attempts_wait and now_ms < self._reserved_until_ms - BURST_MS:
            return 0
        return max(0, self._limit(first_attempts_wait) - self._count_active(now_ms))

    def next_ms(self, now_ms: int, *, first_attempts_wait: bool) -> int | None:
        """Return when there may be room without the end of a retry; None: not before one ends."""
        next_ms = now_ms
        if first_attempts_wait:
            next_ms = max(next_ms, self._reserved_until_ms - BURST_MS)
        if self._count_active(now_ms) >= self._limit(first_attempts_wait):
            started = [ms for ms in self._started_ms.values() if ms > max(0, now_ms - LONG_MS)]
            if not started:
                return None
            next_ms = max(next_ms, min(started) + LONG_MS)
        return next_ms

    def _limit(self, first_attempts_wait: bool) -> int:
        workers_per_retry = TIME_DIVISOR if first_attempts_wait else WORKERS_PER_TRY
        return max(1, self._concurrency // workers_per_retry)

    def _count_active(self, now_ms: int) -> int:
        return sum(not 0 < ms <= now_ms - LONG_MS for ms in self._started_ms.values())

    def take(self, retry_id: int) -> None:
        """Record that a retry was handed out."""
        self._started_ms[retry_id] = 0

    def begin(self, retry_id: int, now_ms: int) -> None:
        """Record that a worker has started a retry."""
        self._started_ms[retry_id] = now_ms

    def end(self, retry_id: int, now_ms: int) -> None:
        """Record that a retry has ended, or will not start."""
        started_ms = self._started_ms.pop(retry_id, 0)
        if started_ms:
            reserved_ms = (now_ms - started_ms) * TIME_DIVISOR // self._concurrency
            until_ms = max(self._reserved_until_ms, started_ms) + reserved_ms
            self._reserved_until_ms = min(until_ms, now_ms + PAUSE_MAX_MS)


class PartitionOffers:
    """
    The offers of a consumer's partitions.

    Args:
        boot_ms: the boot clock.
        wake: wakes an idle worker.
        count_free: returns the number of workers that have nothing to do.
    """

    def __init__(
        self,
        concurrency: int,
        *,
        boot_ms: Callable[[], int],
        wake: Callable[[], None],
        count_free: Callable[[], int],
    ) -> None:
        self.ready: dict[OfferingShell, None] = {}
        """The partitions that may have something; the one whose turn is next comes first."""
        self.limited: dict[OfferingShell, None] = {}
        """The partitions that give no more messages than workers are free: those whose workers wait
        for each ack, and those of shared groups, where another consumer may be free.
        """
        self.retry_share = RetryShare(concurrency)
        self.are_over = False
        """True once no handler may begin any more."""
        self._boot_ms = boot_ms
        self._wake = wake
        self._count_free = count_free
        self._held: dict[OfferingShell, bool] = {}
        """Partitions that have only retries, for which there is no room. False while a worker asks
        and nothing was offered.
        """
        self._without_worker: dict[OfferingShell, None] = {}
        """Those of `limited` for which no worker is free."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, shell: OfferingShell) -> None:
        """Note that a worker that asks this partition may get something."""
        if self.are_over:
            return
        self._without_worker.pop(shell, None)  # an ack may have freed one
        if self._held.get(shell) and _has_first_tries(shell):
            del self._held[shell]
        if shell in self._held:
            self._held[shell] = True
        elif shell not in self.ready:
            self.ready[shell] = None
            self._wake()

    def remove(self, shell: OfferingShell) -> None:
        """Forget a partition, which is being handed over."""
        self.ready.pop(shell, None)
        self._held.pop(shell, None)
        self._without_worker.pop(shell, None)
        self.limited.pop(shell, None)

    def ask_next(
        self, count: int, run: int = 0, *, given: int = 0
    ) -> tuple[OfferingShell, list[Message]]:
        """
        Ask the partition whose turn it is, and return it with what it hands out.

        Args:
            count: how many messages a worker takes.
            run: how many it would take as a run.
            given: how many were handed out and have no worker.
        """
        shell = next(iter(self.ready))
        del self.ready[shell]  # it offers again if it has more
        if not shell.state.may_be_bundled:
            self.limited[shell] = None
            count = min(count, self._count_room(given))
            if count <= 0:
                self._without_worker[shell] = None
                return shell, []
        retries = self.room_for_retries(shell, given)
        if not retries:
            self._held[shell] = False  # so that it is not ready before it was asked
        messages = shell.ask(WorkWanted(count, retries, run))
        if not retries:
            has_more = self._held.pop(shell, False) or shell in self.ready
            if messages:
                self.ready[shell] = None
            elif has_more:
                self._hold(shell)
        return shell, messages

    def count_spare(self, given: int, per_worker: int) -> int:
        """
        Return for how many messages a worker is free; if negative, how many messages wait for one.

        Args:
            given: how many messages or batches were handed out and have no worker.
            per_worker: how many messages a worker takes at once.
        """
        shells = (*self.ready, *self._held, *self._without_worker)
        waiting = sum(shell.state.count_waiting for shell in shells)
        return self._count_room(given) * per_worker - waiting

    def _count_room(self, given: int) -> int:
        """
        Return how many workers have nothing, and wait for no ack.

        An end of the process loses what is acked before its handler, and repeats what is not acked
        after it: no more than one for each worker. A refused ack occupies none.
        """
        acking = sum(
            len(each.state.acks.awaited)
            for each in self.limited
            if not each.state.acks.handled.is_refused
        )
        return self._count_free() - given - acking

    def room_for_retries(self, shell: OfferingShell, given: int = 0) -> int:
        """Return how many later tries a worker may take of a partition."""
        lanes = shell.state.lanes
        others_wait = bool(given or self.ready or lanes.opened or lanes.stored)
        return self.retry_share.room(self._boot_ms(), first_attempts_wait=others_wait)

    def _hold(self, shell: OfferingShell) -> None:
        """Ask a partition that has only retries again when there is room for one."""
        self.ready.pop(shell, None)
        self._held[shell] = True
        now_ms = self._boot_ms()
        next_ms = self.retry_share.next_ms(now_ms, first_attempts_wait=False)
        if next_ms is not None and self._timer is None:
            delay_s = max(next_ms - now_ms, 1) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.release)

    def begin_retry(self, message: Message) -> None:
        """Record that a worker begins with a later try of a message."""
        self.retry_share.begin(id(message), self._boot_ms())

    def end_retry(self, message: Message) -> None:
        """Record that a later try of a message has ended, or does not begin."""
        self.retry_share.end(id(message), self._boot_ms())
        self.release()

    def release(self) -> None:
        """There may be room: offer what was held."""
        self.close()
        held, self._held = (*self._held, *self._without_worker), {}
        self._without_worker.clear()
        for shell in held:
            self.add(shell)

    def end(self) -> None:
        """Offer nothing any more: no handler may begin."""
        self.are_over = True
        self.close()
        for partitions in (self.ready, self._held, self._without_worker):
            partitions.clear()

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _has_first_tries(shell: OfferingShell) -> bool:
    """Return True if a partition has something else than failed messages that are due."""
    lanes = shell.state.lanes
    return bool(lanes.again or lanes.opened or lanes.stored or lanes.extra)
