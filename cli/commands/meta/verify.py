"""`keylane meta verify`: the metaserver's database compared with the brokers."""

from __future__ import annotations

import typer

from ....admin import Verification
from ....protocol.text import counted
from ...connection import open_admin
from ...options import OutputFormat
from ...screen import make_table, show_json, show_line, show_table


async def verify_cluster(meta: str, output: OutputFormat) -> None:
    """Compare the metaserver's database with the brokers; exit status 1 if a check finds a
    violation.
    """
    async with open_admin(meta) as admin:
        verification = await admin.verify()
    if output is OutputFormat.JSON:
        show_json(verification)
    else:
        _show(verification)
    if not verification.ok:
        raise typer.Exit(1)


def _show(verification: Verification) -> None:
    """A line for each check, and the violations below."""
    rows = [
        (
            check.code,
            check.name,
            counted(check.violations_total, "violation") if check.violations_total else "ok",
            check.claim,
        )
        for check in verification.checks
    ]
    verb = "agree" if verification.ok else "differ"
    title = f"the database and the brokers {verb}"
    show_table(make_table(title, ("check", "name", "result", "claim"), rows))
    for check in verification.checks:
        for violation in check.violations:
            show_line(f"{check.code} {check.name}: {violation}")
        hidden = check.violations_total - len(check.violations)
        if hidden:
            show_line(f"{check.code} {check.name}: … and {hidden} more")
