"""The metaserver's tables, in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from keylane.metaserver.sql.dialect import prepare_sqlite
from keylane.metaserver.sql.migrate import migrate
from keylane.protocol.clock import SystemClock
from support.sql.rows import Rows


@pytest.fixture
def engine() -> Iterator[sa.Engine]:
    """One connection for all transactions of a test."""
    engine = sa.create_engine("sqlite://", poolclass=sa.pool.StaticPool)
    prepare_sqlite(engine, SystemClock())
    with engine.begin() as connection:
        migrate(connection)
    yield engine
    engine.dispose()


@pytest.fixture
def rows() -> Rows:
    """A database to which three broker groups have reported themselves."""
    rows = Rows()
    rows.report("g1", "g2", "g3")
    return rows
