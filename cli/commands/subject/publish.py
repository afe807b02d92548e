"""`keylane subject publish`."""

from __future__ import annotations

from ....protocol.operations import OperationState
from ...connection import open_admin
from ...options import OutputFormat
from ...screen import show_json, show_line


async def publish_subject(
    meta: str, output: OutputFormat, hidden: str, subject: str, *, replace: bool, wait: bool
) -> None:
    """Publish a hidden subject, and show what became of it.  Raises RefusedError."""
    async with open_admin(meta) as admin:
        answer = await admin.publish_subject(hidden, subject, replace=replace, wait=wait)
    if output is OutputFormat.JSON:
        show_json(answer)
    elif answer.state is OperationState.DONE:
        show_line(f"{hidden} is published in {subject}")
    elif answer.state is OperationState.CANCELED:
        show_line(
            f"the publication of {hidden} in {subject} was canceled: its messages are given up"
        )
    else:
        waits = f": {answer.problem}" if answer.problem else ""
        show_line(f"operation {answer.operation_id} publishes {hidden} in {subject}{waits}")
