"""The lease, which ensures that only one process sends. I/O: SQL.

Taking the lease raises the token, and every write by a holder checks its token first. A holder that
was suspended finds a higher token and stops, and PostgreSQL ends the transaction during which it
was suspended. Until then it can only send recorded batches, which the broker recognizes or refuses.
The duration of the lease, by the database's clock, therefore only determines how soon another
process takes over.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .settings import LEASE_MS_MAX
from .tables import OutboxTables, database_ms

IDLE_MS_MIN = 5_000
"""PostgreSQL ends an idle transaction that has locked the lease's row once the lease's duration has
passed, but not before this many milliseconds.
"""

TOKENS_PER_DELETION = 1 << 32
"""Added to the token for each deletion by an operator: the token's high half counts deletions, so
that callers waiting for a row can tell a deleted row from a sent one.
"""


class TokenChangedError(Exception):
    """The token has changed, because another process took the lease or an operator changed rows.
    The tables must be read again.
    """


def acquire(
    connection: Connection, tables: OutboxTables, *, owner: str, lease_ms: int
) -> int | None:
    """Take the lease for `lease_ms` and return its token, or return None if another process holds
    it.
    """
    lease = tables.lease
    now = database_ms()
    _end_when_idle(connection, lease_ms)
    # An expiry beyond the maximum lease was written before the clock was set back.
    is_free = sa.or_(
        lease.c.until_ms < now, lease.c.until_ms > now + LEASE_MS_MAX, lease.c.owner == owner
    )
    update = connection.execute(
        sa.update(lease)
        .where(is_free)
        .values(token=lease.c.token + 1, owner=owner, until_ms=now + lease_ms)
    )
    if update.rowcount == 0:
        return None
    token: int = connection.execute(sa.select(lease.c.token)).scalar_one()
    return token


def renew(connection: Connection, tables: OutboxTables, *, token: int, lease_ms: int) -> None:
    """
    Extend the lease to `lease_ms` from now, and lock its row until the transaction ends.

    Raises:
        TokenChangedError: the token has changed.
    """
    _end_when_idle(connection, lease_ms)
    lease = tables.lease
    until_ms = database_ms() + lease_ms
    done = connection.execute(
        sa.update(lease).where(lease.c.token == token).values(until_ms=until_ms)
    )
    if done.rowcount == 0:
        raise TokenChangedError


def release(connection: Connection, tables: OutboxTables, *, owner: str) -> None:
    """
    Release the lease if `owner` holds it.

    This also raises the token, because a cancelled transaction of the holder may still be running
    in a thread and would renew the lease.
    """
    lease = tables.lease
    connection.execute(
        sa.update(lease).where(lease.c.owner == owner).values(token=lease.c.token + 1, until_ms=0)
    )


def advance_token(connection: Connection, tables: OutboxTables, *, deletes: bool) -> None:
    """
    Lock the lease's row, and make its holder read everything again. Every change by an operator
    starts with this call.

    Args:
        deletes: True if the change may delete unsent rows; see `deletion_count`.
    """
    lease = tables.lease
    _end_when_idle(connection, IDLE_MS_MIN)
    step = TOKENS_PER_DELETION if deletes else 1
    connection.execute(sa.update(lease).values(token=lease.c.token + step, until_ms=0, owner=""))


def deletion_count(token: int) -> int:
    """Return the number of operators' deletions that a token counts."""
    return token // TOKENS_PER_DELETION


def _end_when_idle(connection: Connection, lease_ms: int) -> None:
    """
    Make PostgreSQL end this transaction if the process is suspended while it is open.

    Otherwise the lock on the lease's row would prevent other processes from taking the lease or
    closing their outboxes until this process resumes.
    """
    if connection.dialect.name == "postgresql":
        setting = sa.literal("idle_in_transaction_session_timeout")
        idle_ms = sa.literal(str(max(lease_ms, IDLE_MS_MIN)))
        connection.execute(sa.select(sa.func.set_config(setting, idle_ms, sa.true())))
