"""`keylane subject publish`: publishes a hidden subject, and shows the result."""

from __future__ import annotations

from contextlib import suppress

from ....protocol.errors import ConfigError, JobError
from ....protocol.operations import OperationState
from ...connection import open_admin
from ...options import OutputFormat
from ...screen import show_json, show_line


def show_parked(folder: str) -> None:
    """Show, before a cut-over, which messages it deletes without a row in their place, if any."""
    from ....spark.reprocess.folder import MANIFEST, OutputFolder

    output = OutputFolder(folder)
    manifest = None
    with suppress(JobError):  # the cut-over says so
        manifest = output.read(MANIFEST)
    if manifest is not None and (line := output.parked_text(manifest)):
        show_line(f"{line}; a cut-over deletes them, and no group will get them", errors=True)


async def publish_subject(
    meta: str,
    output: OutputFormat,
    hidden: str,
    subject: str,
    *,
    replace: bool,
    groups_from: str,
    wait: bool,
) -> None:
    """Publish a hidden subject, and show the result."""
    if groups_from and not replace:
        raise ConfigError("--groups-from needs --replace")
    async with open_admin(meta) as admin:
        starts = None
        if groups_from:
            from .cut_over import cut_over

            starts, answer = await cut_over(admin, meta, hidden, subject, groups_from, wait=wait)
        else:
            answer = await admin.publish_subject(hidden, subject, replace=replace, wait=wait)
    if output is OutputFormat.JSON:
        show_json(answer)
    elif answer.state is OperationState.DONE:
        for group, offsets in sorted((starts or {}).items()):
            places = ", ".join(f"{number}: {offset}" for number, offset in sorted(offsets.items()))
            show_line(f"{group} continues at (partition: offset) {places}")
        show_line(f"{hidden} is published in {subject}")
    elif answer.state is OperationState.CANCELED:
        show_line(
            f"the publication of {hidden} in {subject} was canceled: its messages are given up"
        )
    else:
        waits = f": {answer.problem}" if answer.problem else ""
        show_line(f"operation {answer.operation_id} publishes {hidden} in {subject}{waits}")
