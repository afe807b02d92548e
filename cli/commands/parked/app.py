"""`keylane parked`, and `keylane dead`: the same commands for dead letters."""

from __future__ import annotations

import typer

from ...answer import Answer, expanded
from ...options import ConsumerGroupArgument, SubjectArgument
from .selection import (
    Change,
    DeadPlace,
    DeadRedriving,
    DeadSelection,
    DeadSkipping,
    FirstOption,
    ParkedPlace,
    Redriving,
    Selection,
    Skipping,
)

parked_app = typer.Typer()
dead_app = typer.Typer()


@parked_app.command("list")
@expanded
def parked_list(
    subject: SubjectArgument, group: ConsumerGroupArgument, *, selection: Selection, answer: Answer
) -> None:
    """Show the parked keys of a consumer group with the last failure of each, and messages without
    an order grouped by their errors.
    """
    from .keys import list_parked

    answer.run(list_parked, subject, group, selection)


@parked_app.command("show")
@expanded
def parked_show(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    selection: Selection,
    first: FirstOption = 20,
    answer: Answer,
) -> None:
    """Show the parked messages of the selected keys, the oldest of each key first."""
    from .messages import show_parked

    answer.run(show_parked, subject, group, selection, first=first)


@parked_app.command("redrive")
@expanded
def parked_redrive(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    selection: Selection,
    redriving: Redriving,
    answer: Answer,
) -> None:
    """Have parked messages handled again, the oldest of each key first. Without a key the command
    asks first.
    """
    from .keys import redrive_parked

    answer.run(redrive_parked, subject, group, selection, redriving)


parked_app.command("retry", help="Another name for redrive.")(parked_redrive)


@parked_app.command("edit")
@expanded
def parked_edit(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    place: ParkedPlace,
    change: Change,
    answer: Answer,
) -> None:
    """
    Replace the value of a parked message.

    Name the message by its partition and offset, or by its key: then it is the oldest message of
    the key, which is the one that fails. The original stays in the log, and the key stays the
    same.
    """
    from .messages import edit_parked

    answer.run(edit_parked, subject, group, place, change)


@parked_app.command("skip")
@expanded
def parked_skip(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    selection: Selection,
    skipping: Skipping,
    answer: Answer,
) -> None:
    """Skip the oldest parked message of each selected key, or more: no consumer will handle them.
    The command shows them, and asks.
    """
    from .messages import skip_parked

    answer.run(skip_parked, subject, group, selection, skipping)


_OF_DEAD = {
    Selection: DeadSelection,
    Redriving: DeadRedriving,
    Skipping: DeadSkipping,
    ParkedPlace: DeadPlace,
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
            "keys may already be handled. Without --key the command asks first."
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
    dead_app.command(_name, help=_help)(expanded(_command, _OF_DEAD))
