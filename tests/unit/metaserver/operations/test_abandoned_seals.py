"""
Sealed partitions of a broker that died: abandoned and declared if messages may be reordered, else
kept and reported as busy.
"""

from __future__ import annotations

from typing import Any

import pytest

from keylane.metaserver.cluster.subjects import read_route
from keylane.metaserver.groups.lease_rows import read_grants, store_drained
from keylane.metaserver.groups.sessions import join_group
from keylane.metaserver.operations.evacuations import plan_evacuations
from keylane.metaserver.operations.journal import idle_operations
from keylane.metaserver.operations.plan import EMPTY_PLAN
from keylane.metaserver.operations.views import operation_views, subject_history
from keylane.protocol.control import Join
from keylane.protocol.operations import OperationKind, OperationState, OperationView, Reshape
from keylane.protocol.routing import OrderStrategy
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

BEST_TRIED = OrderStrategy.BEST_TRIED
WITHOUT_G1 = Reshape(kind=OperationKind.EVACUATE, broker_group="g1", without_source=True)


def move(rows: Rows, subject: str, to: str) -> tuple[int, int]:
    """Move the only open partition of a subject; returns (the sealed parent, the child)."""
    (source,) = rows.run(read_route, subject).open_partitions()
    ask = Reshape(kind=OperationKind.MOVE, partition_ids=(source.partition_id,), broker_group=to)
    ((operation_id, _),) = rows.begin(ask)
    assert rows.drive(operation_id) is None
    (child,) = rows.run(read_route, subject).open_partitions()
    return source.partition_id, child.partition_id


def created(rows: Rows, subject: str = "s", **settings: Any) -> int:
    """A subject with one partition, on g1."""
    rows.create(subject, 1, **{"order_strategy": BEST_TRIED} | settings)
    (only,) = rows.run(read_route, subject).partitions
    if only.broker_group != "g1":
        move(rows, subject, "g1")
    (only,) = rows.run(read_route, subject).open_partitions()
    return only.partition_id


def view(rows: Rows, operation_id: int) -> OperationView:
    (view,) = rows.run(operation_views, [operation_id])
    assert isinstance(view, OperationView)
    return view


def session_of(group: str) -> str:
    return group.encode().hex().zfill(32)


def granted(rows: Rows, group: str, *through: int, subject: str = "s") -> list[int]:
    """The partitions granted to the only session of a consumer group after it has drained
    `through`.
    """
    session = session_of(group)
    ask = Join(subject=subject, group=group, session=session, ttl_ms=30_000)
    group_id = rows.run(join_group, ask, sessions_max=9).group_id
    rows.run(settle_group, group_id)
    for partition_id in through:
        rows.run(store_drained, session, [partition_id])
        rows.run(settle_group, group_id)
    return [int(grant.partition.partition_id) for grant in rows.run(read_grants, session).grants]


def test_lagging_group_passes_an_abandoned_partition_and_the_operation_declares_it(rows: Rows):
    """
    Its end is unknown until the broker is back. A group that joins then reads the parent first; a
    group that has the child keeps it.
    """
    created(rows)
    parent, child = move(rows, "s", "g2")
    assert granted(rows, "early") == [parent]
    rows.silence("g1")
    assert granted(rows, "early") == [parent]
    ((operation_id, planned),) = rows.begin(WITHOUT_G1)
    assert planned.view(WITHOUT_G1).state is OperationState.PLAN
    assert rows.drive(operation_id) is OperationState.FENCE
    told = view(rows, operation_id)
    assert (told.sealed, told.reordered, told.children) == ((parent,), (parent,), ())
    assert told.cordoned == "g1"
    assert granted(rows, "early") == [parent, child]
    assert granted(rows, "new") == [parent, child]
    assert rows.begin(WITHOUT_G1) == [], "nothing is left to be abandoned"

    rows.report("g1")
    rows.clock.advance(1_000)  # its driver has died
    assert rows.run(idle_operations) == [operation_id]
    assert rows.drive(operation_id) is None
    (kept,) = (
        partition
        for partition in rows.run(subject_history, "s").partitions
        if partition.partition.partition_id == parent
    )
    assert (kept.abandoned, kept.end_offset) == (True, 100)
    assert granted(rows, "early") == [parent, child]
    assert granted(rows, "late") == [parent]
    assert granted(rows, "last", parent) == [child]

    rows.silence("g1")
    ((operation_id, _),) = rows.begin(WITHOUT_G1)
    assert rows.drive(operation_id) is OperationState.FENCE
    assert granted(rows, "late") == [parent, child]


def test_open_partitions_leave_in_the_operation_that_abandons_sealed_ones(rows: Rows):
    """Each subject has one operation: it moves the open partitions and abandons the sealed ones."""
    rows.create("s", 3, order_strategy=BEST_TRIED)
    rows.resize("s", 2)
    there = [
        partition
        for partition in rows.run(read_route, "s").partitions
        if partition.broker_group == "g1"
    ]
    rows.silence("g1")
    ((operation_id, _),) = rows.begin(WITHOUT_G1)
    assert rows.drive(operation_id) is OperationState.FENCE
    told = view(rows, operation_id)
    assert set(told.reordered) == {partition.partition_id for partition in there}
    assert len(told.children) == sum(partition.state == "open" for partition in there) == 1
    open_now = {
        int(partition.partition_id) for partition in rows.run(read_route, "s").open_partitions()
    }
    groups = {
        partition.partition_id: partition for partition in rows.run(read_route, "s").partitions
    }
    alive = {key for key, partition in groups.items() if partition.broker_group != "g1"}
    sealed = alive - open_now
    assert open_now <= set(granted(rows, "g", *sorted(sealed)))


def test_parent_of_an_abandoned_partition_is_still_read_first(rows: Rows):
    """
    A parent of the abandoned partition lives on another broker: its descendants wait until the
    group has drained it.
    """
    created(rows)
    first, second = move(rows, "s", "g2")
    third, fourth = move(rows, "s", "g1")
    assert third == second
    fourth, fifth = move(rows, "s", "g3")
    assert granted(rows, "g", first) == [second]
    rows.silence("g1")
    ((operation_id, _),) = rows.begin(WITHOUT_G1)
    assert rows.drive(operation_id) is OperationState.FENCE
    assert view(rows, operation_id).reordered == (first, fourth)
    assert granted(rows, "g") == [second]
    assert granted(rows, "new") == [first, second]
    assert granted(rows, "g", second) == [fourth, fifth]


@pytest.mark.parametrize(
    "settings",
    [{"order_strategy": OrderStrategy.STRICT}, {"static": True}],
    ids=["strict", "static"],
)
def test_evacuation_names_a_subject_when_it_may_not_be_reordered(
    rows: Rows, settings: dict[str, Any]
):
    """
    No operation begins. The subject is reported as busy while a group has to read there; an
    abandoned partition is not reported.
    """
    created(rows, **settings)
    parent, child = move(rows, "s", "g2")
    assert granted(rows, "g") == [parent]
    rows.silence("g1")
    ((operation_id, planned),) = rows.begin(WITHOUT_G1)
    assert operation_id == 0
    assert planned.plan == EMPTY_PLAN
    assert "until the broker group is back" in planned.busy_subject.problem
    assert (planned.busy_subject.subject, planned.busy_subject.operation_id) == ("s", 0)
    assert granted(rows, "g") == [parent]
    rows.report("g1")
    assert granted(rows, "g", parent) == [child]
    rows.silence("g1")
    assert rows.begin(WITHOUT_G1) == []


def test_evacuation_names_a_subject_when_another_operation_runs_on_it(rows: Rows):
    """The running operation has to be done first; then the same command abandons the sealed
    partition.
    """
    created(rows)
    parent, child = move(rows, "s", "g2")
    ask = Reshape(kind=OperationKind.MOVE, partition_ids=(child,), broker_group="g3")
    ((running, _),) = rows.begin(ask)
    rows.silence("g1")
    ((operation_id, planned),) = rows.begin(WITHOUT_G1)
    assert operation_id == 0
    assert planned.busy_subject.operation_id == running
    assert "evacuate again" in planned.busy_subject.problem
    assert rows.drive(running) is None
    ((operation_id, planned),) = rows.begin(WITHOUT_G1)
    assert planned.busy_subject is None
    assert rows.drive(operation_id) is OperationState.FENCE
    assert view(rows, operation_id).reordered == (parent,)


def test_evacuation_abandons_no_sealed_partition_when_the_group_answers(rows: Rows):
    """A broker group that answers keeps its sealed partitions for the groups that have not read
    them.
    """
    created(rows)
    move(rows, "s", "g2")
    ask = Reshape(kind=OperationKind.EVACUATE, broker_group="g1")
    assert rows.run(plan_evacuations, ask) == []
