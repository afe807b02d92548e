"""Tables of this package in the user's database, one of which stores their version."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from ..protocol.errors import ConfigError, SchemaError

LONG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # SQLite increments only an INTEGER
TABLE_OPTIONS: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
}
_PREFIX = re.compile(r"[a-z][a-z0-9_]{0,39}")
_MISSING_STATES = ("42P01", "(1146,", "no such table")


class VersionedTables:
    """
    Tables whose names begin with `prefix`, which is the name of the first one.

    Args:
        first_row: the initial values of the only row of `version_table`, with the version.
        missing, older, newer: make the SchemaError for tables that do not exist, or have another
            version.
    """

    version_table: sa.Table

    def __init__(
        self,
        prefix: str,
        first_row: dict[str, Any],
        *,
        missing: Callable[..., SchemaError],
        older: Callable[..., SchemaError],
        newer: Callable[..., SchemaError],
    ) -> None:
        """
        Prepare the metadata for a prefix; subclasses define the tables.

        Raises:
            ConfigError: the prefix is not a lower-case name of at most 40 characters.
        """
        if not isinstance(prefix, str) or _PREFIX.fullmatch(prefix) is None:
            raise ConfigError(f"a table prefix must match {_PREFIX.pattern}, not {prefix!r:.60}")
        self.metadata = sa.MetaData()
        self.prefix = prefix
        self.first_row = first_row
        self._missing_error = missing
        self._older_error = older
        self._newer_error = newer

    def create(self, connection: Connection) -> None:
        """
        Create the missing tables.

        Raises:
            SchemaError: existing tables have another version.
        """
        self.metadata.create_all(connection)
        if connection.execute(sa.select(self.version_table.c.id)).first() is None:
            connection.execute(sa.insert(self.version_table), self.first_row)
        self.check(connection)

    def check(self, connection: Connection) -> None:
        """
        Check that the tables exist and have the right version.

        Raises:
            SchemaError: the tables are missing or have another version.
        """
        table = self.version_table
        try:
            version = connection.execute(sa.select(table.c.version)).scalar_one_or_none()
        except SQLAlchemyError as error:
            raise self.missing_error(error) or error from error
        if version is None:
            raise self._missing_error(f"{table.name} has no row", table=table.name)
        wanted = self.first_row["version"]
        if version != wanted:
            make_error = self._older_error if version < wanted else self._newer_error
            raise make_error(table=self.prefix, version=version, wanted=wanted)

    def missing_error(self, error: SQLAlchemyError) -> SchemaError | None:
        """Return a SchemaError if `error` is about a missing table, otherwise None."""
        cause = getattr(error, "orig", None)
        text = f"{getattr(cause, 'sqlstate', '')} {cause}"
        if not any(state in text for state in _MISSING_STATES):
            return None
        return self._missing_error(table=self.prefix)
