"""`keylane broker run`, `keylane metaserver run` and `keylane config show`: the server programs and
their settings.

Each program declares its settings, and each setting is also a flag.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import click

from ..groups import CommandGroup
from ..options import OutputFormat, OutputOption
from ..parameters import Argument, Option
from ..screen import make_table, show_data, show_table

if TYPE_CHECKING:
    from ...rpc.settings import Setting, SettingSources

RUN_CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""The context settings of a command that passes all flags, including `--help`, on to the server
program.
"""


class ServerProgram(enum.StrEnum):
    """The server programs that the command can run."""

    BROKER = "broker"
    METASERVER = "metaserver"


metaserver_app = CommandGroup()
config_app = CommandGroup()


def add_run_command(app: CommandGroup, program: ServerProgram) -> None:
    """Add the command `run` of a server program to a command group."""
    help_text = f"Run a {program} until SIGTERM or SIGINT; --help lists its settings."

    @app.add("run", help_text=help_text, context_settings=RUN_CONTEXT, add_help_option=False)
    def run(context: click.Context) -> None:
        status = _import_main(program)(context.args, prog=f"keylane {program} run")
        raise click.exceptions.Exit(status)


def _import_main(program: ServerProgram) -> Callable[..., int]:
    if program is ServerProgram.BROKER:
        from ...broker.__main__ import main
    else:
        from ...metaserver.__main__ import main
    return main


def import_sources(program: ServerProgram) -> SettingSources[Any]:
    """Return the sources of a program's settings."""
    if program is ServerProgram.BROKER:
        from ...broker.settings import SOURCES
    else:
        from ...metaserver.settings import SOURCES  # type: ignore[assignment]
    return SOURCES


add_run_command(metaserver_app, ServerProgram.METASERVER)


class SettingFields(TypedDict):
    """A setting, as JSON."""

    value: object
    origin: str


SettingsByName = dict[str, SettingFields]


@config_app.add(
    "show",
    shows=".commands.programs:SettingsByName",
    context_settings=RUN_CONTEXT | {"help_option_names": ["-h", "--help"]},
)
def config_show(
    context: click.Context,
    program: Annotated[ServerProgram, Argument(help="The server program.")],
    *,
    config: Annotated[
        Path | None, Option(metavar="FILE.toml", help="The program's settings file.")
    ] = None,
    origin: Annotated[
        bool, Option("--origin", help="Also show where each value comes from.")
    ] = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """
    Show the settings with which a program would run; accepts the flags of the program too.

    Nothing is started. All mistakes are reported together.
    """
    sources = import_sources(program)
    flags = vars(sources.parser(f"keylane config show {program}", "").parse_args(context.args))
    settings = sources.explain(flags, config or flags.pop("config"), dict(os.environ))
    if output is not OutputFormat.TABLE:
        by_name: SettingsByName = {
            setting.name: {"value": setting.shown, "origin": setting.origin} for setting in settings
        }
        show_data(output, by_name)
        return
    columns = ("setting", "value", *(("origin",) if origin else ()), "what it is for")
    rows = [_row(setting, origin=origin) for setting in settings]
    show_table(make_table(f"settings of a {program}", columns, rows))


def _row(setting: Setting, *, origin: bool) -> tuple[object, ...]:
    value = setting.shown
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    text = "-" if value is None else str(value)
    return (setting.name, text, *((setting.origin,) if origin else ()), setting.text)
