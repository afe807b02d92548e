"""Groups whose leases have to be settled again.  SQL, synchronous."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..sql.schema import groups

_unsettled = (
    sa.update(groups)
    .where(groups.c.group_id == sa.bindparam("of_group"))
    .values(settled=False, version=groups.c.version + 1)
)


def mark_unsettled(connection: Connection, group_id: int) -> None:
    """Note that a group's leases have to be settled; locks the group until the transaction ends."""
    connection.execute(_unsettled, {"of_group": group_id})
