"""`keylane group reset`: a group's progress set back to messages it has handled, or on past others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..options import (
    META_DEFAULT,
    ConsumerGroupArgument,
    MetaOption,
    OutputFormat,
    OutputOption,
    SubjectArgument,
)
from ..screen import show_line

if TYPE_CHECKING:
    from ...protocol.progress import ResetGroup


def register(group_app: typer.Typer) -> None:
    """Add the command to `keylane group`."""
    group_app.command("reset")(reset)


def reset(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    to: Annotated[
        str,
        typer.Option(
            metavar="earliest|latest|OFFSET|TIME",
            help="An offset goes with --queue (a logic one) or --partition; "
            "a time is ISO 8601, UTC without a zone.",
        ),
    ],
    queue: Annotated[
        int | None, typer.Option(min=0, help="This logic queue only, of a static subject.")
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="This partition only, by id; not of a static subject. Those before and behind it "
            "stay where they are.",
        ),
    ] = None,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Set the progress of a group without live consumers; run again, it finishes what was interrupted."""
    from ..screen import run

    run(output, _reset(meta, output, subject, group, to=to, queue=queue, partition=partition))


def parse_target(to: str, *, queue: int | None, partition: int | None) -> ResetGroup:
    """
    What `--to` says.

    Raises:
        ConfigError: no offset and no time.
    """
    from ...protocol.progress import ResetGroup, ResetTo
    from ..options import parse_time

    where = {"queue": queue, "partition_id": partition}
    if to in {ResetTo.EARLIEST, ResetTo.LATEST}:
        return ResetGroup(to=ResetTo(to), **where)
    if to.isascii() and to.isdecimal():
        return ResetGroup(to=ResetTo.OFFSET, offset=int(to), **where)
    return ResetGroup(to=ResetTo.TIME, at_ms=parse_time(to), **where)


async def _reset(
    meta: str,
    output: OutputFormat,
    subject: str,
    group: str,
    *,
    to: str,
    queue: int | None,
    partition: int | None,
) -> None:
    from ...protocol.ids import check_name
    from ..connection import connect
    from ..screen import make_table, show_json, show_table

    check_name("subject", subject)
    check_name("consumer group", group)
    ask = parse_target(to, queue=queue, partition=partition)
    async with connect(meta) as (client, _network):
        done = await client.reset_group(subject, group, ask)
    if output is OutputFormat.JSON:
        show_json(done)
        return
    rows = [
        (one.queue, one.partition_id, one.cursor, one.logic_cursor, one.token)
        for one in done.cursors
    ]
    columns = ("queue#", "partition#", "offset#", "logic offset#", "token#")
    show_table(make_table(f"{group} on {subject} was set to {to}", columns, rows))
    if done.left_out:
        ids = ", ".join(map(str, done.left_out))
        show_line(f"left as they were, on silent brokers that were left behind: partitions {ids}")
