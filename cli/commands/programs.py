"""`keylane broker run`, `keylane metaserver run` and `keylane config show`: the server programs and
their settings.

The programs declare their settings, and each setting is a flag.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ...protocol.text import without_password
from ...rpc.settings import Setting, SettingSources
from ..options import OutputFormat, OutputOption
from ..screen import make_table, show_json, show_table

RUN_CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""Settings with which the program itself reads its flags, including `--help`."""


class ServerProgram(enum.StrEnum):
    """A server program."""

    BROKER = "broker"
    METASERVER = "metaserver"


metaserver_app = typer.Typer()
config_app = typer.Typer()


def add_run(app: typer.Typer, program: ServerProgram) -> None:
    """Add the command `run` of a program to its group of commands."""

    @app.command("run", context_settings=RUN_CONTEXT, add_help_option=False)
    def run(context: typer.Context) -> None:
        raise typer.Exit(_main_of(program)(context.args, prog=f"keylane {program} run"))

    run.__doc__ = f"Run a {program} until SIGTERM or SIGINT; --help lists its settings."
    # Typer has read the docstring when it decorated, so the help is set on its record.
    app.registered_commands[-1].help = run.__doc__


def _main_of(program: ServerProgram) -> Callable[..., int]:
    if program is ServerProgram.BROKER:
        from ...broker.__main__ import main
    else:
        from ...metaserver.__main__ import main
    return main


def _sources_of(program: ServerProgram) -> SettingSources[Any]:
    if program is ServerProgram.BROKER:
        from ...broker.settings import SOURCES
    else:
        from ...metaserver.settings import SOURCES  # type: ignore[assignment]
    return SOURCES


add_run(metaserver_app, ServerProgram.METASERVER)


@config_app.command("show", context_settings=RUN_CONTEXT | {"help_option_names": ["-h", "--help"]})
def config_show(
    context: typer.Context,
    program: Annotated[ServerProgram, typer.Argument(help="The server program.")],
    *,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="The program's settings file.")
    ] = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Also show where each value comes from.")
    ] = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """
    Show the settings with which a program would run; it takes the flags of the program too.

    Nothing is started. All mistakes are reported at once.
    """
    sources = _sources_of(program)
    flags = vars(sources.parser(f"keylane config show {program}", "").parse_args(context.args))
    settings = sources.explain(flags, config or flags.pop("config"), dict(os.environ))
    if output is OutputFormat.JSON:
        show_json(
            {
                setting.name: {"value": _plain(setting), "origin": setting.origin}
                for setting in settings
            }
        )
        return
    heads = ("setting", "value", *(("origin",) if origin else ()), "what it is for")
    rows = [_row(setting, origin=origin) for setting in settings]
    show_table(make_table(f"settings of a {program}", heads, rows))


def _plain(setting: Setting) -> object:
    """Return the value for JSON, without the password of a database."""
    value = setting.value
    if setting.name == "database_url" and isinstance(value, str):
        return without_password(value)
    return str(value) if isinstance(value, Path) else value


def _row(setting: Setting, *, origin: bool) -> tuple[object, ...]:
    value = _plain(setting)
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    shown = "-" if value is None else str(value)
    return (setting.name, shown, *((setting.origin,) if origin else ()), setting.text)
