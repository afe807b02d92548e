"""Errors about a database do not contain its password, even if its URL is unreadable."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import make_url

from keylane.metaserver.sql.database import open_database
from keylane.metaserver.sql.transactions import storage_error
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import ConfigError, DataFolderError


def test_error_of_the_database_tells_no_password():
    url = make_url("postgresql+asyncpg://kl:secret@db/meta?password=secret")
    told = storage_error(OSError("connection refused"), url)
    assert "postgresql+asyncpg://kl:***@db/meta?password=***" in told.message
    assert "secret" not in str(told)


async def test_url_without_a_port_is_refused_and_tells_no_part_of_its_password(tmp_path: Path):
    """A password with an unescaped @ and : looks like a host with a port."""
    url = "postgresql+asyncpg://kl:a@b:secret@db/meta"
    with pytest.raises(ConfigError) as refused:
        async with open_database(
            folder=tmp_path, url=url, clock=SystemClock(), boot="", broker_ttl_ms=10_000
        ):
            pass
    assert "%40" in refused.value.message
    assert "secret" not in str(refused.value)
    assert refused.value.__suppress_context__


async def test_folder_of_a_broker_is_refused_and_nothing_is_written(tmp_path: Path):
    """A mistyped `--data` made an empty database in it, beside the broker's log."""
    (tmp_path / "identity.json").write_text("{}")
    with pytest.raises(DataFolderError, match="is a broker's data folder"):
        async with open_database(
            folder=tmp_path, url=None, clock=SystemClock(), boot="", broker_ttl_ms=10_000
        ):
            pass
    assert [each.name for each in tmp_path.iterdir()] == ["identity.json"]


@pytest.mark.parametrize(
    ("said", "advice"),
    [("attempt to write a readonly database", "may write"), ("file is not a database", "restore")],
)
def test_advice_for_a_database_that_cannot_be_used_keeps_it(said: str, advice: str):
    """The advice to move it away let an empty one take its place."""
    told = str(storage_error(OSError(said), make_url("sqlite+aiosqlite:///meta/meta.db")))
    assert advice in told
    assert "move" not in told
