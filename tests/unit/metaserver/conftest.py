"""The metaserver's tables, in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from support.sql.rows import Rows


@pytest.fixture
def engine() -> Iterator[sa.Engine]:
    """The engine of a database to which nothing has reported itself."""
    engine = Rows().engine
    yield engine
    engine.dispose()


@pytest.fixture
def rows() -> Rows:
    """A database to which three broker groups have reported themselves."""
    rows = Rows()
    rows.report("g1", "g2", "g3")
    return rows
