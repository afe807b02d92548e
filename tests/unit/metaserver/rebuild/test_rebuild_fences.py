"""After a rebuild an abandoned source and later operations are operations of their own."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.cluster.subjects import read_route
from keylane.metaserver.operations.journal import claim_operation, finish_round, idle_operations
from keylane.metaserver.rebuild.plan import plan_rebuild
from keylane.metaserver.rebuild.writer import store_rebuilt
from keylane.metaserver.sql.schema import operations
from keylane.protocol.control import BrokerHeartbeat, PartitionStatus
from keylane.protocol.operations import OperationState
from keylane.protocol.routing import OrderStrategy
from support.sql.kept_by_brokers import (
    EXPIRED,
    OPEN,
    PLANNED,
    SEALED,
    rebuilt,
    source,
    states,
    status,
)

BEST = OrderStrategy.BEST_TRIED


def part(
    number: int, start: int, end: int, *parents: int, sealed: bool = False, messages: int = 10
) -> PartitionStatus:
    return status(
        number, start, end, parents=parents, sealed=sealed, messages=messages, strategy=BEST
    )


GIVEN_UP = (part(1, 0, 512), part(2, 512, 1024))
"""Partition 1 is continued by 3 without having been sealed."""
MERGED = (*GIVEN_UP, part(3, 0, 512, 1, sealed=True), part(4, 0, 1024, 2, 3, messages=0))
MOVED_AND_MERGED = (
    *GIVEN_UP,
    part(3, 0, 512, 1, sealed=True),
    part(5, 0, 512, 3, sealed=True),
    part(6, 0, 1024, 2, 5, messages=0),
)


@pytest.mark.parametrize("statuses", [MERGED, MOVED_AND_MERGED])
@pytest.mark.parametrize("first", [0, 1])
def test_fence_and_running_merge_both_end_in_either_order(
    engine: sa.Engine, statuses: tuple[PartitionStatus, ...], first: int
) -> None:
    """In either order of driving, the merge opens its own child alone, and the fence opens no
    partition.
    """
    with engine.begin() as connection:
        store_rebuilt(connection, plan_rebuild([source(*statuses)]), route_version=1_000_000)
        report = BrokerHeartbeat(broker_group="g1", broker_id="id-g1", address="g1:1")
        store_report(connection, report, ttl_ms=60_000)
        idle = idle_operations(connection)
        assert len(idle) == 2
        for operation_id in (idle[first], idle[1 - first]):
            claimed = claim_operation(connection, operation_id, driver="d", lease_ms=1_000)
            assert claimed is not None
            ends = {int(partition.partition_id): 10 for partition in claimed.targets}
            assert len(ends) == 1
            finish_round(connection, operation_id, ends)
        route = read_route(connection, "s")
        left = connection.execute(sa.select(operations.c.state)).scalars().all()
    assert set(left) == {OperationState.DONE}
    opened = [
        int(partition.partition_id) for partition in route.partitions if partition.state is OPEN
    ]
    assert opened == [statuses[-1].partition_id]


def test_partition_counts_as_opened_when_it_has_a_child() -> None:
    """The child of an abandoned source got no message before it was moved on; the source stays
    abandoned.
    """
    subject = rebuilt(
        part(1, 0, 1024), part(2, 0, 1024, 1, sealed=True, messages=0), part(3, 0, 1024, 2)
    )
    assert states(subject) == {1: SEALED, 2: SEALED, 3: OPEN}
    assert [fence.state for fence in subject.fences] == [OperationState.FENCE]
    assert subject.operation is None
    canceled = rebuilt(*GIVEN_UP, part(3, 0, 512, 1, messages=0))
    assert (states(canceled), canceled.fences) == ({1: OPEN, 2: OPEN, 3: EXPIRED}, [])


def test_only_the_child_of_the_running_operation_is_planned() -> None:
    """The merge's child is planned and its parents are open; the source stays sealed and
    abandoned.
    """
    subject = rebuilt(*MOVED_AND_MERGED)
    assert states(subject) == {1: SEALED, 2: OPEN, 3: SEALED, 5: OPEN, 6: PLANNED}
    assert subject.operation is not None
    assert subject.operation.steps.keys() == {2, 5, 6}
    (fence,) = subject.fences
    assert fence.steps.keys() == {1, 3}
