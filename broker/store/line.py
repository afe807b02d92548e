"""Appends that wait for room in the queue for the disk, first come, first served.

    room, and nobody waits ─▶ goes on at once
    no room                ─▶ waits its turn: later appends wait behind it, however small they are
    too many wait, or a turn takes longer than WAIT_MS ─▶ refused, and nothing was decided

Without the line a large append never finds room beside small ones: each of them takes the room that has just become free.

Invariants
    Appends are let in in the order of arrival: those of one connection are decided in its order.
    Promised room is kept for its append until that is decided.
    The end of each turn lets in the next append: a repeat or a refused append takes no room, and without a commit
    under way nothing else would.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ...protocol.errors import OverloadedError

WAITING_MAX = 32
"""Of a broker: 36 MB, if each is the largest batch there is."""
WAIT_MS = 2_000
"""Less than a producer waits for an answer: a refusal says that nothing was done, a time-out does not."""


class Line:
    """
    The line in front of the queue.

    Args:
        waiting_max: how many may wait, each with a batch in memory.  Counted, not weighed: at the end of the line, too,
            a large batch has the chance of a small one.
        fits: whether so many bytes have room beside those that are queued.
    """

    def __init__(self, waiting_max: int, fits: Callable[[int], bool]) -> None:
        self._waiting_max = waiting_max
        self._fits = fits
        self._waiting: OrderedDict[asyncio.Future[None], int] = OrderedDict()
        """With the bytes that each needs."""
        self.promised_bytes = 0
        """Room of appends that are let in and not decided yet."""

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def passes(self, length: int) -> bool:
        """True if `length` bytes may be taken at once: there is room, and no append waits or was just let in."""
        return not self._waiting and not self.promised_bytes and self._fits(length)

    @asynccontextmanager
    async def turn(self, length: int) -> AsyncIterator[None]:
        """
        Wait for room for `length` bytes, to be taken inside the block without another await.  The end of the block
        lets in the next append, whether the room was taken or not.

        Raises:
            OverloadedError: too many are waiting, or it took too long.
        """
        if len(self._waiting) >= self._waiting_max:
            raise OverloadedError("too many appends wait for the disk", limit=self._waiting_max)
        ours: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[ours] = length
        try:
            async with asyncio.timeout(WAIT_MS / 1000):
                await ours
        except BaseException as error:
            self._leave(ours, length)
            self.let_in()
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    f"no room in the queue for the disk within {WAIT_MS} ms", retry_after_ms=10
                ) from None
            raise
        self._leave(ours, length)
        try:
            yield
        finally:
            self.let_in()

    def _leave(self, ours: asyncio.Future[None], length: int) -> None:
        if self._waiting.pop(ours, None) is None:
            self.promised_bytes -= length

    def let_in(self, *, all_of_them: bool = False) -> None:
        """Let in waiting appends that fit; `all_of_them` when no append is taken any more, so that each is refused."""
        while self._waiting:
            ours, length = next(iter(self._waiting.items()))
            if not (all_of_them or self._fits(length)):
                return
            del self._waiting[ours]
            self.promised_bytes += length
            if not ours.done():
                ours.set_result(None)
