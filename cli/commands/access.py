"""`keylane access`: tokens, rights, quotas and the audit log.

A token is shown only once, and is never passed as an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from ...protocol.errors import ConfigError
from ...protocol.reading.instants import parse_ago_ms
from ..answer import CommonOptions, expand_options
from ..completion import complete_group, complete_subject
from ..groups import CommandGroup
from ..options import parse_time
from ..parameters import Argument, Option
from ..screen import make_table, show_line, show_table

access_app = CommandGroup()
token_app = CommandGroup("token", "Manage the tokens of principals.")
quota_app = CommandGroup("quota", "Manage the limits of principals and subjects.")
access_app.add_command(token_app)
access_app.add_command(quota_app)

PrincipalArgument = Annotated[str, Argument(help="Name of the principal.")]
OnlyPrincipalArgument = Annotated[
    str | None, Argument(help="Only those of this principal; all by default.")
]
RightArgument = Annotated[str, Argument(help="produce, consume, read, administer or cluster.")]
SubjectPattern = Annotated[
    str,
    Option(help="A subject, or the beginning of names followed by '*'.", complete=complete_subject),
]
GroupPattern = Annotated[
    str,
    Option(
        help="A consumer group, or the beginning of names followed by '*'.",
        complete=complete_group,
    ),
]
NameArgument = Annotated[
    str, Argument(help="A principal, or '*' for all without a quota of their own.")
]
SubjectOption = Annotated[
    bool,
    Option("--for-subjects", help="NAME is a subject, or the beginning of names followed by '*'."),
]


def show_rows(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], added_by: str
) -> None:
    """Show a table, or which command adds its first row."""
    if rows:
        show_table(make_table(title, columns, rows))
    else:
        show_line(f"no {title}; add one with: {added_by}")


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────
@token_app.add("create", shows="..admin:MadeToken")
@expand_options
def create_token(
    principal: PrincipalArgument,
    *,
    label: Annotated[str, Option(help="A note for people: what uses the token.")] = "",
    ends: Annotated[
        str | None,
        Option(
            metavar="TIME",
            help="When it expires: ISO 8601, UTC without a zone.",
            show_default="never",
        ),
    ] = None,
    common: CommonOptions,
) -> None:
    """Create a token and print it; it cannot be shown again."""
    expires_at = None if ends is None else datetime.fromtimestamp(parse_time(ends) / 1000, UTC)
    common.ask(
        lambda admin: admin.create_token(principal, label=label, ends=expires_at),
        lambda created: show_line(created.token),
    )


@token_app.add("list", shows="..admin:TokenList")
@expand_options
def list_tokens(principal: OnlyPrincipalArgument = None, *, common: CommonOptions) -> None:
    """Show all tokens by id; the tokens themselves are not stored."""
    columns = ("id", "principal", "state", "label")

    def show(result: Any) -> None:
        rows = [(row.token_id, row.principal, row.state, row.label) for row in result.tokens]
        show_rows("tokens", columns, rows, "keylane access token create PRINCIPAL")

    common.ask(lambda admin: admin.list_tokens(principal), show)


@token_app.add("revoke", shows="..admin:TokenView")
@expand_options
def revoke_token(
    token_id: Annotated[int, Argument(min=1, help="Id, see `keylane access token list`.")],
    *,
    common: CommonOptions,
) -> None:
    """Revoke a token; brokers reject it within seconds."""
    common.ask(
        lambda admin: admin.revoke_token(token_id),
        lambda view: show_line(f"token {view.token_id} of {view.principal} is {view.state}"),
    )


# ── rights ────────────────────────────────────────────────────────────────────────────────────────
@access_app.add("grant")
@expand_options
def grant(
    principal: PrincipalArgument,
    right: RightArgument,
    *,
    subject: SubjectPattern = "*",
    group: GroupPattern = "*",
    common: CommonOptions,
) -> None:
    """Grant a right; without options it covers every subject and group."""
    common.ask(
        lambda admin: admin.grant(principal, right, subject=subject, group=group),
        lambda _: show_line(f"{principal} may {right} {subject}, group {group}"),
    )


@access_app.add("revoke")
@expand_options
def revoke(
    principal: PrincipalArgument,
    right: RightArgument,
    *,
    subject: SubjectPattern = "*",
    group: GroupPattern = "*",
    common: CommonOptions,
) -> None:
    """Revoke exactly this right, with its patterns."""
    common.ask(
        lambda admin: admin.revoke_grant(principal, right, subject=subject, group=group),
        lambda _: show_line(f"{principal} has no such right: {right} {subject}, group {group}"),
    )


@access_app.add("list", shows="..admin:GrantList")
@expand_options
def list_grants(principal: OnlyPrincipalArgument = None, *, common: CommonOptions) -> None:
    """Show all rights by principal."""
    columns = ("principal", "right", "subject", "group")

    def show(result: Any) -> None:
        rows = [
            (row.principal, row.grant.right.value, row.grant.subject, row.grant.group)
            for row in result.grants
        ]
        show_rows("rights", columns, rows, "keylane access grant PRINCIPAL RIGHT")

    common.ask(lambda admin: admin.list_grants(principal), show)


@access_app.add("check", shows="..admin:Decision")
@expand_options
def check(
    principal: PrincipalArgument,
    right: RightArgument,
    *,
    subject: Annotated[
        str, Option(help="A subject.", show_default="all of them", complete=complete_subject)
    ] = "",
    group: Annotated[
        str, Option(help="A consumer group.", show_default="all of them", complete=complete_group)
    ] = "",
    common: CommonOptions,
) -> None:
    """Show whether a principal has a right, and which grant gives it."""

    def show(decision: Any) -> None:
        grant = decision.by
        reason = "nothing grants it"
        if grant is not None:
            reason = f"by {grant.right} {grant.subject}, group {grant.group}"
        show_line(f"{'allowed' if decision.allowed else 'refused'}: {reason}")

    common.ask(
        lambda admin: admin.check_access(principal, right, subject=subject, group=group), show
    )


# ── quotas ────────────────────────────────────────────────────────────────────────────────────────
@quota_app.add("set")
@expand_options
def set_quota(
    name: NameArgument,
    *,
    bytes_per_s: Annotated[
        int, Option("--bytes", min=0, help="Bytes of messages per second; 0: no limit.")
    ] = 0,
    requests_per_s: Annotated[
        int, Option("--requests", min=0, help="Requests per second; 0: no limit.")
    ] = 0,
    connections: Annotated[int, Option(min=0, help="Connections to each broker; 0: no limit.")] = 0,
    sessions: Annotated[
        int,
        Option(min=0, help="Consumers at a time, in all groups together; 0: no limit."),
    ] = 0,
    subjects: Annotated[
        int,
        Option(min=0, help="Number of subjects that may match the pattern NAME; 0: no limit."),
    ] = 0,
    scheduled_bytes: Annotated[
        int,
        Option(
            min=0,
            help="Bytes of scheduled messages at each broker, of all subjects that match NAME "
            "together; 0: no limit.",
        ),
    ] = 0,
    subject: SubjectOption = False,
    common: CommonOptions,
) -> None:
    """Set the limits of a principal at each server or, with --for-subjects, those of subjects at
    each broker.

    The new limits replace all earlier ones.
    """
    common.ask(
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


@quota_app.add("unset")
@expand_options
def unset_quota(
    name: NameArgument, *, subject: SubjectOption = False, common: CommonOptions
) -> None:
    """Remove the limits of a principal or, with --for-subjects, of subjects."""
    common.ask(
        lambda admin: admin.unset_quota(name, kind="subject" if subject else "principal"),
        lambda _: show_line(f"{name} is not limited"),
    )


@quota_app.add("list", shows="..admin:QuotaList")
@expand_options
def list_quotas(*, common: CommonOptions) -> None:
    """Show all limits; 0 means no limit."""
    limits = ("bytes/s#", "requests/s#", "connections#", "sessions#", "subjects#")
    columns = ("kind", "name", *limits, "scheduled bytes#")

    def show(result: Any) -> None:
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
            for row in result.quotas
        ]
        show_rows("quotas", columns, rows, "keylane access quota set NAME")

    common.ask(lambda admin: admin.list_quotas(), show)


# ── the audit log ─────────────────────────────────────────────────────────────────────────────────
@access_app.add("audit", shows="..admin:AuditPage")
@expand_options
def show_audit(
    *,
    who: Annotated[str | None, Option(help="Only events of this principal.")] = None,
    subject: Annotated[
        str | None, Option(help="Only events of this subject.", complete=complete_subject)
    ] = None,
    outcome: Annotated[
        str | None, Option(help="done or refused: only events with this outcome.")
    ] = None,
    since: Annotated[
        str | None,
        Option(
            metavar="TIME",
            help="From this time on: 2030-01-31T08:00:00Z, local time without a zone, or -1h.",
        ),
    ] = None,
    before: Annotated[
        int | None, Option(min=1, help="Only events older than the one with this id.")
    ] = None,
    limit: Annotated[
        int, Option("--limit", "-n", min=1, max=500, help="Show at most this many events.")
    ] = 100,
    common: CommonOptions,
) -> None:
    """Show the audit log, the newest events first."""
    if outcome not in {None, "done", "refused"}:
        raise ConfigError(f"--outcome is done or refused, not {outcome!r:.80}")
    start = None if since is None else _parse_since(since)
    common.ask(
        lambda admin: admin.list_audit(
            who=who, subject=subject, outcome=outcome, since=start, before=before, limit=limit
        ),
        _show_audit,
    )


def _parse_since(text: str) -> datetime:
    """Parse the value of --since, which is a time or an age. Raises ConfigError."""
    ago = parse_ago_ms(text)
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
    columns = ("id#", "at", "who", "from", "did", "subject", "group", "outcome", "times#", "server")
    rows = []
    for row in page.rows:
        event = row.event
        time = datetime.fromtimestamp(event.at_ms / 1000, UTC)
        rows.append(
            (
                row.audit_id,
                f"{time:%Y-%m-%dT%H:%M:%SZ}",
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
    show_table(make_table("audit log" if rows else "no such events", columns, rows))
    if page.before is not None:
        show_line(f"older ones: --before {page.before}")
