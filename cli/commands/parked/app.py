"""`keylane parked` and `keylane dead`, which has the same commands for dead letters."""

from __future__ import annotations

from typing import Annotated, cast

from ...answer import CommonOptions, expand_options
from ...groups import Command, CommandGroup
from ...options import ConsumerGroupArgument, SubjectArgument
from ...parameters import Option
from .selection import (
    DeadMessageOptions,
    DeadRedriveOptions,
    DeadSelection,
    DeadSkipOptions,
    EditOptions,
    FirstOption,
    MessageOptions,
    RedriveOptions,
    Selection,
    SkipOptions,
)

parked_app = CommandGroup()
dead_app = CommandGroup()


@parked_app.add("list", shows=".commands.parked.selection:ParkedKeyFields")
@expand_options
def parked_list(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    selection: Selection,
    limit: Annotated[
        int | None,
        Option(
            "--limit",
            "-n",
            min=1,
            help="At most this many keys; unordered messages are then not grouped by error.",
        ),
    ] = None,
    common: CommonOptions,
) -> None:
    """Show the parked keys of a consumer group, each with its last failure, and unordered messages
    grouped by error. While a broker is away, those of the others are shown, and the exit status is
    1.
    """
    from .keys import list_parked

    common.run(list_parked, subject, group, selection, limit=limit)


@parked_app.add("show", shows=".commands.parked.messages:ParkedMessageFields")
@expand_options
def parked_show(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    selection: Selection,
    first: FirstOption = 20,
    common: CommonOptions,
) -> None:
    """Show the parked messages of the selected keys, oldest first."""
    from .messages import show_parked

    common.run(show_parked, subject, group, selection, first=first)


@parked_app.add("redrive", shows=".commands.parked.keys:RedrivenKeys")
@expand_options
def parked_redrive(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    selection: Selection,
    redrive_options: RedriveOptions,
    common: CommonOptions,
) -> None:
    """Have parked messages handled again, oldest first: of the selected keys, or of every key with
    --all-keys. Unless --key or --key-hex names one key, the command asks first.
    """
    from .keys import redrive_parked

    common.run(redrive_parked, subject, group, selection, redrive_options)


parked_app.add(
    "retry", shows=".commands.parked.keys:RedrivenKeys", help_text="Another name for redrive."
)(parked_redrive)


@parked_app.add("edit", shows=".commands.parked.messages:ParkedMessageFields")
@expand_options
def parked_edit(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    message_options: MessageOptions,
    edit_options: EditOptions,
    common: CommonOptions,
) -> None:
    """
    Replace the value of a parked message.

    Name the message by its partition and offset, or by its key: then it is the oldest message of
    the key, which is the one that fails. The original stays in the log, and the key stays the
    same.
    """
    from .messages import edit_parked

    common.run(edit_parked, subject, group, message_options, edit_options)


@parked_app.add("skip", shows=".commands.parked.messages:SkipResult")
@expand_options
def parked_skip(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    selection: Selection,
    skip_options: SkipOptions,
    common: CommonOptions,
) -> None:
    """Skip the oldest parked message of each selected key, or more: no consumer will handle them.
    The command shows them, and asks.
    """
    from .messages import skip_parked

    common.run(skip_parked, subject, group, selection, skip_options)


_DEAD_OPTIONS = {
    Selection: DeadSelection,
    RedriveOptions: DeadRedriveOptions,
    SkipOptions: DeadSkipOptions,
    MessageOptions: DeadMessageOptions,
}
_DEAD_COMMANDS = (
    (
        "list",
        parked_list,
        "Show the number of dead letters of a consumer group on each partition, by their errors.",
    ),
    (
        "show",
        parked_show,
        "Show dead letters, the oldest first, each with its own error, its time and its tries.",
    ),
    (
        "retry",
        parked_redrive,
        (
            "Have dead letters handled again; those that fail again stay. Later messages of their "
            "keys may already be handled. Without --key or --key-hex the command asks first."
        ),
    ),
    ("redrive", parked_redrive, "Another name for retry."),
    (
        "edit",
        parked_edit,
        """
        Replace the value of a dead letter.

        Name it by its partition and offset, or by its key: then it is the oldest dead letter of
        the key. The original stays in the log, and the key stays the same.
        """,
    ),
    (
        "skip",
        parked_skip,
        (
            "Skip the oldest dead letter, or more: no consumer will handle them. The command "
            "shows them, and asks."
        ),
    ),
)
for _name, _command, _help in _DEAD_COMMANDS:
    _shows = cast(Command, parked_app.commands[_name]).shows
    dead_app.add(_name, shows=_shows, help_text=_help)(expand_options(_command, _DEAD_OPTIONS))
