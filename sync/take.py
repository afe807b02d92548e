"""A call that takes messages on the event loop for a caller in another thread, which may be
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
    A call that takes messages, and puts them back if its caller is interrupted, as by Ctrl-C.

    Args:
        take: takes the messages; it runs on the event loop.
        put_back: puts back messages that the caller did not receive; it runs on the event loop.
    """

    def __init__(
        self, take: Callable[[], Coroutine[Any, Any, T]], put_back: Callable[[T], None]
    ) -> None:
        self._take = take
        self._put_back = put_back
        self._taken: list[T] = []
        self._abandoned = False

    def run(self, thread: LoopThread, made: Callable[[T], R]) -> R:
        """Take messages and return `made(messages)`; raise the errors of `LoopThread.run`."""
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
