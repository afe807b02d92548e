"""The rows of an accepted loss: operations continue, and grandparents are read first."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.announcements import unannounced_children
from keylane.metaserver.cluster.brokers import cordon_broker, store_report, writable_groups
from keylane.metaserver.cluster.removals import _delete_group_rows
from keylane.metaserver.cluster.subjects import find_subject, read_route
from keylane.metaserver.groups.leases import GroupPartition, readable_partitions
from keylane.metaserver.groups.sessions import join_group
from keylane.metaserver.groups.views import read_group
from keylane.metaserver.metrics import _read
from keylane.metaserver.operations.begin import plan_operations
from keylane.metaserver.operations.journal import claim_operation, finish_round, idle_operations
from keylane.metaserver.operations.views import operation_views, subject_history
from keylane.metaserver.sql.clock_restart import restart_times
from keylane.metaserver.sql.schema import drained
from keylane.metaserver.starts.rows import begin_group, read_start_scope
from keylane.protocol.control import BrokerHeartbeat, Join
from keylane.protocol.errors import Reason
from keylane.protocol.groups import CreateGroup
from keylane.protocol.ids import PartitionId
from keylane.protocol.operations import GroupLoss, OperationKind, OperationState, Reshape
from keylane.protocol.routing import OrderStrategy, PartitionState
from support.raising import raises
from support.sql.rows import Rows

STRICT = OrderStrategy.STRICT
WITHOUT_G1 = Reshape(kind=OperationKind.EVACUATE, broker_group="g1", without_source=True)
LOSE_G1 = Reshape(kind=OperationKind.EVACUATE, broker_group="g1", accept_loss=True)
DAY_MS = 86_400_000


def open_places(rows: Rows, name: str) -> set[str]:
    return {partition.broker_group for partition in rows.run(read_route, name).open_partitions()}


def lost(rows: Rows, name: str) -> set[int]:
    history = rows.run(subject_history, name).partitions
    return {entry.partition.partition_id for entry in history if entry.lost}


def test_strict_subject_leaves_a_lost_disk_with_all_its_partitions(rows: Rows) -> None:
    """A dry run lists the losses and changes nothing; the real one refuses the folder for ever."""
    rows.create("s", 3, order_strategy=STRICT)
    rows.resize("s", 6)
    there = {
        partition.partition_id
        for partition in rows.run(read_route, "s").partitions
        if partition.broker_group == "g1"
    }
    states = {partition.state for partition in rows.run(read_route, "s").partitions}
    assert states == {PartitionState.OPEN, PartitionState.SEALED}
    rows.silence("g1")
    (planned,) = rows.run(plan_operations, LOSE_G1)
    view = planned.view(LOSE_G1)
    assert {loss.partition_id for loss in view.losses} == there
    assert {loss.end_offset for loss in view.losses} == {None, 100}
    assert lost(rows, "s") == set()

    ((operation_id, _),) = rows.begin(LOSE_G1)
    assert rows.drive(operation_id) is None
    assert lost(rows, "s") == there
    assert "g1" not in open_places(rows, "s")
    (done,) = rows.run(operation_views, [operation_id])
    assert done.state is OperationState.DONE
    assert {loss.partition_id for loss in done.losses} == there
    with raises(Reason.FOLDER_GIVEN_UP):
        rows.report("g1")
    empty = BrokerHeartbeat(broker_group="g1", broker_id="new", address="g1:2")
    rows.run(store_report, empty, ttl_ms=DAY_MS)


@pytest.mark.parametrize("clock", ["continues", "restarts"])
def test_lost_disk_takes_no_new_partition_before_an_empty_folder_reports_itself(
    rows: Rows, clock: str
) -> None:
    """A partition planned there would keep the empty folder out for ever."""
    rows.create("s", 3, order_strategy=STRICT)
    rows.silence("g1")
    ((operation_id, _),) = rows.begin(LOSE_G1)
    rows.drive(operation_id)
    rows.run(cordon_broker, "g1", False)
    if clock == "restarts":
        rows.run(restart_times, broker_ttl_ms=DAY_MS)
    assert "g1" not in rows.run(writable_groups)
    with raises(Reason.FOLDER_GIVEN_UP):
        rows.report("g1")
    rows.resize("s", 6)
    assert "g1" not in open_places(rows, "s")

    empty = BrokerHeartbeat(broker_group="g1", broker_id="new", address="g1:2")
    rows.run(store_report, empty, ttl_ms=DAY_MS)
    assert "g1" in rows.run(writable_groups)


def test_operation_continues_when_the_disk_it_waits_for_is_lost(rows: Rows) -> None:
    """An operation in SEAL opens its children; one that had only to fence is done."""
    rows.create("fenced", 2, order_strategy=OrderStrategy.BEST_TRIED)
    rows.create("sealing", 3, order_strategy=STRICT)
    (source,) = (
        partition
        for partition in rows.run(read_route, "sealing").partitions
        if partition.broker_group == "g1"
    )
    move = Reshape(kind=OperationKind.MOVE, partition_ids=(source.partition_id,), broker_group="g3")
    ((waits, _),) = rows.begin(move)
    rows.silence("g1")
    begun = rows.begin(WITHOUT_G1)
    (fencing,) = (operation_id for operation_id, plan in begun if plan.subject.name == "fenced")
    assert rows.drive(fencing) is OperationState.FENCE
    assert rows.drive(waits) is OperationState.PLAN

    again = {plan.subject.name: number for number, plan in rows.begin(LOSE_G1)}
    rows.drive(again["fenced"])
    rows.drive(waits)
    assert source.partition_id in lost(rows, "sealing")
    assert "g1" not in open_places(rows, "sealing")
    rows.clock.advance(10_000)
    for operation_id in rows.run(idle_operations):
        rows.drive(operation_id)
    (view,) = rows.run(operation_views, [fencing])
    assert view.state is OperationState.DONE


def test_dry_run_names_the_losses_of_a_running_operation(rows: Rows) -> None:
    """An evacuation with the broker's help has begun when the broker's disk is lost: what would be
    given up is shown.
    """
    rows.create("s", 2, order_strategy=STRICT)
    there = {
        partition.partition_id
        for partition in rows.run(read_route, "s").partitions
        if partition.broker_group == "g1"
    }
    rows.begin(Reshape(kind=OperationKind.EVACUATE, broker_group="g1"))
    rows.silence("g1")
    (planned,) = rows.run(plan_operations, LOSE_G1)
    assert planned.continued_id
    assert {loss.partition_id for loss in planned.losses} == there

    rows.begin(LOSE_G1)
    assert rows.drive(planned.continued_id) is None
    assert lost(rows, "s") == there


def test_losses_of_groups_stay_known_when_the_operation_is_done(rows: Rows) -> None:
    """By group and partition, with what is known of their number; not for a group that drained it,
    or came later.
    """
    rows.create("s", 3, order_strategy=STRICT)
    rows.resize("s", 6)
    there = {
        partition.partition_id: partition.state
        for partition in rows.run(read_route, "s").partitions
        if partition.broker_group == "g1"
    }
    sealed = next(key for key, state in there.items() if state is PartitionState.SEALED)
    for group in ("behind", "through", "deleted"):
        rows.run(
            begin_group, rows.run(read_start_scope, "s", group), group, CreateGroup(), cursors={}
        )
    through, deleted = (
        rows.run(read_start_scope, "s", each).group_id for each in ("through", "deleted")
    )
    rows.run(
        lambda connection: connection.execute(
            sa.insert(drained), [{"group_id": through, "partition_id": key} for key in there]
        )
    )
    rows.silence("g1")
    (planned,) = rows.run(plan_operations, LOSE_G1)
    would = {loss.partition_id: loss.losses for loss in planned.view(LOSE_G1).losses}
    most = {key: 100 if key == sealed else None for key in there}
    assert would == {
        key: (
            GroupLoss(group="behind", messages_max=most[key]),
            GroupLoss(group="deleted", messages_max=most[key]),
        )
        for key in there
    }
    ((operation_id, _),) = rows.begin(LOSE_G1)
    rows.drive(operation_id)
    rows.run(
        begin_group, rows.run(read_start_scope, "s", "later"), "later", CreateGroup(), cursors={}
    )
    (done,) = rows.run(operation_views, [operation_id])
    assert {loss.partition_id: loss.losses for loss in done.losses} == would
    for group, lost_ids in {"behind": set(there), "through": set(), "later": set()}.items():
        given_up = rows.run(read_group, "s", group).given_up
        assert {loss.partition_id: loss.messages_max for loss in given_up} == {
            key: most[key] for key in lost_ids
        }
    assert {loss.broker_group for loss in rows.run(read_group, "s", "behind").given_up} == {"g1"}
    figures = rows.run(_read)
    behind = (("subject", "s"), ("group", "behind"))
    assert figures.given_up[behind] == 100
    assert figures.given_up_partitions[behind] == len(there)
    rows.run(_delete_group_rows, [deleted])
    assert set(rows.run(_read).given_up) == {behind}


def part(number: int, *parents: int, state: PartitionState, lost: bool = False) -> GroupPartition:
    return GroupPartition(
        partition_id=PartitionId(number),
        state=state,
        parents=tuple(PartitionId(partition_id) for partition_id in parents),
        abandoned=lost,
        lost=lost,
    )


@pytest.mark.parametrize(("drained", "readable"), [((), [1]), ((1,), [3])])
def test_child_of_a_lost_partition_waits_for_its_grandparents(
    drained: tuple[int, ...], readable: list[int]
) -> None:
    """1 is unread on another broker, its child 2 is lost, 3 is the child of 2."""
    chain = [
        part(1, state=PartitionState.SEALED),
        part(2, 1, state=PartitionState.EXPIRED, lost=True),
        part(3, 2, state=PartitionState.OPEN),
    ]
    through = {PartitionId(partition_id) for partition_id in drained}
    assert [partition.partition_id for partition in readable_partitions(chain, through)] == readable


def test_loss_of_a_disk_spares_another_silent_one(rows: Rows) -> None:
    """A resize waits for two silent brokers; the loss of one is accepted, and it waits for the
    other.
    """
    rows.create("s", 3, order_strategy=STRICT)
    ((operation_id, _),) = rows.begin(Reshape(kind=OperationKind.RESIZE, subject="s", partitions=1))
    todo = rows.run(claim_operation, operation_id, driver="d", lease_ms=1_000).targets
    hosted = dict.fromkeys(partition.partition_id for partition in todo)
    assert rows.run(finish_round, operation_id, hosted) is OperationState.SEAL
    (child,) = rows.run(operation_views, [operation_id])[0].children
    away = sorted({"g1", "g2", "g3"} - {child.broker_group})
    rows.silence(*away)
    here = {
        partition.broker_group: partition.partition_id
        for partition in rows.run(read_route, "s").partitions
    }
    accepted = Reshape(kind=OperationKind.EVACUATE, broker_group=away[0], accept_loss=True)
    rows.begin(accepted)
    assert rows.drive(operation_id) is OperationState.SEAL
    assert lost(rows, "s") == set()
    rows.report(away[1])
    assert rows.drive(operation_id) is None
    assert lost(rows, "s") == {here[away[0]]}


def begin_unheard_move(rows: Rows) -> int:
    """A move to g3 that waits in OPEN: g3 is silent, and does not know the group "g" that was made
    since.
    """
    rows.create("s", 2, order_strategy=STRICT)
    source, *_ = (
        partition
        for partition in rows.run(read_route, "s").partitions
        if partition.broker_group != "g3"
    )
    move = Reshape(kind=OperationKind.MOVE, partition_ids=(source.partition_id,), broker_group="g3")
    ((operation_id, _),) = rows.begin(move)
    rows.run(join_group, Join(subject="s", group="g", session="a" * 16), sessions_max=9)
    claim = {"driver": "d", "lease_ms": 1_000}
    for state, end_offset in ((OperationState.SEAL, None), (OperationState.OPEN, 100)):
        todo = rows.run(claim_operation, operation_id, **claim).targets
        done = {partition.partition_id: end_offset for partition in todo}
        assert rows.run(finish_round, operation_id, done) is state
    rows.silence("g3")
    assert rows.drive(operation_id) is OperationState.OPEN
    return operation_id


def unheard(rows: Rows, name: str, broker_group: str) -> list[int]:
    """The open partitions of a subject on a broker group that does not know all of its groups."""
    places = rows.run(read_route, name).open_partitions()
    ids = [partition.partition_id for partition in places if partition.broker_group == broker_group]
    subject_id = rows.run(find_subject, name).subject_id
    return list(rows.run(unannounced_children, subject_id, ids))


def test_operation_opens_a_child_whose_disk_is_lost_before_it_heard_of_a_group(
    rows: Rows,
) -> None:
    """Else the operation would never end, and the subject could not leave the lost disk."""
    operation_id = begin_unheard_move(rows)
    lose = Reshape(kind=OperationKind.EVACUATE, broker_group="g3", accept_loss=True)
    rows.begin(lose)
    assert rows.drive(operation_id) is None
    assert "g3" in open_places(rows, "s")
    ((again, _),) = rows.begin(lose)
    assert rows.drive(again) is None
    assert "g3" not in open_places(rows, "s")


def test_folder_is_refused_when_its_loss_opened_a_child_that_had_not_heard_of_a_group(
    rows: Rows,
) -> None:
    """The folder would serve the child, and remove messages that the group has not read."""
    operation_id = begin_unheard_move(rows)
    rows.begin(Reshape(kind=OperationKind.EVACUATE, broker_group="g3", accept_loss=True))
    assert rows.drive(operation_id) is None
    assert unheard(rows, "s", "g3")
    with raises(Reason.FOLDER_GIVEN_UP):
        rows.report("g3")


def test_creation_of_a_group_waits_for_no_folder_that_is_refused(rows: Rows) -> None:
    """No message is ever sent to the child there, until the subject leaves the folder."""
    operation_id = begin_unheard_move(rows)
    rows.begin(Reshape(kind=OperationKind.EVACUATE, broker_group="g3", accept_loss=True))
    assert rows.drive(operation_id) is None
    refused_ids = unheard(rows, "s", "g3")
    open_ids = {each.partition_id for each in rows.run(read_route, "s").open_partitions()}
    settings = rows.run(read_start_scope, "s", "g").settings
    assert refused_ids
    assert set(settings.unstarted) == open_ids.difference(refused_ids)


def test_child_hears_of_a_group_when_its_broker_returns_before_the_loss_takes_effect(
    rows: Rows,
) -> None:
    """As with parents, nothing is given up that a returned broker can still do."""
    operation_id = begin_unheard_move(rows)
    rows.begin(Reshape(kind=OperationKind.EVACUATE, broker_group="g3", accept_loss=True))
    rows.report("g3")
    assert rows.drive(operation_id) is None
    assert "g3" in open_places(rows, "s")
    assert unheard(rows, "s", "g3") == []
    rows.report("g3")
