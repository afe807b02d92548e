"""Runs a server program: its event loop and signals, the line that announces that it is ready, and
error messages without tracebacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import json
import logging
import os
import re
import resource
import signal
import ssl
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ..protocol.errors import KeylaneError, MissingExtraError
from ..protocol.errors.failures import few_files_error
from .operating.log_lines import log_to
from .operating.service_manager import notify, watchdog_loop
from .race import start_task

log = logging.getLogger("keylane.rpc")

_CLOSED = re.compile(r"unable to perform operation on <.*closed=True.*>; the handler is closed")
_UNREACHABLE = {
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
}
"""Error numbers for an unreachable network or host, for which Python has no exception class."""
OPEN_FILES = 65_536
FILES_NEEDED = 128
"""The lowest usable limit for open files. An idle server has about 20 files open; half of the rest
is for connections, and half for data.
"""
PRIVATE_UMASK = 0o077
"""A umask that lets only the server's own user read its files, including those that RocksDB and
SQLite write.
"""


class Stop(enum.StrEnum):
    """The progress of a program that was asked to stop by a signal."""

    STOPPING = "stopping"
    STOPPED = "stopped"


def run_program(
    main: Callable[[asyncio.Event], Awaitable[None]],
    *,
    log_level: str = "INFO",
    log_format: str = "text",
    log_fields: Mapping[str, object] | None = None,
    on_reload: Callable[[], None] | None = None,
    on_stop: Callable[[Stop], None] = lambda _stop: None,
) -> int:
    """
    Run `main(stop)` on uvloop until it returns. SIGTERM and SIGINT set `stop`. A service manager
    is told that the event loop runs, and that the program stops.

    Args:
        log_format, log_fields: see `log_lines.log_to`.
        on_stop: called on the first of these signals, and again when `main` has returned.
        on_reload: called on SIGHUP; if None, SIGHUP ends the program.

    Returns:
        The exit status: 0, or 1 after a KeylaneError, whose message is written to standard error.
    """
    try:
        import uvloop
    except ModuleNotFoundError as error:
        print(f"keylane: {MissingExtraError.of(error, 'a server', 'server')}", file=sys.stderr)
        return 1
    allow_open_files()
    os.umask(PRIVATE_UMASK)
    log_to(sys.stderr, level=log_level, log_format=log_format, fields=log_fields or {})

    async def run() -> bool:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(handle_loop_error)

        def request_stop() -> None:
            if not stop.is_set():
                stop.set()
                notify("STOPPING=1")
                on_stop(Stop.STOPPING)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, request_stop)
        if on_reload is not None:
            loop.add_signal_handler(signal.SIGHUP, on_reload)
        watchdog = start_task(watchdog_loop())
        try:
            await main(stop)
        finally:
            watchdog.cancel()
        return stop.is_set()

    try:
        _check_open_files()  # otherwise the event loop fails with a traceback
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            stopped = runner.run(run())
        if stopped:
            on_stop(Stop.STOPPED)
    except KeylaneError as error:
        print(f"keylane: {error}", file=sys.stderr)
        return 1
    return 0


def handle_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle an error like the event loop's default handler, but only log a DEBUG line if the peer
    of a connection has disconnected.
    """
    if is_peer_disconnect(context):
        log.debug("a connection has ended: %s: %s", context.get("message"), context["exception"])
    else:
        loop.default_exception_handler(context)


def is_peer_disconnect(context: Mapping[str, Any]) -> bool:
    """Return True if an event loop reports that the peer of a connection has disconnected, which is
    not an error in this program.
    """
    error = context.get("exception")
    if "transport" not in context and "protocol" not in context:
        return False
    if isinstance(error, ConnectionError | TimeoutError | ssl.SSLError):
        return True
    if isinstance(error, OSError) and error.errno in _UNREACHABLE:
        return True
    # uvloop raises this when TLS writes its last bytes to an aborted connection.
    return isinstance(error, RuntimeError) and _CLOSED.fullmatch(str(error)) is not None


def allow_open_files() -> None:
    """
    Raise the limit for open files and connections to `OPEN_FILES`, or as far as the system allows.

    The usual default of 1,024 is lower than the number of consumers that a server may have.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(ValueError, OSError):  # the system allows less
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def _check_open_files() -> None:
    """Raise StorageError if the open-file limit of this process is too low to serve clients."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES_NEEDED:
        raise few_files_error(soft, FILES_NEEDED)


def announce_ready(program: str, address: str) -> None:
    """
    Announce in one JSON line on standard output, and to a service manager, that this program is
    listening at `address`.

    A broker starts to listen before a metaserver has registered it; `/health/ready` tells whether
    clients can use it.
    """
    print(json.dumps({"ready": True, "program": program, "address": address}), flush=True)
    log.info("listens at %s", address)
    notify(f"READY=1\nSTATUS=serves at {address}")


def announce_stop(program: str, stop: Stop) -> None:
    """Announce in one JSON line on standard output that this program is stopping or has stopped."""
    print_line(json.dumps({stop: True, "program": program}))
    log.info("%s", stop)


def print_line(line: str) -> None:
    """Write a line to standard output. Do nothing if nobody is reading it any more."""
    with contextlib.suppress(OSError, ValueError):  # print would buffer, and fail again on exit
        os.write(sys.stdout.fileno(), f"{line}\n".encode())
