"""The tables of an outbox in the user's database, and the database's clock.

keylane_outbox         a row for each unsent or failed message
keylane_outbox_batch   a row for each recorded batch that is not settled
keylane_outbox_lease   one row: the sending process, its token, and the version of the tables
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from ..protocol.errors import Reason, SchemaError
from ..protocol.ids import NAME_CHARS_MAX
from ..protocol.limits import KEY_BYTES_MAX
from ..user_database.tables import LONG, TABLE_OPTIONS, VersionedTables

DEFAULT_PREFIX = "keylane_outbox"
VERSION = 1
"""The version of the tables' schema."""
WAITING = 0
"""The `batch_id` of a row that is not recorded."""
FAILED = -1
HALTED = -2
"""The `batch_id` of a row behind a failed row of its key."""
REFUSED = -3
"""The `batch_id` of a row that is not sent because it exceeds its subject's size limit; newer rows
of its key are sent.
"""
LEASE_ID = 1
FIRST_LEASE = {"id": LEASE_ID, "version": VERSION, "token": 0, "owner": "", "until_ms": 0}
"""The initial values of the lease's row."""
_BLOB = sa.LargeBinary().with_variant(sa.LargeBinary(1 << 24), "mysql", "mariadb")


class OutboxTables(VersionedTables):
    """The tables, whose names start with `prefix`."""

    def __init__(self, prefix: str = DEFAULT_PREFIX) -> None:
        """
        Define the tables for a prefix.

        Raises:
            ConfigError: the prefix is not a lower-case name of at most 40 characters.
        """
        super().__init__(
            prefix,
            FIRST_LEASE,
            missing=lambda *text, **details: SchemaError(Reason.OUTBOX_MISSING, *text, **details),
            older=lambda *text, **details: SchemaError(Reason.OUTBOX_OLDER, *text, **details),
            newer=lambda *text, **details: SchemaError(Reason.OUTBOX_NEWER, *text, **details),
        )
        self.rows = sa.Table(
            prefix,
            self.metadata,
            sa.Column("id", LONG, primary_key=True, autoincrement=True),
            sa.Column("subject", sa.String(NAME_CHARS_MAX), nullable=False),
            sa.Column("logical", sa.Integer, nullable=False),
            sa.Column("order_key", sa.LargeBinary(KEY_BYTES_MAX), nullable=False),
            sa.Column("value", _BLOB, nullable=False),
            sa.Column("properties", _BLOB, nullable=False),
            sa.Column("added_at_ns", sa.BigInteger, nullable=False),
            sa.Column("batch_id", sa.BigInteger, nullable=False, default=WAITING),
            sa.Column("failure", sa.String(500)),
            sa.Index(f"{prefix}_by_batch", "batch_id", "id"),
            sqlite_autoincrement=True,  # ids are never reused
            **TABLE_OPTIONS,
        )
        self.batches = sa.Table(
            f"{prefix}_batch",
            self.metadata,
            sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column("subject", sa.String(NAME_CHARS_MAX), nullable=False),
            sa.Column("partition_id", sa.BigInteger, nullable=False),
            sa.Column("producer_id", sa.BigInteger, nullable=False),
            sa.Column("epoch", sa.BigInteger, nullable=False),
            sa.Column("sequence", sa.BigInteger, nullable=False),
            **TABLE_OPTIONS,
        )
        self.lease = self.version_table = sa.Table(
            f"{prefix}_lease",
            self.metadata,
            sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("version", sa.Integer, nullable=False),
            sa.Column("token", sa.BigInteger, nullable=False),
            sa.Column("owner", sa.String(200), nullable=False),
            sa.Column("until_ms", sa.BigInteger, nullable=False),
            **TABLE_OPTIONS,
        )


class database_ms(FunctionElement[int]):  # noqa: N801  an SQL function
    """The database's time, in milliseconds since 1970, by which all processes compare leases."""

    type = sa.BigInteger()
    inherit_cache = True
    name = "database_ms"


@compiles(database_ms, "sqlite")
def _sqlite_ms(_element: database_ms, _compiler: Any, **_kwargs: Any) -> str:
    return "CAST(ROUND((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"


@compiles(database_ms, "postgresql")
def _postgresql_ms(_element: database_ms, _compiler: Any, **_kwargs: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"


@compiles(database_ms, "mysql")
@compiles(database_ms, "mariadb")
def _mysql_ms(_element: database_ms, _compiler: Any, **_kwargs: Any) -> str:
    return "CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS SIGNED)"
