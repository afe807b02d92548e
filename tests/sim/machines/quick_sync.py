"""Commits of a simulated broker without a thread: written at once, synced after a while."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from keylane.testing.machines.disk import Crashed
from keylane.testing.programs import SyncsInTasks

T = TypeVar("T")


class HostQuickSync(SyncsInTasks):
    """
    See `keylane.broker.store.quick_sync.QuickSync`.

    Args:
        blocking: runs a function after a while.
        lose_power: the disk has crashed.
    """

    def __init__(
        self, blocking: Callable[..., Coroutine[Any, Any, Any]], lose_power: Callable[[], None]
    ) -> None:
        super().__init__(blocking)
        self._lose_power = lose_power

    def write(self, function: Callable[..., T], /, *args: Any) -> T:
        try:
            return function(*args)
        except Crashed:
            self._lose_power()
            raise
