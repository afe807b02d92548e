"""The rows of a loss that is accepted: what waits for the lost disk goes on, and what is elsewhere is still read first."""

from __future__ import annotations

import pytest

from keylane.metaserver.leases import Readable, readable_partitions
from keylane.metaserver.store_brokers import report_broker
from keylane.metaserver.store_history import operation_views, subject_history
from keylane.metaserver.store_operations import (
    advance_operation,
    claim_operation,
    idle_operations,
    note_steps,
)
from keylane.metaserver.store_plans import plan_operations
from keylane.metaserver.store_subjects import read_route
from keylane.protocol.control import BrokerHeartbeat
from keylane.protocol.errors import LossAcceptedError
from keylane.protocol.ids import PartitionId
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.protocol.routing import OrderStrategy, PartitionState
from sql_rows import Rows

STRICT = OrderStrategy.STRICT
WITHOUT_G1 = Reshape(kind=OperationKind.EVACUATE, broker_group="g1", without_source=True)
LOSE_G1 = Reshape(kind=OperationKind.EVACUATE, broker_group="g1", accept_loss=True)
DAY_MS = 86_400_000


def open_places(rows: Rows, name: str) -> set[str]:
    return {one.broker_group for one in rows.run(read_route, name).open_partitions()}


def lost(rows: Rows, name: str) -> set[int]:
    found = rows.run(subject_history, name).partitions
    return {one.partition.partition_id for one in found if one.lost}


def test_a_strict_subject_leaves_a_lost_disk_open_and_sealed_partitions_alike(rows: Rows) -> None:
    """A dry run tells what is given up and changes nothing; then it is done, and the folder is refused for ever."""
    rows.create("s", 3, order_strategy=STRICT)
    rows.resize("s", 6)
    there = {
        one.partition_id for one in rows.run(read_route, "s").partitions if one.broker_group == "g1"
    }
    states = {one.state for one in rows.run(read_route, "s").partitions}
    assert states == {PartitionState.OPEN, PartitionState.SEALED}
    rows.silence("g1")
    (planned,) = rows.run(plan_operations, LOSE_G1)
    view = planned.view(LOSE_G1)
    assert {one.partition_id for one in view.losses} == there
    assert {one.end_offset for one in view.losses} == {None, 100}
    assert lost(rows, "s") == set()

    ((operation_id, _),) = rows.begin(LOSE_G1)
    assert rows.drive(operation_id) is None
    assert lost(rows, "s") == there
    assert "g1" not in open_places(rows, "s")
    (done,) = rows.run(operation_views, [operation_id])
    assert done.state is OperationState.DONE
    assert {one.partition_id for one in done.losses} == there
    with pytest.raises(LossAcceptedError):
        rows.report("g1")
    empty = BrokerHeartbeat(broker_group="g1", broker_id="new", address="g1:2")
    rows.run(report_broker, empty, ttl_ms=DAY_MS)


def test_an_operation_that_waits_for_a_lost_disk_goes_on(rows: Rows) -> None:
    """One in its seal opens its children; one that had only to fence has nothing left to do."""
    rows.create("fenced", 2, order_strategy=OrderStrategy.BEST_TRIED)
    rows.create("sealing", 3, order_strategy=STRICT)
    (source,) = (
        one for one in rows.run(read_route, "sealing").partitions if one.broker_group == "g1"
    )
    move = Reshape(kind=OperationKind.MOVE, partition_ids=(source.partition_id,), broker_group="g3")
    ((waits, _),) = rows.begin(move)
    rows.silence("g1")
    begun = rows.begin(WITHOUT_G1)
    (fencing,) = (one for one, plan in begun if plan.subject.name == "fenced")
    assert rows.drive(fencing) is OperationState.FENCE
    assert rows.drive(waits) is OperationState.PLAN

    again = {plan.subject.name: number for number, plan in rows.begin(LOSE_G1)}
    rows.drive(again["fenced"])
    rows.drive(waits)
    assert source.partition_id in lost(rows, "sealing")
    assert "g1" not in open_places(rows, "sealing")
    rows.now_ms += 10_000
    for operation_id in rows.run(idle_operations):
        rows.drive(operation_id)
    (view,) = rows.run(operation_views, [fencing])
    assert view.state is OperationState.DONE


def part(number: int, *parents: int, state: PartitionState, lost: bool = False) -> Readable:
    return Readable(
        partition_id=PartitionId(number),
        state=state,
        parents=tuple(PartitionId(one) for one in parents),
        forsaken=lost,
        lost=lost,
    )


@pytest.mark.parametrize(("drained", "readable"), [((), [1]), ((1,), [3])])
def test_a_child_of_a_lost_partition_waits_for_what_that_continued(
    drained: tuple[int, ...], readable: list[int]
) -> None:
    """1 is unread elsewhere, 2 continued it and is lost, 3 continues 2."""
    chain = [
        part(1, state=PartitionState.SEALED),
        part(2, 1, state=PartitionState.EXPIRED, lost=True),
        part(3, 2, state=PartitionState.OPEN),
    ]
    through = {PartitionId(one) for one in drained}
    assert [one.partition_id for one in readable_partitions(chain, through)] == readable


def test_the_loss_of_a_disk_gives_up_nothing_of_another_that_is_silent(rows: Rows) -> None:
    """A resize waits for two silent brokers; the loss of one is accepted, and it waits for the other."""
    rows.create("s", 3, order_strategy=STRICT)
    ((operation_id, _),) = rows.begin(Reshape(kind=OperationKind.RESIZE, subject="s", partitions=1))
    todo = rows.run(claim_operation, operation_id, driver="d", lease_ms=1_000).todo
    rows.run(note_steps, operation_id, dict.fromkeys(one.partition_id for one in todo), "")
    assert rows.run(advance_operation, operation_id) is OperationState.SEAL
    (child,) = rows.run(operation_views, [operation_id])[0].children
    away = sorted({"g1", "g2", "g3"} - {child.broker_group})
    rows.silence(*away)
    here = {one.broker_group: one.partition_id for one in rows.run(read_route, "s").partitions}
    accepted = Reshape(kind=OperationKind.EVACUATE, broker_group=away[0], accept_loss=True)
    rows.begin(accepted)
    assert rows.drive(operation_id) is OperationState.SEAL
    assert lost(rows, "s") == set()
    rows.report(away[1])
    assert rows.drive(operation_id) is None
    assert lost(rows, "s") == {here[away[0]]}
