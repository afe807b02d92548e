"""Rows of the audit log: append, list, and remove by age and number. SQL, synchronous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from msgspec.structs import asdict
from sqlalchemy.engine import Connection

from ...protocol.http.audit import AuditEvent, AuditPage, AuditRow
from ..sql.schema import access_audit

ROWS_AT_ONCE = 10_000
"""Most rows that one transaction deletes: a statement on PostgreSQL has 10 s, and other writers
wait.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSearch:
    """The filter of a listing; None matches everything."""

    who: str | None
    subject: str | None
    outcome: str | None
    since_ms: int
    before: int
    """Upper limit of the ids, exclusive."""
    limit: int


def append_events(connection: Connection, events: Sequence[AuditEvent]) -> None:
    """Store audit events in one statement."""
    if events:
        connection.execute(sa.insert(access_audit), [asdict(event) for event in events])


def read_events(connection: Connection, search: AuditSearch) -> AuditPage:
    """Return a page of events, the newest first."""
    columns = access_audit.c
    chosen = sa.select(access_audit).where(
        columns.audit_id < search.before, columns.at_ms >= search.since_ms
    )
    for name in ("who", "subject", "outcome"):
        wanted = getattr(search, name)
        if wanted is not None:
            chosen = chosen.where(columns[name] == wanted)
    page = chosen.order_by(columns.audit_id.desc()).limit(search.limit + 1)
    rows = [
        AuditRow(
            audit_id=row["audit_id"],
            event=AuditEvent(**{name: row[name] for name in AuditEvent.__struct_fields__}),
        )
        for row in connection.execute(page).mappings()
    ]
    more = len(rows) > search.limit
    rows = rows[: search.limit]
    return AuditPage(rows=rows, before=rows[-1].audit_id if more else None)


def remove_events(connection: Connection, *, older_than_ms: int, rows_max: int) -> bool:
    """
    Remove events that are too old, and the oldest ones above a number.

    Returns:
        True if more are left: the caller continues in another transaction.
    """
    columns = access_audit.c
    newest = connection.execute(sa.select(sa.func.max(columns.audit_id))).scalar_one() or 0
    old = (columns.at_ms < older_than_ms) | (columns.audit_id <= newest - rows_max)
    some = list(
        connection.execute(sa.select(columns.audit_id).where(old).limit(ROWS_AT_ONCE)).scalars()
    )
    if some:
        connection.execute(sa.delete(access_audit).where(columns.audit_id.in_(some)))
    return len(some) == ROWS_AT_ONCE
