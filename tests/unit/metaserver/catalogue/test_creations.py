"""Creations that are planned anew: ids and names are used once, open subjects do not change."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from keylane.metaserver.catalogue.creations import replan_creation
from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.cluster.subjects import (
    find_subject,
    open_subject,
    plan_subject,
    planned_partitions,
    read_route,
)
from keylane.metaserver.sql.schema import operations, partitions
from keylane.protocol.control import BrokerHeartbeat, CreateSubject
from keylane.protocol.errors import InvalidRequestError
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.protocol.routing import PartitionState
from support.sql.rows import Rows

DAY_MS = 86_400_000


def planned(rows: Rows, count: int = 6) -> int:
    """The id of a subject that is planned over three broker groups."""
    rows.run(plan_subject, CreateSubject(subject="s", partitions=count), subjects_max=9)
    return int(rows.run(find_subject, "s").subject_id)


def test_partitions_of_a_silent_broker_are_planned_elsewhere(rows: Rows):
    """They get new ids and names in the same queues and ranges, spread over the available brokers;
    the others stay.
    """
    subject_id = planned(rows)
    before = rows.run(planned_partitions, subject_id)
    rows.silence("g2")
    assert rows.run(replan_creation, subject_id)
    after = rows.run(planned_partitions, subject_id)
    assert [
        (partition.queue, partition.range_start, partition.range_end) for partition in after
    ] == [(partition.queue, partition.range_start, partition.range_end) for partition in before]
    kept = {partition.partition_id for partition in before if partition.broker_group != "g2"}
    new = [partition for partition in after if partition.partition_id not in kept]
    assert kept < {partition.partition_id for partition in after}
    assert sorted(partition.broker_group for partition in new) == ["g1", "g3"]
    assert min(partition.partition_id for partition in new) > max(
        partition.partition_id for partition in before
    )
    assert {partition.name for partition in new} == {"s.p6", "s.p7"}
    assert not rows.run(replan_creation, subject_id)
    assert rows.run(open_subject, "s")
    assert len(rows.run(read_route, "s").partitions) == 6


def test_partition_left_on_a_silent_broker_is_sealed_when_it_is_back(rows: Rows):
    """It is never opened; a canceled operation seals it."""
    subject_id = planned(rows, 3)
    (left,) = (
        partition
        for partition in rows.run(planned_partitions, subject_id)
        if partition.broker_group == "g2"
    )
    rows.silence("g2")
    rows.run(replan_creation, subject_id)
    row = rows.run(lambda c: c.execute(sa.select(operations)).one())
    assert (row.kind, row.state) == (OperationKind.CREATE, OperationState.CANCELED)
    assert rows.drive(row.operation_id) is OperationState.CANCELED
    rows.report("g2")
    rows.drive(row.operation_id)
    stored = rows.run(
        lambda c: c.execute(
            sa.select(partitions).where(partitions.c.partition_id == left.partition_id)
        ).one()
    )
    assert stored.state == PartitionState.EXPIRED


def test_creation_stays_as_planned_when_no_other_broker_is_available(rows: Rows):
    """It waits for the brokers that it was planned on."""
    subject_id = planned(rows)
    before = rows.run(planned_partitions, subject_id)
    rows.silence("g1", "g2", "g3")
    assert not rows.run(replan_creation, subject_id)
    after = rows.run(planned_partitions, subject_id)
    assert [partition.partition_id for partition in after] == [
        partition.partition_id for partition in before
    ]


def test_creation_leaves_a_broker_that_takes_no_writes(rows: Rows):
    """A full disk keeps a new subject from opening no longer than a dead broker does."""
    subject_id = planned(rows, 3)
    full = BrokerHeartbeat(broker_group="g3", broker_id="g3", address="g3:1", writable=False)
    rows.run(store_report, full, ttl_ms=DAY_MS)
    assert rows.run(replan_creation, subject_id)
    homes = {partition.broker_group for partition in rows.run(planned_partitions, subject_id)}
    assert homes == {"g1", "g2"}


def test_open_subject_is_not_planned_anew(rows: Rows):
    """Its partitions stay with their brokers, silent or not."""
    rows.create("s", 3)
    subject_id = rows.run(find_subject, "s").subject_id
    rows.silence("g2")
    assert not rows.run(replan_creation, subject_id)


def test_subject_is_not_opened_when_another_plan_was_hosted(rows: Rows):
    """A metaserver that had the first plan hosted opens nothing after another has planned anew."""
    subject_id = planned(rows)
    hosted = [partition.partition_id for partition in rows.run(planned_partitions, subject_id)]
    rows.silence("g2")
    rows.run(replan_creation, subject_id)
    assert not rows.run(open_subject, "s", hosted)
    assert rows.run(find_subject, "s").route_version == 0


def test_operation_of_kind_create_is_refused_as_a_request(rows: Rows):
    """The kind names only what a creation left."""
    rows.create("s", 3)
    with pytest.raises(InvalidRequestError):
        rows.begin(Reshape(kind=OperationKind.CREATE, subject="s", partitions=2))
