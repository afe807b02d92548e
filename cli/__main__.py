"""`python -m keylane.cli` is the `keylane` command.  Importing it takes a while, in which Ctrl-C ends it quietly too."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line; the exit status says how it went, and is 130 after Ctrl-C."""
    try:
        fill_standard_streams()
        from .main import main as run_command

        run_command()
    except KeyboardInterrupt:
        sys.exit(130)


def fill_standard_streams() -> None:
    """
    Give standard input, output and errors that the caller closed, as by `keylane … >&-`, to the null device.

    Otherwise the next socket takes the number of one of them, and libuv aborts the process when it closes it.
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


if __name__ == "__main__":
    main()
