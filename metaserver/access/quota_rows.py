"""Rows of quotas of principals and limits of subjects. SQL, synchronous."""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from msgspec.structs import replace
from sqlalchemy.engine import Connection

from ...protocol.access.principals import check_principal
from ...protocol.access.quota import (
    EVERYBODY,
    NO_QUOTA,
    SUBJECT_LIMITS_MAX,
    Quota,
    check_quota,
    check_sessions,
    check_together,
)
from ...protocol.access.rights import check_pattern
from ...protocol.errors import InvalidRequestError, OverloadedError
from ...protocol.http.access import PRINCIPAL, SUBJECT, QuotaRow, SetQuota, UnsetQuota
from ..sql.dialect import insert_or_replace
from ..sql.schema import access_quotas, name_limits
from .rows import PRINCIPALS_MAX, raise_version, touch

_MOST = {PRINCIPAL: PRINCIPALS_MAX, SUBJECT: SUBJECT_LIMITS_MAX}


def set_quota(connection: Connection, ask: SetQuota, *, now_ms: int) -> None:
    """
    Store limits; a repeat changes nothing.

    Raises:
        InvalidRequestError
        OverloadedError: there are too many quotas.
    """
    _check_name(ask.kind, ask.name)
    together = (ask.subjects, ask.scheduled_bytes)
    if not any((*together, ask.sessions)) or ask.quota != NO_QUOTA:
        check_quota(ask.quota)
    check_together(ask.name, *together, of_subjects=ask.kind == SUBJECT)
    check_sessions(ask.sessions, of_subjects=ask.kind == SUBJECT)
    if ask.kind == SUBJECT and (ask.quota.requests_per_s or ask.quota.connections):
        raise InvalidRequestError("the limit of a subject is bytes_per_s alone")
    quotas = {row.name: row for row in read_quotas(connection) if row.kind == ask.kind}
    row = QuotaRow(
        ask.kind,
        ask.name,
        ask.quota.bytes_per_s,
        ask.quota.requests_per_s,
        ask.quota.connections,
        *together,
        ask.sessions,
    )
    if quotas.get(ask.name) == row:
        return
    if len(quotas) >= _MOST[ask.kind] and ask.name not in quotas:
        raise OverloadedError("too many quotas", limit=_MOST[ask.kind])
    _changed(connection, ask.kind, ask.name, now_ms)
    _store(connection, row, access_quotas, kept=ask.quota != NO_QUOTA or ask.sessions > 0)
    if ask.kind == SUBJECT:
        _store(connection, row, name_limits, kept=any(together))


def _store(connection: Connection, row: QuotaRow, table: sa.Table, *, kept: bool) -> None:
    """Store a table's part of a quota in place of the earlier row, or delete that row."""
    if kept:
        values = {str(column.name): getattr(row, column.name) for column in table.columns}
        insert_or_replace(connection, table, values)
    else:
        _delete(connection, row.kind, row.name, table)


def _delete(connection: Connection, kind: str, name: str, table: sa.Table) -> bool:
    """Delete the row of a table; returns False if there was none."""
    same = table.c.name == name
    if "kind" in table.c:
        same &= table.c.kind == kind
    return bool(connection.execute(sa.delete(table).where(same)).rowcount)


def unset_quota(connection: Connection, ask: UnsetQuota, *, now_ms: int) -> None:
    """Delete limits; a repeat changes nothing. Raises InvalidRequestError."""
    _check_name(ask.kind, ask.name)
    tables = (access_quotas, name_limits) if ask.kind == SUBJECT else (access_quotas,)
    if sum(_delete(connection, ask.kind, ask.name, table) for table in tables):
        _changed(connection, ask.kind, ask.name, now_ms)


def read_quotas(connection: Connection) -> list[QuotaRow]:
    """Return all quotas, sorted."""
    quotas = connection.execute(sa.select(access_quotas))
    rows = {(row.kind, row.name): QuotaRow(**row._mapping) for row in quotas}
    for limits in connection.execute(sa.select(name_limits)).mappings():
        key = SUBJECT, limits["name"]
        row = rows.get(key) or QuotaRow(*key, 0, 0, 0)  # type: ignore[arg-type]
        rows[key] = replace(row, **limits)
    return sorted(rows.values())


def quotas_of(rows: list[QuotaRow]) -> tuple[Mapping[str, Quota], Mapping[str, int]]:
    """Return principal → quota, and subject or pattern → limit in bytes per second."""
    quotas = {
        row.name: Quota(row.bytes_per_s, row.requests_per_s, row.connections)
        for row in rows
        if row.kind == PRINCIPAL
    }
    limits = {row.name: row.bytes_per_s for row in rows if row.kind == SUBJECT and row.bytes_per_s}
    return quotas, limits


def _check_name(kind: str, name: str) -> None:
    if kind == SUBJECT:
        check_pattern("subject", name)
    elif name != EVERYBODY:
        check_principal(name)


def _changed(connection: Connection, kind: str, name: str, now_ms: int) -> None:
    """End the capabilities of a principal. Those of EVERYBODY are renewed within minutes, so that a
    version is enough.
    """
    if kind == PRINCIPAL and name != EVERYBODY:
        touch(connection, name, now_ms)
    else:
        raise_version(connection)
