"""Groups of options: a command takes each group as one dataclass parameter, such as `CommonOptions`
with --meta and --output.
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

from ..protocol.address import META_DEFAULT
from .options import MetaOption, OutputFormat, OutputOption
from .screen import run as run_to_end
from .screen import show_data
from .status import showing

if TYPE_CHECKING:
    from ..admin import Admin

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """The options of most commands: the cluster to connect to and the output format."""

    meta: MetaOption = META_DEFAULT
    output: OutputOption = OutputFormat.TABLE

    def run(
        self,
        work: Callable[Concatenate[str, OutputFormat, P], Coroutine[Any, Any, None]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Run a command's coroutine function to completion; see `screen.run`."""
        run_to_end(self.output, work(self.meta, self.output, *args, **kwargs))

    def ask(self, call: Callable[[Admin], Awaitable[T]], show: Callable[[T], None]) -> T:
        """Call the admin client, show the result as JSON or with `show`, and return it."""
        from .connection import open_admin

        results: list[T] = []

        async def work() -> None:
            with showing(f"waiting for {self.meta}"):
                async with open_admin(self.meta) as admin:
                    results.append(await call(admin))
            if self.output is not OutputFormat.TABLE:
                show_data(self.output, {} if results[0] is None else results[0])
            else:
                show(results[0])

        run_to_end(self.output, work())
        return results[0]


def expand_options(
    command: Callable[..., None], replacements: Mapping[type[Any], type[Any]] = MappingProxyType({})
) -> Callable[..., None]:
    """
    Convert a command so that the `Annotated` fields of each dataclass parameter become options.

        @subject_app.add("list")
        @expand_options
        def subject_list(*, common: CommonOptions) -> None: ...

    Args:
        replacements: maps a parameter type to the dataclass to use instead, with other options or
            help texts.
    """
    command = inspect.unwrap(command)
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        option_class: Any = parameter.annotation
        if is_dataclass(parameter.annotation):
            group: type[Any] = replacements.get(option_class, option_class)
            options = _option_parameters(group)
            groups[parameter.name] = group, [option.name for option in options]
            parameters += options
        else:
            parameters.append(parameter)

    @wraps(command)
    def run(**values: Any) -> None:
        if any(issubclass(group, CommonOptions) for group, _ in groups.values()):
            from .connection import import_network

            import_network()
        arguments = {
            name: group(**{option: values.pop(option) for option in options})
            for name, (group, options) in groups.items()
        }
        command(**values, **arguments)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _option_parameters(group: type[Any]) -> list[inspect.Parameter]:
    types = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=types[field.name],
        )
        for field in fields(group)
        if get_origin(types[field.name]) is Annotated
    ]
