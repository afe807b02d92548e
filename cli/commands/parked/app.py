"""`keylane parked`: the options and help of its commands."""

from __future__ import annotations

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
    help="Look at messages that a consumer group has set aside, redrive them or skip them.",
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
    float | None,
    typer.Option(min=0, metavar="SECONDS", help="Only keys that are parked for at least so long."),
]
ErrorOption = Annotated[
    str | None,
    typer.Option(metavar="CLASS", help="Only keys whose last failure is of this type."),
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
    """Show the parked keys of a consumer group, with the last failure of each."""
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
    first: Annotated[int, typer.Option(min=1, help="Number of messages, from the oldest on.")] = 20,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the parked messages of a key, the oldest first."""
    from ...screen import run
    from .messages import show_parked
    from .selection import Selection

    selection = Selection(key, key_hex, no_key, dead, partition)
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
    first: Annotated[
        int, typer.Option(min=1, help="Number of messages that are skipped, from the oldest on.")
    ] = 1,
    all_messages: Annotated[
        bool, typer.Option("--all", help="Skip every parked message of the key.")
    ] = False,
    yes: YesOption = False,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Never handle the oldest parked message of a key, or more of them.  Shows what is skipped, and asks."""
    from ...screen import run
    from .messages import skip_parked
    from .selection import Selection

    selection = Selection(key, key_hex, no_key, dead, partition)
    count = None if all_messages else first
    run(output, skip_parked(meta, output, subject, group, selection, first=count, yes=yes))
