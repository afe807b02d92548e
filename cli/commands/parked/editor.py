"""A value edited in the user's editor."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from ....protocol.errors import ConfigError

EDITOR_DEFAULT = "vi"


def edited_text(value: bytes) -> bytes | None:
    """
    Have the user edit a value, in $VISUAL or $EDITOR; None if it is as before.

    Raises:
        ConfigError: the value is not text, or the editor cannot be started, or ended with an error.
    """
    try:
        before = value.decode()
    except UnicodeDecodeError:
        raise ConfigError(
            "the value is not text: edit a file, and give it as --value-file"
        ) from None
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or EDITOR_DEFAULT
    with tempfile.TemporaryDirectory(prefix="keylane-") as folder:
        path = Path(folder) / "value"
        path.write_bytes(value)
        try:
            done = subprocess.run([*shlex.split(command), str(path)], check=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the editor {command!r} cannot be started: {error}") from None
        if done.returncode:
            raise ConfigError(
                f"the editor ended with status {done.returncode}: nothing was changed"
            )
        after = path.read_bytes()
    # Editors end the last line, which may have had no end before.
    if not before.endswith("\n"):
        after = after.removesuffix(b"\n")
    return None if after == value else after
