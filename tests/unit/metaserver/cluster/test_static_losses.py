"""A static subject whose disk is lost: its queues continue above every offset of the lost
partitions.
"""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.queues import read_queues
from keylane.metaserver.cluster.subjects import read_route
from keylane.metaserver.operations.journal import claim_operation, finish_round
from keylane.metaserver.operations.views import subject_history
from keylane.metaserver.rebuild.plan import plan_rebuild
from keylane.metaserver.rebuild.rows import RebuildOptions
from keylane.metaserver.rebuild.writer import store_rebuilt
from keylane.metaserver.resets.cursors import PartitionOffsets, compute_cursors
from keylane.metaserver.sql.schema import subjects
from keylane.metaserver.verify.checks import Views, verify
from keylane.metaserver.verify.service import read_sql_view
from keylane.protocol.errors import InvalidRequestError, OffsetOutOfRangeError
from keylane.protocol.ids import MAX_I64
from keylane.protocol.limits import PARTITION_MESSAGES_MAX
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.protocol.progress import ResetGroup, ResetTo
from keylane.protocol.queues import is_behind_loss, start_behind_loss
from keylane.protocol.routing import OrderStrategy, Partition, PartitionState
from support.sql.kept_by_brokers import OPEN, source, status
from support.sql.rows import Rows

SPAN = PARTITION_MESSAGES_MAX


def lose(group: str) -> Reshape:
    return Reshape(kind=OperationKind.EVACUATE, broker_group=group, accept_loss=True)


def lose_group(rows: Rows, group: str, *lost_before: str) -> None:
    """Accept the loss of a broker group and drive all operations to their end."""
    rows.silence(group, *lost_before)
    for operation_id, planned in rows.begin(lose(group)):
        assert planned.busy_subject is None
        assert rows.drive(operation_id) is None


def move(rows: Rows, partition_id: int, to: str) -> int:
    ask = Reshape(kind=OperationKind.MOVE, partition_ids=(partition_id,), broker_group=to)
    ((operation_id, _),) = rows.begin(ask)
    return operation_id


def chain(rows: Rows, queue: int = 0) -> list[tuple[str, int, int | None]]:
    """(name, logic start, logic end) of a queue's partitions that have data."""
    segments = rows.run(read_queues, "s").queues[queue].segments
    return [
        (segment.partition.name, segment.partition.logic_start, segment.logic_end)
        for segment in segments
    ]


def place(rows: Rows, queue: int = 0) -> Partition:
    """The queue's open partition."""
    return next(
        partition
        for partition in rows.run(read_route, "s").open_partitions()
        if partition.queue == queue
    )


def broken(rows: Rows) -> list[str]:
    """The findings of `meta verify` about the lineage."""
    view = rows.run(read_sql_view)
    checks = verify(Views(before=view, answers=[], after=view)).checks
    (violations,) = [check.violations for check in checks if check.code == "V02"]
    return list(violations)


def test_growth_continues_when_the_disk_of_the_split_queue_is_lost(rows: Rows) -> None:
    """The first half begins above every offset of the lost partition, the second half at 0."""
    rows.create("s", 1, static=True)
    source = place(rows).broker_group
    ((operation_id, _),) = rows.begin(Reshape(kind=OperationKind.GROW, subject="s", partitions=2))
    claimed = rows.run(claim_operation, operation_id, driver="d", lease_ms=1_000)
    hosted = {partition.partition_id: None for partition in claimed.targets}
    assert rows.run(finish_round, operation_id, hosted) is OperationState.SEAL
    rows.silence(source)
    assert rows.drive(operation_id) is OperationState.SEAL
    ((freed, _),) = rows.begin(lose(source))
    assert freed == operation_id
    assert rows.drive(operation_id) is None
    assert chain(rows) == [("s.p1", SPAN, None)]
    assert chain(rows, 1) == [("s.p2", 0, None)]
    assert broken(rows) == []
    lose_group(rows, source)
    assert chain(rows) == [("s.p3", 3 * SPAN, None)]
    assert broken(rows) == []


@pytest.mark.parametrize("strategy", list(OrderStrategy))
def test_static_queue_continues_when_its_disk_is_lost(rows: Rows, strategy: OrderStrategy) -> None:
    """Behind each of two losses it begins above every earlier offset; a move in between continues
    from there.
    """
    rows.create("s", 3, static=True, order_strategy=strategy)
    assert chain(rows) == [("s.p0", 0, None)]
    lose_group(rows, place(rows).broker_group)
    assert chain(rows) == [("s.p3", 3 * SPAN, None)]
    there = place(rows)
    (other,) = {"g1", "g2", "g3"} - {there.broker_group, "g1"}
    assert rows.drive(move(rows, there.partition_id, other)) is None
    assert chain(rows) == [("s.p3", 3 * SPAN, 3 * SPAN + 100), ("s.p4", 3 * SPAN + 100, None)]
    rows.report("new")
    lose_group(rows, other, "g1")
    last = chain(rows)[-1]
    assert last[0] != "s.p4"
    assert last[1] == start_behind_loss(last[0]) > 4 * SPAN
    assert broken(rows) == []
    lost = {
        partition.partition.name: partition.end_offset
        for partition in rows.run(subject_history, "s").partitions
        if partition.lost
    }
    assert lost["s.p0"] is lost["s.p4"] is None


def test_child_keeps_its_start_when_its_sealed_parent_is_lost(
    rows: Rows,
) -> None:
    """Its end was known: no offset of the child changes, and none counts as missing."""
    rows.create("s", 3, static=True)
    first = place(rows)
    assert first.broker_group == "g1"
    rows.drive(move(rows, first.partition_id, "g2"))
    lose_group(rows, "g1")
    assert chain(rows) == [("s.p3", 100, None)]
    assert not is_behind_loss(place(rows))
    assert broken(rows) == []


def test_move_of_a_static_queue_continues_when_its_source_is_lost(rows: Rows) -> None:
    """The move waits for its source, whose loss is accepted: its child begins behind the loss."""
    rows.create("s", 3, static=True)
    operation_id = move(rows, place(rows).partition_id, "g2")
    rows.silence("g1")
    assert rows.drive(operation_id) is OperationState.PLAN
    ((freed, planned),) = rows.begin(lose("g1"))
    assert (freed, planned.busy_subject) == (operation_id, None)
    assert rows.drive(operation_id) is None
    last = place(rows)
    assert last.broker_group != "g1"
    assert last.logic_start == start_behind_loss(last.name) > 0
    assert broken(rows) == []


def test_loss_is_refused_when_no_logic_offsets_are_left(rows: Rows) -> None:
    """A subject that has named two million partitions has no offsets left behind a loss; nothing is
    changed.
    """
    rows.create("s", 3, static=True)
    rows.silence("g1")
    with rows.engine.begin() as connection:
        connection.execute(sa.update(subjects).values(partitions_named=MAX_I64 // SPAN))
    before = rows.run(read_route, "s")
    with pytest.raises(InvalidRequestError, match="logic offset"):
        rows.begin(lose("g1"))
    assert rows.run(read_route, "s") == before


def test_highest_start_behind_a_loss_fits_a_full_partition() -> None:
    """Offsets stay numbers of 63 bits."""
    last = MAX_I64 // SPAN - 1
    assert start_behind_loss(f"s.p{last}") + SPAN <= MAX_I64
    with pytest.raises(InvalidRequestError):
        start_behind_loss(f"s.p{last + 1}")


def test_rebuild_restores_the_start_behind_a_loss() -> None:
    """Only the broker that is left is asked: its partitions begin where they began, and every check
    passes.
    """
    rows = Rows()
    rows.report("g1", "g2")
    rows.create("s", 2, static=True)
    lose_group(rows, "g1")
    rows.report("g3")
    rows.drive(move(rows, place(rows, 0).partition_id, "g3"))
    before = {
        partition.partition_id: partition.logic_start
        for partition in rows.run(read_route, "s").partitions
    }
    assert max(before.values()) == 2 * SPAN + 100

    def kept(group: str) -> list[object]:
        return [
            status(
                partition.partition_id,
                partition.range_start,
                partition.range_end,
                parents=partition.parents,
                group=group,
                sealed=partition.state is PartitionState.SEALED,
                messages=100,
                queue=partition.queue,
                static=True,
                token=4,
                name=partition.name,
            )
            for partition in rows.run(read_route, "s").partitions
            if partition.broker_group == group
        ]

    sources = [source(*kept(group), group=group) for group in ("g2", "g3")]
    cluster = plan_rebuild(sources, RebuildOptions(gone=("g1",)))
    again = Rows()
    again.run(store_rebuilt, cluster, route_version=9)
    after = {
        partition.partition_id: partition.logic_start
        for partition in again.run(read_route, "s").partitions
    }
    assert after == before
    assert broken(again) == []


def segment(number: int, start: int, messages: int, *, first: int = 0) -> PartitionOffsets:
    partition = Partition(
        partition_id=number,
        name=f"s.p{number - 1}",
        queue=0,
        range_start=0,
        range_end=1024,
        broker_group="g1",
        state=OPEN,
        logic_start=start,
    )
    return PartitionOffsets(partition=partition, first_offset=first, next_offset=messages)


def reset(offset: int, *offsets: PartitionOffsets) -> dict[int, int]:
    ask = ResetGroup(to=ResetTo.OFFSET, offset=offset, queue=0)
    return compute_cursors(ask, offsets, static=True)


def test_reset_to_a_lost_offset_goes_to_the_first_message_behind_it() -> None:
    """Between two partitions, and before the first that is left; an offset above the end is
    refused.
    """
    before, behind = segment(1, 0, 40), segment(5, 4 * SPAN, 7)
    assert reset(39, before, behind) == {1: 39, 5: 0}
    assert reset(1_000, before, behind) == {1: 40, 5: 0}
    assert reset(4 * SPAN + 2, before, behind) == {1: 40, 5: 2}
    assert reset(25, behind) == {5: 0}
    with pytest.raises(OffsetOutOfRangeError):
        reset(4 * SPAN + 8, behind)
    with pytest.raises(OffsetOutOfRangeError):
        reset(25, segment(5, 4 * SPAN, 7, first=3))
