"""Prepares the standard streams of a command: it opens those that the caller closed, and lets them
print every character.
"""

from __future__ import annotations

import codecs
import io
import os
import sys

ESCAPED = "keylane.escaped"
"""The name of the error handler that escapes characters that an encoding lacks."""


def fill_standard_streams() -> None:
    """
    Connect standard streams that the caller closed, as in `keylane … >&-`, to the null device.

    Otherwise the next socket would get the descriptor of one of them, and libuv aborts the process
    when it closes such a socket.
    """
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def escape_what_encodings_lack() -> None:
    r"""
    Let standard output and errors print characters that their encoding lacks, for example with
    `PYTHONIOENCODING=ascii`, as `\u00e9`.

    Messages may contain any text. The escapes are those of JSON, so a line of JSON stays valid.
    """
    codecs.register_error(ESCAPED, _escape)
    for stream in (sys.stdout, sys.stderr):
        # Arguments in the encoding of a file system are printed unchanged where Python allows it.
        if isinstance(stream, io.TextIOWrapper) and not (
            stream.errors == "surrogateescape" and codecs.lookup(stream.encoding).name == "utf-8"
        ):
            stream.reconfigure(errors=ESCAPED)


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)), error.end
