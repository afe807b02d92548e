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

parked_app = typer.Typer(
    no_args_is_help=True,
    help="Look at messages that a consumer group has set aside, redrive, edit or skip them.",
)
dead_app = typer.Typer(
    no_args_is_help=True,
    help="Look at messages that a consumer group has given up, have them handled "
    "again, edit or skip them.",
)


@parked_app.command("list")
@expanded
def parked_list(
    subject: SubjectArgument, group: ConsumerGroupArgument, *, selection: Selection, answer: Answer
) -> None:
    """Show the parked keys of a consumer group, with the last failure of each, and messages without
    an order by their errors.
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
    """Show the parked messages of a key, or of all keys asked for, the oldest of each first."""
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
    """Have parked messages handled again, the oldest of each key first.  Without a key it asks
    before it does.
    """
    from .keys import redrive_parked

    answer.run(redrive_parked, subject, group, selection, redriving)


parked_app.command("retry", help="Another name of redrive.")(parked_redrive)


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
    Have consumers get another value in the place of a parked message.

    The message is named by its partition and offset, or by its key: then it is the oldest one of
    the key, which fails.  The original stays in the log; the key stays.
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
    """Never handle the oldest parked message of each key asked for, or more of them.  Shows what is
    skipped, and asks.
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
            "Have dead letters handled again, without --key after a yes; those that fail again stay.  "
            "Later messages of their keys may be handled already."
        ),
    ),
    ("redrive", parked_redrive, "Another name of retry."),
    (
        "edit",
        parked_edit,
        """
        Have consumers get another value in the place of a dead letter.

        It is named by its partition and offset, or by its key: then it is the oldest dead letter of the key.  The original stays
        in the log; the key stays.
        """,
    ),
    (
        "skip",
        parked_skip,
        "Never handle the oldest dead letter, or more of them.  Shows what is skipped, and asks.",
    ),
)
for _name, _command, _help in _DEAD_COMMANDS:
    dead_app.command(_name, help=_help)(expanded(_command, _OF_DEAD))
