"""Answers a wrong command line: with the usage, or with one JSON object for programs; the exit
status is 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
import typer.main

from ..protocol.errors import ConfigError, KeylaneError
from .groups import with_plain_numbers
from .options import OutputFormat


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Return True if the options ask for JSON, in any spelling, even if other options are wrong."""
    for at, word in enumerate(arguments):
        if word == "--":
            return False
        if word in {"-ojson", "--output=json"}:
            return True
        if word in {"-o", "--output"} and list(arguments[at + 1 : at + 2]) == ["json"]:
            return True
    return False


def with_one_meta(arguments: Sequence[str]) -> list[str]:
    """
    Return the words with the addresses of all `--meta` options joined in the first one.

    The parser would use only the last one, and silently ask one of several metaservers.
    """
    words: list[str] = []
    first: int | None = None
    rest = iter(arguments)
    for word in rest:
        if word == "--":
            return [*words, word, *rest]
        value = next(rest, None) if word == "--meta" else word.removeprefix("--meta=")
        if word != "--meta" and not word.startswith("--meta="):
            words.append(word)
        elif value is None:
            words.append(word)  # the parser reports the missing value
        elif first is None:
            first = len(words)
            words.append(f"--meta={value}")
        else:
            words[first] += f",{value}"
    return words


def run_command_line(app: typer.Typer, program: str) -> None:
    """Run `app` with the words of the command line, and end the process with its status, which is 1
    after a KeylaneError.
    """
    in_json = asks_for_json(sys.argv[1:])
    form = OutputFormat.JSON if in_json else OutputFormat.TABLE
    try:
        _run_app(app, program, in_json=in_json)
    except KeylaneError as error:
        from .screen import show_error

        show_error(error, form)
        sys.exit(1)
    except OSError as error:  # --help and --version print outside of `screen.run`
        from .screen import show_full_output

        show_full_output(error, form)
        sys.exit(1)


def _run_app(app: typer.Typer, program: str, *, in_json: bool) -> None:
    words = with_one_meta(sys.argv[1:])
    command = with_plain_numbers(typer.main.get_command(app))
    if not in_json:
        command(words, prog_name=program)
        return
    try:
        status = command(words, prog_name=program, standalone_mode=False)
    except typer.TyperException as error:
        _show_json(error, program)
        sys.exit(getattr(error, "exit_code", 1))
    except typer.Abort:
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)


def _show_json(error: typer.TyperException, program: str) -> None:
    from ..protocol.control import ErrorBody
    from ..protocol.http.bodies import encode_json

    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else program
    message = getattr(error, "format_message", error.__str__)()
    body = ErrorBody(
        code=ConfigError.code,
        name=ConfigError.__name__,
        message=str(message),
        hint=f"{command} --help shows the options.",
    )
    print(encode_json(body).decode(), file=sys.stderr)
