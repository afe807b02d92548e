"""Starts, monitors, kills and stops the processes of the demo."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from ...protocol.errors import AddressError, InternalError

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
LOG_TAIL_CHARS = 1_500


class Program:
    """
    A child process that runs a keylane program, which first prints a ready line on standard output.

    It is not an asyncio subprocess, because the event loop would kill it when it closes, and the
    servers may have to outlive the loop.
    """

    def __init__(self, name: str, module: str, arguments: list[str], log: Path) -> None:
        self.name = name
        self.address = ""
        """The address in the ready line."""
        self._command = [sys.executable, "-m", f"keylane.{module}", *arguments]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    def start(self) -> None:
        """Start the process, redirecting its standard error to its log file."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Ctrl-C must reach only the demo, which then stops its processes in order.
                start_new_session=True,
            )

    async def wait_until_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """
        Wait for the ready line.

        Raises:
            InternalError: no ready line arrived in time, or the program exited; the message
                contains the end of its log.
        """
        line = await self.read_line(timeout_s)
        try:
            self.address = str(json.loads(line)["address"])
        except (ValueError, KeyError, TypeError):
            raise InternalError(
                f"{self.name} printed {line[:200]!r} instead of its ready line"
            ) from None

    async def read_line(self, timeout_s: float) -> bytes:
        """Return the next line of standard output. Raises InternalError on a timeout, or if the
        program has exited.
        """
        stdout = self._running_process.stdout
        assert stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await asyncio.to_thread(stdout.readline)
        except TimeoutError:
            # This also unblocks the thread that reads the line.
            self._running_process.kill()
            raise InternalError(
                f"{self.name} printed nothing for {timeout_s:.0f} s{self.log_tail()}"
            ) from None
        if not line:
            await self._wait_for_exit()
            self.check()
        return line

    def write_line(self, line: str) -> None:
        """Write a line to the program's standard input."""
        stdin = self._running_process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # it has exited: `read_line` or `check` will raise
            stdin.write(line.encode() + b"\n")
            stdin.flush()

    def check(self) -> None:
        """Raise InternalError if the program has exited on its own."""
        if not self._killed and self._process is not None and self._process.poll() is not None:
            raise InternalError(
                f"{self.name} ended with status {self._process.returncode}{self.log_tail()}"
            )

    def log_tail(self) -> str:
        """Return the end of the program's log, for use in an error message."""
        text = self._log.read_text(errors="replace").strip() if self._log.exists() else ""
        return f"; its log ends: {text[-LOG_TAIL_CHARS:]}" if text else "; its log is empty"

    @property
    def pid(self) -> int:
        """The process id."""
        return self._running_process.pid

    @property
    def running(self) -> bool:
        """True while the process is running."""
        return self._process is not None and self._process.poll() is None

    async def kill(self) -> None:
        """Send SIGKILL and wait until the process has exited."""
        self._killed = True
        self._running_process.kill()
        await self._wait_for_exit()

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if the process is still running after STOP_TIMEOUT_S."""
        if not self.running:
            return
        self._running_process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._wait_for_exit()
        except TimeoutError:
            await self.kill()

    async def _wait_for_exit(self) -> None:
        process = self._running_process
        await asyncio.to_thread(process.wait)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    @property
    def _running_process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"{self.name} was not started"
        return self._process


def free_port() -> int:
    """
    Return a TCP port that is currently free.

    Raises:
        AddressError: the machine has no free ports.
    """
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError as error:
            raise AddressError(f"no free port: {error}") from error
        return int(probe.getsockname()[1])
