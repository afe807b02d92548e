"""Admits appends to the commit queue in the order of their arrival.

    the commit queue has room, and no append waits ─▶ admitted at once
    the commit queue is full                       ─▶ waits; later appends wait after it
    too many wait, or one waits WAIT_MS            ─▶ refused, before anything is decided

Without this order a large append would starve: smaller appends would take all room that becomes
free.

Invariants
    Appends are admitted in the order of arrival, so the appends of a connection are decided in
    their order. Room that is promised to an admitted append is kept until the append is decided.
    The end of each turn admits the next append. A commit does that as well, but a refused or
    repeated append makes none.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ...protocol.errors import OverloadedError

WAITING_MAX = 32
"""The most appends that may wait at a broker; they take 36 MB if each has the largest batch."""
WAIT_MS = 2_000
"""The longest wait of an append, in milliseconds. It is less than a producer's timeout: a refusal
says that the batch was not stored, a timeout does not.
"""


class AdmissionQueue:
    """
    The queue of appends that wait for room in the commit queue.

    Args:
        waiting_max: the number of appends that may wait, each with a batch in memory. Bytes are not
            counted, so a large batch is refused no more often than a small one.
        fits: returns whether the commit queue has room for this number of bytes.
    """

    def __init__(self, waiting_max: int, fits: Callable[[int], bool]) -> None:
        self._waiting_max = waiting_max
        self._fits = fits
        self._waiting: OrderedDict[asyncio.Future[None], int] = OrderedDict()
        """Waiting append → its bytes, in the order of arrival."""
        self.empty = True
        """True if no append waits or is being decided: one that fits is admitted at once."""
        self.promised_bytes = 0
        """Bytes of the appends that are admitted and not decided yet."""

    @property
    def waiting(self) -> int:
        """The number of waiting appends."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, length: int) -> AsyncIterator[None]:
        """
        Wait until an append of `length` bytes is admitted; the block then decides on it without
        another await.

        The end of the block admits the next append.

        Raises:
            OverloadedError: too many appends wait, or this one has waited WAIT_MS.
        """
        if len(self._waiting) >= self._waiting_max:
            raise OverloadedError("too many appends wait for the disk", limit=self._waiting_max)
        ours: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[ours] = length
        self.empty = False
        try:
            async with asyncio.timeout(WAIT_MS / 1000):
                await ours
        except BaseException as error:
            self._leave(ours, length)
            self.admit()
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    f"the append waited {WAIT_MS} ms for the disk", retry_after_ms=10
                ) from None
            raise
        self._leave(ours, length)
        try:
            yield
        finally:
            self.admit()

    def _leave(self, ours: asyncio.Future[None], length: int) -> None:
        if self._waiting.pop(ours, None) is None:
            self.promised_bytes -= length
        self.empty = not self._waiting and not self.promised_bytes

    def admit(self, *, all_of_them: bool = False) -> None:
        """Admit the waiting appends that fit. With `all_of_them`, admit every append; each is then
        refused.
        """
        while self._waiting:
            ours, length = next(iter(self._waiting.items()))
            if not (all_of_them or self._fits(length)):
                return
            del self._waiting[ours]
            self.promised_bytes += length
            if not ours.done():
                ours.set_result(None)
