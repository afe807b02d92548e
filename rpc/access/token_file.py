"""Where a client or a server takes its token from: an argument, a file, the environment.

    token=  ▶  KEYLANE_TOKEN_FILE  ▶  KEYLANE_TOKEN  ▶  none: callers are not asked, or are refused

A file is read again when the token is used anew, so a token is replaced without a restart.  A pipe,
as of the shell's `<(…)`, has its token once.
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
"""How long a start waits for what writes a token into a pipe."""

TokenSource = Callable[[], str]
"""Returns the token as it is now.  Raises ConfigError."""


def token_in_file(path: Path, *, wait_s: float = PIPE_S) -> str:
    """
    The token in a file, which may have white space around it, and a byte order mark before it.

    Args:
        wait_s: how long to wait for the end of a pipe, in seconds; a file is read at once.

    Raises:
        ConfigError: the file cannot be read, or has no token.
    """
    try:
        data = _read(path, wait_s)
    except (OSError, ValueError) as error:
        raise ConfigError(
            Reason.TOKEN_INVALID, f"cannot read the token in {path}: {reason(error)}"
        ) from error
    return check_token(data.decode("utf-8-sig", "replace"), f"the file {path}")


def _read(path: Path, wait_s: float) -> bytes:
    """At most FILE_BYTES_MAX of a file or a pipe.  Raises OSError, ValueError."""
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
    """Wait until a pipe has data, or its end.  Raises TimeoutError."""
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
    A token in a file, as it is when it is used; while the file cannot be read, the last one.

    Attributes:
        problem: why the last one is used; "": the file was read.

    Raises:
        ConfigError: it cannot be read at first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = token_in_file(path)
        self._is_pipe = path.is_fifo()
        self.problem = ""

    def __call__(self) -> str:
        """The token."""
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
    """The token in a file, as it is when it is used.  Raises ConfigError: it cannot be read
    at first.
    """
    return TokenFile(Path(path))


def refused_token(error: UnauthenticatedError, source: TokenSource | None) -> UnauthenticatedError:
    """The refusal of a token from `source`; it says so if the file of the token could not be
    read.
    """
    problem = source.problem if isinstance(source, TokenFile) else ""
    if not problem:
        return error
    text = f"{problem}, and the last token of it is refused: {error.message}"
    return UnauthenticatedError(text, **error.details)


def told_by_environment() -> tuple[str, str]:
    """The file and the token that the environment names now; "" for each that it does not."""
    return os.environ.get(FILE_VARIABLE, ""), os.environ.get(VARIABLE, "")


def token_source(given: str | None) -> TokenSource | None:
    """
    Where the token of a client comes from; None: it has none.

    Args:
        given: the argument `token=`.

    Raises:
        ConfigError: there is one, and it cannot be used.
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
