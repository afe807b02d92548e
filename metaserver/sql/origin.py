"""Reads from which PostgreSQL server a database comes. Runs SQL synchronously.

Invariants
    A standby that is promoted begins a new timeline. It has everything that was answered only if
    the server before it waited for standbys.
"""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

_origin_query = sa.text(
    "SELECT CASE WHEN pg_is_in_recovery() THEN '' "
    "ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END AS timeline, "
    "(SELECT system_identifier FROM pg_control_system()) AS server, "
    "current_setting('synchronous_standby_names') <> '' AND "
    "current_setting('synchronous_commit') NOT IN ('off', 'local') AS is_synchronous"
)


class Origin(NamedTuple):
    """A server of PostgreSQL, and the timeline of its log."""

    server: str
    timeline: str
    is_synchronous: bool
    """True if its commits wait for a standby."""

    def has_lost(self, now: Origin) -> bool:
        """Return True if a database that has moved from here may lack what was answered."""
        if self.server != now.server:
            return True
        return self.timeline != now.timeline and not self.is_synchronous

    @property
    def text(self) -> str:
        """The origin as it is stored."""
        return f"{self.server}/{self.timeline}/{'synchronous' if self.is_synchronous else ''}"


def parse_origin(text: str) -> Origin:
    """Return the origin that was stored as `text`."""
    server, timeline, mode = text.split("/")
    return Origin(server, timeline, mode == "synchronous")


def read_origin(connection: Connection) -> Origin | None:
    """Return where the database comes from; None with SQLite, and where the server does not say
    it, as some managed ones.
    """
    if connection.dialect.name != "postgresql":
        return None
    try:
        with connection.begin_nested():
            row = connection.execute(_origin_query).one()
    except DBAPIError as error:
        if error.connection_invalidated:
            raise
        return None
    return Origin(str(row.server), row.timeline, row.is_synchronous) if row.timeline else None
