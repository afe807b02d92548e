"""Stores the quotas of principals and the limits of subjects. Runs SQL synchronously."""

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
    check_shared_limits,
)
from ...protocol.access.rights import check_pattern
from ...protocol.errors import InvalidRequestError, OverloadedError
from ...protocol.http.access import PRINCIPAL, SUBJECT, QuotaRow, SetQuota, UnsetQuota
from ..sql.dialect import insert_or_replace
from ..sql.schema import access_quotas, name_limits
from .rows import PRINCIPALS_MAX, raise_version, record_principal_change

_QUOTAS_MAX = {PRINCIPAL: PRINCIPALS_MAX, SUBJECT: SUBJECT_LIMITS_MAX}


def set_quota(connection: Connection, request: SetQuota, *, now_ms: int) -> None:
    """
    Store limits. Repeating the call with the same limits has no effect.

    Raises:
        InvalidRequestError
        OverloadedError: there are too many quotas.
    """
    _check_name(request.kind, request.name)
    extra_limits = (request.subjects, request.scheduled_bytes)
    if not any((*extra_limits, request.sessions)) or request.quota != NO_QUOTA:
        check_quota(request.quota)
    check_shared_limits(request.name, *extra_limits, of_subjects=request.kind == SUBJECT)
    check_sessions(request.sessions, of_subjects=request.kind == SUBJECT)
    if request.kind == SUBJECT and (request.quota.requests_per_s or request.quota.connections):
        raise InvalidRequestError("the limit of a subject is bytes_per_s alone")
    quotas = {row.name: row for row in read_quotas(connection) if row.kind == request.kind}
    row = QuotaRow(
        request.kind,
        request.name,
        request.quota.bytes_per_s,
        request.quota.requests_per_s,
        request.quota.connections,
        *extra_limits,
        request.sessions,
    )
    if quotas.get(request.name) == row:
        return
    if len(quotas) >= _QUOTAS_MAX[request.kind] and request.name not in quotas:
        raise OverloadedError("too many quotas", limit=_QUOTAS_MAX[request.kind])
    _invalidate(connection, request.kind, request.name, now_ms)
    _store_limits(
        connection, row, access_quotas, keep=request.quota != NO_QUOTA or request.sessions > 0
    )
    if request.kind == SUBJECT:
        _store_limits(connection, row, name_limits, keep=any(extra_limits))


def _store_limits(connection: Connection, row: QuotaRow, table: sa.Table, *, keep: bool) -> None:
    """Store those limits of a quota for which `table` has columns. If `keep` is false, delete the
    quota's row there.
    """
    if keep:
        values = {str(column.name): getattr(row, column.name) for column in table.columns}
        insert_or_replace(connection, table, values)
    else:
        _delete_limits(connection, row.kind, row.name, table)


def _delete_limits(connection: Connection, kind: str, name: str, table: sa.Table) -> bool:
    """Delete a quota's row in a table. Return False if there was none."""
    is_named = table.c.name == name
    if "kind" in table.c:
        is_named &= table.c.kind == kind
    return bool(connection.execute(sa.delete(table).where(is_named)).rowcount)


def unset_quota(connection: Connection, request: UnsetQuota, *, now_ms: int) -> None:
    """Delete limits. Repeating the call has no effect. Raises InvalidRequestError."""
    _check_name(request.kind, request.name)
    tables = (access_quotas, name_limits) if request.kind == SUBJECT else (access_quotas,)
    if sum(_delete_limits(connection, request.kind, request.name, table) for table in tables):
        _invalidate(connection, request.kind, request.name, now_ms)


def read_quotas(connection: Connection) -> list[QuotaRow]:
    """Return all quotas, sorted by kind and name."""
    quota_rows = connection.execute(sa.select(access_quotas))
    rows = {(row.kind, row.name): QuotaRow(**row._mapping) for row in quota_rows}
    for limits_row in connection.execute(sa.select(name_limits)).mappings():
        key = SUBJECT, limits_row["name"]
        row = rows.get(key) or QuotaRow(*key, 0, 0, 0)  # type: ignore[arg-type]
        rows[key] = replace(row, **limits_row)
    return sorted(rows.values())


def index_quotas(rows: list[QuotaRow]) -> tuple[Mapping[str, Quota], Mapping[str, int]]:
    """Return a dict that maps each principal to its quota, and one that maps each subject or
    pattern to its limit in bytes per second.
    """
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


def _invalidate(connection: Connection, kind: str, name: str, now_ms: int) -> None:
    """Invalidate a principal's capabilities. For EVERYBODY, a new version is enough, because all
    capabilities are renewed every few minutes.
    """
    if kind == PRINCIPAL and name != EVERYBODY:
        record_principal_change(connection, name, now_ms)
    else:
        raise_version(connection)
