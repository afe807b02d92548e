"""Our programs as processes that start in a few hundredths of a second.

They are forked from a process that has imported them, one for each worker; that process,
multiprocessing's fork server, has no threads and runs nothing else. What a start with `python -m`
adds is tested by tests/acceptance and tests/crash.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import pty
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from multiprocessing.reduction import DupFd
from pathlib import Path

from support.running.shared_end import end_with_tests

_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(
    [
        "keylane.metaserver.__main__",
        "keylane.broker.__main__",
        "keylane.cli.__main__",
        "keylane.cli.main",  # every command; the program imports it when it runs
        *("keylane.admin", "keylane.producer", "keylane.consumer", "keylane.cli.screen"),
        *("aiosqlite", "alembic.command", "alembic.config", "asyncpg", "caio", "rocksdict"),
        "proof.group_member",  # started thousands of times; only `make proof` finds it here
    ]
)
_LOCK = threading.Lock()
"""A start looks at all children, and only one thread may take the exit status of a process."""


class _File:
    """An open file that becomes a standard file of a process."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[type[_Detached], tuple[object]]:
        return _Detached, (DupFd(self._number),)


class _Detached:
    def __init__(self, duplicate) -> None:
        self.number: int = duplicate.detach()


def _run(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    files: dict[int, _Detached],
    place: Callable[[], AbstractContextManager[None]],
) -> None:
    end_with_tests()
    with place():
        _run_here(module, arguments, environment, files)


def _run_here(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    files: dict[int, _Detached],
) -> None:
    # what was imported stays: no collection goes through it, and its memory stays shared
    gc.freeze()
    for number, file in files.items():
        os.dup2(file.number, number)
        os.close(file.number)
    if 0 in files:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    if "\n" in module:
        sys.argv = ["-c", *arguments]
        exec(compile(module, "<script>", "exec"), {"__name__": "__main__"})
        return
    if module.endswith(".py"):
        sys.argv = [module, *arguments]
        runpy.run_path(module, run_name="__main__")
        return
    program = import_module(f"{module}.__main__")
    sys.argv = [str(program.__file__), *arguments]
    sys.exit(program.main())


class ForkedProcess:
    """
    `python -m module arguments…`, with some of its standard files; ends with the tests' process at
    the latest.

    The module may be the path of a script, whose name ends in `.py`, or the lines of one. What a
    script registers with `atexit` is not called.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        files: Mapping[int, int],
        place: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        Args:
            place: entered by the process before all else: where it runs. It can be pickled.
        """
        given = {number: _File(file) for number, file in files.items()}
        self._process = _FORKING.Process(
            target=_run,
            args=(module, list(arguments), dict(environment), given, place),
            daemon=True,
        )
        with _LOCK:
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        with _LOCK:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit status. Raises `subprocess.TimeoutExpired`."""
        multiprocessing.connection.wait([self._process.sentinel], timeout)
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


class ServerProcess(ForkedProcess):
    """A server with what tests use of `subprocess.Popen`; its standard output is a pipe."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        errors: int | None = None,
        place: Callable[[], AbstractContextManager[None]] = nullcontext,
        **environment: str,
    ) -> None:
        """
        Args:
            errors: an open file that becomes its standard error; None: the tests' own.
        """
        read, write = os.pipe()
        self.stdout = os.fdopen(read, encoding="utf-8")
        files = {1: write} if errors is None else {1: write, 2: errors}
        try:
            super().__init__(module, arguments, os.environ | environment, files, place)
        finally:
            os.close(write)


@contextmanager
def running_script(path: Path, *arguments: str) -> Iterator[ServerProcess]:
    """A script of the tests as a process, after its line "ready"; killed at the end."""
    process = ServerProcess(str(path), arguments)
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def run_keylane(
    *arguments: str,
    text: str = "",
    timeout_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
    terminal: bool = False,
    place: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> subprocess.CompletedProcess[str]:
    """
    Run `keylane ARGUMENTS` to its end, with `text` as its standard input. Raises
    `subprocess.TimeoutExpired`.

    Args:
        terminal: standard input is a terminal, at which `text` is typed.
        place: entered by the process before all else, such as its folder. It can be pickled.
    """
    return run_program(
        "keylane.cli",
        *arguments,
        text=text,
        timeout_s=timeout_s,
        environment=environment,
        terminal=terminal,
        place=place,
    )


def run_program(
    module: str,
    *arguments: str,
    text: str = "",
    timeout_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
    terminal: bool = False,
    place: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ARGUMENTS` to its end, as `run_keylane`."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as given,
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
    ):
        given.write(text)
        given.seek(0)
        typed, read = pty.openpty() if terminal else (None, given.fileno())
        if typed is not None:
            os.write(typed, text.encode())
        process = ForkedProcess(
            module,
            arguments,
            os.environ if environment is None else environment,
            {0: read, 1: out.fileno(), 2: errors.fileno()},
            place,
        )
        try:
            status = process.wait(timeout_s)
        finally:
            process.kill()
            if typed is not None:
                os.close(typed)
                os.close(read)
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess([module, *arguments], status, out.read(), errors.read())
