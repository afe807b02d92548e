"""For how long an operation has had no driver, as `meta verify` shows it."""

from __future__ import annotations

import pytest

from keylane.metaserver.operations.journal import claim_operation, release_operation
from keylane.metaserver.rebuild.plan import plan_rebuild
from keylane.metaserver.rebuild.writer import store_rebuilt
from keylane.metaserver.sql.clock_restart import restart_times_after_boot
from keylane.metaserver.verify.service import read_sql_view
from keylane.protocol.operations import OperationKind, Reshape
from support.sql.kept_by_brokers import HALVES, source, status
from support.sql.rows import Rows


def idle_ms(rows: Rows) -> int:
    (operation,) = rows.run(read_sql_view).operations
    return operation.idle_ms


@pytest.mark.parametrize("how", ["let go", "another boot"])
def test_idle_time_starts_when_the_driver_leaves(rows: Rows, how: str) -> None:
    """A released operation is free at once and idle from then on, whatever the database's clock
    shows.
    """
    ask = Reshape(kind=OperationKind.RESIZE, subject="s", partitions=3)
    rows.create("s", 2)
    ((operation_id, _),) = rows.begin(ask)
    if how == "let go":
        rows.run(release_operation, operation_id, driver="d")
    else:
        rows.run(restart_times_after_boot, "another", broker_ttl_ms=1_000)
    assert idle_ms(rows) == 0
    assert rows.run(claim_operation, operation_id, driver="next", lease_ms=1) is not None
    rows.clock.advance(501)
    assert idle_ms(rows) == 500


def test_idle_time_starts_with_a_rebuild() -> None:
    """An operation of a rebuilt database is idle from the rebuild on."""
    rows = Rows()
    child = status(3, 0, 1024, parents=(1, 2), messages=0)
    plan = plan_rebuild([source(status(1, 0, 512, sealed=True), HALVES[1], child)])
    rows.run(store_rebuilt, plan, route_version=1_000_000)
    assert idle_ms(rows) == 0
