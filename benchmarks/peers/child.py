"""The measured clients, as children of the measuring process, with a time by which they have to
end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from peers.systems.base import System

BENCHMARKS = Path(__file__).parent.parent
MEASUREMENT_S = 180
"""A take that is not over by then is given up."""


class Child:
    """A client of a system, in a role."""

    def __init__(self, system: System, role: str, **job: Any) -> None:
        job = {
            "client": system.client,
            "clients": str(system.home / "clients"),
            "where": system.where,
            "loop": system.loop,
            "role": role,
            "sender": "each",
            "handler": "each",
            "size": 100,
            **job,
        }
        self._ends_at = time.monotonic() + MEASUREMENT_S
        self._buffered = b""
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "peers.client", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(BENCHMARKS)},
        )

    def line(self) -> dict[str, Any]:
        """Return the next JSON line that the process prints; other lines are skipped."""
        pipe = self.process.stdout
        assert pipe is not None
        while True:
            text, newline, buffered = self._buffered.partition(b"\n")
            if newline:
                self._buffered = buffered
                if text.startswith(b"{"):
                    figures: dict[str, Any] = json.loads(text)
                    return figures
                continue
            remaining_s = max(0.0, self._ends_at - time.monotonic())
            if not select.select([pipe], [], [], remaining_s)[0]:
                self.kill()
                raise TimeoutError(f"a client took over {MEASUREMENT_S} s")
            data = os.read(pipe.fileno(), 65_536)
            if not data:
                raise ChildProcessError(f"a client ended with status {self.process.wait()}")
            self._buffered += data

    def open_gate(self) -> None:
        """Let a gated client begin."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def end(self) -> dict[str, Any]:
        """Return the last figures, and wait until the process ends."""
        figures = self.line()
        self.process.wait(60)
        return figures

    def kill(self) -> None:
        """Kill the process if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
