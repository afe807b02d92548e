"""Checks whether a principal may have one more consumer. SQL, synchronous.

Two simultaneous joins in different groups may both get the last place, because their transactions
do not wait for each other.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.access.quota import EVERYBODY
from ...protocol.errors import QuotaExceededError, Reason
from ...protocol.http.quotas import PRINCIPAL
from ..sql.dialect import now_ms
from ..sql.schema import access_quotas, sessions

RETRY_AFTER_MS = 5_000

_quotas = sa.select(access_quotas.c.name, access_quotas.c.sessions).where(
    access_quotas.c.kind == PRINCIPAL,
    access_quotas.c.name.in_((EVERYBODY, sa.bindparam("of_principal"))),
)
_live = sa.select(sa.func.count()).where(
    sessions.c.principal == sa.bindparam("of_principal"), sessions.c.expires_at > now_ms()
)


def check_session_quota(connection: Connection, principal: str, *, more: int = 1) -> None:
    """
    Check that a principal may begin `more` sessions; "" has no limit.

    Raises:
        QuotaExceededError: it would have more than its quota, or, if it has none, than the quota of
            EVERYBODY.
    """
    if not principal:
        return
    who = {"of_principal": principal}
    limits = {row.name: row.sessions for row in connection.execute(_quotas, who)}
    limit = limits.get(principal, limits.get(EVERYBODY, 0))
    if limit and connection.execute(_live, who).scalar_one() + more > limit:
        raise QuotaExceededError(
            Reason.SESSION_QUOTA,
            f"{principal!r} has {limit} consumers, and may have no more",
            principal=principal,
            limit=limit,
            retry_after_ms=RETRY_AFTER_MS,
        )
