"""Converts the annotated parameters of a function to the options and arguments of a click command.

    subject: Annotated[str, Argument(help="Name of the subject.")]
    count: Annotated[int | None, Option("--count", "-n", min=1, help="Stop after …")] = None

A parameter without a default is required, and one with a list type may be given several times.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import click

NUMBER_PATTERNS = {
    int: re.compile("-?[0-9]{1,19}"),
    float: re.compile(r"-?[0-9]{1,19}(\.[0-9]{1,19})?"),
}
"""The permitted syntax of numbers. Python would also accept `1_000`, digits of other scripts, line
ends, and `nan` as a limit.
"""
Complete = Callable[[click.Context, click.Parameter, str], list[str]]


class Option:
    """An option of a command: its names, by default `--name`, and the information that click
    needs.
    """

    def __init__(
        self,
        *names: str,
        help: str = "",  # noqa: A002 - click's word
        metavar: str | None = None,
        min: float | None = None,  # noqa: A002 - the least number allowed
        max: float | None = None,  # noqa: A002 - the largest number allowed
        envvar: str | None = None,
        show_default: bool | str = True,
        complete: Complete | None = None,
        parser: Callable[[str], Any] | None = None,
        at_once: Callable[[], None] | None = None,
    ) -> None:
        self.names = names
        self.bounds = (min, max)
        self.parser = parser
        """Converts a value if its type is not enough to do so."""
        self.at_once = at_once
        """Called when a flag is given, before other parameters are processed."""
        self.settings: dict[str, Any] = {
            "help": help,
            "metavar": metavar,
            "envvar": envvar,
            "show_envvar": True,
            "show_default": show_default,
            "shell_complete": complete,
        }


@dataclass(frozen=True)
class Argument:
    """A positional argument of a command."""

    help: str = ""
    metavar: str | None = None
    min: float | None = None
    complete: Complete | None = None


class HelpedArgument(click.Argument):
    """An argument that has a line in the help of its command."""

    summary: str = ""


class Number(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """An `int` or `float` within bounds, written in ASCII digits."""

    def __init__(self, kind: type[int | float], bounds: tuple[float | None, float | None]) -> None:
        self.kind = kind
        self.bounds = bounds
        self.name = "integer" if kind is int else "number"

    def range_text(self) -> str:
        """Return the range, such as `1..1024`, or "" if there are no bounds."""
        least, largest = ("" if bound is None else str(bound) for bound in self.bounds)
        return f"{least}..{largest}" * bool(least or largest)

    def get_metavar(self, param: click.Parameter, *_: Any, **__: Any) -> str | None:
        """Return the placeholder that the help shows for the value of an option."""
        if isinstance(param, click.Argument):
            return None  # click shows its name
        return self.range_text() or self.name.upper()

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | float:
        """Return the number. Raises BadParameter."""
        if isinstance(value, str):
            if NUMBER_PATTERNS[self.kind].fullmatch(value) is None:
                self.fail(f"{value!r:.40} is not a number", param, ctx)
            value = self.kind(value)
        least, largest = self.bounds
        if (least is not None and value < least) or (largest is not None and value > largest):
            self.fail(f"{value} is not in the range {self.range_text()}", param, ctx)
        number: int | float = value
        return number


class Word(click.Choice):  # type: ignore[type-arg]  # generic from click 8.2 on
    """A member of an enumeration, specified by its value."""

    def __init__(self, members: type[enum.Enum]) -> None:
        super().__init__([str(member.value) for member in members])
        self.members = members

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the member. Raises BadParameter."""
        return self.members(super().convert(value, param, ctx))


def click_parameter(parameter: inspect.Parameter) -> click.Parameter:
    """Return the option or argument declared by a function's annotated parameter."""
    assert get_origin(parameter.annotation) is Annotated, parameter
    annotation, declared = get_args(parameter.annotation)
    kind, is_list = _kind(annotation)
    is_required = parameter.default is inspect.Parameter.empty
    default = parameter.default
    if isinstance(default, enum.Enum):
        default = default.value
    settings: dict[str, Any] = {"required": True} if is_required else {"default": default}
    if isinstance(declared, Argument):
        argument = HelpedArgument(
            [parameter.name],
            type=_click_type(kind, (declared.min, None)),
            nargs=-1 if is_list else 1,
            metavar=declared.metavar,
            shell_complete=declared.complete,
            **({"required": False} | settings),
        )
        argument.summary = declared.help
        return argument
    assert isinstance(declared, Option)
    settings |= declared.settings
    if default == "" and settings["show_default"] is True:
        settings["show_default"] = False  # the help would show `[default: ""]`
    if kind is bool:
        assert declared.names, f"name the flag {parameter.name}"
        settings |= {"is_flag": True}
    else:
        value_type = declared.parser or _click_type(kind, declared.bounds)
        settings |= {"type": value_type, "multiple": is_list}
        if isinstance(value_type, Number) and settings["metavar"]:
            settings["help"] = f"{settings['help']} [{value_type.range_text()}]".replace(" []", "")
    if declared.at_once is not None:
        settings |= {"is_eager": True, "callback": _call_if_given(declared.at_once)}
    names = declared.names or ("--" + parameter.name.replace("_", "-"),)
    return click.Option([parameter.name, *names], **settings)


def _call_if_given(at_once: Callable[[], None]) -> Callable[..., bool]:
    def callback(ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
        if value and not ctx.resilient_parsing:
            at_once()
            ctx.exit()
        return value

    return callback


def _kind(annotation: Any) -> tuple[Any, bool]:
    """Return the type of a single value, and whether there may be several values."""
    if get_origin(annotation) in {Union, UnionType}:
        (annotation,) = (each for each in get_args(annotation) if each is not NoneType)
    if get_origin(annotation) is list:
        return get_args(annotation)[0], True
    return annotation, False


def _click_type(kind: Any, bounds: tuple[float | None, float | None]) -> Any:
    if kind in NUMBER_PATTERNS:
        return Number(kind, bounds)
    if issubclass(kind, enum.Enum):
        return Word(kind)
    if kind is Path:
        return click.Path(path_type=Path)
    assert kind is str, kind
    return click.STRING
