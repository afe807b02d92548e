"""Prints the output of commands: tables or JSON on standard output, and errors on standard
error.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..protocol.errors import KeylaneError, StorageError
from ..protocol.text import counted, json_printable, printable
from .options import OutputFormat

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 300
"""Width, in characters, of a table that is not shown on a terminal, whose lines are not wrapped."""


def json_text(value: object) -> str:
    """Return `value`, which consists of structs, dicts and lists, as one line of JSON in which all
    control characters are escaped.
    """
    import msgspec

    return json_printable(msgspec.json.encode(value).decode())


def show_data(output: OutputFormat, value: object) -> None:
    """Print `value`, which consists of structs, dicts and lists, as one line of JSON or with the
    template, which shows fields that a row does not have as "-".
    """
    lines = [json_text(value)] if output.template is None else output.template.lines(value)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def show_row(output: OutputFormat, row: object) -> None:
    """Print one of many rows like `show_data`, without flushing."""
    line = json_text(row) if output.template is None else output.template.line(row)
    sys.stdout.write(line + "\n")


def show_line(text: str, *, errors: bool = False) -> None:
    """Print a line and flush the output. Control characters are escaped, because text from servers
    and users must not control the terminal.
    """
    print(printable(text), file=sys.stderr if errors else sys.stdout, flush=True)


def end_without(unread: Mapping[int, str]) -> None:
    """Name the partitions that could not be read, if there are any, each with its problem, and end
    the command with status 1.
    """
    for partition_id, problem in unread.items():
        show_line(f"partition {partition_id} is not read: {problem}", errors=True)
    if unread:
        raise click.exceptions.Exit(1)


def show_error(error: KeylaneError, output: OutputFormat) -> None:
    """Print an error with its code and hint, as text or as one JSON object."""
    if output is OutputFormat.JSON:
        from ..protocol.control import ErrorBody
        from ..protocol.http.bodies import encode_json

        print(json_printable(encode_json(ErrorBody.of(error)).decode()), file=sys.stderr)
    else:
        hint = str(error).removeprefix(error.message).split("\n")  # may come from a server
        lines = [printable(error.message) + printable(hint[0]), *map(printable, hint[1:])]
        print("keylane: " + "\n".join(lines), file=sys.stderr)


def report_full_disk(error: OSError, output: OutputFormat) -> None:
    """Report that the disk of standard output is full and discard further output. Raises any other
    `error` again.
    """
    if error.errno != errno.ENOSPC:
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    show_error(StorageError(f"the output cannot be written: {error.strerror}"), output)


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Build a table. Columns whose names end in # contain numbers and are right-aligned."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=escape(printable(title)),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    for column in columns:
        table.add_column(
            column.removesuffix("#"),
            justify="right" if column.endswith("#") else "left",
            overflow="fold",  # never truncate, because people copy from the table
        )
    for row in rows:
        table.add_row(*("-" if cell is None else escape(printable(str(cell))) for cell in row))
    return table


def show_table(table: Table) -> None:
    """
    Print a table below its title, which is never wrapped.

    If the output is not a terminal, lines are not wrapped. If the terminal is too narrow for the
    longest word of each column, each row is printed as a list.
    """
    from rich.measure import Measurement
    from rich.text import Text

    console = _console()
    if not console.is_terminal:
        console = _console(PIPE_WIDTH)
    unlimited = console.options.update(max_width=PIPE_WIDTH)
    title, table.title = table.title, None  # rich would wrap it to the width of the columns
    if title is not None:
        console.print(Text.from_markup(title) if isinstance(title, str) else title, style="bold")
    if Measurement.get(console, unlimited, table).minimum > console.width:
        _show_as_lists(console, table)
    else:
        console.print(table)


def _console(width: int | None = None) -> Console:
    """Return a console that lets `run` handle a closed standard output; rich's own console would
    exit with status 1.
    """
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PipedConsole(width=width)


def _show_as_lists(console: Console, table: Table) -> None:
    """Print each row of a table as a list of column names and cells."""
    from rich.table import Table

    columns = [(column.header, list(column.cells)) for column in table.columns]
    if len(columns) == 2 and not columns[0][0]:  # its first column contains the names of the values
        for name, value in zip(columns[0][1], columns[1][1], strict=True):
            console.print(f"{name}: {value}", highlight=False)
        return
    for row in range(table.row_count):
        lines = Table.grid(padding=(0, 1))
        lines.add_column(no_wrap=True)
        lines.add_column(overflow="fold")
        for header, cells in columns:
            lines.add_row(header, cells[row])
        console.print()
        console.print(lines)


def show_omitted(count: int) -> None:
    """Print how many drained partitions have been omitted from a table, if any."""
    if count:
        pronoun = "it" if count == 1 else "them"
        show_line(f"… and {counted(count, 'drained partition')} (--all shows {pronoun})")


def run(output: OutputFormat, work: Coroutine[Any, Any, None]) -> None:
    """
    Run a command to completion.

    If a KeylaneError is raised, it is printed and the exit status is 1. If standard output is
    closed, the command ends quietly with status 0.
    """
    import asyncio

    import uvloop

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work)
    except KeylaneError as error:
        show_error(error, output)
        raise click.exceptions.Exit(1) from None
    except BrokenPipeError:
        # Otherwise Python would fail again when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(0) from None
    except OSError as error:
        report_full_disk(error, output)
        raise click.exceptions.Exit(1) from None
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None
    except asyncio.CancelledError:  # SIGTERM, in a command that handles it
        raise click.exceptions.Exit(143) from None
