"""Unfinished operations, as found by the periodic tasks and by drivers."""

from __future__ import annotations

import sqlalchemy as sa

from keylane.metaserver.cluster.unfinished import UNFINISHED, UNFINISHED_STATES
from keylane.metaserver.operations.journal import cancel_operation
from keylane.metaserver.operations.states import ACTIVE_STATES
from keylane.metaserver.sql.schema import operations, steps
from keylane.protocol.operations import OperationKind, Reshape
from support.sql.rows import Rows


def unfinished(connection: sa.Connection) -> list[int]:
    return list(
        connection.execute(sa.select(operations.c.operation_id).where(UNFINISHED)).scalars()
    )


def test_states_under_way_are_those_in_which_brokers_are_asked() -> None:
    assert set(UNFINISHED_STATES) == set(ACTIVE_STATES)


def test_canceled_operation_is_finished_when_no_step_is_left() -> None:
    rows = Rows()
    rows.report("g1")
    rows.create("s", 1)
    ask = Reshape(kind=OperationKind.RESIZE, subject="s", partitions=2)
    ((operation_id, _),) = rows.begin(ask)
    assert rows.run(unfinished) == [operation_id]
    rows.run(cancel_operation, operation_id)
    assert rows.run(unfinished) == [operation_id]
    rows.run(lambda connection: connection.execute(sa.update(steps).values(done=True)))
    assert rows.run(unfinished) == []
