"""Finds the token of a client or server in an argument, a file, or the environment.

    token=  ▶  KEYLANE_TOKEN_FILE  ▶  KEYLANE_TOKEN  ▶  none

A file is read at each use, so that a token can be replaced without a restart. A pipe, such as
`<(…)` in a shell, is read once.
"""

from __future__ import annotations

import logging
import os
import selectors
import stat
from collections.abc import Callable
from pathlib import Path

from ...protocol.access.tokens import check_token
from ...protocol.clock import SystemClock
from ...protocol.errors import ConfigError, Reason, UnauthenticatedError
from ..reasons import reason

log = logging.getLogger("keylane.rpc")
FILE_VARIABLE = "KEYLANE_TOKEN_FILE"
VARIABLE = "KEYLANE_TOKEN"
FILE_BYTES_MAX = 16_384
PIPE_S = 5.0
"""The time in seconds to wait for the program that writes the token to a pipe."""

TokenSource = Callable[[], str]
"""A function that returns the current token. Raises ConfigError."""


def token_in_file(path: Path, *, wait_s: float = PIPE_S) -> str:
    """
    Return the token in a file, without surrounding whitespace and without a byte order mark.

    Args:
        wait_s: the time in seconds to wait for the end of a pipe; a regular file needs no wait.

    Raises:
        ConfigError: the file cannot be read, or contains no token.
    """
    try:
        data = _read(path, wait_s)
    except (OSError, ValueError) as error:
        raise ConfigError(
            Reason.TOKEN_INVALID, f"cannot read the token in {path}: {reason(error)}"
        ) from error
    return check_token(data.decode("utf-8-sig", "replace"), f"the file {path}")


def _read(path: Path, wait_s: float) -> bytes:
    """Return up to FILE_BYTES_MAX bytes of a file or a pipe. Raises OSError or ValueError."""
    # Without O_NONBLOCK, a pipe without a writer would block the program forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        may_block = not stat.S_ISREG(os.fstat(descriptor).st_mode)
        deadline_ms = SystemClock.boot_ms() + wait_s * 1000
        data = b""
        while len(data) < FILE_BYTES_MAX:
            if may_block:
                _wait_for_data(descriptor, max(0.0, deadline_ms - SystemClock.boot_ms()) / 1000)
            chunk = os.read(descriptor, FILE_BYTES_MAX - len(data))
            if not chunk:
                break
            data += chunk
        return data
    finally:
        os.close(descriptor)


def _wait_for_data(descriptor: int, wait_s: float) -> None:
    """Wait until a pipe has data or is closed. Raises TimeoutError."""
    # Not select.select, which does not support file descriptors above 1,023.
    with selectors.DefaultSelector() as selector:
        try:
            selector.register(descriptor, selectors.EVENT_READ)
        except PermissionError:  # a directory or a device, which cannot be polled
            return
        if not selector.select(wait_s):
            raise TimeoutError


class TokenFile:
    """
    Reads the token from a file at each use, and returns the last token while the file cannot be
    read.

    Attributes:
        problem: why the last read failed; "" if it succeeded.

    Raises:
        ConfigError: the first read failed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = token_in_file(path)
        self._is_pipe = path.is_fifo()
        self.problem = ""

    def __call__(self) -> str:
        """Return the current token."""
        if self._is_pipe:
            return self._token
        problem = ""
        try:
            self._token = token_in_file(self._path, wait_s=0.0)
        except ConfigError as error:
            is_missing = isinstance(error.__cause__, FileNotFoundError)
            problem = f"the file {self._path} is gone" if is_missing else error.message
        if problem and problem != self.problem:
            log.warning("%s; the last token stays in use", problem)
        elif self.problem and not problem:
            log.info("read the token in %s again", self._path)
        self.problem = problem
        return self._token


def token_from_file(path: str) -> TokenSource:
    """Return a source that reads the file at each use. Raises ConfigError if the first read
    fails.
    """
    return TokenFile(Path(path))


def refused_token_error(
    error: UnauthenticatedError, source: TokenSource | None
) -> UnauthenticatedError:
    """Return the error for a refused token. It mentions if the token file could not be read."""
    problem = source.problem if isinstance(source, TokenFile) else ""
    if not problem:
        return error
    text = f"{problem}, and its last token is refused: {error.message}"
    return UnauthenticatedError(text, **error.details)


def token_variables() -> tuple[str, str]:
    """Return the current values of KEYLANE_TOKEN_FILE and KEYLANE_TOKEN; "" if unset."""
    return os.environ.get(FILE_VARIABLE, ""), os.environ.get(VARIABLE, "")


def token_source(argument: str | None) -> TokenSource | None:
    """
    Return the source of a client's token, or None if the client has no token.

    Args:
        argument: the value of the client's argument `token=`.

    Raises:
        ConfigError: the token is malformed, or its file cannot be read.
    """
    if argument is not None:
        token = check_token(argument, "token=")
        return lambda: token
    path = os.environ.get(FILE_VARIABLE)
    if path:
        return TokenFile(Path(path))
    text = os.environ.get(VARIABLE)
    if text:
        token = check_token(text, VARIABLE)
        return lambda: token
    return None
