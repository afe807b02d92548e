"""Our server programs as processes that start in a few hundredths of a second.

They are forked from a process that has imported them, one for each worker; that process, multiprocessing's fork server,
has no threads and runs nothing else.  What a start with `python -m` adds is tested by tests/acceptance and tests/crash.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.reduction import DupFd

_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(
    [
        "keylane.metaserver.__main__",
        "keylane.broker.__main__",
        *("aiosqlite", "alembic.command", "alembic.config", "asyncpg", "rocksdict"),
    ]
)


class _Output:
    """The end of a pipe that becomes the standard output of a process."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[type[_Detached], tuple[object]]:
        return _Detached, (DupFd(self._number),)


class _Detached:
    def __init__(self, duplicate) -> None:
        self.number: int = duplicate.detach()


def _run(module: str, arguments: list[str], environment: dict[str, str], output: _Detached) -> None:
    os.dup2(output.number, 1)
    os.close(output.number)
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(import_module(f"{module}.__main__").main(arguments))


class ServerProcess:
    """`python -m module arguments…`, with what tests use of `subprocess.Popen`; its standard output is a pipe."""

    def __init__(self, module: str, arguments: Sequence[str], **environment: str) -> None:
        read, write = os.pipe()
        self.stdout = os.fdopen(read, encoding="utf-8")
        try:
            self._process = _FORKING.Process(
                target=_run,
                args=(module, list(arguments), os.environ | environment, _Output(write)),
                daemon=True,
            )
            self._process.start()
        finally:
            os.close(write)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit status.  Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
