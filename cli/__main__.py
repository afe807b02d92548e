"""The entry point of the `keylane` command. Ctrl-C is quiet, even during imports."""

from __future__ import annotations

import sys

from .streams import escape_unencodable, reopen_closed_streams


def main() -> None:
    """Run the command line and exit with its status, which is 130 after Ctrl-C."""
    try:
        reopen_closed_streams()
        escape_unencodable()
        try:
            from .main import main as run_command
        except ModuleNotFoundError as error:
            from ..protocol.errors import MissingExtraError

            missing = MissingExtraError.of(error, "the command keylane", "cli")
            if not isinstance(missing, MissingExtraError):
                raise
            sys.exit(f"keylane: {missing}")
        run_command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
