"""
A silent broker group is evacuated although operations wait for it: each subject is decided by
itself and reported.
"""

from __future__ import annotations

import pytest

from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.cluster.subjects import plan_subject, read_route
from keylane.metaserver.groups.lease_rows import read_grants, store_drained
from keylane.metaserver.groups.sessions import join_group
from keylane.metaserver.operations.evacuations import plan_evacuations
from keylane.metaserver.operations.journal import (
    claim_operation,
    finish_round,
    idle_operations,
    release_operation,
)
from keylane.metaserver.operations.views import operation_views
from keylane.protocol.control import BrokerHeartbeat, CreateSubject, Join
from keylane.protocol.errors import InvalidRequestError
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.protocol.routing import OrderStrategy
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

BEST_TRIED = OrderStrategy.BEST_TRIED
WITHOUT_G1 = Reshape(kind=OperationKind.EVACUATE, broker_group="g1", without_source=True)


def resize(rows: Rows, subject: str, count: int) -> int:
    ((operation_id, _),) = rows.begin(
        Reshape(kind=OperationKind.RESIZE, subject=subject, partitions=count)
    )
    return int(operation_id)


def hosted(rows: Rows, operation_id: int) -> None:
    """The operation enters SEAL."""
    todo = rows.run(claim_operation, operation_id, driver="d", lease_ms=1_000).targets
    done = dict.fromkeys(partition.partition_id for partition in todo)
    assert rows.run(finish_round, operation_id, done) is OperationState.SEAL


def state(rows: Rows, operation_id: int) -> OperationState:
    (view,) = rows.run(operation_views, [operation_id])
    return OperationState(view.state)


def test_seal_waiting_for_a_lost_group_is_skipped_after_evacuate(rows: Rows):
    """
    A resize whose source dies in SEAL continues without it, as a dry run says; subjects without an
    operation are evacuated.
    """
    rows.create("sealing", 2, order_strategy=BEST_TRIED)
    rows.create("quiet", 2, order_strategy=BEST_TRIED)
    operation_id = resize(rows, "sealing", 1)
    hosted(rows, operation_id)
    rows.silence("g1")
    assert rows.drive(operation_id) is OperationState.SEAL
    rows.run(release_operation, operation_id, driver="d")
    assert rows.run(idle_operations) == []

    planned = rows.run(plan_evacuations, WITHOUT_G1)
    assert [
        (planned_operation.subject.name, planned_operation.continued_id)
        for planned_operation in planned
    ] == [
        ("quiet", 0),
        ("sealing", operation_id),
    ]
    assert rows.run(idle_operations) == [], "a dry run changes nothing"

    (quiet, _), (freed, _) = rows.begin(WITHOUT_G1)
    assert freed == operation_id
    assert rows.run(idle_operations) == [operation_id]
    for running in (operation_id, quiet):
        assert rows.drive(running) is OperationState.FENCE
    (view,) = rows.run(operation_views, [operation_id])
    (lost,) = view.reordered
    assert view.without_source
    assert lost in view.sealed
    for name in ("sealing", "quiet"):
        places = {
            partition.broker_group for partition in rows.run(read_route, name).open_partitions()
        }
        assert "g1" not in places
    rows.report("g1")
    assert rows.drive(operation_id) is None
    assert state(rows, operation_id) is OperationState.DONE


def test_waiting_strict_subject_is_named_and_blocks_no_other(rows: Rows):
    """
    The operations of strict and static subjects stay as they are; the best_tried subject beside
    them is evacuated.
    """
    rows.create("a-strict", 3, order_strategy=OrderStrategy.STRICT)
    rows.create("b-static", 3, order_strategy=BEST_TRIED, static=True)
    rows.create("c-tried", 3, order_strategy=BEST_TRIED)
    (source,) = (
        partition
        for partition in rows.run(read_route, "a-strict").partitions
        if partition.broker_group == "g1"
    )
    move = Reshape(kind=OperationKind.MOVE, partition_ids=(source.partition_id,), broker_group="g3")
    ((strict, _),) = rows.begin(move)
    (source,) = (
        partition
        for partition in rows.run(read_route, "b-static").partitions
        if partition.broker_group == "g1"
    )
    move = Reshape(kind=OperationKind.MOVE, partition_ids=(source.partition_id,), broker_group="g3")
    ((static, _),) = rows.begin(move)
    rows.silence("g1")
    begun = rows.begin(WITHOUT_G1)
    assert [planned.busy_subject and planned.busy_subject.operation_id for _, planned in begun] == [
        strict,
        static,
        None,
    ]
    assert [bool(operation_id) for operation_id, _ in begun] == [False, False, True]
    assert rows.drive(begun[2][0]) is OperationState.FENCE
    for running in (strict, static):
        assert rows.drive(running) is OperationState.PLAN
        assert not rows.run(operation_views, [running])[0].without_source


def test_evacuation_names_children_and_creations_on_their_way_to_the_group(rows: Rows):
    """A child to be hosted there and an unfinished creation cannot be moved: both subjects are
    reported.
    """
    rows.create("resized", 1, order_strategy=BEST_TRIED)
    rows.create("spread", 3)
    operation_id = resize(rows, "resized", 4)
    ask = CreateSubject(subject="unborn", partitions=3, order_strategy=BEST_TRIED)
    rows.run(plan_subject, ask, subjects_max=9)
    rows.silence("g1")
    busy = {
        planned.busy_subject.subject: planned.busy_subject
        for _, planned in rows.begin(WITHOUT_G1)
        if planned.busy_subject
    }
    assert {name: busy_subject.operation_id for name, busy_subject in busy.items()} == {
        "resized": operation_id,
        "unborn": 0,
    }
    assert "cancel it" in busy["resized"].problem
    assert "created" in busy["unborn"].problem


def test_evacuation_says_when_a_continued_operation_leaves_partitions_there(rows: Rows):
    """The operation continues, and the broker group has to be evacuated again afterwards."""
    rows.create("halves", 6, order_strategy=BEST_TRIED)
    here = [
        partition
        for partition in rows.run(read_route, "halves").partitions
        if partition.broker_group == "g1"
    ]
    move = Reshape(
        kind=OperationKind.MOVE, partition_ids=(here[0].partition_id,), broker_group="g2"
    )
    ((operation_id, _),) = rows.begin(move)
    hosted(rows, operation_id)
    rows.silence("g1")
    ((freed, planned),) = rows.begin(WITHOUT_G1)
    assert freed == operation_id
    assert "evacuate again" in planned.busy_subject.problem
    assert rows.drive(operation_id) is OperationState.FENCE
    ((second, planned),) = rows.begin(WITHOUT_G1)
    assert planned.busy_subject is None
    assert rows.drive(second) is OperationState.FENCE
    places = {
        partition.broker_group for partition in rows.run(read_route, "halves").open_partitions()
    }
    assert places == {"g2", "g3"}


def session_of(group: str) -> str:
    return group.encode().hex().zfill(32)


def granted(rows: Rows, group: str) -> list[int]:
    """The partitions granted to the only session of a consumer group."""
    session = session_of(group)
    ask = Join(subject="tried", group=group, session=session, ttl_ms=30_000)
    rows.run(settle_group, rows.run(join_group, ask, sessions_max=9).group_id)
    return [int(grant.partition.partition_id) for grant in rows.run(read_grants, session).grants]


def test_group_reads_the_source_first_when_it_joins_after_its_return(rows: Rows):
    """
    While the parent's end is unknown, the child is granted beside it and stays granted. A group
    that joins when the end is known gets the parent first.
    """
    rows.create("tried", 1, order_strategy=BEST_TRIED)
    (parent,) = rows.run(read_route, "tried").partitions
    source = parent.broker_group
    rows.silence(source)
    ask = Reshape(kind=OperationKind.EVACUATE, broker_group=source, without_source=True)
    ((operation_id, _),) = rows.begin(ask)
    assert rows.drive(operation_id) is OperationState.FENCE
    (child,) = (
        partition.partition_id for partition in rows.run(read_route, "tried").open_partitions()
    )
    assert granted(rows, "early") == [parent.partition_id, child]
    rows.report(source)
    assert rows.drive(operation_id) is None
    assert granted(rows, "early") == [parent.partition_id, child]
    assert granted(rows, "late") == [parent.partition_id]
    rows.run(store_drained, session_of("late"), [parent.partition_id])
    assert granted(rows, "late") == [child]


@pytest.mark.parametrize("flag", ["without_source", "accept_loss"])
def test_evacuation_of_a_broker_killed_moments_ago_says_when_to_ask_again(rows: Rows, flag: str):
    """It cannot be told from one that answers until its ttl is over; what it says is right for
    both, and comes true.
    """
    rows.create("s", 2)
    heartbeat = BrokerHeartbeat(broker_group="g1", broker_id="g1", address="g1:1")
    rows.run(store_report, heartbeat, ttl_ms=10_000)
    rows.clock.advance(2_500)
    ask = Reshape(kind=OperationKind.EVACUATE, broker_group="g1", **{flag: True})
    with pytest.raises(InvalidRequestError) as refused:
        rows.run(plan_evacuations, ask)
    said = refused.value.message
    assert "'g1' reported itself 2.5 s ago, within its ttl" in said
    assert "try again once it is silent, at the latest in 8 s" in said
    assert "If it is running, evacuate it without --without-source and --accept-loss" in said
    rows.clock.advance(8_000)
    assert len(rows.run(plan_evacuations, ask)) == 1
