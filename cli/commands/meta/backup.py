"""`keylane meta` backup, restore: the file of a backup, written and read."""

from __future__ import annotations

import os
from pathlib import Path

from ....metaserver.backup.service import backup_database, restore_database
from ....protocol.errors import ConfigError, Reason
from ...options import OutputFormat
from ...screen import show_json, show_line
from .database import backup_content, database_settings

PRIVATE_MODE = 0o600


async def backup(
    data: Path | None, database_url: str | None, file: Path, output: OutputFormat
) -> None:
    """Write a new file.  Raises KeylaneError."""

    def write(content: bytes) -> None:
        number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_MODE)
        with open(number, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(number)

    try:
        head = await backup_database(database_settings(data, database_url), write)
    except OSError as error:
        raise ConfigError(
            Reason.BACKUP_FILE, f"cannot write {file}: {error.strerror}", path=str(file)
        ) from error
    if output is OutputFormat.JSON:
        show_json(head)
    else:
        show_line(f"{file} is a complete backup of the database, of schema {head.revision}")


async def restore(
    data: Path | None, database_url: str | None, file: Path, output: OutputFormat
) -> None:
    """Fill an empty database.  Raises KeylaneError."""
    settings = database_settings(data, database_url)
    head, rows = await restore_database(settings, backup_content(file), str(file))
    if output is OutputFormat.JSON:
        show_json({"rows": rows, "cluster": head.cluster, "program": head.program})
        return
    show_line(f"{rows} rows are restored.  Start the metaserver, then: keylane meta verify")
