"""Operations canceled before the first seal, and broker groups that get no new partitions, in
SQL.
"""

from __future__ import annotations

from typing import Any

import pytest

from keylane.metaserver.cluster.brokers import broker_views, cordon_broker, writable_groups
from keylane.metaserver.cluster.subjects import open_subject, plan_subject, read_route
from keylane.metaserver.groups import views
from keylane.metaserver.groups.views import read_due_work
from keylane.metaserver.operations import journal
from keylane.metaserver.operations.begin import begin_operations, plan_operations
from keylane.metaserver.operations.journal import (
    cancel_operation,
    claim_operation,
    finish_round,
    idle_operations,
)
from keylane.metaserver.operations.views import operation_views, subject_history
from keylane.metaserver.verify.checks import Views, verify
from keylane.metaserver.verify.service import read_sql_view
from keylane.protocol.control import CreateSubject
from keylane.protocol.errors import (
    Reason,
)
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from support.raising import raises
from support.sql.rows import Rows

FOUR = Reshape(kind=OperationKind.RESIZE, subject="s", partitions=4)


@pytest.fixture
def rows() -> Rows:
    rows = Rows()
    rows.report("g1", "g2", "g3")
    rows.create("s", 2)
    return rows


def begin(rows: Rows, ask: Reshape) -> int:
    ((operation_id, _),) = rows.run(begin_operations, ask, driver="first", lease_ms=500)
    return int(operation_id)


def claim(rows: Rows, operation_id: int, driver: str = "first") -> Any:
    return rows.run(claim_operation, operation_id, driver=driver, lease_ms=500)


def test_cancel_restores_route_and_history(rows: Rows):
    """Route and history are as before; hosted children are sealed; the next operation may begin."""
    before = rows.run(read_route, "s"), rows.run(subject_history, "s")
    operation_id = begin(rows, FOUR)
    children = [partition.partition_id for partition in claim(rows, operation_id).targets]
    rows.run(finish_round, operation_id, {children[0]: None}, "g2 is silent")
    rows.run(cancel_operation, operation_id)
    (view,) = rows.run(operation_views, [operation_id])
    assert (view.state, view.sealed, view.problem) == (OperationState.CANCELED, (), "")
    assert [partition.partition_id for partition in view.children] == children
    assert (rows.run(read_route, "s"), rows.run(subject_history, "s")) == before

    assert rows.run(idle_operations) == [operation_id]
    assert rows.run(read_due_work).operations
    left = claim(rows, operation_id, "second")
    assert [partition.partition_id for partition in left.targets] == children
    assert (
        rows.run(finish_round, operation_id, dict.fromkeys(children, 0)) is OperationState.CANCELED
    )
    assert rows.run(idle_operations) == []
    read = rows.run(lambda connection: connection.execute(journal._idle_query).all())
    assert read == []  # operations that are over are many in time, and are not read again
    rows.clock.advance(60_000)
    assert not rows.run(read_due_work).operations
    with rows.engine.connect() as connection:
        assert views._query_due_work(connection)[
            1
        ]  # nothing is read again until something is written
    view = rows.run(read_sql_view)
    verification = verify(Views(before=view, answers=[], after=view))
    assert [check.violations for check in verification.checks if check.code == "V12"] == [[]]

    rows.resize("s", 4)
    assert len(rows.run(read_route, "s").open_partitions()) == 4


def test_cancel_changes_nothing_when_repeated(rows: Rows):
    """A repeated call changes nothing, also after the next operation has begun."""
    operation_id = begin(rows, FOUR)
    rows.run(cancel_operation, operation_id)
    begin(rows, FOUR)
    rows.run(cancel_operation, operation_id)
    with raises(Reason.OPERATION_RUNNING):
        begin(rows, FOUR)


def test_cancel_is_refused_from_seal_on(rows: Rows):
    """From SEAL on a cancel is refused and changes nothing."""
    operation_id = begin(rows, FOUR)
    while True:
        operation = claim(rows, operation_id)
        if operation is None:
            break
        if operation.state is not OperationState.PLAN:
            with raises(Reason.OPERATION_FORWARD):
                rows.run(cancel_operation, operation_id)
        end = None if operation.state is OperationState.PLAN else 7
        done = dict.fromkeys((partition.partition_id for partition in operation.targets), end)
        rows.run(finish_round, operation_id, done)
    with raises(Reason.OPERATION_FORWARD):
        rows.run(cancel_operation, operation_id)
    assert len(rows.run(read_route, "s").open_partitions()) == 4


@pytest.mark.parametrize("operation_id", [0, -1, 99, 2**70])
def test_cancel_is_refused_when_the_operation_is_unknown(rows: Rows, operation_id: int):
    """An operation without sealed parents has nothing to undo."""
    with raises(Reason.OPERATION_UNKNOWN):
        rows.run(cancel_operation, operation_id)


def test_cancel_stands_when_a_driver_finishes_its_round_later(rows: Rows):
    """A child hosted after the cancel is still sealed; the driver's next step finds the operation
    canceled.
    """
    operation_id = begin(rows, FOUR)
    children = [partition.partition_id for partition in claim(rows, operation_id).targets]
    rows.run(cancel_operation, operation_id)
    assert rows.run(finish_round, operation_id, dict.fromkeys(children)) is OperationState.CANCELED
    assert [partition.partition_id for partition in claim(rows, operation_id).targets] == children


def test_evacuated_group_gets_no_partitions_until_it_is_uncordoned(rows: Rows):
    """No plan uses a cordoned broker group, during and after its evacuation; an operator may
    uncordon it.
    """
    ask = Reshape(kind=OperationKind.EVACUATE, broker_group="g1")
    rows.run(plan_operations, ask)
    assert "g1" in rows.run(writable_groups), "a dry run changes nothing"
    begin(rows, ask)
    assert {broker.broker_group for broker in rows.run(broker_views) if broker.cordoned} == {"g1"}
    assert "g1" not in rows.run(writable_groups)
    rows.create("new", 6)
    route = rows.run(read_route, "new")
    assert {partition.broker_group for partition in route.partitions} == {"g2", "g3"}
    move = Reshape(
        kind=OperationKind.MOVE,
        partition_ids=(route.partitions[0].partition_id,),
        broker_group="g1",
    )
    with raises(Reason.BROKER_CORDONED, match="keylane broker uncordon"):
        begin(rows, move)
    rows.run(cordon_broker, "g1", False)
    assert begin(rows, move)


def test_plan_is_refused_when_every_group_is_cordoned(rows: Rows):
    """The error is typed, and nothing is stored."""
    for group in ("g1", "g2", "g3"):
        rows.run(cordon_broker, group, True)
        rows.run(cordon_broker, group, True)
    with raises(Reason.NOT_ENOUGH_BROKERS):
        begin(rows, FOUR)
    with raises(Reason.BROKER_GROUP_UNKNOWN):
        rows.run(cordon_broker, "nowhere", True)


def test_cordon_stays_when_the_broker_reports_itself(rows: Rows):
    """A broker that reports itself again, from another address, stays cordoned."""
    rows.run(cordon_broker, "g1", True)
    rows.report("g1")
    assert "g1" not in rows.run(writable_groups)


def test_evacuation_is_refused_while_a_partition_moves_to_the_group(rows: Rows):
    """A running move to the broker group refuses the evacuation and the cordon; later the moved
    child leaves too.
    """
    moved = rows.run(read_route, "s").partitions[0].partition_id
    move = Reshape(kind=OperationKind.MOVE, partition_ids=(moved,), broker_group="g3")
    operation_id = begin(rows, move)
    evacuate = Reshape(kind=OperationKind.EVACUATE, broker_group="g3")
    for _ in range(2):
        with raises(Reason.OPERATION_RUNNING) as refused:
            rows.run(begin_operations, evacuate, driver="first", lease_ms=500)
        assert refused.value.operation_id == operation_id
    assert "g3" in rows.run(writable_groups)
    for started in (operation_id, None):
        rows.drive(started or begin(rows, evacuate), driver="first")
    places = {partition.broker_group for partition in rows.run(read_route, "s").open_partitions()}
    assert places == {"g1", "g2"}


def test_evacuation_is_refused_while_a_subject_is_created_on_the_group(rows: Rows):
    """The evacuation is refused by an error of its own, and succeeds when the subject is open."""
    rows.run(plan_subject, CreateSubject(subject="new", partitions=3), subjects_max=9)
    evacuate = Reshape(kind=OperationKind.EVACUATE, broker_group="g3")
    for work in (plan_operations, begin_operations):
        arguments = {} if work is plan_operations else {"driver": "first", "lease_ms": 500}
        with raises(Reason.CREATION_RUNNING):
            rows.run(work, evacuate, **arguments)
    assert "g3" in rows.run(writable_groups)
    rows.run(open_subject, "new")
    assert begin(rows, evacuate)
