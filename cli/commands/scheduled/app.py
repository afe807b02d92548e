"""`keylane scheduled`: the options and help of its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from ....protocol.limits import SCHEDULED_LISTED_MAX
from ...answer import Answer, expanded

scheduled_app = typer.Typer(
    no_args_is_help=True, help="List and cancel messages that brokers keep for a later delivery."
)
BrokerOption = Annotated[
    str | None,
    typer.Option(
        "--broker",
        metavar="HOST:PORT",
        help="Ask this broker alone, and no metaserver.",
        show_default="all that are available",
    ),
]


@scheduled_app.command("list")
@expanded
def scheduled_list(
    *,
    subject: Annotated[
        str | None, typer.Option(metavar="SUBJECT", help="Only messages for this subject.")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=SCHEDULED_LISTED_MAX, help="At most this many messages.")
    ] = 100,
    broker: BrokerOption = None,
    answer: Answer,
) -> None:
    """Show the messages that are delivered next, by their times, and which will be dropped then."""
    from .messages import list_scheduled

    answer.run(list_scheduled, subject=subject, limit=limit, broker=broker)


@scheduled_app.command("cancel")
@expanded
def scheduled_cancel(
    scheduled_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of the message, as its receipt and `list` show.")
    ],
    *,
    broker: BrokerOption = None,
    answer: Answer,
) -> None:
    """Never deliver a message; shows whether it was canceled, or was delivered or dropped
    before.
    """
    from .messages import cancel_scheduled

    answer.run(cancel_scheduled, scheduled_id, broker=broker)
