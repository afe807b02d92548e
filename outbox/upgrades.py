"""Upgrades of an outbox's tables: from each older version to the next, in the transaction of `create_tables`.  I/O: SQL.

Version 1 is the first, so there is no step yet.  A step is written beside the version that it makes necessary: it goes
by the names of the tables, because the tables in `tables.py` are those of the present version.  The columns of the
lease's table stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

Step = Callable[[Connection, str], None]
"""Changes tables whose names begin with the given prefix.  MySQL commits each statement by itself, so a step that broke
off is repeated, and passes over what it has done."""
STEPS: Mapping[int, Step] = {}
"""By the version that a step begins at; it ends at the next one."""


def upgrade(
    connection: Connection,
    lease: sa.Table,
    *,
    prefix: str,
    wanted: int,
    steps: Mapping[int, Step] | None = None,
) -> None:
    """
    Bring older tables to the version `wanted`, as far as there are steps; others are not touched.

    Args:
        lease: the lease's table, with one row; it has the version.
        steps: None: those of this keylane.
    """
    steps = STEPS if steps is None else steps
    ask = sa.select(lease.c.version)
    version: int = connection.execute(ask).scalar_one()
    if version >= wanted or version not in steps:
        return
    # One upgrade at a time; the process that sends reads everything again.
    connection.execute(sa.update(lease).values(token=lease.c.token + 1, until_ms=0, owner=""))
    version = connection.execute(ask).scalar_one()
    while version < wanted and version in steps:
        steps[version](connection, prefix)
        version += 1
        connection.execute(sa.update(lease).values(version=version))
