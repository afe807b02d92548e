"""SIGTERM for simulated processes: what `Consumer.run` waits for, without the signals of the
process that simulates.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from .loop import PROCESS, Process


class SimStopSignals:
    """In place of `keylane.rpc.stop_signals.StopSignals`: of the process that makes it."""

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
    """Tell a process to stop; False if it does not listen: then the signal's default ends it at
    once.
    """
    listeners = list(process.on_stop)
    for tell in listeners:
        tell()
    return bool(listeners)
