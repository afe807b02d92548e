"""Command groups that are imported on first use, hints for users of other message systems, and
strict parsing of numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, MutableMapping
from functools import cached_property, partial
from importlib import import_module
from typing import Any, ClassVar

import typer
import typer.core
import typer.main

_NUMBER_PATTERNS: dict[object, re.Pattern[str]] = {
    int: re.compile("-?[0-9]{1,19}"),
    float: re.compile(r"-?[0-9]{1,19}(\.[0-9]{1,19})?"),
}


class LazyGroup(typer.core.TyperGroup):
    """A command group whose module is imported on first use, because building the options of all
    groups takes longer than running most commands.
    """

    source: tuple[str, str]
    """The module below `commands`, and the name of its Typer app."""

    @cached_property
    def _loaded(self) -> MutableMapping[str, Any]:
        module, name = self.source
        group: Any = typer.main.get_group(
            getattr(import_module(f".commands.{module}", __package__), name)
        )
        return dict(restrict_numbers(group).commands)

    @property
    def commands(self) -> MutableMapping[str, Any]:
        """The commands by name."""
        return self._loaded

    @commands.setter
    def commands(self, value: MutableMapping[str, Any]) -> None:
        assert not value, "the commands come from the module"


class PeerCommandGroup(typer.core.TyperGroup):
    """The top-level commands; a command name of another message system gets a hint."""

    EQUIVALENTS: ClassVar = {
        "topic": "subject",
        "topics": "subject list",
        "stream": "subject",
        "server": "dev",
        "start": "dev",
        "consumer": "group",
        "groups": "group list",
        "publish": "produce",
        "pub": "produce",
        "sub": "consume",
        "subscribe": "consume",
        "context": "profile",
    }
    _OUTPUT_HINT = (
        "the output has --output json or --output TEMPLATE, the input of produce --format"
    )
    OPTION_HINTS: ClassVar = {
        "-p": "a profile comes before the command, keylane -p NAME …; --partitions is written out",
        "--profile": "it comes before the command: keylane --profile NAME …",
        "--wait-s": "it comes before the command: keylane --wait-s SECONDS …",
        "--json": _OUTPUT_HINT,
        "--format": _OUTPUT_HINT,
        "--topic": "the subject has no option: keylane produce SUBJECT …",
        "--bootstrap-server": "it is --meta HOST:PORT, the metaserver's address",
        "--broker-list": "it is --meta HOST:PORT, the metaserver's address",
        "--from-beginning": "a new group begins at the first message; read has --from earliest",
    }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command. Raises BadParameter with a hint if only another system has it."""
        if args and args[0] in self.EQUIVALENTS and self.get_command(ctx, args[0]) is None:
            hint = f"it is `keylane {self.EQUIVALENTS[args[0]]}` here"
            raise typer.BadParameter(hint, ctx=ctx, param_hint=args[0])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. The message for an option that only another system has gets a hint."""
        try:
            return super().invoke(ctx)
        except typer.TyperException as error:
            option = getattr(error, "option_name", None)
            command = getattr(getattr(error, "ctx", None), "command", None)
            option_names = {name for each in getattr(command, "params", ()) for name in each.opts}
            hint = self.OPTION_HINTS.get(str(option))
            if hint is not None and option not in option_names:
                error.message = f"{error.message}: {hint}"
            raise


def lazy_group(module: str, name: str, help_text: str) -> typer.Typer:
    """Return a group that imports the Typer app `name` of a module in `commands` on first use."""
    group_class = type("LazyGroup", (LazyGroup,), {"source": (module, name)})
    return typer.Typer(cls=group_class, no_args_is_help=True, help=help_text)


def restrict_numbers(command: Any) -> Any:
    """
    Make all numeric options of a command accept only ASCII digits, a sign and a decimal point.

    The parser would also accept `1_000`, digits of other scripts, line ends, and `nan` as a limit.
    """
    if not isinstance(command, LazyGroup):  # which does the same when it imports its commands
        for subcommand in getattr(command, "commands", {}).values():
            restrict_numbers(subcommand)
    for param in command.params:
        descriptor = getattr(param, "type_descriptor", None)  # the option --help has none
        if descriptor is not None and descriptor.annotation in _NUMBER_PATTERNS:
            process = param.process_value
            pattern = _NUMBER_PATTERNS[descriptor.annotation]
            param.process_value = partial(_process_number, process, pattern, param)
    return command


def _process_number(
    process: Callable[[Any, Any], Any],
    pattern: re.Pattern[str],
    param: Any,
    context: Any,
    value: Any,
) -> Any:
    """Check the text of a number, then call the parameter's `process`; raise BadParameter."""
    if isinstance(value, str) and pattern.fullmatch(value) is None:
        raise typer.BadParameter(f"{value!r:.40} is not a number", ctx=context, param=param)
    return process(context, value)
