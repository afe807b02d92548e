"""Groups of commands, which are imported when one of their commands is used, and the numbers that
commands accept.
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

_NUMBERS: dict[object, re.Pattern[str]] = {
    int: re.compile("-?[0-9]{1,19}"),
    float: re.compile(r"-?[0-9]{1,19}(\.[0-9]{1,19})?"),
}


class LaterGroup(typer.core.TyperGroup):
    """A group of commands whose module is imported when its commands are asked for, because
    building the options of all groups takes longer than most commands.
    """

    home: tuple[str, str]
    """The module below `commands`, and the name of its Typer."""

    @cached_property
    def _loaded(self) -> MutableMapping[str, Any]:
        module, name = self.home
        group: Any = typer.main.get_group(
            getattr(import_module(f".commands.{module}", __package__), name)
        )
        return dict(with_plain_numbers(group).commands)

    @property
    def commands(self) -> MutableMapping[str, Any]:
        """The commands by their names."""
        return self._loaded

    @commands.setter
    def commands(self, none: MutableMapping[str, Any]) -> None:
        assert not none, "the commands come from the module"


class CommandsOfPeers(typer.core.TyperGroup):
    """The commands of keylane; one that another system has names the command to use here."""

    HERE: ClassVar = {
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

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command. Raises BadParameter if another system has it."""
        if args and args[0] in self.HERE and self.get_command(ctx, args[0]) is None:
            here = self.HERE[args[0]]
            raise typer.BadParameter(f"it is `keylane {here}` here", ctx=ctx, param_hint=args[0])
        return super().resolve_command(ctx, args)


def later(module: str, name: str, text: str) -> typer.Typer:
    """Return a group with the commands of a Typer of a module below `commands`; `text` is its
    help.
    """
    kind = type("LaterGroup", (LaterGroup,), {"home": (module, name)})
    return typer.Typer(cls=kind, no_args_is_help=True, help=text)


def with_plain_numbers(command: Any) -> Any:
    """
    Make every numeric option of a command accept only digits, a sign and a point.

    The parser would also accept `1_000`, digits of other scripts, line ends, and `nan` as a limit.
    """
    if not isinstance(command, LaterGroup):  # it does so when it imports its commands
        for other in getattr(command, "commands", {}).values():
            with_plain_numbers(other)
    for param in command.params:
        described = getattr(param, "type_descriptor", None)  # the option --help has none
        if described is not None and described.annotation in _NUMBERS:
            process = param.process_value
            pattern = _NUMBERS[described.annotation]
            param.process_value = partial(_process_number, process, pattern, param)
    return command


def _process_number(
    process: Callable[[Any, Any], Any],
    pattern: re.Pattern[str],
    param: Any,
    context: Any,
    value: Any,
) -> Any:
    """Call `process` of a parameter, after checking the text; raise BadParameter."""
    if isinstance(value, str) and pattern.fullmatch(value) is None:
        raise typer.BadParameter(f"{value!r:.40} is not a number", ctx=context, param=param)
    return process(context, value)
