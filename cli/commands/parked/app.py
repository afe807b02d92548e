"""`keylane parked`: the options and help of its commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...options import (
    META_DEFAULT,
    ConsumerGroupArgument,
    MetaOption,
    OutputFormat,
    OutputOption,
    SubjectArgument,
)

parked_app = typer.Typer(
    no_args_is_help=True,
    help="Look at messages that a consumer group has set aside, redrive, edit or skip them.",
)
KeyOption = Annotated[str | None, typer.Option(metavar="TEXT", help="This order key.")]
KeyHexOption = Annotated[
    str | None, typer.Option(metavar="HEX", help="This order key, in hexadecimal.")
]
NoKeyOption = Annotated[bool, typer.Option("--no-key", help="Messages without a key.")]
DeadOption = Annotated[bool, typer.Option("--dead", help="Dead letters, of any key.")]
PartitionOption = Annotated[
    int | None, typer.Option(min=1, metavar="ID", help="Only on the partition with this id.")
]
OlderThanOption = Annotated[
    str | None,
    typer.Option(
        metavar="AGE",
        help="Only what is parked for at least so long: 90 (seconds), 15m, 1h, 2d.",
    ),
]
ErrorOption = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help="Only what has this in the type or text of the last failure."
    ),
]
FirstOption = Annotated[
    int, typer.Option(min=1, help="Number of messages of each key, from the oldest on.")
]
SkipFirstOption = Annotated[
    int | None,
    typer.Option(min=1, help="Number of messages of each key, from the oldest on.  [default: 1]"),
]
EditPartitionOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="ID",
        help="The partition of the message, as show says; with a key the one that has it parked.",
    ),
]
EditOffsetOption = Annotated[int | None, typer.Option(min=0, help="Its offset there.")]
ValueOption = Annotated[str | None, typer.Option(metavar="TEXT", help="The new value.")]
ValueFileOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A file with the new value.")
]
EditorOption = Annotated[
    bool, typer.Option("--editor", help="Edit the value, which is text, in $EDITOR.")
]
HeaderOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="A property, in place of all it has; may be repeated."),
]
YesOption = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask; needed where the input is no terminal.")
]


@parked_app.command("list")
def parked_list(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    key: KeyOption = None,
    key_hex: KeyHexOption = None,
    no_key: NoKeyOption = False,
    dead: DeadOption = False,
    partition: PartitionOption = None,
    older_than: OlderThanOption = None,
    error: ErrorOption = None,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the parked keys of a consumer group, with the last failure of each, and messages without an order by their errors."""
    from ...screen import run
    from .keys import list_parked
    from .selection import Selection

    selection = Selection(key, key_hex, no_key, dead, partition, older_than, error)
    run(output, list_parked(meta, output, subject, group, selection))


@parked_app.command("show")
def parked_show(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    key: KeyOption = None,
    key_hex: KeyHexOption = None,
    no_key: NoKeyOption = False,
    dead: DeadOption = False,
    partition: PartitionOption = None,
    older_than: OlderThanOption = None,
    error: ErrorOption = None,
    first: FirstOption = 20,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the parked messages of a key, or of all keys asked for, the oldest of each first."""
    from ...screen import run
    from .messages import show_parked
    from .selection import Selection

    selection = Selection(key, key_hex, no_key, dead, partition, older_than, error)
    run(output, show_parked(meta, output, subject, group, selection, first=first))


@parked_app.command("redrive")
def parked_redrive(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    key: KeyOption = None,
    key_hex: KeyHexOption = None,
    no_key: NoKeyOption = False,
    dead: DeadOption = False,
    partition: PartitionOption = None,
    older_than: OlderThanOption = None,
    error: ErrorOption = None,
    all_keys: Annotated[bool, typer.Option("--all", help="Every parked key.")] = False,
    yes: YesOption = False,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Have parked messages handled again, the oldest of each key first.  Without a key it asks before it does."""
    from ...screen import run
    from .keys import redrive_parked
    from .selection import Selection

    selection = Selection(key, key_hex, no_key, dead, partition, older_than, error)
    run(
        output,
        redrive_parked(meta, output, subject, group, selection, all_keys=all_keys, yes=yes),
    )


parked_app.command("retry", help="Another name of redrive.")(parked_redrive)


@parked_app.command("edit")
def parked_edit(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    key: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The oldest parked message of this order key."),
    ] = None,
    key_hex: Annotated[
        str | None, typer.Option(metavar="HEX", help="The same, of a key in hexadecimal.")
    ] = None,
    partition: EditPartitionOption = None,
    offset: EditOffsetOption = None,
    value: ValueOption = None,
    value_file: ValueFileOption = None,
    editor: EditorOption = False,
    header: HeaderOption = None,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """
    Have consumers get another value in the place of a parked message.

    The message is named by its partition and offset, or by its key: then it is the oldest one of the key, which fails.  The
    original stays in the log; the key stays.
    """
    from ...screen import run
    from .messages import Change, edit_parked

    change = Change(value, value_file, editor, header or ())
    place = partition, offset, key, key_hex
    run(output, edit_parked(meta, output, subject, group, place=place, change=change))


@parked_app.command("skip")
def parked_skip(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    key: KeyOption = None,
    key_hex: KeyHexOption = None,
    no_key: NoKeyOption = False,
    dead: DeadOption = False,
    partition: PartitionOption = None,
    older_than: OlderThanOption = None,
    error: ErrorOption = None,
    first: SkipFirstOption = None,
    all_messages: Annotated[
        bool, typer.Option("--all", help="Skip every parked message of the key.")
    ] = False,
    yes: YesOption = False,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Never handle the oldest parked message of each key asked for, or more of them.  Shows what is skipped, and asks."""
    from ...screen import run
    from .messages import skip_parked
    from .selection import Selection, skipped_count

    selection = Selection(key, key_hex, no_key, dead, partition, older_than, error)
    count = skipped_count(first, all_messages=all_messages)
    run(output, skip_parked(meta, output, subject, group, selection, first=count, yes=yes))
