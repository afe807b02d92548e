"""A real broker in a process of its own, to be called, killed and started again on the same folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

NO_METASERVER = "127.0.0.1:1"
"""Nothing listens there: a broker serves without its metaserver."""


class BrokerProcess:
    """`python -m keylane.broker` on `data`; each `start` waits for the line that says it is ready."""

    def __init__(self, data: Path, *arguments: str, group: str = "g1") -> None:
        self.data = data
        self._arguments = (
            "--group",
            group,
            "--data",
            str(data),
            "--meta",
            NO_METASERVER,
            *arguments,
        )
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    def run(self, *more: str) -> subprocess.Popen[str]:
        """The process, not waited for."""
        return subprocess.Popen(
            [sys.executable, "-m", "keylane.broker", *self._arguments, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            cwd=self.data.parent,
        )

    def start(self) -> BrokerProcess:
        assert self._process is None
        self._process = self.run()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            _, problem = self._process.communicate()
            raise AssertionError(f"the broker did not start: {problem}")
        self.address = json.loads(line)["address"]
        return self

    def refused(self, *more: str) -> str:
        """What it says when it cannot start."""
        process = self.run(*more)
        out, problem = process.communicate(timeout=20)
        assert process.returncode == 1, (out, problem)
        assert not out
        return problem

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
        process.communicate(timeout=20)
        return process.returncode

    def kill(self) -> None:
        self.end(signal.SIGKILL)
