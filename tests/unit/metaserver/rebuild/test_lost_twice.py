"""A database is lost again after a rebuild: children that the first rebuild left out stay out."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.operations.journal import idle_operations, read_operation
from keylane.metaserver.rebuild.plan import plan_rebuild
from keylane.metaserver.rebuild.writer import store_rebuilt
from keylane.protocol.control import BrokerHeartbeat, PartitionStatus
from keylane.protocol.operations import OperationState, StepAction
from support.sql.kept_by_brokers import (
    EXPIRED,
    HALVES,
    OPEN,
    PLANNED,
    SEALED,
    rebuilt,
    source,
    states,
    status,
)


def forgotten(number: int, sealed: bool) -> tuple[PartitionStatus, PartitionStatus]:
    """The children of an unfinished split of partition 1, numbered from `number`."""
    return (
        status(number, 0, 256, parents=(1,), messages=0, sealed=sealed),
        status(number + 1, 256, 512, parents=(1,), messages=0, sealed=sealed),
    )


@pytest.mark.parametrize("sealed", [False, True])
def test_second_rebuild_leaves_out_what_the_first_left_out(engine: sa.Engine, sealed: bool) -> None:
    """
    The first rebuild seals canceled children at their brokers. The second leaves them out as well,
    in every state of the seals and of the operation begun since.
    """
    first = plan_rebuild([source(*HALVES, *forgotten(3, False))])
    with engine.begin() as connection:
        store_rebuilt(connection, first, route_version=1_000_000)
        assert idle_operations(connection) == []
        report = BrokerHeartbeat(broker_group="g1", broker_id="id-g1", address="g1:1")
        store_report(connection, report, ttl_ms=60_000)
        (operation_id,) = idle_operations(connection)
        left = read_operation(connection, operation_id)
    assert left.state is OperationState.CANCELED
    assert [partition.partition_id for partition in left.targets] == [3, 4]

    old = (*HALVES[1:], *forgotten(3, sealed))
    done = rebuilt(status(1, 0, 512, sealed=True), *old, *forgotten(5, False))
    assert states(done) == {1: SEALED, 2: OPEN, 3: EXPIRED, 4: EXPIRED, 5: OPEN, 6: OPEN}
    assert done.operation is None
    whole = status(7, 0, 1024, parents=(1, 2), messages=0)
    under_way = rebuilt(status(1, 0, 512, sealed=True), *old, whole)
    assert states(under_way) == {1: OPEN, 2: OPEN, 3: EXPIRED, 4: EXPIRED, 7: PLANNED}
    again = rebuilt(HALVES[0], *old, *forgotten(5, False))
    assert states(again) == {1: OPEN, 2: OPEN} | dict.fromkeys((3, 4, 5, 6), EXPIRED)
    given_up = rebuilt(HALVES[0], *old, status(5, 0, 512, parents=(1,)))
    assert states(given_up) == {1: SEALED, 2: OPEN, 3: EXPIRED, 4: EXPIRED, 5: OPEN}
    for running in (done, under_way, again, given_up):
        assert running.canceled_operation is not None
        assert {key: running.canceled_operation.steps[key] for key in (3, 4)} == dict.fromkeys(
            (3, 4), (StepAction.SEAL, sealed)
        )


def test_older_of_two_interrupted_operations_is_left_out_whole() -> None:
    """A resize to three was canceled, then one of its two parents split: no child of the resize
    comes back.
    """
    cut = (
        status(3, 0, 341, parents=(1,), messages=0),
        status(4, 341, 682, parents=(1, 2), messages=0),
        status(5, 682, 1024, parents=(2,), messages=0),
    )
    subject = rebuilt(status(1, 0, 512, sealed=True), HALVES[1], *cut, *forgotten(6, False))
    left_out = dict.fromkeys((3, 4, 5), EXPIRED)
    assert states(subject) == {1: SEALED, 2: OPEN, 6: OPEN, 7: OPEN} | left_out
    assert subject.operation is None
