"""`keylane outbox` status, redrive, purge: rows that wait, and rows that failed."""

from __future__ import annotations

from ....outbox import OutboxStatus, outbox_status, purge_failed, redrive_failed
from ....protocol.text import counted, key_digest, printable, seconds
from ...options import OutputFormat
from ...screen import make_table, show_json, show_line, show_table

SUBJECT_COLUMNS = (
    "subject", "waiting#", "recorded#", "failed#", "halted#", "refused#", "oldest",
)  # fmt: skip
FAILED_COLUMNS = ("row#", "subject", "key", "why")


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
    if status.failed_rows:
        failed = [
            (row.id, row.subject, key_digest(row.key), printable(row.failure))
            for row in status.failed_rows
        ]
        failed_rows = counted(status.failed, "failed row")
        title = f"{failed_rows} and {status.refused} refused, the first {len(failed)}"
        show_table(make_table(title, FAILED_COLUMNS, failed))
    if not status.owner:
        show_line("no process sends: the lease is free")
    elif status.lease_left_ms:
        show_line(f"{printable(status.owner)} sends")
    else:
        show_line(
            f"{printable(status.owner)} has the lease and is silent: any outbox takes it over"
        )


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
    }


async def redrive(
    database_url: str, output: OutputFormat, *, subject: str | None, prefix: str
) -> None:
    """Send failed and refused rows again."""
    count = await redrive_failed(database_url, subject=subject, prefix=prefix)
    _show_count(output, count, "waits again", "wait again")


async def purge(
    database_url: str, output: OutputFormat, *, subject: str | None, prefix: str
) -> None:
    """Delete failed and refused rows."""
    count = await purge_failed(database_url, subject=subject, prefix=prefix)
    _show_count(output, count, "is deleted", "are deleted")


def _show_count(output: OutputFormat, count: int, becomes: str, become: str) -> None:
    if output is OutputFormat.JSON:
        show_json({"failed_rows": count})
    else:
        show_line(f"{counted(count, 'failed row')} {becomes if count == 1 else become}")
