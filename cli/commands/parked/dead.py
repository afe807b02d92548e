"""`keylane dead`: the commands of `keylane parked`, for dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ...options import (
    META_DEFAULT,
    ConsumerGroupArgument,
    MetaOption,
    OutputFormat,
    OutputOption,
    SubjectArgument,
)
from .app import (
    EditOffsetOption,
    EditorOption,
    EditPartitionOption,
    ErrorOption,
    FirstOption,
    HeaderOption,
    KeyHexOption,
    KeyOption,
    NoKeyOption,
    OlderThanOption,
    PartitionOption,
    SkipFirstOption,
    ValueFileOption,
    ValueOption,
    YesOption,
)

if TYPE_CHECKING:
    from .selection import Selection

dead_app = typer.Typer(
    no_args_is_help=True,
    help="Look at messages that a consumer group has given up, have them handled again, edit or skip them.",
)


@dead_app.command("list")
def dead_list(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    key: KeyOption = None,
    key_hex: KeyHexOption = None,
    no_key: NoKeyOption = False,
    partition: PartitionOption = None,
    older_than: OlderThanOption = None,
    error: ErrorOption = None,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the number of dead letters of a consumer group on each partition, by their errors."""
    from ...screen import run
    from .keys import list_parked

    selection = _selection(key, key_hex, partition, older_than, error, no_key=no_key)
    run(output, list_parked(meta, output, subject, group, selection))


@dead_app.command("show")
def dead_show(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    key: KeyOption = None,
    key_hex: KeyHexOption = None,
    no_key: NoKeyOption = False,
    partition: PartitionOption = None,
    older_than: OlderThanOption = None,
    error: ErrorOption = None,
    first: FirstOption = 20,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show dead letters, the oldest first, each with its own error, its time and its tries."""
    from ...screen import run
    from .messages import show_parked

    selection = _selection(key, key_hex, partition, older_than, error, no_key=no_key)
    run(output, show_parked(meta, output, subject, group, selection, first=first))


@dead_app.command("retry")
def dead_retry(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    key: KeyOption = None,
    key_hex: KeyHexOption = None,
    no_key: NoKeyOption = False,
    partition: PartitionOption = None,
    older_than: OlderThanOption = None,
    error: ErrorOption = None,
    yes: YesOption = False,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Have dead letters handled again, without --key after a yes; those that fail again stay.  Later messages of their keys may be handled already."""
    from ...screen import run
    from .keys import redrive_parked

    selection = _selection(key, key_hex, partition, older_than, error, no_key=no_key)
    run(
        output,
        redrive_parked(meta, output, subject, group, selection, all_keys=False, yes=yes),
    )


dead_app.command("redrive", help="Another name of retry.")(dead_retry)


@dead_app.command("edit")
def dead_edit(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    key: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The oldest dead letter of this order key.")
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
    Have consumers get another value in the place of a dead letter.

    It is named by its partition and offset, or by its key: then it is the oldest dead letter of the key.  The original stays
    in the log; the key stays.
    """
    from ...screen import run
    from .messages import Change, edit_parked

    change = Change(value, value_file, editor, header or ())
    place = partition, offset, key, key_hex
    run(output, edit_parked(meta, output, subject, group, place=place, change=change, dead=True))


@dead_app.command("skip")
def dead_skip(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    key: KeyOption = None,
    key_hex: KeyHexOption = None,
    no_key: NoKeyOption = False,
    partition: PartitionOption = None,
    older_than: OlderThanOption = None,
    error: ErrorOption = None,
    first: SkipFirstOption = None,
    all_messages: Annotated[bool, typer.Option("--all", help="Skip every dead letter.")] = False,
    yes: YesOption = False,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Never handle the oldest dead letter, or more of them.  Shows what is skipped, and asks."""
    from ...screen import run
    from .messages import skip_parked
    from .selection import skipped_count

    selection = _selection(key, key_hex, partition, older_than, error, no_key=no_key)
    count = skipped_count(first, all_messages=all_messages)
    run(output, skip_parked(meta, output, subject, group, selection, first=count, yes=yes))


def _selection(
    key: str | None,
    key_hex: str | None,
    partition: int | None,
    older_than: str | None,
    error: str | None,
    *,
    no_key: bool,
) -> Selection:
    from .selection import Selection

    return Selection(
        key,
        key_hex,
        no_key,
        partition=partition,
        older_than=older_than,
        error=error,
        among_dead=True,
    )
