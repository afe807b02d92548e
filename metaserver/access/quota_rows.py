"""Rows of quotas of principals and limits of subjects.  SQL, synchronous."""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.access.principals import check_principal
from ...protocol.access.quota import EVERYBODY, SUBJECT_LIMITS_MAX, Quota, check_quota
from ...protocol.access.rights import check_pattern
from ...protocol.errors import InvalidRequestError, OverloadedError
from ...protocol.http.quotas import PRINCIPAL, SUBJECT, QuotaRow, SetQuota, UnsetQuota
from ..sql.dialect import insert_or_replace
from ..sql.schema import access_quotas
from .rows import PRINCIPALS_MAX, raise_version, touch

_MOST = {PRINCIPAL: PRINCIPALS_MAX, SUBJECT: SUBJECT_LIMITS_MAX}


def set_quota(connection: Connection, ask: SetQuota, *, now_ms: int) -> None:
    """
    Store limits; a repeat changes nothing.

    Raises:
        InvalidNameError, InvalidRequestError
        OverloadedError: there are too many.
    """
    _check_name(ask.kind, ask.name)
    check_quota(ask.quota)
    if ask.kind == SUBJECT and (ask.quota.requests_per_s or ask.quota.connections):
        raise InvalidRequestError("the limit of a subject is bytes_per_s alone")
    quotas = {row.name: row for row in read_quotas(connection) if row.kind == ask.kind}
    row = QuotaRow(
        ask.kind, ask.name, ask.quota.bytes_per_s, ask.quota.requests_per_s, ask.quota.connections
    )
    if quotas.get(ask.name) == row:
        return
    if len(quotas) >= _MOST[ask.kind] and ask.name not in quotas:
        raise OverloadedError("too many quotas", limit=_MOST[ask.kind])
    _changed(connection, ask.kind, ask.name, now_ms)
    values = {name: getattr(row, name) for name in QuotaRow.__struct_fields__}
    insert_or_replace(connection, access_quotas, values)


def unset_quota(connection: Connection, ask: UnsetQuota, *, now_ms: int) -> None:
    """Delete limits; a repeat changes nothing.  Raises InvalidNameError, InvalidRequestError."""
    _check_name(ask.kind, ask.name)
    same = (access_quotas.c.kind == ask.kind) & (access_quotas.c.name == ask.name)
    if connection.execute(sa.delete(access_quotas).where(same)).rowcount:
        _changed(connection, ask.kind, ask.name, now_ms)


def read_quotas(connection: Connection) -> list[QuotaRow]:
    """Return all, sorted."""
    rows = connection.execute(sa.select(access_quotas))
    return sorted(QuotaRow(**row._mapping) for row in rows)


def quotas_of(rows: list[QuotaRow]) -> tuple[Mapping[str, Quota], Mapping[str, int]]:
    """Quotas by principal, and limits by subject or pattern."""
    quotas = {
        row.name: Quota(row.bytes_per_s, row.requests_per_s, row.connections)
        for row in rows
        if row.kind == PRINCIPAL
    }
    return quotas, {row.name: row.bytes_per_s for row in rows if row.kind == SUBJECT}


def _check_name(kind: str, name: str) -> None:
    if kind == SUBJECT:
        check_pattern("subject", name)
    elif name != EVERYBODY:
        check_principal(name)


def _changed(connection: Connection, kind: str, name: str, now_ms: int) -> None:
    """End the capabilities of a principal; those that the quota of everybody is in are renewed within minutes."""
    if kind == PRINCIPAL and name != EVERYBODY:
        touch(connection, name, now_ms)
    else:
        raise_version(connection)
