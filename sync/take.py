"""One call that takes messages on the event loop for a caller in another thread, who may be
interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from .loop_thread import LoopThread

T = TypeVar("T")
R = TypeVar("R")


class Take(Generic[T]):
    """
    A call that takes something; what an interrupted caller never saw, as after Ctrl-C, is put back.

    Args:
        take: takes it; runs on the event loop.
        put_back: is given what the caller did not get, on the event loop.
    """

    def __init__(
        self, take: Callable[[], Coroutine[Any, Any, T]], put_back: Callable[[T], None]
    ) -> None:
        self._take, self._put_back = take, put_back
        self._taken: list[T] = []
        self._abandoned = False

    def run(self, thread: LoopThread, made: Callable[[T], R]) -> R:
        """What `made` makes of what was taken.  Raises as `LoopThread.run` does."""
        try:
            thread.run(self._run)
            return made(self._taken[0])
        except BaseException:
            thread.post(self._abandon)
            raise

    async def _run(self) -> None:
        self._taken.append(await self._take())
        if self._abandoned:
            self._abandon()

    def _abandon(self) -> None:
        self._abandoned = True
        while self._taken:
            self._put_back(self._taken.pop())
