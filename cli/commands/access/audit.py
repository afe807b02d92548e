"""`keylane access audit`: who did what, and who was refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from ....protocol.errors import ConfigError
from ....protocol.reading.instants import ago_ms
from ...options import META_DEFAULT, MetaOption, OutputFormat, OutputOption
from ...screen import make_table, show_line, show_table
from .running import ask_and_show


def show_audit(
    *,
    who: Annotated[str | None, typer.Option(help="Only this principal.")] = None,
    subject: Annotated[str | None, typer.Option(help="Only this subject.")] = None,
    outcome: Annotated[str | None, typer.Option(help="Only done, or only refused.")] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="From this time on: 2030-01-31T08:00:00Z, local time without a zone, or -1h.",
        ),
    ] = None,
    before: Annotated[
        int | None, typer.Option(min=1, help="Older ones than the event with this id.")
    ] = None,
    limit: Annotated[int, typer.Option("-n", min=1, max=500, help="Most events shown.")] = 100,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the audit log, the newest events first."""
    if outcome not in {None, "done", "refused"}:
        raise ConfigError(f"--outcome is done or refused, not {outcome!r:.80}")
    start = None if since is None else _start_of(since)
    ask_and_show(
        meta,
        output,
        lambda admin: admin.list_audit(
            who=who, subject=subject, outcome=outcome, since=start, before=before, limit=limit
        ),
        _show,
    )


def _start_of(text: str) -> datetime:
    """The time that --since says.  Raises ConfigError."""
    ago = ago_ms(text)
    try:
        if ago is not None:
            return datetime.now(UTC) - timedelta(milliseconds=ago)
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"--since is a time such as 2030-01-31T08:00:00Z, or how long ago, such as -1h, not "
            f"{text[:80]!r}"
        ) from None


def _show(page: Any) -> None:
    heads = ("id#", "at", "who", "from", "did", "subject", "group", "outcome", "times#", "server")
    rows = []
    for row in page.rows:
        event = row.event
        at = datetime.fromtimestamp(event.at_ms / 1000, UTC)
        outcome = event.outcome if not event.code else f"{event.outcome} {event.code}"
        did = f"{event.did} {event.detail}".strip()
        rows.append(
            (
                row.audit_id,
                f"{at:%Y-%m-%dT%H:%M:%SZ}",
                event.who,
                event.remote,
                did,
                event.subject,
                event.group,
                outcome,
                event.times,
                event.server,
            )
        )
    show_table(make_table("audit log", heads, rows))
    if page.before is not None:
        show_line(f"older ones: --before {page.before}")
