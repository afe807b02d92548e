"""Lets the user edit a value in an editor."""

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
    Let the user edit a value in $VISUAL or $EDITOR; return None if it was not changed.

    Raises:
        ConfigError: the value is no text, or the editor cannot be started, or ended with an error.
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
    # Editors add an end to the last line, which may have had none.
    if not before.endswith("\n"):
        after = after.removesuffix(b"\n")
    return None if after == value else after
