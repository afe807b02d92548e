"""`keylane group reset`: set the cursors of a consumer group."""

from __future__ import annotations

from ....admin import ResetTo
from ....protocol.clock import SystemClock
from ....protocol.errors import ConfigError
from ....protocol.progress import GroupReset
from ....protocol.reading.instants import ago_ms
from ....protocol.text import counted, listed, plain_number
from ...connection import open_admin
from ...options import OutputFormat, parse_time
from ...screen import make_table, show_json, show_line, show_table


def parse_target(to: str, *, now_ms: int) -> tuple[ResetTo, int | None, int | None]:
    """
    What `--to` says: where to, the offset if it is one, the milliseconds since 1970 if it is a time
    or how long ago.

    Raises:
        ConfigError: neither a word, an offset nor a time.
    """
    if to in {ResetTo.EARLIEST, ResetTo.LATEST}:
        return ResetTo(to), None, None
    offset = plain_number(to)
    if offset is not None:
        return ResetTo.OFFSET, offset, None
    ago = ago_ms(to)
    if ago is not None:
        return ResetTo.TIME, None, max(now_ms - ago, 0)
    try:
        return ResetTo.TIME, None, parse_time(to)
    except ConfigError:
        raise ConfigError(
            f"{to[:80]!r} is not a position: give earliest, latest, an offset, how long ago, "
            "such as -1h, or a time, such as 2024-05-31T12:00:00"
        ) from None


async def reset_group(
    meta: str,
    output: OutputFormat,
    subject: str,
    group: str,
    *,
    to: str | None,
    shift: int | None,
    queue: int | None,
    partition: int | None,
    dry_run: bool,
    live: bool,
) -> None:
    """Set the cursors of a group and show them; with `dry_run` only show them."""
    if (to is None) == (shift is None):
        raise ConfigError("say where to with --to, or by how many messages with --shift")
    target, offset, at_ms = ResetTo.SHIFT, None, None
    if to is not None:
        target, offset, at_ms = parse_target(to, now_ms=SystemClock.wall_ms())
    async with open_admin(meta) as admin:
        reset = await admin.reset_group(
            subject,
            group,
            target,
            offset=offset,
            at_ms=at_ms,
            queue=queue,
            partition_id=partition,
            shift=shift,
            dry_run=dry_run,
            live=live,
        )
    if output is OutputFormat.JSON:
        show_json(reset)
        return
    columns: tuple[str, ...] = ("partition#", "offset#", "before#" if dry_run else "token#")
    rows: list[tuple[int | None, ...]] = [
        (cursor.partition_id, cursor.cursor, cursor.before if dry_run else cursor.token)
        for cursor in reset.cursors
    ]
    if reset.static:
        columns = ("queue#", "logic offset#", *columns)
        rows = [
            (cursor.queue, cursor.logic_cursor, *row)
            for cursor, row in zip(reset.cursors, rows, strict=True)
        ]
    done = "would be set" if dry_run else "was set"
    where = f"to {to}" if to is not None else f"by {shift:+}"
    show_table(make_table(f"{group} on {subject} {done} {where}", columns, rows))
    if line := still_parked_line(reset):
        show_line(line)
    if reset.left_out:
        ids = ", ".join(map(str, reset.left_out))
        show_line(f"left as they were, on silent brokers that were left behind: partitions {ids}")


def still_parked_line(reset: GroupReset) -> str:
    """What stays parked on the partitions that were set; "" if nothing does."""
    still = [cursor for cursor in reset.cursors if cursor.parked]
    if not still:
        return ""
    count = sum(cursor.parked or 0 for cursor in still)
    return (
        f"{counted(count, 'message')} of partitions before these "
        f"{'stays' if count == 1 else 'stay'} parked on "
        f"{counted(len(still), 'partition')} ({listed(cursor.partition_id for cursor in still)}): "
        f"keylane parked list {reset.subject} {reset.group}"
    )


async def cancel_reset(
    meta: str, output: OutputFormat, subject: str, group: str, *, alone: bool
) -> None:
    """Cancel a reset that waits for the group's consumers, and say so; `alone`: no option says what
    to set.
    """
    if not alone:
        raise ConfigError("--cancel ends the reset that is under way, and takes no other option")
    async with open_admin(meta) as admin:
        canceled = await admin.cancel_reset(subject, group)
    if output is OutputFormat.JSON:
        show_json(canceled)
        return
    show_line(
        f"the reset of {group} on {subject} to {canceled.asked.to} is canceled; nothing was changed"
    )
