"""Reads the complete access state. Runs SQL synchronously."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.access.rights import AccessGrant
from ..sql.schema import access_keys, access_principals, access_tokens
from .book import AccessState, KnownToken
from .quota_rows import index_quotas, read_quotas
from .rows import STATE, read_grants


def read_access_state(connection: Connection, now_ms: int) -> AccessState:
    """Return the current access state."""
    state = connection.execute(STATE).one()
    tokens = connection.execute(sa.select(access_tokens).where(access_tokens.c.revoked_at == 0))
    grants: dict[str, list[AccessGrant]] = {}
    for principal, grant in read_grants(connection, None):
        grants.setdefault(principal, []).append(grant)
    keys = connection.execute(sa.select(access_keys).where(access_keys.c.ends_at > now_ms))
    rows = read_quotas(connection)
    quotas, subject_bytes = index_quotas(rows)
    return AccessState(
        cluster=state.cluster,
        version=state.version,
        tokens={row.hash: KnownToken(row.principal, row.begins_at, row.ends_at) for row in tokens},
        grants={principal: tuple(its_grants) for principal, its_grants in grants.items()},
        changed={
            row.principal: (row.version, row.changed_at)
            for row in connection.execute(sa.select(access_principals))
        },
        keys={row.key_id: bytes.fromhex(row.public) for row in keys},
        quotas=quotas,
        subject_bytes=subject_bytes,
        scheduled_bytes={row.name: row.scheduled_bytes for row in rows if row.scheduled_bytes},
    )
