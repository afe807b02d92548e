"""What `keylane meta` migrate, backup and restore show while they take long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keylane.cli import status
from keylane.cli.commands import metaserver_database
from keylane.cli.commands.metaserver_database import backup, migrate, restore
from keylane.cli.options import OutputFormat
from keylane.metaserver.backup.file import decode_backup
from keylane.metaserver.sql.migrate import HEAD


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text of each status line, at the beginning and at the end of the work."""
    texts: list[str] = []

    @contextmanager
    def showing(text: str | Callable[[], str]) -> Iterator[None]:
        texts.append(text if isinstance(text, str) else text())
        yield
        texts.append(text if isinstance(text, str) else text())

    monkeypatch.setattr(status, "showing", showing)
    monkeypatch.setattr(metaserver_database, "showing", showing)
    return texts


async def test_database_commands_show_how_far_they_are(
    tmp_path: Path, shown: list[str], capsys: pytest.CaptureFixture[str]
):
    """A migration is one transaction, of which only the time is known."""
    file = tmp_path / "backup"
    await migrate(tmp_path / "old", None, OutputFormat.TABLE)
    assert shown == [f"migrating the schema to revision {HEAD}"] * 2
    shown.clear()
    await backup(tmp_path / "old", None, file, OutputFormat.TABLE)
    _head, rows = decode_backup(file.read_bytes(), str(file))
    assert len(rows) > 1
    assert shown == [
        "backing up the database: 0 rows",
        f"backing up the database: {len(rows)} rows",
    ]
    shown.clear()
    await restore(tmp_path / "new", None, file, OutputFormat.TABLE)
    restoring = f"restoring the database from {file}"
    assert shown == [restoring, f"{restoring}: 100 %"]
    assert f"{len(rows)} rows are restored" in capsys.readouterr().out
