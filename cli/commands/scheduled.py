"""`keylane scheduled`: lists and cancels scheduled messages, which brokers store until their
delivery.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, TypedDict

import click

from ...protocol.limits import SCHEDULED_LISTED_MAX
from ...protocol.scheduled.receipt import CancelOutcome
from ...protocol.text import counted, format_time
from ..answer import CommonOptions, expand_options
from ..completion import complete_subject
from ..groups import CommandGroup
from ..parameters import Argument, Option
from ..screen import make_table, show_line, show_table

if TYPE_CHECKING:
    from ...admin.views import ScheduledMessages

COLUMNS = ("id", "subject", "deliver at", "broker group", "bytes#", "")

scheduled_app = CommandGroup()
BrokerOption = Annotated[
    str | None,
    Option(
        "--broker",
        metavar="HOST:PORT",
        help="Ask only this broker, and no metaserver.",
        show_default="all that are available",
    ),
]


class CanceledMessage(TypedDict):
    """What became of a message to cancel, as JSON."""

    scheduled_id: str
    outcome: CancelOutcome


@scheduled_app.add("list", shows="..admin:ScheduledMessages")
@expand_options
def scheduled_list(
    *,
    subject: Annotated[
        str | None,
        Option(
            metavar="SUBJECT", help="Only messages for this subject.", complete=complete_subject
        ),
    ] = None,
    limit: Annotated[
        int,
        Option(
            "--limit", "-n", min=1, max=SCHEDULED_LISTED_MAX, help="At most this many messages."
        ),
    ] = 100,
    broker: BrokerOption = None,
    common: CommonOptions,
) -> None:
    """
    Show the messages that are due next, by time, and which of them will be dropped.

    The exit status is 1 if a broker, which may have more messages, could not be asked.
    """
    scheduled = replace(common, meta=broker or common.meta).ask(
        lambda admin: admin.list_scheduled(subject=subject, limit=limit, broker=broker), _show
    )
    if scheduled.problems:
        raise click.exceptions.Exit(1)


def _show(scheduled: ScheduledMessages) -> None:
    rows = [
        (
            each.scheduled_id,
            each.subject,
            format_time(each.deliver_at_ms),
            each.broker_group,
            each.size_bytes,
            f"will be dropped: {each.drop}" if each.drop else "due" if each.due else "",
        )
        for each in scheduled.messages
    ]
    title = counted(scheduled.count, "scheduled message")
    if len(rows) < scheduled.count:
        title += f", the first {len(rows)}"
    show_table(make_table(title, COLUMNS, rows))
    for broker, problem in scheduled.problems.items():
        show_line(f"{broker} is not listed: {problem}")


@scheduled_app.add("cancel", shows=".commands.scheduled:CanceledMessage")
@expand_options
def scheduled_cancel(
    scheduled_id: Annotated[
        str, Argument(metavar="ID", help="Id of the message, from its receipt or `list`.")
    ],
    *,
    broker: BrokerOption = None,
    common: CommonOptions,
) -> None:
    """Cancel the delivery of a message; show whether it was canceled, or already delivered or
    dropped.
    """
    from ..connection import open_admin
    from ..options import OutputFormat
    from ..screen import show_data

    async def cancel(meta: str, output: OutputFormat) -> None:
        async with open_admin(broker or meta) as admin:
            outcome = await admin.cancel_scheduled(scheduled_id, broker=broker)
        if output is not OutputFormat.TABLE:
            show_data(output, CanceledMessage(scheduled_id=scheduled_id, outcome=outcome))
        else:
            show_line(f"{scheduled_id}: {outcome}")

    common.run(cancel)
