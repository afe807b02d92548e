"""`keylane cluster versions`: how far an upgrade is."""

from __future__ import annotations

from ...connection import open_admin
from ...options import OutputFormat
from ...screen import make_table, show_json, show_line, show_table


async def show_versions(meta: str, output: OutputFormat) -> None:
    """Show the version of the cluster and of each member.  Raises KeylaneError."""
    async with open_admin(meta) as admin:
        view = await admin.describe_cluster()
    if output is OutputFormat.JSON:
        show_json(view)
        return
    rows = [
        (
            member.name,
            member.version or "not told",
            "yes" if member.name in view.held_back_by else "",
        )
        for member in view.members
    ]
    title = f"cluster {view.name}".rstrip() + f": version {view.version}"
    show_table(make_table(title, ("member", "version", "to upgrade"), rows))
    if view.held_back_by:
        show_line("Formats of the newest version are written once every member has it.")
