"""`keylane outbox` status and redrive: rows that wait, failed, or were refused."""

from __future__ import annotations

from ....outbox import OutboxStatus, RowChange, outbox_status, redrive_failed
from ....protocol.text import counted, key_digest, printable, seconds
from ...options import OutputFormat
from ...screen import make_table, show_json, show_line, show_table

SUBJECT_COLUMNS = (
    "subject",
    "waiting#",
    "recorded#",
    "failed#",
    "halted#",
    "refused#",
    "oldest",
)
LISTED_COLUMNS = ("row#", "subject", "key", "why")


async def show_status(
    database_url: str, output: OutputFormat, *, subject: str | None, prefix: str
) -> None:
    """Show the rows by subject, the failed ones, and the lease."""
    status = await outbox_status(database_url, subject=subject, prefix=prefix)
    if output is OutputFormat.JSON:
        show_json(_facts(status))
        return
    rows = [
        (
            each.subject,
            each.waiting,
            each.recorded,
            each.failed,
            each.halted,
            each.refused,
            seconds(each.oldest_age_ms),
        )
        for each in status.subjects
    ]
    show_table(make_table(f"{prefix}: {counted(status.rows, 'row')}", SUBJECT_COLUMNS, rows))
    _show_listed(
        counted(status.failed, "failed row"),
        [(row.id, row.subject, row.key, row.failure) for row in status.failed_rows],
    )
    _show_listed(
        counted(status.refused, "refused row"),
        [(row.id, row.subject, row.key, row.refusal) for row in status.refused_rows],
    )
    if not status.owner:
        show_line("no process sends: the lease is free")
    elif status.lease_left_ms:
        show_line(f"{printable(status.owner)} sends")
    else:
        show_line(
            f"{printable(status.owner)} has the lease and is silent: any outbox takes it over"
        )


def _show_listed(title: str, listed: list[tuple[int, str, bytes, str]]) -> None:
    rows = [(row_id, name, key_digest(key), printable(why)) for row_id, name, key, why in listed]
    if rows:
        show_table(make_table(f"{title}, the first {len(rows)}", LISTED_COLUMNS, rows))


def _facts(status: OutboxStatus) -> dict[str, object]:
    return {
        "rows": status.rows,
        "failed": status.failed,
        "refused": status.refused,
        "oldest_age_ms": status.oldest_age_ms,
        "owner": status.owner,
        "lease_left_ms": status.lease_left_ms,
        "subjects": [
            {name: getattr(each, name) for name in each.__struct_fields__}
            for each in status.subjects
        ],
        "failed_rows": [
            {"id": row.id, "subject": row.subject, "key": key_digest(row.key), "why": row.failure}
            for row in status.failed_rows
        ],
        "refused_rows": [
            {"id": row.id, "subject": row.subject, "key": key_digest(row.key), "why": row.refusal}
            for row in status.refused_rows
        ],
    }


async def redrive(
    database_url: str, output: OutputFormat, *, subject: str | None, prefix: str
) -> None:
    """Send failed and refused rows again."""
    change = await redrive_failed(database_url, subject=subject, prefix=prefix)
    show_change(output, change, "waits again", "wait again")


def rows_of(change: RowChange) -> str:
    """As "1 failed row and 2 refused rows"; "0 rows" if there are none."""
    parts = [
        counted(count, f"{state} row")
        for state in change.__struct_fields__
        if (count := getattr(change, state))
    ]
    return " and ".join(parts) or "0 rows"


def show_change(output: OutputFormat, change: RowChange, becomes: str, become: str) -> None:
    """Show which rows a command has changed."""
    if output is OutputFormat.JSON:
        show_json({state: getattr(change, state) for state in change.__struct_fields__})
    else:
        show_line(f"{rows_of(change)} {becomes if change.rows == 1 else become}")
