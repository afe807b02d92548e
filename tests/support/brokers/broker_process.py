"""A real broker in a process of its own, to be called, killed and started again on the same
folder.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

from support.server_process import ServerProcess, run_program

NO_METASERVER = "127.0.0.1:1"
"""Nothing listens there: a broker serves without its metaserver."""


class BrokerProcess:
    """A broker on `data`; each `start` waits for the line that says it is ready."""

    def __init__(self, data: Path, *arguments: str, group: str = "g1") -> None:
        self.data = data
        self._arguments = (
            *("--group", group, "--data", str(data), "--meta", NO_METASERVER),
            *arguments,
        )
        self._process: ServerProcess | None = None
        self.address = ""

    def start(self) -> BrokerProcess:
        assert self._process is None
        process = ServerProcess("keylane.broker", self._arguments)
        line = process.stdout.readline()
        assert line, f"the broker did not start: its status is {process.wait()}"
        self._process = process
        self.address = json.loads(line)["address"]
        return self

    def refused(self, *more: str) -> str:
        """Return what `python -m keylane.broker` says when it cannot start."""
        done = run_program("keylane.broker", *self._arguments, *more, timeout_s=60)
        assert done.returncode == 1, done
        assert not done.stdout
        return done.stderr

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit status."""
        process = self._process
        self._process = None
        if process is None:
            return 0
        process.send_signal(number)
        process.stdout.close()
        return process.wait(60)

    def kill(self) -> None:
        self.end(signal.SIGKILL)
