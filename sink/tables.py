"""The tables of fenced effects in the user's database.

keylane_sink           a row for each partition of a consumer group: the highest token with
                       committed effects
keylane_sink_done      disjoint ranges of offsets whose effects are committed: a row for each
                       effect, later merged
keylane_sink_version   one row: the version of the tables
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from ..protocol.errors import ConfigError, Reason, SchemaError
from ..protocol.ids import NAME_CHARS_MAX

DEFAULT_PREFIX = "keylane_sink"
VERSION = 1
"""The version of the tables' schema."""
VERSION_ROW = {"id": 1, "version": VERSION}
_PREFIX = re.compile(r"[a-z][a-z0-9_]{0,39}")
_LONG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # SQLite increments only an INTEGER
_TEXT: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
}
_MISSING_STATES = ("42P01", "(1146,", "no such table")


class SinkTables:
    """The tables whose names begin with `prefix`."""

    def __init__(self, prefix: str = DEFAULT_PREFIX) -> None:
        """
        Raises:
            ConfigError: the prefix is not a lower-case name of at most 40 characters.
        """
        if not isinstance(prefix, str) or _PREFIX.fullmatch(prefix) is None:
            raise ConfigError(f"a table prefix must match {_PREFIX.pattern}, not {prefix!r:.60}")
        self.metadata = sa.MetaData()
        self.fences = sa.Table(
            prefix,
            self.metadata,
            sa.Column("id", _LONG, primary_key=True, autoincrement=True),
            sa.Column("subject", sa.String(NAME_CHARS_MAX), nullable=False),
            sa.Column("consumer_group", sa.String(NAME_CHARS_MAX), nullable=False),
            sa.Column("partition_id", sa.BigInteger, nullable=False),
            sa.Column("token", sa.BigInteger, nullable=False),
            sa.UniqueConstraint(
                "partition_id", "consumer_group", "subject", name=f"{prefix}_by_partition"
            ),
            sqlite_autoincrement=True,  # ids are never reused
            **_TEXT,
        )
        self.done = sa.Table(
            f"{prefix}_done",
            self.metadata,
            sa.Column("fence_id", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column("first_offset", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column("next_offset", sa.BigInteger, nullable=False),
            **_TEXT,
        )
        self.version = sa.Table(
            f"{prefix}_version",
            self.metadata,
            sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("version", sa.Integer, nullable=False),
            **_TEXT,
        )

    def create(self, connection: Connection) -> None:
        """
        Create the missing tables.

        Raises:
            SchemaError: existing tables have another version.
        """
        self.metadata.create_all(connection)
        if connection.execute(sa.select(self.version.c.id)).first() is None:
            connection.execute(sa.insert(self.version), VERSION_ROW)
        self.check(connection)

    def check(self, connection: Connection) -> None:
        """
        Check that the tables exist and have the right version.

        Raises:
            SchemaError: they are missing, or have another version.
        """
        try:
            version = connection.execute(sa.select(self.version.c.version)).scalar_one_or_none()
        except SQLAlchemyError as error:
            raise self.missing_error(error) or error from error
        if version is None:
            raise SchemaError(
                Reason.SINK_MISSING, f"{self.version.name} has no row", table=self.version.name
            )
        if version < VERSION:
            raise SchemaError(
                Reason.SINK_OLDER, table=self.fences.name, version=version, wanted=VERSION
            )
        if version > VERSION:
            raise SchemaError(
                Reason.SINK_NEWER, table=self.fences.name, version=version, wanted=VERSION
            )

    def missing_error(self, error: SQLAlchemyError) -> SchemaError | None:
        """Return a SchemaError if `error` is about a missing table, else None."""
        cause = getattr(error, "orig", None)
        text = f"{getattr(cause, 'sqlstate', '')} {cause}"
        if not any(state in text for state in _MISSING_STATES):
            return None
        return SchemaError(Reason.SINK_MISSING, table=self.fences.name)


@lru_cache(maxsize=64)
def tables_of(prefix: str) -> SinkTables:
    """Return the tables of a prefix, cached.

    Raises:
        ConfigError: the prefix is invalid.
    """
    return SinkTables(prefix)
