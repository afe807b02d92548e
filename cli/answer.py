"""Options as fields of a dataclass, which a command has as one parameter; --meta and --output are
the first of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from types import MappingProxyType
from typing import Annotated, Any, Concatenate, ParamSpec, get_origin, get_type_hints

from .options import META_DEFAULT, MetaOption, OutputFormat, OutputOption
from .screen import run as run_work

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Answer:
    """The options that say which cluster a command asks, and how it answers."""

    meta: MetaOption = META_DEFAULT
    output: OutputOption = OutputFormat.TABLE

    def run(
        self,
        work: Callable[Concatenate[str, OutputFormat, P], Coroutine[Any, Any, None]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Run what a command does to its end; see `screen.run`."""
        run_work(self.output, work(self.meta, self.output, *args, **kwargs))


def expanded(
    command: Callable[..., None], instead: Mapping[type[Any], type[Any]] = MappingProxyType({})
) -> Callable[..., None]:
    """
    A command as typer takes it: where it has a parameter of a dataclass, each `Annotated` field is
    an option of it.

        @subject_app.command("list")
        @expanded
        def subject_list(*, answer: Answer) -> None: ...

    Args:
        instead: a dataclass → the one that takes its place, with other options or other help.
    """
    command = inspect.unwrap(command)
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(command, eval_str=True).parameters.values():
        kind: Any = each.annotation
        if is_dataclass(each.annotation):
            group: type[Any] = instead.get(kind, kind)
            options = _options_of(group)
            groups[each.name] = group, [option.name for option in options]
            parameters += options
        else:
            parameters.append(each)

    @wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: group(**{option: given.pop(option) for option in options})
            for name, (group, options) in groups.items()
        }
        command(**given, **made)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _options_of(group: type[Any]) -> list[inspect.Parameter]:
    types = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=types[each.name],
        )
        for each in fields(group)
        if get_origin(types[each.name]) is Annotated
    ]
