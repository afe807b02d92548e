"""The lease, which makes sure that one process sends. I/O: SQL.

Each take raises the token, and every write of a holder checks its token first. A holder that was
suspended finds that its token has passed, and stops; PostgreSQL ends the transaction in which it
was suspended. Until then it can only send batches that were recorded, which the broker recognizes
or refuses. So the duration of the lease, measured by the database's clock, decides only how soon
another process takes over.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .settings import LEASE_MS_MAX
from .tables import OutboxTables, database_ms

IDLE_MS_MIN = 5_000
"""Shortest time in milliseconds, if the lease is shorter, after which PostgreSQL ends an idle
transaction that has locked the row of the lease.
"""

TOKENS_PER_DELETION = 1 << 32
"""The high half of the token counts deletions by operators, so that a caller who waits for a row
can distinguish a deleted row from a sent one.
"""


class TokenPassedError(Exception):
    """Another process took the lease, or an operator changed rows: this process must read them
    again.
    """


def take(connection: Connection, tables: OutboxTables, *, owner: str, lease_ms: int) -> int | None:
    """Take the lease for `lease_ms` and return its token; None while another live process has
    it.
    """
    lease = tables.lease
    now = database_ms()
    _end_when_idle(connection, lease_ms)
    # An end that is further away than any lease was written before the clock was set back.
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
    End the lease at once, if `owner` has it, so that another process can take it.

    The token is raised too: a transaction that the holder cancelled may still run in a thread, and
    would renew the lease.
    """
    lease = tables.lease
    connection.execute(
        sa.update(lease).where(lease.c.owner == owner).values(token=lease.c.token + 1, until_ms=0)
    )


def pass_token(connection: Connection, tables: OutboxTables, *, deletes: bool) -> None:
    """
    Lock the row of the lease, and make its holder read everything again; an operator's change
    begins with it.

    Args:
        deletes: the change may delete rows that were not sent; see `deletions`.
    """
    lease = tables.lease
    _end_when_idle(connection, IDLE_MS_MIN)
    step = TOKENS_PER_DELETION if deletes else 1
    connection.execute(sa.update(lease).values(token=lease.c.token + step, until_ms=0, owner=""))


def deletions(token: int) -> int:
    """Return how often operators had deleted rows that were not sent when the lease had this
    token.
    """
    return token // TOKENS_PER_DELETION


def _end_when_idle(connection: Connection, lease_ms: int) -> None:
    """
    Let PostgreSQL end this transaction if this process is suspended in it.

    The transaction locks the row of the lease: otherwise no other process could take the lease, or
    close its outbox, until this process continues.
    """
    if connection.dialect.name == "postgresql":
        setting = sa.literal("idle_in_transaction_session_timeout")
        idle_ms = sa.literal(str(max(lease_ms, IDLE_MS_MIN)))
        connection.execute(sa.select(sa.func.set_config(setting, idle_ms, sa.true())))
