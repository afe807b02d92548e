"""Limits how many bytes a consumer prefetches across all its partitions.

    reserve ─▶ pull in flight ─▶ buffered batches, not decoded yet ─▶ decoded ─▶ the next waiter

Without this limit, many partitions would prefetch at once: their bytes would be read into new
memory each time, and would leave the processor's cache before they are decoded.

Invariants
    A partition that has been pulled to its end never waits: a reservation is for bytes that a
    broker has ready. Waiting partitions are served in order of arrival. A reservation without
    progress, for example because the partition is paused or its broker does not reply, delays other
    partitions for less than twice `STALL_S`, no matter how much progress they make.
"""

from __future__ import annotations

import asyncio

BUDGET_BYTES = 4 << 20
STALL_S = 0.5
"""The interval between stall checks, in seconds: bytes that a partition held at one check stop
counting at the next if it has released none of them since.
"""
MESSAGE_BYTES = 1 << 10
"""The assumed size of a message, in bytes, until a pull has measured it."""


class PrefetchBudget:
    """
    The prefetch budget of a consumer.

    Args:
        bytes_max: the limit for all its partitions together; a single pull may exceed it if nothing
            else is reserved.
        stall_s: the interval between stall checks, in seconds.
    """

    def __init__(self, bytes_max: int = BUDGET_BYTES, *, stall_s: float = STALL_S) -> None:
        self._bytes_max = bytes_max
        self._stall_s = stall_s
        self.used = 0
        """The reserved and buffered bytes of all partitions, except stalled ones."""
        self._shares: set[BudgetShare] = set()
        self._waiters: dict[asyncio.Future[None], tuple[BudgetShare, int]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def new_share(self) -> BudgetShare:
        """Return the share for a new partition."""
        share = BudgetShare(self)
        self._shares.add(share)
        return share

    @property
    def has_waiters(self) -> bool:
        """True while a partition waits for budget."""
        return bool(self._waiters)

    def fits(self, count: int) -> bool:
        """Return True if `count` more bytes fit into the budget."""
        return not self.used or self.used + count <= self._bytes_max

    def wait(self, share: BudgetShare, count: int) -> asyncio.Future[None]:
        """Return a future that is done once `count` bytes are reserved for `share`."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters[waiter] = share, count
        if self._timer is None:
            for other in self._shares:
                other.start_check()
            self._timer = loop.call_later(self._stall_s, self._check_stalls)
        return waiter

    def cancel_wait(self, waiter: asyncio.Future[None]) -> None:
        """Remove a waiter that was cancelled."""
        self._waiters.pop(waiter, None)
        self._serve()

    def release(self, count: int) -> None:
        """Release `count` bytes, and serve the waiters."""
        self.used -= count
        if self._waiters:
            self._serve()

    def close(self, share: BudgetShare) -> None:
        """Remove the share of a partition."""
        self._shares.discard(share)

    def _serve(self) -> None:
        for waiter in list(self._waiters):
            share, count = self._waiters[waiter]
            if waiter.done():  # its task was cancelled, but has not run since
                del self._waiters[waiter]
            elif self.fits(count):
                del self._waiters[waiter]
                share.hold(count)
                waiter.set_result(None)
            else:
                return

    def _check_stalls(self) -> None:
        """Stop counting the bytes of stalled partitions, which have released nothing since the last
        check.
        """
        self._timer = None
        for share in self._shares:
            self.used -= share.mark_stalled()
        self._serve()
        if self._waiters:
            self._timer = asyncio.get_running_loop().call_later(self._stall_s, self._check_stalls)


class _ByteCount:
    """Counts the bytes that one partition holds; they are released in FIFO order."""

    __slots__ = ("_released", "_at_last_check", "_stalled", "count")

    def __init__(self) -> None:
        self.count = 0
        self._stalled = 0
        """The number of the oldest bytes that are stalled, and so not counted in the budget."""
        self._at_last_check = 0
        """The number of bytes at the last stall check."""
        self._released = False
        """True if bytes were released since the last check."""

    def release(self, count: int) -> int:
        """Release the oldest `count` bytes, or all if there are fewer. Return how many of them
        counted towards the budget.
        """
        count = min(count, self.count)
        self.count -= count
        self._released = True
        if not self._stalled:
            return count
        uncounted = min(count, self._stalled)
        self._stalled -= uncounted
        return count - uncounted

    def start_check(self) -> None:
        """Start the interval in which bytes must be released."""
        self._at_last_check = self.count
        self._released = False

    def mark_stalled(self) -> int:
        """Mark the bytes of the last check as stalled if none have been released since. Return how
        many of them counted towards the budget until now.
        """
        newly_stalled = 0 if self._released else self._at_last_check - self._stalled
        self._stalled += newly_stalled
        self.start_check()
        return newly_stalled


class BudgetShare:
    """One partition's share of the prefetch budget."""

    __slots__ = ("_message_bytes", "_budget", "_in_flight", "_buffered")

    def __init__(self, budget: PrefetchBudget) -> None:
        self._budget = budget
        self._buffered = _ByteCount()
        self._in_flight = _ByteCount()
        """The bytes reserved for the pull in flight."""
        self._message_bytes = MESSAGE_BYTES

    def try_reserve(self, messages: int, bytes_max: int) -> bool:
        """
        Reserve budget for a pull. Return False if the pull must wait.

        Args:
            messages: the number of messages that the broker has ready.
            bytes_max: the size limit of the pull.
        """
        count = self._size(messages, bytes_max)
        budget = self._budget
        if count and (budget.has_waiters or not budget.fits(count)):
            return False
        self.hold(count)
        return True

    async def reserve(self, messages: int, bytes_max: int) -> None:
        """Wait until budget is reserved for a pull; see `try_reserve`."""
        if self.try_reserve(messages, bytes_max):
            return
        waiter = self._budget.wait(self, self._size(messages, bytes_max))
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._budget.cancel_wait(waiter)
            else:
                self.end_pull()
            raise

    def _size(self, messages: int, bytes_max: int) -> int:
        """Return the expected size of a pull, in bytes."""
        return min(bytes_max, max(0, messages) * self._message_bytes)

    def hold(self, count: int) -> None:
        """Reserve `count` bytes for the pull in flight."""
        self._in_flight.count += count
        self._budget.used += count

    def end_pull(self, count: int = 0, messages: int = 0) -> None:
        """Release the reservation of a pull that has ended.

        Args:
            count: the number of bytes that it returned.
            messages: the number of messages in these bytes.
        """
        if messages > 0 and count:
            self._message_bytes = -(-count // messages)
        reserved = self._in_flight
        if reserved.count:
            self._budget.release(reserved.release(reserved.count))

    def add_buffered(self, count: int) -> None:
        """Count `count` pulled bytes as buffered: they are not decoded yet."""
        self._buffered.count += count
        self._budget.used += count

    def release_buffered(self, count: int) -> None:
        """Release `count` bytes whose batches were decoded."""
        self._budget.release(self._buffered.release(count))

    def start_check(self) -> None:
        """Start the interval in which bytes must be released."""
        self._in_flight.start_check()
        self._buffered.start_check()

    def mark_stalled(self) -> int:
        """Mark bytes as stalled if none have been released since the last check. Return how many of
        them counted towards the budget until now.
        """
        return self._in_flight.mark_stalled() + self._buffered.mark_stalled()

    def close(self) -> None:
        """Release everything, and remove the share: its batches will not be decoded."""
        self.end_pull()
        self.release_buffered(self._buffered.count)
        self._budget.close(self)
