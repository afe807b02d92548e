"""The tables of fenced effects in the user's database.

keylane_sink           a row for each partition of a consumer group: the highest token with
                       committed effects, and the cluster to which the partition belongs
keylane_sink_done      disjoint ranges of offsets whose effects are committed: a row for each
                       effect, later merged
keylane_sink_version   one row: the version of the tables
"""

from __future__ import annotations

from functools import lru_cache

import sqlalchemy as sa

from ..protocol.errors import Reason, SchemaError
from ..protocol.ids import NAME_CHARS_MAX
from ..user_database.tables import LONG, TABLE_OPTIONS, VersionedTables

DEFAULT_PREFIX = "keylane_sink"
VERSION = 2
"""The version of the tables' schema."""
VERSION_ROW = {"id": 1, "version": VERSION}


class SinkTables(VersionedTables):
    """The tables, whose names start with `prefix`."""

    def __init__(self, prefix: str = DEFAULT_PREFIX) -> None:
        """
        Define the tables for a prefix.

        Raises:
            ConfigError: the prefix is not a lower-case name of at most 40 characters.
        """
        super().__init__(
            prefix,
            VERSION_ROW,
            missing=lambda *text, **details: SchemaError(Reason.SINK_MISSING, *text, **details),
            older=lambda *text, **details: SchemaError(Reason.SINK_OLDER, *text, **details),
            newer=lambda *text, **details: SchemaError(Reason.SINK_NEWER, *text, **details),
        )
        self.fences = sa.Table(
            prefix,
            self.metadata,
            sa.Column("id", LONG, primary_key=True, autoincrement=True),
            sa.Column("subject", sa.String(NAME_CHARS_MAX), nullable=False),
            sa.Column("consumer_group", sa.String(NAME_CHARS_MAX), nullable=False),
            sa.Column("partition_id", sa.BigInteger, nullable=False),
            sa.Column("token", sa.BigInteger, nullable=False),
            sa.Column("cluster_id", sa.String(64), nullable=False),
            sa.UniqueConstraint(
                "partition_id", "consumer_group", "subject", name=f"{prefix}_by_partition"
            ),
            sqlite_autoincrement=True,  # ids are never reused
            **TABLE_OPTIONS,
        )
        self.done_ranges = sa.Table(
            f"{prefix}_done",
            self.metadata,
            sa.Column("fence_id", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column("first_offset", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column("next_offset", sa.BigInteger, nullable=False),
            **TABLE_OPTIONS,
        )
        self.version_table = sa.Table(
            f"{prefix}_version",
            self.metadata,
            sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("version", sa.Integer, nullable=False),
            **TABLE_OPTIONS,
        )


@lru_cache(maxsize=64)
def tables_of(prefix: str) -> SinkTables:
    """Return the tables for a prefix, from a cache if possible.

    Raises:
        ConfigError: the prefix is invalid.
    """
    return SinkTables(prefix)
