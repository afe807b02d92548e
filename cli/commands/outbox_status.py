"""The state of an outbox, as `keylane outbox status --output json` shows it."""

from __future__ import annotations

from typing import TypedDict

from ...outbox import OutboxStatus, SubjectRows
from ...protocol.text import key_digest


class RowFields(TypedDict):
    """A failed or refused row, as JSON."""

    id: int
    subject: str
    key: str
    why: str


class StatusFields(TypedDict):
    """The state of an outbox, as JSON."""

    rows: int
    failed: int
    refused: int
    oldest_age_ms: int
    owner: str
    lease_left_ms: int
    subjects: list[SubjectRows]
    failed_rows: list[RowFields]
    refused_rows: list[RowFields]


def status_fields(status: OutboxStatus) -> StatusFields:
    """Return the state of an outbox as JSON fields."""
    return {
        "rows": status.rows,
        "failed": status.failed,
        "refused": status.refused,
        "oldest_age_ms": status.oldest_age_ms,
        "owner": status.owner,
        "lease_left_ms": status.lease_left_ms,
        "subjects": list(status.subjects),
        "failed_rows": [
            {"id": row.id, "subject": row.subject, "key": key_digest(row.key), "why": row.failure}
            for row in status.failed_rows
        ],
        "refused_rows": [
            {"id": row.id, "subject": row.subject, "key": key_digest(row.key), "why": row.refusal}
            for row in status.refused_rows
        ],
    }
