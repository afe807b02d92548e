"""`keylane access`: tokens, rights, quotas and the audit log.

A token is shown once, and is never an argument.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from ...protocol.errors import ConfigError
from ...protocol.reading.instants import ago_ms
from ..answer import Answer, expanded
from ..options import parse_time
from ..screen import make_table, show_line, show_table

access_app = typer.Typer()
token_app = typer.Typer(no_args_is_help=True, help="Manage the tokens of principals.")
quota_app = typer.Typer(no_args_is_help=True, help="Manage the limits of principals and subjects.")
access_app.add_typer(token_app, name="token")
access_app.add_typer(quota_app, name="quota")

PrincipalArgument = Annotated[str, typer.Argument(help="Name of the principal.")]
OnlyPrincipalArgument = Annotated[
    str | None, typer.Argument(help="Only those of this principal.", show_default="all")
]
RightArgument = Annotated[
    str, typer.Argument(help="produce, consume, read, administer or cluster.")
]
SubjectPattern = Annotated[
    str, typer.Option(help="A subject, or the beginning of names followed by '*'.")
]
GroupPattern = Annotated[
    str, typer.Option(help="A consumer group, or the beginning of names followed by '*'.")
]
NameArgument = Annotated[
    str, typer.Argument(help="A principal, or '*' for all without a quota of their own.")
]
SubjectOption = Annotated[
    bool,
    typer.Option("--subject", help="NAME is a subject, or the beginning of names followed by '*'."),
]


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────
@token_app.command("create")
@expanded
def create_token(
    principal: PrincipalArgument,
    *,
    label: Annotated[str, typer.Option(help="A note for people: what uses the token.")] = "",
    ends: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="When it expires: ISO 8601, UTC without a zone.",
            show_default="never",
        ),
    ] = None,
    answer: Answer,
) -> None:
    """Create a token and print it; it cannot be shown again."""
    until = None if ends is None else datetime.fromtimestamp(parse_time(ends) / 1000, UTC)
    answer.ask(
        lambda admin: admin.create_token(principal, label=label, ends=until),
        lambda made: show_line(made.token),
    )


@token_app.command("list")
@expanded
def list_tokens(principal: OnlyPrincipalArgument = None, *, answer: Answer) -> None:
    """Show all tokens by id; the tokens themselves are not stored."""
    heads = ("id", "principal", "state", "label")

    def show(listed: Any) -> None:
        rows = [(row.token_id, row.principal, row.state, row.label) for row in listed.tokens]
        show_table(make_table("tokens", heads, rows))

    answer.ask(lambda admin: admin.list_tokens(principal), show)


@token_app.command("revoke")
@expanded
def revoke_token(
    token_id: Annotated[int, typer.Argument(min=1, help="Id, see `keylane access token list`.")],
    *,
    answer: Answer,
) -> None:
    """Revoke a token; brokers know of it within seconds."""
    answer.ask(
        lambda admin: admin.revoke_token(token_id),
        lambda view: show_line(f"token {view.token_id} of {view.principal} is {view.state}"),
    )


# ── rights ────────────────────────────────────────────────────────────────────────────────────────
@access_app.command("grant")
@expanded
def grant(
    principal: PrincipalArgument,
    right: RightArgument,
    *,
    subject: SubjectPattern = "*",
    group: GroupPattern = "*",
    answer: Answer,
) -> None:
    """Grant a right; without options it covers every subject and group."""
    answer.ask(
        lambda admin: admin.grant(principal, right, subject=subject, group=group),
        lambda _: show_line(f"{principal} may {right} {subject}, group {group}"),
    )


@access_app.command("revoke")
@expanded
def revoke(
    principal: PrincipalArgument,
    right: RightArgument,
    *,
    subject: SubjectPattern = "*",
    group: GroupPattern = "*",
    answer: Answer,
) -> None:
    """Revoke exactly this right, with its patterns."""
    answer.ask(
        lambda admin: admin.revoke_grant(principal, right, subject=subject, group=group),
        lambda _: show_line(f"{principal} has no such right: {right} {subject}, group {group}"),
    )


@access_app.command("list")
@expanded
def list_grants(principal: OnlyPrincipalArgument = None, *, answer: Answer) -> None:
    """Show all rights by principal."""
    heads = ("principal", "right", "subject", "group")

    def show(listed: Any) -> None:
        rows = [
            (row.principal, row.grant.right.value, row.grant.subject, row.grant.group)
            for row in listed.grants
        ]
        show_table(make_table("rights", heads, rows))

    answer.ask(lambda admin: admin.list_grants(principal), show)


@access_app.command("check")
@expanded
def check(
    principal: PrincipalArgument,
    right: RightArgument,
    *,
    subject: Annotated[str, typer.Option(help="A subject.", show_default="all of them")] = "",
    group: Annotated[str, typer.Option(help="A consumer group.", show_default="all of them")] = "",
    answer: Answer,
) -> None:
    """Show whether a principal has a right, and which grant gives it."""

    def show(decision: Any) -> None:
        by = decision.by
        why = "nothing grants it" if by is None else f"by {by.right} {by.subject}, group {by.group}"
        show_line(f"{'allowed' if decision.allowed else 'refused'}: {why}")

    answer.ask(
        lambda admin: admin.check_access(principal, right, subject=subject, group=group), show
    )


# ── quotas ────────────────────────────────────────────────────────────────────────────────────────
@quota_app.command("set")
@expanded
def set_quota(
    name: NameArgument,
    *,
    bytes_per_s: Annotated[
        int, typer.Option("--bytes", min=0, help="Bytes of messages per second; 0: no limit.")
    ] = 0,
    requests_per_s: Annotated[
        int, typer.Option("--requests", min=0, help="Requests per second; 0: no limit.")
    ] = 0,
    connections: Annotated[
        int, typer.Option(min=0, help="Connections to each broker; 0: no limit.")
    ] = 0,
    sessions: Annotated[
        int,
        typer.Option(min=0, help="Consumers at a time, in all groups together; 0: no limit."),
    ] = 0,
    subjects: Annotated[
        int,
        typer.Option(
            min=0, help="Number of subjects that may match the pattern NAME; 0: no limit."
        ),
    ] = 0,
    scheduled_bytes: Annotated[
        int,
        typer.Option(
            min=0,
            help="Bytes of scheduled messages at each broker, of all subjects that match NAME "
            "together; 0: no limit.",
        ),
    ] = 0,
    subject: SubjectOption = False,
    answer: Answer,
) -> None:
    """Set the limits of a principal at each server or, with --subject, of subjects at each broker.

    The new limits replace all earlier ones.
    """
    answer.ask(
        lambda admin: admin.set_quota(
            name,
            bytes_per_s=bytes_per_s,
            requests_per_s=requests_per_s,
            connections=connections,
            sessions=sessions,
            subjects=subjects,
            scheduled_bytes=scheduled_bytes,
            kind="subject" if subject else "principal",
        ),
        lambda _: show_line(f"{name} is limited"),
    )


@quota_app.command("unset")
@expanded
def unset_quota(name: NameArgument, *, subject: SubjectOption = False, answer: Answer) -> None:
    """Remove the limits of a principal or, with --subject, of subjects."""
    answer.ask(
        lambda admin: admin.unset_quota(name, kind="subject" if subject else "principal"),
        lambda _: show_line(f"{name} is not limited"),
    )


@quota_app.command("list")
@expanded
def list_quotas(*, answer: Answer) -> None:
    """Show all limits; 0 means no limit."""
    limits = ("bytes/s#", "requests/s#", "connections#", "sessions#", "subjects#")
    heads = ("kind", "name", *limits, "scheduled bytes#")

    def show(listed: Any) -> None:
        rows = [
            (
                row.kind,
                row.name,
                row.bytes_per_s,
                row.requests_per_s,
                row.connections,
                row.sessions,
                row.subjects,
                row.scheduled_bytes,
            )
            for row in listed.quotas
        ]
        show_table(make_table("quotas", heads, rows))

    answer.ask(lambda admin: admin.list_quotas(), show)


# ── the audit log ─────────────────────────────────────────────────────────────────────────────────
@access_app.command("audit")
@expanded
def show_audit(
    *,
    who: Annotated[str | None, typer.Option(help="Only events of this principal.")] = None,
    subject: Annotated[str | None, typer.Option(help="Only events of this subject.")] = None,
    outcome: Annotated[
        str | None, typer.Option(help="done or refused: only events with this outcome.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="From this time on: 2030-01-31T08:00:00Z, local time without a zone, or -1h.",
        ),
    ] = None,
    before: Annotated[
        int | None, typer.Option(min=1, help="Only events older than the one with this id.")
    ] = None,
    limit: Annotated[
        int, typer.Option("-n", min=1, max=500, help="Show at most this many events.")
    ] = 100,
    answer: Answer,
) -> None:
    """Show the audit log, the newest events first."""
    if outcome not in {None, "done", "refused"}:
        raise ConfigError(f"--outcome is done or refused, not {outcome!r:.80}")
    start = None if since is None else _start_of(since)
    answer.ask(
        lambda admin: admin.list_audit(
            who=who, subject=subject, outcome=outcome, since=start, before=before, limit=limit
        ),
        _show_audit,
    )


def _start_of(text: str) -> datetime:
    """Return the time that --since names; raise ConfigError if it is none."""
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


def _show_audit(page: Any) -> None:
    heads = ("id#", "at", "who", "from", "did", "subject", "group", "outcome", "times#", "server")
    rows = []
    for row in page.rows:
        event = row.event
        at = datetime.fromtimestamp(event.at_ms / 1000, UTC)
        rows.append(
            (
                row.audit_id,
                f"{at:%Y-%m-%dT%H:%M:%SZ}",
                event.who,
                event.remote,
                f"{event.did} {event.detail}".strip(),
                event.subject,
                event.group,
                f"{event.outcome} {event.code}" if event.code else event.outcome,
                event.times,
                event.server,
            )
        )
    show_table(make_table("audit log", heads, rows))
    if page.before is not None:
        show_line(f"older ones: --before {page.before}")
