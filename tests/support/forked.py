"""Runs a function in a forked child of the test's process, as gunicorn --preload and
multiprocessing do.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import traceback
from collections.abc import Callable
from typing import Any

from keylane.protocol.errors import KeylaneError

LIFE_S = 90
"""A child whose test has failed ends by itself."""


class Child:
    """A fork that runs `body()` and ends; what that returns, as JSON, is `result`."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(LIFE_S)
                os.close(self._read)
                told = {"result": body()}
            except BaseException as error:  # noqa: BLE001 - it is told to the parent
                told = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
            with os.fdopen(write, "w") as pipe:
                json.dump(told, pipe)
            os._exit(0)
        os.close(write)

    def result(self, *, seconds: float = 60.0) -> Any:
        """The body's return value; an exception in the body fails the test."""
        data = b""
        try:
            ready = (
                select.poll()
            )  # not select: the tests' process may have more than 1,024 files open
            ready.register(self._read, select.POLLIN)
            while ready.poll(seconds * 1000):
                part = os.read(self._read, 1 << 16)
                if not part:
                    break
                data += part
            else:
                raise AssertionError(f"the child did not end within {seconds} s")
        finally:
            os.close(self._read)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        told = json.loads(data)
        assert "error" not in told, told["error"]
        return told["result"]


def error_of(call: Callable[[], Any]) -> str:
    """The reason or the class of what `call` raises, by name, "" if it returns."""
    try:
        call()
    except KeylaneError as error:
        return error.reason.name if error.reason else type(error).__name__
    except Exception as error:  # noqa: BLE001 - it is looked at
        return type(error).__name__
    return ""
