"""SIGTERM for simulated processes: `Consumer.run` waits for it, without using signals of the
simulating process.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from .loop import PROCESS, Process


class SimStopSignals:
    """Replaces `keylane.rpc.stop_signals.StopSignals`, for the process that makes it."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self._process = PROCESS.get()

    def __enter__(self) -> Self:
        self._process.on_stop[self.event.set] = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del self._process.on_stop[self.event.set]


def send_stop(process: Process) -> bool:
    """Ask a process to stop; False if it does not listen, so that the signal's default ends it at
    once.
    """
    listeners = list(process.on_stop)
    for stop in listeners:
        stop()
    return bool(listeners)
