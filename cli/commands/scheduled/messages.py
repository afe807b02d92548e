"""`keylane scheduled` list, cancel."""

from __future__ import annotations

import typer

from ....admin.scheduled import ScheduledMessages
from ....protocol.scheduled.deliver_at import shown
from ....protocol.text import counted
from ...connection import open_admin
from ...options import OutputFormat
from ...screen import make_table, show_json, show_line, show_table

COLUMNS = ("id", "subject", "deliver at", "broker group", "bytes#", "")


async def list_scheduled(
    meta: str, output: OutputFormat, *, subject: str | None, limit: int, broker: str | None
) -> None:
    """Show the messages that are delivered next; status 1 if a broker could not be asked."""
    async with open_admin(broker or meta) as admin:
        listed = await admin.list_scheduled(subject=subject, limit=limit, broker=broker)
    if output is OutputFormat.JSON:
        show_json(listed)
    else:
        _show(listed)
    if listed.problems:  # a broker that was not asked may have more
        raise typer.Exit(1)


def _show(listed: ScheduledMessages) -> None:
    rows = [
        (
            each.scheduled_id,
            each.subject,
            shown(each.deliver_at_ms),
            each.broker_group,
            each.size_bytes,
            f"will be dropped: {each.drop}" if each.drop else "due" if each.due else "",
        )
        for each in listed.messages
    ]
    title = counted(listed.count, "scheduled message")
    if len(rows) < listed.count:
        title += f", the first {len(rows)}"
    show_table(make_table(title, COLUMNS, rows))
    for where, why in listed.problems.items():
        show_line(f"{where} is not listed: {why}")


async def cancel_scheduled(
    meta: str, output: OutputFormat, scheduled_id: str, *, broker: str | None
) -> None:
    """Cancel a message.  Raises NotFoundError."""
    async with open_admin(broker or meta) as admin:
        outcome = await admin.cancel_scheduled(scheduled_id, broker=broker)
    if output is OutputFormat.JSON:
        show_json({"scheduled_id": scheduled_id, "outcome": outcome})
    else:
        show_line(f"{scheduled_id}: {outcome}")
