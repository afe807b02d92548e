"""Commits of a simulated broker without a thread: written at once, synced after a while."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from keylane.broker.storage.files import AppendFile
from keylane.testing.machines.disk import Crashed

T = TypeVar("T")


class HostQuickSync:
    """
    See `keylane.broker.store.quick_sync.QuickSync`.

    Args:
        blocking: runs a function after a while.
        lose_power: the disk has crashed.
    """

    def is_ready(self) -> bool:
        return True

    def __init__(
        self, blocking: Callable[..., Awaitable[Any]], lose_power: Callable[[], None]
    ) -> None:
        self._blocking = blocking
        self._lose_power = lose_power

    def write(self, function: Callable[..., T], /, *args: Any) -> T:
        try:
            return function(*args)
        except Crashed:
            self._lose_power()
            raise

    async def sync(self, file: AppendFile) -> None:
        await self._blocking(file.fdatasync)
