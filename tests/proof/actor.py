"""One program of a stage, as a process: how it is started, stopped and killed, and its last
output.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from proof.recording import Stop, boot_ns
from support.running.shared_end import ending_with_parent
from support.server_process import ServerProcess

HERE = Path(__file__).parent
LAUNCHER = str(HERE / "launcher.py")
READY_S = 60.0
LAST_WORDS = 2_000
"""Characters of a log."""


class Actor:
    """One program: a process that can be stopped, killed and started again."""

    def __init__(
        self,
        name: str,
        command: list[str],
        log: Path,
        *,
        anew: bool = False,
        place: Callable[[], AbstractContextManager[None]] = nullcontext,
        **environment: str,
    ) -> None:
        """
        Args:
            anew: a Python of its own, with imports of its own, as a program of another version
                needs; else a fork of a process that has imported our programs.
            place: where it runs: entered by a fork before all else, or while the process is
                started. It can be pickled.
        """
        self.name = name
        self.command = command
        self._log = log
        self._anew = anew
        self._place = place
        self._environment = environment
        self.process: subprocess.Popen[str] | ServerProcess | None = None
        self.stops: list[Stop] = []
        """When it was stopped, as by SIGSTOP, and went on; see `signal`."""
        self._stopped_ns: int | None = None

    async def start(self) -> None:
        self.spawn()
        await self.ready()

    def spawn(self) -> None:
        with self._log.open("a") as log:
            if not self._anew:
                self.process = ServerProcess(
                    LAUNCHER,
                    self.command,
                    errors=log.fileno(),
                    place=self._place,
                    **self._environment,
                )
                return
            paths = os.pathsep.join((str(HERE.parent), os.environ.get("PYTHONPATH", "")))
            own = {"PYTHONPATH": paths, "PYTHONHASHSEED": "0"}
            with self._place():
                self.process = subprocess.Popen(
                    [sys.executable, LAUNCHER, *self.command],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    preexec_fn=ending_with_parent(),  # noqa: PLW1509  it calls nothing but the kernel
                    env=os.environ | own | self._environment,
                )

    async def ready(self) -> None:
        """Wait until it says that it is."""
        assert self.process is not None
        assert self.process.stdout is not None
        async with asyncio.timeout(READY_S):
            line = await asyncio.to_thread(self.process.stdout.readline)
        assert line, self.last_words()

    def last_words(self) -> str:
        """The exit status of a program that has ended, and the end of its log."""
        assert self.process is not None
        said = self._log.read_text()[-LAST_WORDS:]
        return f"{self.name} ended with {self.process.wait()}: {said}"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def stopped(self) -> bool:
        """As by SIGSTOP."""
        assert self.process is not None
        _, _, state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")
        return state.startswith("T")

    def signal(self, number: int) -> None:
        assert self.process is not None
        if number == signal.SIGSTOP:
            self.note_stop(boot_ns())
        elif number == signal.SIGCONT:
            self._note_end_of_stop()
        self.process.send_signal(number)

    def note_stop(self, at_ns: int) -> None:
        """Note that the process is stopped since `at_ns` of the boot clock, or a little later."""
        self._stopped_ns = at_ns

    def _note_end_of_stop(self) -> None:
        if self._stopped_ns is not None:
            self.stops.append((self._stopped_ns, boot_ns()))
            self._stopped_ns = None

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def stop(self, *, seconds: float = 20.0) -> None:
        """Stop with SIGTERM; a program that does not end is killed."""
        self.signal(signal.SIGCONT)
        try:
            async with asyncio.timeout(seconds):
                await self._end(signal.SIGTERM)
        except TimeoutError:
            await self.kill()

    async def _end(self, number: int) -> None:
        process = self.process
        assert process is not None
        self._note_end_of_stop()
        process.send_signal(number)  # nothing happens if it has ended
        while process.poll() is None:
            await asyncio.sleep(0.01)
        assert process.stdout is not None
        process.stdout.close()
