"""Static subjects: chains of partitions without gaps, and queues that only grow in number."""

import pytest

from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.cluster.queues import read_queues
from keylane.metaserver.cluster.subjects import open_subject, plan_subject, read_route, read_subject
from keylane.metaserver.operations.begin import begin_operations, plan_operations
from keylane.metaserver.operations.journal import (
    cancel_operation,
    claim_operation,
    finish_round,
)
from keylane.metaserver.operations.plan import EMPTY_PLAN
from keylane.metaserver.verify.checks import Views, verify
from keylane.metaserver.verify.service import read_sql_view
from keylane.protocol.control import BrokerHeartbeat, CreateSubject, Retention
from keylane.protocol.errors import Reason, SubjectUnknownError
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.protocol.routing import OrderStrategy
from support.raising import raises
from support.sql.rows import Rows

TTL_MS = 1_000


class QueueRows(Rows):
    """A database in memory with a clock that is moved by hand."""

    def report(self, *groups: str) -> None:
        for group in groups:
            body = BrokerHeartbeat(broker_group=group, broker_id=group, address=f"{group}:1")
            self.run(store_report, body, ttl_ms=TTL_MS)

    def move(self, partition_id: int, to: str, end: int) -> None:
        """A move from its beginning to its end; the parent is sealed at `end`."""
        self.drive_to(
            Reshape(kind=OperationKind.MOVE, partition_ids=(partition_id,), broker_group=to), end
        )

    def drive_to(self, ask: Reshape, end: int) -> None:
        """An operation from its beginning to its end; every parent is sealed at `end`."""
        ((operation_id, _),) = self.run(begin_operations, ask, driver="d", lease_ms=1_000)
        state = OperationState.PLAN
        while state is not OperationState.DONE:
            operation = self.run(claim_operation, operation_id, driver="d", lease_ms=1_000)
            seals = state is OperationState.SEAL
            answers = {
                partition.partition_id: end if seals else None for partition in operation.targets
            }
            state = self.run(finish_round, operation_id, answers)

    def chain(self, queue: int) -> list[tuple[int, int, int | None]]:
        """(partition id, logic start, logic end) of a queue's segments."""
        view = self.run(read_queues, "s").queues[queue]
        assert view.queue == queue
        return [
            (segment.partition.partition_id, segment.partition.logic_start, segment.logic_end)
            for segment in view.segments
        ]


@pytest.fixture
def rows() -> QueueRows:
    rows = QueueRows()
    rows.report("g1", "g2")
    rows.run(plan_subject, CreateSubject(subject="s", partitions=2, static=True), subjects_max=9)
    rows.run(open_subject, "s")
    return rows


def test_segments_begin_where_the_previous_ones_end(rows: QueueRows):
    """Three moves of a queue, of one message and of none: no logic offset is missing or used
    twice.
    """
    for partition_id, to, end in ((1, "g2", 40), (3, "g1", 1), (4, "g2", 0)):
        rows.move(partition_id, to, end)
    assert rows.chain(0) == [(1, 0, 40), (3, 40, 41), (4, 41, 41), (5, 41, None)]
    assert rows.chain(1) == [(2, 0, None)]
    opened = rows.run(read_route, "s").open_partitions()
    assert [
        (partition.queue, partition.range_start, partition.range_end) for partition in opened
    ] == [
        (0, 0, 512),
        (1, 512, 1024),
    ]


def test_split_queue_keeps_its_number_and_offsets(rows: QueueRows):
    """The first half continues the offsets, the second half is queue 2 and begins at 0; both
    continue when they move.
    """
    rows.drive_to(Reshape(kind=OperationKind.GROW, subject="s", queues=(0,)), 40)
    assert rows.chain(0) == [(1, 0, 40), (3, 40, None)]
    assert rows.chain(1) == [(2, 0, None)]
    assert rows.chain(2) == [(4, 0, None)]
    rows.move(3, other(rows, 3), 2)
    rows.move(4, other(rows, 4), 5)
    assert rows.chain(0) == [(1, 0, 40), (3, 40, 42), (5, 42, None)]
    assert rows.chain(2) == [(4, 0, 5), (6, 5, None)]
    opened = rows.run(read_route, "s").open_partitions()
    assert [(each.queue, each.range_start, each.range_end) for each in opened] == [
        (0, 0, 256),
        (2, 256, 512),
        (1, 512, 1024),
    ]
    view = rows.run(read_sql_view)
    checks = verify(Views(before=view, answers=[], after=view)).checks
    assert [check.violations for check in checks if check.code in {"V01", "V02"}] == [[], []]


def other(rows: QueueRows, partition_id: int) -> str:
    """The one of two broker groups that does not have the partition."""
    route = rows.run(read_route, "s")
    (group,) = (each.broker_group for each in route.partitions if each.partition_id == partition_id)
    return "g2" if group == "g1" else "g1"


def test_grown_subject_is_the_same_when_it_is_created_again(rows: QueueRows):
    """The settings of a creation do not change; a growth to the number that is there does
    nothing.
    """
    rows.drive_to(Reshape(kind=OperationKind.GROW, subject="s", partitions=5), 7)
    ask = CreateSubject(subject="s", partitions=2, static=True)
    rows.run(plan_subject, ask, subjects_max=9)
    assert len(rows.run(read_queues, "s").queues) == 5
    (planned,) = rows.run(
        plan_operations, Reshape(kind=OperationKind.GROW, subject="s", partitions=5)
    )
    assert planned.plan == EMPTY_PLAN


def test_canceled_growth_leaves_the_numbers_free(rows: QueueRows):
    """The queue continues whole, and the next growth gives the same numbers to other partitions."""
    ask = Reshape(kind=OperationKind.GROW, subject="s", queues=(1,))
    ((operation_id, _),) = rows.run(begin_operations, ask, driver="d", lease_ms=1_000)
    rows.run(cancel_operation, operation_id)
    assert rows.chain(1) == [(2, 0, None)]
    rows.drive_to(ask, 9)
    assert rows.chain(1) == [(2, 0, 9), (5, 9, None)]
    assert rows.chain(2) == [(6, 0, None)]


def test_growth_of_a_subject_without_queues_is_refused(rows: QueueRows):
    """Its number of partitions is changed by a resize."""
    rows.run(plan_subject, CreateSubject(subject="other"), subjects_max=9)
    rows.run(open_subject, "other")
    with raises(Reason.SUBJECT_NOT_STATIC):
        rows.run(plan_operations, Reshape(kind=OperationKind.GROW, subject="other", partitions=3))
    with raises(Reason.QUEUE_UNKNOWN, match="queues 0 to 1, not 2"):
        rows.run(plan_operations, Reshape(kind=OperationKind.GROW, subject="s", queues=(2,)))


def test_subject_view_shows_static(rows: QueueRows):
    """The view of a subject says whether it is static."""
    assert rows.run(read_subject, "s").static
    rows.run(plan_subject, CreateSubject(subject="other"), subjects_max=9)
    rows.run(open_subject, "other")
    assert not rows.run(read_subject, "other").static


@pytest.mark.parametrize(
    "ask",
    [
        Reshape(kind=OperationKind.RESIZE, subject="s", partitions=3),
        Reshape(kind=OperationKind.RESIZE, subject="s", partitions=2),
        Reshape(kind=OperationKind.SPLIT, partition_ids=(1,)),
        Reshape(kind=OperationKind.MERGE, partition_ids=(1, 2)),
    ],
    ids=lambda ask: f"{ask.kind} {ask.partitions}",
)
def test_reshape_of_a_static_subject_is_refused(rows: QueueRows, ask: Reshape):
    """Resize, split and merge are refused by name, planned or done, and the route stays."""
    route = rows.run(read_route, "s")
    with raises(Reason.SUBJECT_STATIC, match="keeps its queues") as refused:
        rows.run(plan_operations, ask)
    assert "subject grow" in refused.value.hint
    assert refused.value.queues == 2
    with raises(Reason.SUBJECT_STATIC):
        rows.run(begin_operations, ask, driver="d", lease_ms=1_000)
    assert rows.run(read_route, "s") == route


def test_subject_is_refused_when_it_exists_with_another_static_setting(rows: QueueRows):
    """Static and not static are different settings; the error says what is there and what was asked
    for.
    """
    with raises(Reason.SUBJECT_EXISTS, match=r"created with static true, not false"):
        rows.run(plan_subject, CreateSubject(subject="s", partitions=2), subjects_max=9)
    ask = CreateSubject(subject="s", partitions=3, static=True, retention=Retention.TIME)
    with raises(Reason.SUBJECT_EXISTS, match="partitions 2, not 3; retention acked, not time"):
        rows.run(plan_subject, ask, subjects_max=9)


def test_queues_of_other_subjects_are_refused(rows: QueueRows):
    """A subject that is not static is refused by name, an unknown one as unknown."""
    rows.run(plan_subject, CreateSubject(subject="other"), subjects_max=9)
    rows.run(open_subject, "other")
    with raises(Reason.SUBJECT_NOT_STATIC):
        rows.run(read_queues, "other")
    with pytest.raises(SubjectUnknownError):
        rows.run(read_queues, "nothing")


def test_static_subject_waits_for_a_silent_source():
    """No queue continues at an unknown offset: an evacuation waits for the silent broker,
    best_tried or not.
    """
    rows = QueueRows()
    rows.report("g1", "g2")
    best = CreateSubject(
        subject="s", partitions=2, static=True, order_strategy=OrderStrategy.BEST_TRIED
    )
    rows.run(plan_subject, best, subjects_max=9)
    rows.run(open_subject, "s")
    rows.clock.advance(TTL_MS)
    rows.report("g2")
    ask = Reshape(kind=OperationKind.EVACUATE, broker_group="g1", without_source=True)
    ((operation_id, _),) = rows.run(begin_operations, ask, driver="d", lease_ms=1_000)
    operation = rows.run(claim_operation, operation_id, driver="d", lease_ms=1_000)
    hosted = {partition.partition_id: None for partition in operation.targets}
    assert not any(step.may_skip for step in operation.pending)
    assert rows.run(finish_round, operation_id, hosted) is OperationState.PLAN
    assert rows.chain(0) == [(1, 0, None)]
