"""The source of a client's or server's token: an argument, a file, or the environment.

    token=  ▶  KEYLANE_TOKEN_FILE  ▶  KEYLANE_TOKEN  ▶  none: callers are not identified, or refused

A file is read again at each use of the token, so a token is replaced without a restart. A pipe,
such as the shell's `<(…)`, provides its token once.
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
"""Seconds that a start waits for the writer of a token into a pipe."""

TokenSource = Callable[[], str]
"""Function that returns the current token. Raises ConfigError."""


def token_in_file(path: Path, *, wait_s: float = PIPE_S) -> str:
    """
    Return the token in a file, which may have white space around it, and a byte order mark before
    it.

    Args:
        wait_s: seconds to wait for the end of a pipe; a file is read at once.

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
    """Return at most FILE_BYTES_MAX of a file or a pipe. Raises OSError, ValueError."""
    # A pipe without a writer would hold the program for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        waits = not stat.S_ISREG(os.fstat(descriptor).st_mode)
        until_ms = SystemClock.boot_ms() + wait_s * 1000
        data = b""
        while len(data) < FILE_BYTES_MAX:
            if waits:
                _wait_for_data(descriptor, max(0.0, until_ms - SystemClock.boot_ms()) / 1000)
            part = os.read(descriptor, FILE_BYTES_MAX - len(data))
            if not part:
                break
            data += part
        return data
    finally:
        os.close(descriptor)


def _wait_for_data(descriptor: int, wait_s: float) -> None:
    """Wait until a pipe has data, or has ended. Raises TimeoutError."""
    # select.select takes no file number above 1,023.
    with selectors.DefaultSelector() as ready:
        try:
            ready.register(descriptor, selectors.EVENT_READ)
        except PermissionError:  # a folder or a device, where nothing is waited for
            return
        if not ready.select(wait_s):
            raise TimeoutError


class TokenFile:
    """
    The token in a file, read at each use; while the file cannot be read, the last token.

    Attributes:
        problem: reason why the last token is used; "": the file was read.

    Raises:
        ConfigError: the file cannot be read when this is made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = token_in_file(path)
        self._is_pipe = path.is_fifo()
        self.problem = ""

    def __call__(self) -> str:
        """Return the token."""
        if self._is_pipe:
            return self._last
        problem = ""
        try:
            self._last = token_in_file(self._path, wait_s=0.0)
        except ConfigError as error:
            gone = isinstance(error.__cause__, FileNotFoundError)
            problem = f"the file {self._path} is gone" if gone else error.message
        if problem and problem != self.problem:
            log.warning("%s; the last token stays in use", problem)
        elif self.problem and not problem:
            log.info("read the token in %s again", self._path)
        self.problem = problem
        return self._last


def token_from_file(path: str) -> TokenSource:
    """Return a source that reads the file at each use. Raises ConfigError if the first read
    fails.
    """
    return TokenFile(Path(path))


def refused_token(error: UnauthenticatedError, source: TokenSource | None) -> UnauthenticatedError:
    """Return the refusal of a token from `source`; it says so if the token's file could not be
    read.
    """
    problem = source.problem if isinstance(source, TokenFile) else ""
    if not problem:
        return error
    text = f"{problem}, and its last token is refused: {error.message}"
    return UnauthenticatedError(text, **error.details)


def told_by_environment() -> tuple[str, str]:
    """Return the file and the token that the environment names now, each "" if it does not."""
    return os.environ.get(FILE_VARIABLE, ""), os.environ.get(VARIABLE, "")


def token_source(given: str | None) -> TokenSource | None:
    """
    Return the source of a client's token; None: it has no token.

    Args:
        given: the argument `token=`.

    Raises:
        ConfigError: there is a token, but it cannot be used.
    """
    if given is not None:
        token = check_token(given, "token=")
        return lambda: token
    path = os.environ.get(FILE_VARIABLE)
    if path:
        return TokenFile(Path(path))
    text = os.environ.get(VARIABLE)
    if text:
        token = check_token(text, VARIABLE)
        return lambda: token
    return None
