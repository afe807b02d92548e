"""`keylane group reset`: set the cursors of a consumer group."""

from __future__ import annotations

from ....admin import ResetTo
from ...connection import open_admin
from ...options import OutputFormat, parse_time
from ...screen import make_table, show_json, show_line, show_table


def parse_target(to: str) -> tuple[ResetTo, int | None, int | None]:
    """
    What `--to` says: where to, the offset if it is one, the milliseconds since 1970 if it is a time.

    Raises:
        ConfigError: neither a word, an offset nor a time.
    """
    if to in {ResetTo.EARLIEST, ResetTo.LATEST}:
        return ResetTo(to), None, None
    if to.isascii() and to.isdecimal():
        return ResetTo.OFFSET, int(to), None
    return ResetTo.TIME, None, parse_time(to)


async def reset_group(
    meta: str,
    output: OutputFormat,
    subject: str,
    group: str,
    *,
    to: str,
    queue: int | None,
    partition: int | None,
) -> None:
    """Set the cursors of a group and show them."""
    target, offset, at_ms = parse_target(to)
    async with open_admin(meta) as admin:
        reset = await admin.reset_group(
            subject,
            group,
            target,
            offset=offset,
            at_ms=at_ms,
            queue=queue,
            partition_id=partition,
        )
    if output is OutputFormat.JSON:
        show_json(reset)
        return
    columns: tuple[str, ...] = ("partition#", "offset#", "token#")
    rows: list[tuple[int, ...]] = [
        (cursor.partition_id, cursor.cursor, cursor.token) for cursor in reset.cursors
    ]
    if reset.static:
        columns = ("queue#", "logic offset#", *columns)
        rows = [
            (cursor.queue, cursor.logic_cursor, *row)
            for cursor, row in zip(reset.cursors, rows, strict=True)
        ]
    show_table(make_table(f"{group} on {subject} was set to {to}", columns, rows))
    if reset.left_out:
        ids = ", ".join(map(str, reset.left_out))
        show_line(f"left as they were, on silent brokers that were left behind: partitions {ids}")
