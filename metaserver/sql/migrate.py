"""Migrates the schema with Alembic, in the caller's transaction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ... import migrations
from ...protocol.errors import ConfigError
from .schema import metadata

if TYPE_CHECKING:
    from alembic.config import Config  # loaded only where there is something to migrate

HEAD = "0027"
"""The newest revision.  With it an up-to-date database opens without importing Alembic."""
_LOCK = 0x6B65796C616E65


def migrate(connection: Connection) -> None:
    """
    Migrate the schema to HEAD; does nothing if it is there.

    Raises:
        ConfigError: the database was written by a newer keylane.
    """
    lock_schema(connection)
    if _revision(connection) == HEAD:
        return
    from alembic import command
    from alembic.util import CommandError

    try:
        command.upgrade(alembic_config(connection), "head")
    except CommandError as error:
        raise ConfigError(
            f"the database was written by a newer keylane: {error}; use that version, or another database"
        ) from error


def lock_schema(connection: Connection) -> None:
    """Keep other programs that open the database waiting until the transaction ends; again changes nothing."""
    if connection.dialect.name == "postgresql":
        # Two metaservers may start at once; SQLite's writers wait for each other anyway.
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))


def check_revision(connection: Connection) -> None:
    """Raises ConfigError if the schema is not at HEAD."""
    revision = _revision(connection)
    if revision != HEAD:
        raise ConfigError(
            f"the schema of the database is at {revision}, this keylane has {HEAD}; use the keylane that serves it"
        )


def alembic_config(connection: Connection) -> Config:
    """Alembic's configuration for the migrations, in the connection's transaction."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.set_main_option("recursive_version_locations", "true")
    config.attributes |= {"connection": connection, "metadata": metadata}
    return config


def _revision(connection: Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    table = sa.table("alembic_version", sa.column("version_num"))
    return connection.execute(sa.select(table.c.version_num)).scalar_one_or_none()
