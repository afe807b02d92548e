"""Appends that wait for room in the queue for the disk, first come, first served.

    room, and nobody waits ─▶ goes on at once
    no room                ─▶ waits its turn: what comes later waits behind it, however small it is
    too many wait, or a turn takes longer than WAIT_MS ─▶ refused, and nothing was decided

Without the line a large append never finds room beside small ones: each of them takes what has just become free.

Invariants
    Whoever is let in goes on in the order of arrival: what one connection sends is decided in its order.
    Room that was promised is nobody else's until its append is decided.
    The end of each turn lets in the next.  A repeat or a refused append takes no room, and where no commit is under
    way none would let in anybody.
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
"""Less than a producer waits for an answer: a refusal says that nothing was done, silence does not."""


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
        """Room given to those who have not taken it yet."""

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def passes(self, length: int) -> bool:
        """True if `length` bytes may be taken at once: there is room, and nobody waits for it or was just let in."""
        return not self._waiting and not self.promised_bytes and self._fits(length)

    @asynccontextmanager
    async def turn(self, length: int) -> AsyncIterator[None]:
        """
        Wait for room for `length` bytes; to be taken inside the block, without another wait.  The next is let in at
        the block's end, whether it took the room or not.

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
        """Room has become free; or nothing is taken any more, which `all_of_them` are to hear."""
        while self._waiting:
            ours, length = next(iter(self._waiting.items()))
            if not (all_of_them or self._fits(length)):
                return
            del self._waiting[ours]
            self.promised_bytes += length
            if not ours.done():
                ours.set_result(None)
