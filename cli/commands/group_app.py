"""The `keylane group` commands: their options and help."""

from __future__ import annotations

from typing import Annotated

import typer

from ...protocol.routing import ConsumeStrategy
from ..options import (
    META_DEFAULT,
    ConsumerGroupArgument,
    MetaOption,
    OutputFormat,
    OutputOption,
    SubjectArgument,
)
from . import reset

group_app = typer.Typer(
    no_args_is_help=True, help="Look at consumer groups, and set their progress."
)
reset.register(group_app)


@group_app.command("describe")
def group_describe(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show who handles which partition, how far, and how far behind."""
    from ..screen import run
    from .group import describe_group

    run(output, describe_group(meta, output, subject=subject, group=group))


@group_app.command("list")
def group_list(
    subject: SubjectArgument,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List the consumer groups of a subject, and how they consume."""
    from ..screen import run
    from .group import list_groups

    run(output, list_groups(meta, output, subject=subject))


@group_app.command("switch")
def group_switch(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    strategy: Annotated[
        ConsumeStrategy,
        typer.Argument(
            help="exclusive: each partition is one consumer's, in order. "
            "shared: every consumer takes of every partition, without order."
        ),
    ],
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Have a group consume in another way.  Its consumers end; those started for the new way take over."""
    from ..screen import run
    from .group import switch_group

    run(output, switch_group(meta, output, subject=subject, group=group, strategy=strategy))
