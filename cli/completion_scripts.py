"""Prints and installs the shell completion script."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ..protocol.errors import ConfigError

VARIABLE = "_KEYLANE_COMPLETE"
"""The environment variable with which a shell asks the command for completions."""
SHELLS = ("bash", "zsh", "fish")


def shell_in_use() -> str:
    """Return the user's shell. Raises ConfigError if completion is not supported for it."""
    shell = Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise ConfigError(
            f"completion works in {', '.join(SHELLS)}, and SHELL says {shell or 'nothing'!r}"
        )
    return shell


def completion_script(shell: str) -> str:
    """Return the script for a shell."""
    from click.shell_completion import get_completion_class

    shell_class = get_completion_class(shell)
    assert shell_class is not None, shell
    complete = shell_class(click.Group(), {}, "keylane", VARIABLE)
    return complete.source_template % complete.source_vars()


def show_completion() -> None:
    """Print the completion script for the current shell."""
    print(completion_script(shell_in_use()))


def install_completion() -> None:
    """
    Write the script to a file of the user. Bash and zsh load it through a line in their startup
    file, which is added only once.

    Raises:
        ConfigError: completion is not supported for the shell, or a file cannot be written.
    """
    shell = shell_in_use()
    home = Path.home()
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    if shell == "fish":
        script, start_file = config / "fish" / "completions" / "keylane.fish", None
    else:
        script, start_file = config / "keylane" / f"completion.{shell}", home / f".{shell}rc"
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(completion_script(shell), encoding="utf-8")
        if start_file is not None:
            _add_line(start_file, f"source '{script}'")
    except OSError as error:
        raise ConfigError(f"completion cannot be installed: {error}") from error
    print(f"{shell} completes keylane from its next start on: {script}")


def _add_line(file: Path, line: str) -> None:
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if line not in text.splitlines():
        separator = "" if text.endswith("\n") or not text else "\n"
        file.write_text(f"{text}{separator}{line}\n", encoding="utf-8")
