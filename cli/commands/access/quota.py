"""`keylane access quota`: how much principals may use of each server, and subjects take at each
broker.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ...answer import Answer, expanded
from ...screen import make_table, show_line, show_table
from .running import ask_and_show

quota_app = typer.Typer(no_args_is_help=True, help="Limits of principals and subjects.")

NameArgument = Annotated[
    str, typer.Argument(help="A principal, or '*' for all without a quota of their own.")
]
SubjectOption = Annotated[
    bool, typer.Option("--subject", help="NAME is a subject, or the beginning of names and '*'.")
]


@quota_app.command("set")
@expanded
def set_quota(
    name: NameArgument,
    *,
    bytes_per_s: Annotated[
        int, typer.Option("--bytes", min=0, help="Bytes of messages a second; 0: no limit.")
    ] = 0,
    requests_per_s: Annotated[
        int, typer.Option("--requests", min=0, help="Requests a second; 0: no limit.")
    ] = 0,
    connections: Annotated[
        int, typer.Option(min=0, help="Connections to each broker; 0: no limit.")
    ] = 0,
    sessions: Annotated[
        int,
        typer.Option(min=0, help="Consumers at a time, of all groups together; 0: no limit."),
    ] = 0,
    subjects: Annotated[
        int,
        typer.Option(min=0, help="Subjects that there may be of the pattern NAME; 0: no limit."),
    ] = 0,
    scheduled_bytes: Annotated[
        int,
        typer.Option(
            min=0,
            help="Bytes of messages for a later delivery of all subjects of NAME together at each "
            "broker; 0: no limit.",
        ),
    ] = 0,
    subject: SubjectOption = False,
    answer: Answer,
) -> None:
    """Limit a principal at each server, in place of its limits before; with --subject what subjects
    take.
    """
    ask_and_show(
        answer.meta,
        answer.output,
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
def unset_quota(
    name: NameArgument,
    *,
    subject: SubjectOption = False,
    answer: Answer,
) -> None:
    """End the limits of a principal or, with --subject, of subjects."""
    ask_and_show(
        answer.meta,
        answer.output,
        lambda admin: admin.unset_quota(name, kind="subject" if subject else "principal"),
        lambda _: show_line(f"{name} is not limited"),
    )


@quota_app.command("list")
@expanded
def list_quotas(
    *,
    answer: Answer,
) -> None:
    """Show all limits; 0 is none."""
    heads = (
        "kind",
        "name",
        "bytes/s#",
        "requests/s#",
        "connections#",
        "sessions#",
        "subjects#",
        "scheduled bytes#",
    )
    ask_and_show(
        answer.meta,
        answer.output,
        lambda admin: admin.list_quotas(),
        lambda listed: show_table(
            make_table(
                "quotas",
                heads,
                [
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
                ],
            )
        ),
    )
