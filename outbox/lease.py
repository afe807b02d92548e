"""The lease: one process sends.  Each take has a higher token, and every write of a holder checks
its token first.

A holder that was suspended finds its token passed and stops; PostgreSQL ends the transaction in
which it stood still.  Until then it can only send batches that were recorded, which the broker
recognizes or refuses.  So the time of the lease, the database's, decides only how soon another
process takes over.  I/O: SQL.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .settings import LEASE_MS_MAX
from .tables import OutboxTables, database_ms

IDLE_MS_MIN = 5_000
"""PostgreSQL ends a transaction that has the lease's row locked once it was idle for the time of
the lease, and for this long.
"""

TOKENS_PER_DELETION = 1 << 32
"""The token's high half counts deletions by operators: who waits for a row can tell them from a row
that was sent.
"""


class TokenPassedError(Exception):
    """Another process took the lease, or an operator changed rows: what this process knows of them
    is outdated.
    """


def take(connection: Connection, tables: OutboxTables, *, owner: str, lease_ms: int) -> int | None:
    """The token of the lease, taken for `lease_ms`; None while it is another live process's."""
    lease = tables.lease
    now = database_ms()
    _end_when_idle(connection, lease_ms)
    # A time further away than any lease was written before the clock was set back.
    free = sa.or_(
        lease.c.until_ms < now, lease.c.until_ms > now + LEASE_MS_MAX, lease.c.owner == owner
    )
    taken = connection.execute(
        sa.update(lease)
        .where(free)
        .values(token=lease.c.token + 1, owner=owner, until_ms=now + lease_ms)
    )
    if taken.rowcount == 0:
        return None
    token: int = connection.execute(sa.select(lease.c.token)).scalar_one()
    return token


def renew(connection: Connection, tables: OutboxTables, *, token: int, lease_ms: int) -> None:
    """
    Hold the lease for `lease_ms` from now, and lock its row until the transaction ends.

    Raises:
        TokenPassedError: another process has taken it.
    """
    _end_when_idle(connection, lease_ms)
    lease = tables.lease
    until_ms = database_ms() + lease_ms
    done = connection.execute(
        sa.update(lease).where(lease.c.token == token).values(until_ms=until_ms)
    )
    if done.rowcount == 0:
        raise TokenPassedError


def release(connection: Connection, tables: OutboxTables, *, owner: str) -> None:
    """
    Let another process take the lease at once, if it is the owner's.

    The token passes too: a transaction that its holder cancelled may still run in a thread, and
    would renew the lease.
    """
    lease = tables.lease
    connection.execute(
        sa.update(lease).where(lease.c.owner == owner).values(token=lease.c.token + 1, until_ms=0)
    )


def pass_token(connection: Connection, tables: OutboxTables, *, deletes: bool) -> None:
    """
    Lock the lease's row and have its holder read everything again; for changes by an operator.

    Args:
        deletes: rows may be deleted that were not sent; see `deletions`.
    """
    lease = tables.lease
    _end_when_idle(connection, IDLE_MS_MIN)
    step = TOKENS_PER_DELETION if deletes else 1
    connection.execute(sa.update(lease).values(token=lease.c.token + step, until_ms=0, owner=""))


def deletions(token: int) -> int:
    """How often an operator had deleted rows that were not sent, when the lease had this token."""
    return token // TOKENS_PER_DELETION


def _end_when_idle(connection: Connection, lease_ms: int) -> None:
    """
    Have PostgreSQL end this transaction if this process stands still in it.

    It keeps the lease's row locked: no other process could take the lease, or close its outbox,
    before it goes on.
    """
    if connection.dialect.name == "postgresql":
        setting = sa.literal("idle_in_transaction_session_timeout")
        idle_ms = sa.literal(str(max(lease_ms, IDLE_MS_MIN)))
        connection.execute(sa.select(sa.func.set_config(setting, idle_ms, sa.true())))
