"""Operations interrupted after any transaction, repeated, or raced: the final rows are the same."""

from typing import Any

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.cluster.subjects import open_subject, plan_subject, read_route
from keylane.metaserver.operations.begin import begin_operations, plan_operations
from keylane.metaserver.operations.journal import (
    claim_operation,
    finish_round,
    idle_operations,
    release_operation,
)
from keylane.metaserver.operations.views import operation_views, subject_history, subject_operations
from keylane.metaserver.sql.schema import partitions
from keylane.protocol.control import BrokerHeartbeat, CreateSubject
from keylane.protocol.errors import (
    InvalidRequestError,
    PartitionUnknownError,
    Reason,
    RefusedError,
    SubjectUnknownError,
)
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.protocol.routing import OrderStrategy, PartitionState, route_table
from support.raising import raises
from support.sql.rows import Rows

TTL_MS = 1_000
LEASE_MS = 500


class OperationRows(Rows):
    """A database in memory with a clock that is moved by hand."""

    def report(self, *groups: str) -> None:
        for group in groups:
            body = BrokerHeartbeat(broker_group=group, broker_id=group, address=f"{group}:1")
            self.run(store_report, body, ttl_ms=TTL_MS)

    def create(self, name: str, count: int, strategy: OrderStrategy = OrderStrategy.STRICT) -> None:
        ask = CreateSubject(subject=name, partitions=count, order_strategy=strategy)
        self.run(plan_subject, ask, subjects_max=100)
        self.run(open_subject, name)

    def begin(self, ask: Reshape, *, driver: str = "first") -> list[int]:
        begun = self.run(begin_operations, ask, driver=driver, lease_ms=LEASE_MS)
        return [operation_id for operation_id, _ in begun]

    def drive(self, operation_id: int, *, driver: str, rounds: int = 100) -> OperationState:
        """Drive an operation with brokers that always answer; stops after `rounds` transactions."""
        work = self._work(operation_id, driver)
        for _ in range(rounds):
            if next(work, None) is None:
                break
        return self.run(operation_views, [operation_id])[0].state

    def _work(self, operation_id: int, driver: str) -> Any:
        while True:
            operation = self.run(claim_operation, operation_id, driver=driver, lease_ms=LEASE_MS)
            if operation is None:
                return
            yield "claimed"
            seals = operation.state is not OperationState.PLAN
            answers = {
                partition.partition_id: 100 + partition.partition_id if seals else None
                for partition in operation.targets
                if partition.address is not None
            }
            state = self.run(finish_round, operation_id, answers)
            yield state
            if state is operation.state and not answers:
                self.run(release_operation, operation_id, driver=driver)
                return


def resize(count: int) -> Reshape:
    return Reshape(kind=OperationKind.RESIZE, subject="s", partitions=count)


@pytest.fixture
def rows() -> OperationRows:
    rows = OperationRows()
    rows.report("g1", "g2")
    rows.create("s", 2)
    return rows


def facts(rows: OperationRows) -> Any:
    history = rows.run(subject_history, "s")
    return [
        (
            partition.partition.name,
            partition.partition.state,
            partition.partition.parents,
            partition.end_offset,
        )
        for partition in history.partitions
    ], history.route_version


@pytest.mark.parametrize("cut", range(5))
def test_second_driver_reaches_the_same_rows_when_the_first_dies_after_any_transaction(
    rows: OperationRows, cut: int
):
    """After whatever transaction the first driver stops, the second driver reaches the same
    rows.
    """
    whole = OperationRows()
    whole.report("g1", "g2")
    whole.create("s", 2)
    (operation_id,) = whole.begin(resize(4))
    assert whole.drive(operation_id, driver="first") is OperationState.DONE

    (operation_id,) = rows.begin(resize(4))
    state = rows.drive(operation_id, driver="first", rounds=cut)
    if state is not OperationState.DONE:
        assert rows.run(claim_operation, operation_id, driver="second", lease_ms=1) is None
        rows.clock.advance(LEASE_MS)
        rows.report("g1", "g2")
        assert rows.run(idle_operations) == [operation_id]
        rows.drive(operation_id, driver="second")
    assert facts(rows) == facts(whole)
    route_table(rows.run(read_route, "s"))
    assert rows.run(idle_operations) == []


def test_round_changes_nothing_when_a_late_driver_repeats_it(rows: OperationRows):
    """A late driver that repeats steps and states changes nothing."""
    (operation_id,) = rows.begin(resize(3))
    rows.drive(operation_id, driver="first")
    before = facts(rows)
    sealed = rows.run(operation_views, [operation_id])[0].sealed
    ends = {partition: 100 + partition for partition in sealed}
    assert rows.run(finish_round, operation_id, ends, "late") is OperationState.DONE
    assert rows.run(operation_views, [operation_id])[0].problem == ""
    assert rows.run(claim_operation, operation_id, driver="late", lease_ms=1) is None
    assert facts(rows) == before


def test_route_changes_in_one_transaction(rows: OperationRows):
    """Readers see the old route until the last state, then the whole new route, its version one
    higher.
    """
    before = rows.run(read_route, "s")
    (operation_id,) = rows.begin(resize(4))
    states = []
    for event in rows._work(operation_id, "first"):
        states.append(event)
        route = rows.run(read_route, "s")
        route_table(route)
        if event is not OperationState.DONE:
            assert route == before
    assert [state for state in states if isinstance(state, OperationState)] == [
        OperationState.SEAL,
        OperationState.DONE,
    ]
    route = rows.run(read_route, "s")
    assert route.version == before.version + 1
    assert len(route.open_partitions()) == 4


def test_second_operation_is_refused_until_the_first_has_its_route(rows: OperationRows):
    """Two operators at once: one wins, the other is told which operation runs; other subjects are
    free.
    """
    rows.create("other", 1)
    (operation_id,) = rows.begin(resize(4))
    for ask in (resize(8), Reshape(kind=OperationKind.EVACUATE, broker_group="g1")):
        with raises(Reason.OPERATION_RUNNING) as refused:
            rows.begin(ask)
        assert refused.value.operation_id == operation_id
    elsewhere = Reshape(kind=OperationKind.RESIZE, subject="other", partitions=2)
    (other,) = rows.begin(elsewhere)
    assert rows.drive(other, driver="first") is OperationState.DONE
    assert rows.drive(operation_id, driver="first") is OperationState.DONE
    (again,) = rows.begin(resize(8))
    assert rows.drive(again, driver="first") is OperationState.DONE
    assert [view.operation_id for view in rows.run(subject_operations, "s")] == [
        again,
        operation_id,
    ]


BAD = [
    (resize(0), InvalidRequestError),
    (resize(1_025), InvalidRequestError),
    (Reshape(kind=OperationKind.RESIZE, subject="unknown", partitions=2), SubjectUnknownError),
    (Reshape(kind=OperationKind.SPLIT, partition_ids=(99,)), PartitionUnknownError),
    (Reshape(kind=OperationKind.SPLIT, partition_ids=(2**70,)), PartitionUnknownError),
    (Reshape(kind=OperationKind.SPLIT), PartitionUnknownError),
    (Reshape(kind=OperationKind.SPLIT, partition_ids=(1, 2)), InvalidRequestError),
    (Reshape(kind=OperationKind.MERGE, partition_ids=(1,)), InvalidRequestError),
    (Reshape(kind=OperationKind.MERGE, partition_ids=(1, 99)), PartitionUnknownError),
    (
        Reshape(kind=OperationKind.MOVE, partition_ids=(1,), broker_group="nowhere"),
        Reason.BROKER_GROUP_UNKNOWN,
    ),
    (
        Reshape(kind=OperationKind.MOVE, partition_ids=(1,), broker_group="silent"),
        Reason.NOT_ENOUGH_BROKERS,
    ),
    (
        Reshape(kind=OperationKind.MOVE, partition_ids=(1,), broker_group="full"),
        Reason.NOT_ENOUGH_BROKERS,
    ),
    (Reshape(kind=OperationKind.EVACUATE, broker_group="nowhere"), Reason.BROKER_GROUP_UNKNOWN),
    (
        Reshape(kind=OperationKind.EVACUATE, broker_group="g1", without_source=True),
        InvalidRequestError,
    ),
]


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (
            Reshape(kind=OperationKind.MOVE, partition_ids=(99_999,), broker_group="g1"),
            "there is no partition 99999; open partitions: 1, 2",
        ),
        (
            Reshape(kind=OperationKind.MERGE, partition_ids=(1, 99)),
            "partition 99 is not an open partition of this subject; its open partitions: 1, 2",
        ),
        (
            Reshape(kind=OperationKind.MOVE, partition_ids=(1,), broker_group="nowhere"),
            "there is no broker group 'nowhere'; the known ones are: g1, g2",
        ),
        (
            Reshape(kind=OperationKind.EVACUATE, broker_group="nowhere"),
            "there is no broker group 'nowhere'; the known ones are: g1, g2",
        ),
    ],
)
def test_refusal_names_open_partitions_and_known_groups(
    rows: OperationRows, ask: Reshape, text: str
):
    """The error lists open partitions and broker groups; the hint has the command."""
    with pytest.raises(RefusedError) as caught:
        rows.begin(ask)
    assert caught.value.message == text
    assert "keylane" in caught.value.hint


def test_refusal_counts_partitions_that_it_does_not_name(rows: OperationRows):
    """A cluster may have a million partitions; the error lists a few."""
    rows.create("many", 100)
    with pytest.raises(PartitionUnknownError, match=", 10, … and 92 more"):
        rows.begin(Reshape(kind=OperationKind.SPLIT, partition_ids=(99_999,)))


@pytest.mark.parametrize(("ask", "error"), BAD)
def test_bad_requests_change_nothing(rows: OperationRows, ask: Reshape, error: type[Exception]):
    """Each has its typed error, planned or begun, and no row is written."""
    rows.report("silent")
    rows.clock.advance(TTL_MS)
    rows.report("g1", "g2")
    full = BrokerHeartbeat(broker_group="full", broker_id="f", address="f:1", writable=False)
    rows.run(store_report, full, ttl_ms=TTL_MS)
    before = facts(rows)
    for work in (plan_operations, None):
        with raises(error):
            rows.begin(ask) if work is None else rows.run(work, ask)
    assert facts(rows) == before
    assert rows.run(subject_operations, "s") == []


def test_dry_run_shows_the_plan_and_writes_nothing(rows: OperationRows):
    """The plan of a dry run is the operation that is begun afterwards; the dry run writes
    nothing.
    """
    before = facts(rows)
    (planned,) = rows.run(plan_operations, resize(4))
    view = planned.view(resize(4))
    assert facts(rows) == before
    (operation_id,) = rows.begin(resize(4))
    begun = rows.run(operation_views, [operation_id])[0]
    assert begun.sealed == view.sealed
    assert [partition.name for partition in begun.children] == [
        partition.name for partition in view.children
    ]


def test_resize_journals_nothing_when_the_count_is_the_same(rows: OperationRows):
    """A resize to the present partitions journals nothing."""
    assert rows.begin(resize(2)) == [0]
    assert rows.run(subject_operations, "s") == []


def test_operation_waits_in_plan_while_a_parent_is_silent(rows: OperationRows):
    """With one of two parents silent the operation waits in PLAN, and continues when the broker is
    back.
    """
    (operation_id,) = rows.begin(resize(1))
    rows.clock.advance(TTL_MS)
    rows.report("g2")
    assert rows.drive(operation_id, driver="first") is OperationState.PLAN
    assert rows.run(idle_operations) == []
    rows.report("g1")
    assert rows.run(idle_operations) == [operation_id]
    assert rows.drive(operation_id, driver="second") is OperationState.DONE


def test_operation_waits_in_plan_until_every_parent_is_sealable(rows: OperationRows):
    """A broker that was silent, and so was not asked whether it can seal, keeps the operation in
    PLAN.
    """
    (operation_id,) = rows.begin(resize(1))
    operation = rows.run(claim_operation, operation_id, driver="first", lease_ms=LEASE_MS)
    hosted = {partition.partition_id: None for partition in operation.targets}
    parents = [partition.partition_id for partition in operation.sources]
    assert len(parents) == 2
    for some in ((), parents[:1], parents[1:]):
        state = rows.run(finish_round, operation_id, hosted, sealable_ids=some)
        assert state is OperationState.PLAN
    assert rows.run(finish_round, operation_id, {}, sealable_ids=parents) is OperationState.SEAL


def test_released_operation_is_resumed_after_its_pause_and_last(rows: OperationRows):
    """A released operation rests for the pause, and is then resumed after the operations that
    waited meanwhile.
    """
    rows.create("other", 1)
    other = Reshape(kind=OperationKind.RESIZE, subject="other", partitions=2)
    (first,), (second,) = rows.begin(resize(4)), rows.begin(other)
    rows.run(release_operation, first, driver="another", pause_ms=0)
    assert rows.run(idle_operations) == []
    rows.run(release_operation, first, driver="first", pause_ms=LEASE_MS + 100)
    rows.clock.advance(LEASE_MS)
    assert rows.run(idle_operations) == [second]
    rows.clock.advance(100)
    assert rows.run(idle_operations) == [second, first]
    assert rows.drive(first, driver="second") is OperationState.DONE


def evacuate(rows: OperationRows) -> Reshape:
    rows.clock.advance(TTL_MS)
    rows.report("g2")
    return Reshape(kind=OperationKind.EVACUATE, broker_group="g1", without_source=True)


def test_strict_subject_waits_for_its_silent_source(rows: OperationRows):
    """The children of a dead broker's partitions stay closed until it is back and has sealed."""
    (operation_id,) = rows.begin(evacuate(rows))
    before = rows.run(read_route, "s")
    assert rows.drive(operation_id, driver="first") is OperationState.PLAN
    assert rows.run(read_route, "s") == before
    rows.report("g1")
    assert rows.drive(operation_id, driver="first") is OperationState.DONE
    (view,) = rows.run(operation_views, [operation_id])
    assert view.reordered == ()


def test_best_tried_subject_continues_without_its_source_and_declares_it(rows: OperationRows):
    """
    The children open at once, declared; a second operation may begin; the source is sealed when its
    broker is back.
    """
    rows.create("tried", 2, OrderStrategy.BEST_TRIED)
    begun = rows.begin(evacuate(rows))
    strict, tried = begun
    assert rows.drive(strict, driver="first") is OperationState.PLAN
    assert rows.drive(tried, driver="first") is OperationState.FENCE
    (view,) = rows.run(operation_views, [tried])
    assert view.reordered == view.sealed
    abandoned = sa.select(partitions.c.state, partitions.c.end_offset).where(
        partitions.c.partition_id == view.sealed[0]
    )
    assert rows.run(lambda connection: connection.execute(abandoned).one()) == (
        PartitionState.SEALED,
        None,
    )
    assert rows.run(idle_operations) == []
    ask = Reshape(kind=OperationKind.RESIZE, subject="tried", partitions=3)
    (third,) = rows.begin(ask)
    assert rows.drive(third, driver="first") is OperationState.DONE
    rows.report("g1")
    assert tried in rows.run(idle_operations)
    assert rows.drive(tried, driver="first") is OperationState.DONE
    end = rows.run(lambda connection: connection.execute(abandoned).one()).end_offset
    assert end == 100 + view.sealed[0]
