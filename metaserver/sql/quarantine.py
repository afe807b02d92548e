"""Quarantines the copies of broker groups, because the database may name other copies than those
that acks wait for. Runs SQL synchronously.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .schema import copy_sets

VERSIONS_AHEAD = 1 << 20
"""By how much the version of a set rises, so that older requests come too late."""


def quarantine_copies(connection: Connection, reason: str) -> list[str]:
    """Quarantine the copies of all broker groups that have any, and return the groups' names."""
    begin = (
        sa.update(copy_sets)
        .where(sa.or_(copy_sets.c.wanted > 1, copy_sets.c.members != "[]"))
        .values(
            quarantine=reason,
            version=copy_sets.c.version + VERSIONS_AHEAD,
            promoted="",
            handing_to=None,
        )
        .returning(copy_sets.c.broker_group)
    )
    return sorted(connection.execute(begin).scalars())
