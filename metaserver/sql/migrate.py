"""Creates the schema, or migrates it with Alembic, in the caller's transaction. Runs SQL
synchronously.

    no tables ─▶ all tables are created at HEAD, without Alembic; tests compare them with the
                 migrations
    known revision ─▶ migrated to HEAD, and OLDEST_READER is stored
    revision of a keylane before the first release ─▶ refused
    revision of a newer keylane ─▶ used unchanged if the stored oldest reader allows this version;
                                   otherwise refused

As a result, a metaserver with the previous version can still start while a cluster is being
upgraded.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ... import migrations
from ...protocol.errors import ConfigError, Reason
from ...protocol.membership.versions import FIRST_RELEASE, VERSION, parse_version
from .dialect import insert_or_replace
from .schema import facts, metadata

if TYPE_CHECKING:
    from alembic.config import Config  # loaded only if there is something to migrate

HEAD = "0307"
"""The newest revision. Thanks to this constant, Alembic need not be imported to open an up-to-date
database.
"""
OLDEST_READER = "0.2"
"""The oldest minor version whose programs can use a schema at HEAD. It is not changed by migrations
that only add tables, or columns that are nullable or have a default. A migration that removes,
renames or narrows something raises it, and must come one minor version after the last program that
needs the old form.
"""
HEAD_OF = {"0.2": "0200", "0.3": "0307"}
"""Maps each minor version to its revision. A test checks that the migrations after that of
OLDEST_READER only add things.
"""
READER = "oldest reader of the schema"
"""Name of the fact that stores the oldest reader."""
log = logging.getLogger("keylane.metaserver")
_LOCK = 0x6B65796C616E65
_revisions = sa.Table(
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
"""Alembic's own table, as Alembic creates it."""


def migrate(connection: Connection, *, program: str = VERSION) -> None:
    """
    Create the schema, or migrate it to HEAD.

    Does nothing if the schema is at HEAD, or if a newer program has migrated it and this one can
    still use it.

    Args:
        program: the version of keylane that opens the database.

    Raises:
        ConfigError: the database was written before the first release of keylane, or by a newer
            version whose schema this one cannot use.
    """
    lock_schema(connection)
    revision = _read_revision(connection)
    if revision is None and _has_no_tables(connection):
        _create_tables(connection)
    elif revision != HEAD:
        if revision is not None:
            _check_released(connection, revision)
        from alembic import command
        from alembic.util import CommandError

        try:
            command.upgrade(alembic_config(connection), "head")
        except CommandError as error:
            _check_reader(connection, program, error)
            return
    if _read_oldest_reader(connection) != OLDEST_READER:
        insert_or_replace(connection, facts, {"name": READER, "value": OLDEST_READER})


def _has_no_tables(connection: Connection) -> bool:
    """Return True if the database has neither keylane's tables nor Alembic's."""
    tables = set(sa.inspect(connection).get_table_names())
    return tables.isdisjoint({*metadata.tables, _revisions.name})


def _create_tables(connection: Connection) -> None:
    """Create all tables without Alembic, which would occupy memory as long as the metaserver is
    running.
    """
    metadata.create_all(connection, checkfirst=False)
    _revisions.create(connection)
    connection.execute(sa.insert(_revisions).values(version_num=HEAD))


def _read_oldest_reader(connection: Connection) -> str | None:
    query = sa.select(facts.c.value).where(facts.c.name == READER)
    return connection.execute(query).scalar_one_or_none()


def _check_released(connection: Connection, revision: str) -> None:
    """Check that the schema was written by a released version, which stores the oldest reader.
    Raises ConfigError.
    """
    reader = (
        _read_oldest_reader(connection) if sa.inspect(connection).has_table(facts.name) else None
    )
    if reader is None or parse_version(reader) < FIRST_RELEASE:
        raise ConfigError(
            f"the schema of the database is at {revision}, from a keylane before {FIRST_RELEASE}, "
            "the first release: use a new database, because it cannot be upgraded"
        )


def _check_reader(connection: Connection, program: str, error: Exception) -> None:
    """Check that a program can use a schema with an unknown revision. Raises ConfigError."""
    revision = _read_revision(connection)
    reader = _read_oldest_reader(connection)
    assert reader is not None, "checked before"
    if parse_version(program) >= parse_version(reader):
        log.warning(
            "the database schema %s belongs to a newer keylane, but works with this one too; "
            "finish the upgrade",
            revision,
        )
        return
    raise ConfigError(
        Reason.SCHEMA_TOO_NEW,
        f"the database was written by a newer keylane: its schema is at {revision}, this keylane "
        f"{program} has {HEAD};"
        f" use keylane {reader} or newer, or another database",
        revision=revision,
        reader=reader,
    ) from error


def lock_schema(connection: Connection) -> None:
    """Make other programs that open the database wait until the transaction ends. Idempotent."""
    if connection.dialect.name == "postgresql":
        # Two metaservers may start concurrently. In SQLite, writers wait for each other anyway.
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))


def check_revision(connection: Connection) -> None:
    """Check that the schema is at HEAD. Raises ConfigError."""
    revision = _read_revision(connection)
    if revision != HEAD:
        raise ConfigError(
            f"the schema of the database is at {revision}, this keylane has {HEAD}; use the "
            f"keylane that serves it"
        )


def alembic_config(connection: Connection) -> Config:
    """Return Alembic's configuration for migrations in the connection's transaction."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.attributes |= {"connection": connection, "metadata": metadata}
    return config


def _read_revision(connection: Connection) -> str | None:
    if not sa.inspect(connection).has_table(_revisions.name):
        return None
    return connection.execute(sa.select(_revisions.c.version_num)).scalar_one_or_none()
