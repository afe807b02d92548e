"""Reports an invalid command line as usage text, or as one JSON object for programs. The exit
status is 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from ..protocol.errors import ConfigError, KeylaneError, MissingExtraError
from .options import OutputFormat

EXTRA_BY_PACKAGE = {
    **dict.fromkeys(("click", "prometheus_client", "rich", "uvloop"), "cli"),
    **dict.fromkeys(
        ("aiosqlite", "alembic", "caio", "jinja2", "jwt", "rocksdict", "sqlalchemy"),
        "server",
    ),
    "textual": "top",
}
"""The extra that brings a package which commands import without naming an extra themselves."""


def is_json_requested(arguments: Sequence[str]) -> bool:
    """Return True if an option requests JSON, even if other options are invalid."""
    for index, argument in enumerate(arguments):
        if argument == "--":
            return False
        if argument in {"-ojson", "--output=json"}:
            return True
        if argument in {"-o", "--output"} and list(arguments[index + 1 : index + 2]) == ["json"]:
            return True
    return False


def merge_meta_options(arguments: Sequence[str]) -> list[str]:
    """
    Merge the addresses of all `--meta` options into the first one.

    The parser would use only the last option and silently ignore the other metaservers.
    """
    merged_arguments: list[str] = []
    first_index: int | None = None
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            return [*merged_arguments, argument, *remaining]
        value = next(remaining, None) if argument == "--meta" else argument.removeprefix("--meta=")
        if argument != "--meta" and not argument.startswith("--meta="):
            merged_arguments.append(argument)
        elif value is None:
            merged_arguments.append(argument)  # the parser reports the missing value
        elif first_index is None:
            first_index = len(merged_arguments)
            merged_arguments.append(f"--meta={value}")
        else:
            merged_arguments[first_index] += f",{value}"
    return merged_arguments


def missing_extra(error: ModuleNotFoundError, program: str) -> ModuleNotFoundError:
    """Return the error that names the extra of the missing package, or `error` itself if no extra
    brings the package, or it is named already.
    """
    if isinstance(error, MissingExtraError):
        return error
    extra = EXTRA_BY_PACKAGE.get((error.name or "").partition(".")[0])
    if extra is None:
        return error
    return MissingExtraError.of(error, f"this command of {program}", extra)


def run_command_line(app: click.Group, program: str) -> None:
    """Run `app` with the command line and exit with its status, which is 1 after a KeylaneError."""
    as_json = is_json_requested(sys.argv[1:])
    output = OutputFormat.JSON if as_json else OutputFormat.TABLE
    try:
        try:
            _run_app(app, program, as_json=as_json)
        except ModuleNotFoundError as error:
            raise missing_extra(error, program) from None
    except KeylaneError as error:
        from .screen import show_error

        show_error(error, output)
        sys.exit(1)
    except OSError as error:  # --help and --version do not print through `screen.run`
        from .screen import report_full_disk

        report_full_disk(error, output)
        sys.exit(1)


def _run_app(app: click.Group, program: str, *, as_json: bool) -> None:
    arguments = merge_meta_options(sys.argv[1:])
    try:
        status = app(arguments, prog_name=program, standalone_mode=False)
    except click.ClickException as error:
        if as_json:
            _print_usage_error(error, program)
        else:
            error.show()
        sys.exit(error.exit_code)
    except click.Abort as error:  # a question was declined, or Ctrl-C was pressed
        sys.exit(130 if isinstance(error.__cause__, KeyboardInterrupt) else 1)
    sys.exit(status if isinstance(status, int) else 0)


def _print_usage_error(error: click.ClickException, program: str) -> None:
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
