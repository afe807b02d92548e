"""Copies tokens, grants and quotas from a backup or another database into a rebuilt one. Runs SQL
synchronously.

Invariants
    Earlier capabilities become invalid, because every principal is marked as changed.
    A running metaserver notices the rows, because the version of the access state increases.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import ConfigError, Reason
from ..access.rows import create_access_state, raise_version
from ..backup.rows import skip_later_ids
from ..sql.schema import access_grants, access_principals, access_quotas, access_tokens, name_limits

RIGHTS = (access_principals, access_tokens, access_grants, access_quotas, name_limits)
"""The copied tables; referenced tables come before those that refer to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRights:
    """Rows of these tables, taken from a backup or another database. Rows of other tables are
    ignored.
    """

    rows: Sequence[tuple[str, dict[str, Any]]]

    def of(self, table: sa.Table) -> list[dict[str, Any]]:
        """Return the rows of one table."""
        return [values for name, values in self.rows if name == table.name]

    @property
    def tokens(self) -> int:
        """Number of tokens that have not been revoked."""
        return sum(not row["revoked_at"] for row in self.of(access_tokens))

    @property
    def grants(self) -> int:
        """Number of rights."""
        return len(self.of(access_grants))

    @property
    def quotas(self) -> int:
        """Number of principals and subjects with limits."""
        return len(
            {row["name"] for table in (access_quotas, name_limits) for row in self.of(table)}
        )


def check_no_rights(connection: Connection) -> None:
    """Check that the database has no rights, because copied rights would mix with them. Raises
    ConfigError.
    """
    for table in RIGHTS:
        if connection.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first():
            raise ConfigError(
                Reason.DATABASE_NOT_EMPTY,
                f"the database has tokens or rights of its own ({table.name} has rows); nothing "
                f"was changed",
            )


def store_rights(connection: Connection, rights: ImportedRights, *, now_ms: int) -> None:
    """
    Store tokens, grants and quotas.

    Args:
        now_ms: the current time, in milliseconds since 1970.

    Raises:
        ConfigError
    """
    check_no_rights(connection)
    create_access_state(connection, secrets.token_hex(16))
    version_columns = {"version": raise_version(connection), "changed_at": now_ms}
    for table in RIGHTS:
        rows = rights.of(table)
        if table is access_principals:
            rows = [row | version_columns for row in rows]
        if rows:
            connection.execute(sa.insert(table), rows)
    skip_later_ids(connection, access_tokens)
