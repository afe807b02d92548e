"""Real brokers, and users with outboxes, forked from a process that has all the imports done: a
start takes a few hundredths of a second.

As a program it reads one JSON line per process to fork, {"program": "broker", "index" or "outbox",
"arguments": […], "environment": {…}, "fifo": path}; its standard output goes to the fifo. It
answers with a line per process that began, {"pid": …}, and one when it ended: {"pid": …, "status":
…}.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path


class Forks:
    """Starts brokers; they end with it at the latest."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
        )
        self._folder = tempfile.TemporaryDirectory()

    def _line(self) -> dict[str, int]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that forks is gone"
        return json.loads(line)

    def start(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """The broker's pid and address; no address if it ended before it served."""
        pid, fifo = self._fork("broker", arguments, environment)
        with fifo.open() as ready:
            line = ready.readline()
        return pid, json.loads(line)["address"] if line else ""

    def work(self, work: str, folder: Path, kind: str, **environment: str) -> int:
        """Run the work of `keylane broker index rebuild` or `switch` to its end; returns its
        status.
        """
        pid, fifo = self._fork("index", (work, str(folder), kind), environment)
        fifo.read_bytes()
        return self.ended(pid)

    def write_orders(self, meta: str, database: Path, seed: int, step: int) -> int:
        """Run the user of `outbox.writer` until it ends; how it ended."""
        pid, fifo = self._fork("outbox", (meta, str(database), str(seed), str(step)), {})
        fifo.read_bytes()
        return self.ended(pid)

    def _fork(
        self, program: str, arguments: tuple[str, ...], environment: dict[str, str]
    ) -> tuple[int, Path]:
        fifo = Path(self._folder.name) / "ready"
        fifo.unlink(missing_ok=True)
        os.mkfifo(fifo)
        ask = {
            "program": program,
            "arguments": arguments,
            "environment": environment,
            "fifo": str(fifo),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(ask) + "\n")
        self._process.stdin.flush()
        return self._line()["pid"], fifo

    def ended(self, pid: int) -> int:
        """Wait for the end of a broker; its status as `os.waitstatus_to_exitcode` says it."""
        answer = self._line()
        assert answer["pid"] == pid
        return answer["status"]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)
        self._folder.cleanup()


def serve() -> None:
    import keylane.broker.storage.index.rocksdb  # noqa: F401  # before the first fork
    from keylane.broker.__main__ import main
    from keylane.cli.commands.broker.folder import rebuild, switch
    from keylane.cli.options import OutputFormat
    from support.outbox import writer

    def say(**values: int) -> None:
        sys.stdout.write(json.dumps(values) + "\n")
        sys.stdout.flush()

    while True:
        select.select([0], [], [])
        line = sys.stdin.readline()
        if not line:
            return
        ask = json.loads(line)
        pid = os.fork()
        if pid == 0:
            sys.stdin.close()
            fifo = os.open(ask["fifo"], os.O_WRONLY)
            os.dup2(fifo, 1)
            os.close(fifo)
            os.environ.update(ask["environment"])
            status = 1
            try:
                if ask["program"] == "broker":
                    status = main(ask["arguments"])
                elif ask["program"] == "outbox":
                    writer.run(*ask["arguments"])
                else:
                    work, folder, kind = ask["arguments"]
                    {"rebuild": rebuild, "switch": switch}[work](
                        Path(folder), kind, OutputFormat.JSON
                    )
                    status = 0
            except SystemExit as ended:
                status = int(ended.code or 0)
            finally:
                sys.stdout.flush()
                os._exit(status)
        say(pid=pid)
        _, status = os.waitpid(pid, 0)
        say(pid=pid, status=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    serve()
