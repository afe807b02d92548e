"""Options as fields of a dataclass, which a command takes as one parameter, such as `Answer` with
--meta and --output.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Concatenate,
    ParamSpec,
    TypeVar,
    get_origin,
    get_type_hints,
)

from .options import META_DEFAULT, MetaOption, OutputFormat, OutputOption
from .screen import run as run_work
from .screen import show_json

if TYPE_CHECKING:
    from ..admin import Admin

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """The options that name the cluster that a command asks, and the form of its answer."""

    meta: MetaOption = META_DEFAULT
    output: OutputOption = OutputFormat.TABLE

    def run(
        self,
        work: Callable[Concatenate[str, OutputFormat, P], Coroutine[Any, Any, None]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Run the work of a command to its end; see `screen.run`."""
        run_work(self.output, work(self.meta, self.output, *args, **kwargs))

    def ask(self, call: Callable[[Admin], Awaitable[T]], show: Callable[[T], None]) -> T:
        """Make a call of an admin client, show its answer as JSON or by `show`, and return it."""
        from .connection import open_admin

        answers: list[T] = []

        async def work() -> None:
            async with open_admin(self.meta) as admin:
                answers.append(await call(admin))
            if self.output is OutputFormat.JSON:
                show_json({} if answers[0] is None else answers[0])
            else:
                show(answers[0])

        run_work(self.output, work())
        return answers[0]


def expanded(
    command: Callable[..., None], instead: Mapping[type[Any], type[Any]] = MappingProxyType({})
) -> Callable[..., None]:
    """
    Return a command in the form that typer takes: for each parameter whose type is a dataclass, the
    `Annotated` fields become options.

        @subject_app.command("list")
        @expanded
        def subject_list(*, answer: Answer) -> None: ...

    Args:
        instead: dataclasses that replace those of the parameters, with other options or other help.
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
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=types[each.name],
        )
        for each in fields(group)
        if get_origin(types[each.name]) is Annotated
    ]
