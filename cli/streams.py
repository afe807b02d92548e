"""Prepares the standard streams of a command: opens those that the caller has closed, and escapes
characters that their encoding does not support.
"""

from __future__ import annotations

import codecs
import io
import os
import sys

ESCAPED = "keylane.escaped"
"""Name of the error handler that escapes characters missing from an encoding."""


def reopen_closed_streams() -> None:
    """
    Connect standard streams that the caller has closed, as in `keylane … >&-`, to the null device.

    Otherwise a socket would get one of their file descriptors, and libuv aborts the process when
    such a socket is closed.
    """
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def escape_unencodable() -> None:
    r"""
    Make standard output and standard error escape characters that their encoding lacks: with
    `PYTHONIOENCODING=ascii`, é becomes `\u00e9`.

    Messages may contain any text. The escapes are those of JSON, so a line of JSON remains valid.
    """
    codecs.register_error(ESCAPED, _escape)
    for stream in (sys.stdout, sys.stderr):
        # Undecodable arguments are printed unchanged where Python allows it.
        if isinstance(stream, io.TextIOWrapper) and not (
            stream.errors == "surrogateescape" and codecs.lookup(stream.encoding).name == "utf-8"
        ):
            stream.reconfigure(errors=ESCAPED)


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4)), error.end
