"""Groups of commands: commands built from annotated functions, groups that are imported on first
use, and hints for users of other message systems.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cached_property, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar

import click

from .options import OutputFormat
from .parameters import HelpedArgument, click_parameter

if TYPE_CHECKING:
    from .fields import Fields

F = TypeVar("F", bound=Callable[..., Any])
HELP_NAMES: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


EQUIVALENTS = {
    "topic": "subject",
    "topics": "subject list",
    "stream": "subject",
    "server": "dev",
    "start": "dev",
    "consumer": "group",
    "groups": "group list",
    "publish": "produce",
    "pub": "produce",
    "send": "produce",
    "sub": "consume",
    "subscribe": "consume",
    "context": "profile",
    "subject show": "subject describe",
    "group show": "group describe",
    "profile use": "-p NAME …",
    "profile show": "profile list",
}
"""Commands that other systems have, or that users expect, with ours."""


class _SingleValues(click.Command):
    """A command that refuses a repeated option, unless the option takes a list."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line. Raises UsageError if an option with one value is repeated, of
        which click would use only the last one.
        """
        if not ctx.resilient_parsing:
            _, _, given = self.make_parser(ctx).parse_args(list(args))
            _refuse_repeated(given, ctx)
        return super().parse_args(ctx, args)


def _refuse_repeated(given: Iterable[click.Parameter], ctx: click.Context) -> None:
    """Raise UsageError if `given`, the parameters of a command line, has one twice that takes one
    value. A repeated flag says nothing new.
    """
    seen = set[str | None]()
    for param in given:
        if not isinstance(param, click.Option) or param.multiple or param.is_flag:
            continue
        if param.name in seen:
            name = max(param.opts, key=len)
            ctx.fail(f"{name} is given twice: it takes one value.")
        seen.add(param.name)


class Command(_SingleValues):
    """
    A command whose help also has a line for each argument.

    Args:
        shows: the type of what it shows with --output json, as `module:Name` relative to
            `keylane.cli`, or several types with spaces; "" if it shows nothing. They are imported
            only for a template.
    """

    def __init__(self, *arguments: Any, shows: str = "", **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.shows = shows

    @property
    def fields(self) -> Fields:
        """The fields that a template of --output may name."""
        from .fields import Fields

        kinds = (shown.split(":") for shown in self.shows.split())
        return Fields.merge(
            Fields.of(getattr(import_module(module, __package__), name)) for module, name in kinds
        )

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, unless a template of --output names a field that it does not show.
        Raises ConfigError.
        """
        output = ctx.params.get("output")
        if isinstance(output, OutputFormat) and output.template is not None:
            output.template.check(self.fields)
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments, then the options."""
        arguments = [
            (param.human_readable_name, param.summary)
            for param in self.params
            if isinstance(param, HelpedArgument)
        ]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        super().format_options(ctx, formatter)


class CommandGroup(_SingleValues, click.Group):
    """A group of commands, kept in the order in which they were added."""

    def __init__(self, name: str | None = None, help_text: str = "", **settings: Any) -> None:
        super().__init__(
            name, help=help_text, no_args_is_help=True, context_settings=HELP_NAMES, **settings
        )

    @classmethod
    def of(cls, name: str, function: Callable[..., None]) -> Self:
        """Return a group that calls `function` with its own options before it runs a command."""
        params, _ = _parameters(function)
        return cls(name, inspect.getdoc(function) or "", params=params, callback=function)

    def add(
        self,
        name: str | None = None,
        *,
        shows: str = "",
        help_text: str | None = None,
        **settings: Any,
    ) -> Callable[[F], F]:
        """
        Return a decorator that adds a function as a command; the function's annotated parameters
        become options and arguments.

        Args:
            name: the command's name, by default the function's.
            shows: the type of what it shows, see `Command`.
            help_text: its help, by default the function's docstring.
            settings: further arguments of click's Command.
        """

        def decorate(function: F) -> F:
            own, takes_context = _parameters(function)
            command = Command(
                name or function.__name__,
                params=own,
                help=inspect.cleandoc(help_text or function.__doc__ or ""),
                callback=_as_callback(function, own, takes_context=takes_context),
                shows=shows,
                **({"context_settings": HELP_NAMES} | settings),
            )
            self.add_command(command)
            return function

        return decorate

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        del ctx
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the name of each command with the whole first paragraph of its help."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            text = "" if command is None else command.help or ""
            rows.append((name, " ".join(text.partition("\n\n")[0].split())))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command. Raises UsageError, which suggests similar names if there are any."""
        if args and self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            self.refuse_command(ctx, args[0])
        return super().resolve_command(ctx, args)

    def refuse_command(self, ctx: click.Context, name: str) -> NoReturn:
        """Raise UsageError for a command that does not exist. If another system has it, the error
        names the one to use instead.
        """
        words = " ".join([*ctx.command_path.split()[1:], name])
        if words in EQUIVALENTS:
            ctx.fail(f"No such command {name!r}: in keylane it is `keylane {EQUIVALENTS[words]}`.")
        similar = get_close_matches(name, self.list_commands(ctx))
        hint = f" Did you mean {', '.join(map(repr, similar))}?" * bool(similar)
        ctx.fail(f"No such command {name!r}.{hint}")


class LazyGroup(CommandGroup):
    """
    A command group whose module is imported on first use, because building the options of all
    groups takes longer than running most commands.

    Args:
        source: the module inside `commands`, and the name of its group.
    """

    def __init__(self, name: str, source: tuple[str, str], help_text: str) -> None:
        super().__init__(name, help_text)
        self._source = source

    @cached_property
    def _loaded(self) -> click.Group:
        module, name = self._source
        group: click.Group = getattr(import_module(f".commands.{module}", __package__), name)
        return group

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return self._loaded.list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, or None if it does not exist."""
        return self._loaded.get_command(ctx, cmd_name)


class PeerCommandGroup(CommandGroup):
    """The top-level commands. Options of other message systems get a hint."""

    OPTION_HINTS: ClassVar = {
        "--all": "parked redrive has --all-keys, parked skip and dead skip have --all-messages",
        "-p": "a profile comes before the command, keylane -p NAME …; --partitions is written out",
        "--profile": "it comes before the command: keylane --profile NAME …",
        "--wait-s": "it comes before the command: keylane --wait-s SECONDS …",
        "--json": "--output json prints JSON, --output TEMPLATE a line of your own; what is "
        "read has produce --format",
        "--format": "--output json or --output TEMPLATE shapes the output; only produce has "
        "--format, for what it reads",
        "--meta": "it comes after a command that asks a cluster: keylane subject list --meta "
        "HOST:PORT; KEYLANE_META is for all commands",
        "--to-earliest": "it is --to earliest",
        "--to-latest": "it is --to latest",
        "--replication-factor": "copies are those of a broker group: keylane broker copies GROUP "
        "--wanted N",
        "--property": "it is --header NAME=VALUE; in Python it is properties=",
        "--topic": "the subject has no option: keylane produce SUBJECT …",
        "--bootstrap-server": "it is --meta HOST:PORT, the metaserver's address",
        "--broker-list": "it is --meta HOST:PORT, the metaserver's address",
        "--from-beginning": "a new group begins at the first message; read has --from earliest",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, followed by those of the groups."""
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: isinstance(self.commands[name], click.Group))

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the options before the command. Raises UsageError with a hint, see `invoke`."""
        with self._adding_hints():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. If an unknown option exists in another message system or at another
        place, the error message contains a hint.
        """
        with self._adding_hints():
            return super().invoke(ctx)

    @contextmanager
    def _adding_hints(self) -> Iterator[None]:
        try:
            yield
        except click.UsageError as error:
            option = getattr(error, "option_name", None)
            command = getattr(getattr(error, "ctx", None), "command", None)
            option_names = {name for each in getattr(command, "params", ()) for name in each.opts}
            hint = self.OPTION_HINTS.get(str(option))
            if str(option)[1:2].isdigit():
                hint = f"a value that begins with - comes after --, as in -- {option}"
            if hint is not None and option not in option_names:
                text = f"{error.message.rstrip('.')}: {hint}"
                raise click.UsageError(text, ctx=error.ctx) from None
            raise


def _parameters(function: Callable[..., Any]) -> tuple[list[click.Parameter], bool]:
    """Return the options and arguments of a function, and whether it takes a click.Context."""
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    takes_context = bool(parameters) and parameters[0].annotation is click.Context
    return [click_parameter(each) for each in parameters[takes_context:]], takes_context


def _as_callback(
    function: Callable[..., Any], params: Iterable[click.Parameter], *, takes_context: bool
) -> Callable[..., Any]:
    """Return the callback for click, which calls the function with a list, or the default, where
    click passes a tuple.
    """
    lists: dict[str | None, Any] = {
        param.name: param.default if param.default is None else []
        for param in params
        if param.multiple or param.nargs == -1
    }

    @wraps(function)
    def callback(*context: click.Context, **values: Any) -> Any:
        for name, empty in lists.items():
            values[str(name)] = list(values[str(name)] or ()) or empty
        return function(*context, **values)

    return click.pass_context(callback) if takes_context else callback
