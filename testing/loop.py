"""The event loop of a story. It runs in virtual time, with limits, and stops as soon as the story
uses a real sleep, thread or socket.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from ..protocol.clock import SystemClock
from .machines.loop import FAULTS_OF_CODE, Process, SimLoop, StuckError

JUMPS_PER_CHECK = 64
"""The number of jumps in virtual time between two reads of the real clock."""


class StoryLoop(SimLoop):
    """
    Runs a story in virtual time.

    Args:
        limit_s: maximum virtual time, in seconds.
        real_limit_s: maximum real time, in seconds.
    """

    def __init__(self, rng: random.Random, *, limit_s: float, real_limit_s: float) -> None:
        super().__init__(rng)
        self._limit_s = limit_s
        self._real_limit_s = real_limit_s
        self._real_ns = SystemClock().boot_ns
        self._until_ns = self._real_ns() + real_limit_s * 1e9
        self._jumps_until_check = JUMPS_PER_CHECK
        self.fatal_error: BaseException | None = None
        """The error that ends the story immediately."""
        self.exit_callback: Callable[[Process, SystemExit], None] = super().on_exit
        """Called when a program calls sys.exit."""

    def __del__(self, _warn: object = None) -> None:
        """Suppress the warning about an unclosed loop, because this loop holds no system
        resources.
        """

    def on_exit(self, process: Process, error: SystemExit) -> None:
        """See `SimLoop.on_exit`."""
        self.exit_callback(process, error)

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        super()._on_exception(loop, context)
        is_killed = "was destroyed" in context.get("message", "")
        if not is_killed and not isinstance(context.get("exception"), FAULTS_OF_CODE):
            self.default_exception_handler(context)

    def _advance_time(self) -> None:
        if self.fatal_error is not None:
            raise self.fatal_error
        super()._advance_time()
        if self.now > self._limit_s:
            raise StuckError(f"{self._limit_s:g} s of virtual time have passed")
        self._jumps_until_check -= 1
        if not self._jumps_until_check:
            self._jumps_until_check = JUMPS_PER_CHECK
            if self._real_ns() > self._until_ns:
                raise StuckError(f"it has taken {self._real_limit_s:g} s of real time")
