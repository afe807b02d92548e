"""`python -m keylane.cli` is the `keylane` command; Ctrl-C ends its imports quietly too."""

from __future__ import annotations

import sys

from .streams import escape_what_encodings_lack, fill_standard_streams


def main() -> None:
    """Run the command line, and exit with its status, which is 130 after Ctrl-C."""
    try:
        fill_standard_streams()
        escape_what_encodings_lack()
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
