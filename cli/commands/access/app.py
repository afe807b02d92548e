"""`keylane access`: who may do what.  A token is shown once, and is never an argument."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from ...answer import Answer, expanded
from ...options import parse_time
from ...screen import make_table, show_line, show_table
from .audit import show_audit
from .quota import quota_app
from .running import ask_and_show

access_app = typer.Typer(no_args_is_help=True, help="Who may do what: tokens and rights.")
token_app = typer.Typer(no_args_is_help=True, help="Tokens of principals.")
access_app.add_typer(token_app, name="token")
access_app.add_typer(quota_app, name="quota")
access_app.command("audit")(show_audit)

PrincipalArgument = Annotated[str, typer.Argument(help="Who it is about.")]
RightArgument = Annotated[
    str, typer.Argument(help="produce, consume, read, administer or cluster.")
]
SubjectPattern = Annotated[str, typer.Option(help="A subject, or the beginning of names and '*'.")]
GroupPattern = Annotated[
    str, typer.Option(help="A consumer group, or the beginning of names and '*'.")
]


@token_app.command("create")
@expanded
def create_token(
    principal: PrincipalArgument,
    *,
    label: Annotated[str, typer.Option(help="For people: what uses it.")] = "",
    ends: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="When it ends: ISO 8601, UTC without a zone.",
            show_default="never",
        ),
    ] = None,
    answer: Answer,
) -> None:
    """Make a token and print it, this once."""
    until = None if ends is None else datetime.fromtimestamp(parse_time(ends) / 1000, UTC)
    ask_and_show(
        answer.meta,
        answer.output,
        lambda admin: admin.create_token(principal, label=label, ends=until),
        lambda made: show_line(made.token),
    )


@token_app.command("list")
@expanded
def list_tokens(
    principal: Annotated[str | None, typer.Argument(help="Only this principal's.")] = None,
    *,
    answer: Answer,
) -> None:
    """Show all tokens by id; the tokens themselves are not stored."""
    heads = ("id", "principal", "state", "label")
    ask_and_show(
        answer.meta,
        answer.output,
        lambda admin: admin.list_tokens(principal),
        lambda listed: show_table(
            make_table(
                "tokens",
                heads,
                [(row.token_id, row.principal, row.state, row.label) for row in listed.tokens],
            )
        ),
    )


@token_app.command("revoke")
@expanded
def revoke_token(
    token_id: Annotated[int, typer.Argument(min=1, help="As `keylane access token list` says.")],
    *,
    answer: Answer,
) -> None:
    """Revoke a token; brokers know within seconds."""
    ask_and_show(
        answer.meta,
        answer.output,
        lambda admin: admin.revoke_token(token_id),
        lambda view: show_line(f"token {view.token_id} of {view.principal} is {view.state}"),
    )


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
    """Grant a right; without options on every subject and group."""
    ask_and_show(
        answer.meta,
        answer.output,
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
    """Take back exactly this right, with its patterns."""
    ask_and_show(
        answer.meta,
        answer.output,
        lambda admin: admin.revoke_grant(principal, right, subject=subject, group=group),
        lambda _: show_line(f"{principal} has no such right: {right} {subject}, group {group}"),
    )


@access_app.command("list")
@expanded
def list_grants(
    principal: Annotated[str | None, typer.Argument(help="Only this principal's.")] = None,
    *,
    answer: Answer,
) -> None:
    """Show all rights by principal."""
    heads = ("principal", "right", "subject", "group")
    ask_and_show(
        answer.meta,
        answer.output,
        lambda admin: admin.list_grants(principal),
        lambda listed: show_table(
            make_table(
                "rights",
                heads,
                [
                    (row.principal, row.grant.right.value, row.grant.subject, row.grant.group)
                    for row in listed.grants
                ],
            )
        ),
    )


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
    """Say whether a principal has a right, and by which grant."""

    def show(decision: Any) -> None:
        by = decision.by
        why = "nothing grants it" if by is None else f"by {by.right} {by.subject}, group {by.group}"
        show_line(f"{'allowed' if decision.allowed else 'refused'}: {why}")

    ask_and_show(
        answer.meta,
        answer.output,
        lambda admin: admin.check_access(principal, right, subject=subject, group=group),
        show,
    )
