"""What PostgreSQL does for a round of the periodic work, which comes several times a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from keylane.metaserver.groups import views
from keylane.metaserver.sql.database import open_database
from keylane.protocol.clock import SystemClock
from support.postgres import Postgres


def plan(connection: Connection, statement: sa.Select[Any]) -> str:
    """The plan where whole tables are read only for want of an index."""
    connection.execute(sa.text("SET LOCAL enable_seqscan = off"))
    text = statement.compile(connection, compile_kwargs={"literal_binds": True})
    return "\n".join(connection.exec_driver_sql(f"EXPLAIN {text}").scalars())


@pytest.mark.parametrize("statement", ["_due_groups_query", "_other_work_query"])
async def test_round_reads_no_live_session_when_none_has_expired(
    postgres: Postgres, tmp_path: Path, statement: str
):
    """There may be a hundred thousand of them."""
    options = {"clock": SystemClock(), "boot": "", "broker_ttl_ms": 1_000}
    async with open_database(folder=tmp_path, url=postgres.url(), **options) as database:
        steps = await database.read(plan, getattr(views, statement))
    assert "ix_sessions_expires_at" in steps
    assert "Seq Scan on sessions" not in steps
