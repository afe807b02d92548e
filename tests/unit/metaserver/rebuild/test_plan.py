"""The facts that brokers keep suffice to rebuild the database; contradicting facts are refused."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.brokers import broker_views, cordon_broker, store_report
from keylane.metaserver.cluster.subjects import planned_subjects, read_route
from keylane.metaserver.groups.views import read_group
from keylane.metaserver.operations.journal import read_operation
from keylane.metaserver.rebuild.plan import TOKENS_BETWEEN, plan_rebuild
from keylane.metaserver.rebuild.rows import RebuildOptions
from keylane.metaserver.rebuild.writer import store_rebuilt
from keylane.metaserver.sql.cluster_facts import read_cluster_id, store_cluster_id
from keylane.metaserver.sql.schema import groups
from keylane.metaserver.verify.checks import BrokerAnswer, Views, verify
from keylane.metaserver.verify.service import read_sql_view
from keylane.protocol.control import (
    BrokerHeartbeat,
)
from keylane.protocol.errors import ConfigError, InvalidRequestError
from keylane.protocol.operations import OperationState, StepAction
from keylane.protocol.routing import ConsumeStrategy, OrderStrategy
from support.sql.kept_by_brokers import (
    EXPIRED,
    HALVES,
    OPEN,
    PLANNED,
    SEALED,
    rebuilt,
    source,
    states,
    status,
)
from support.sql.told_groups import settle_group

VERSION = 1_000_000


def test_subject_with_its_settings() -> None:
    """Strategy, size, ranges, names and queues are those that the brokers were told."""
    subject = rebuilt(*HALVES)
    assert (subject.name, subject.order_strategy) == ("s", OrderStrategy.STRICT)
    assert (subject.partitions_wanted, subject.partitions_named) == (2, 2)
    assert states(subject) == {1: OPEN, 2: OPEN}
    assert subject.operation is None


def test_rebuilt_database_is_of_the_cluster_whose_partitions_the_brokers_have(
    engine: sa.Engine,
) -> None:
    left, right = status(1, 0, 512, cluster_id="5ea"), status(2, 512, 1024, cluster_id="5ea")
    with engine.begin() as connection:
        store_cluster_id(connection, "drawn by the new database")
        store_rebuilt(connection, plan_rebuild([source(left, right)]), route_version=VERSION)
        assert read_cluster_id(connection) == "5ea"


def test_brokers_of_two_clusters_are_refused() -> None:
    left, right = status(1, 0, 512, cluster_id="5ea"), status(2, 512, 1024, cluster_id="b0b")
    with pytest.raises(InvalidRequestError, match="belong to different clusters"):
        plan_rebuild([source(left, right)])


def test_tokens_are_above_every_fence() -> None:
    """The next token of a group is far above the highest fence of any partition."""
    subject = rebuilt(status(1, 0, 512, token=5), status(2, 512, 1024, token=41))
    (group,) = subject.groups
    assert group.last_token == 41 + TOKENS_BETWEEN
    assert group.tokens == {1: 5, 2: 41}


def test_group_gets_the_strategy_of_its_highest_token(engine: sa.Engine) -> None:
    """A shared group stays shared, with new tokens; a group that was switched since is
    exclusive.
    """
    shared = ConsumeStrategy.SHARED
    statuses = [
        status(1, 0, 512, token=5, consumes=shared),
        status(2, 512, 1024, token=9, consumes=shared),
    ]
    with engine.begin() as connection:
        store_rebuilt(connection, plan_rebuild([source(*statuses)]), route_version=VERSION)
        group_id = connection.execute(sa.select(groups.c.group_id)).scalar_one()
        settle_group(connection, group_id)
        view = read_group(connection, "s", "g")
    assert view.strategy is shared
    assert [owner.token for owner in view.owners] == [
        9 + TOKENS_BETWEEN + 1,
        9 + TOKENS_BETWEEN + 2,
    ]
    (group,) = rebuilt(*statuses[:1], status(2, 512, 1024, token=9)).groups
    assert (group.strategy, group.tokens) == (ConsumeStrategy.EXCLUSIVE, {1: 5, 2: 9})


def test_resized_subject_keeps_its_lineage() -> None:
    """Sealed parents keep their ends and their drained groups; their children are open."""
    subject = rebuilt(
        status(1, 0, 512, sealed=True, token=1, cursor=10),
        status(2, 512, 1024),
        status(3, 0, 256, parents=(1,)),
        status(4, 256, 512, parents=(1,)),
    )
    assert states(subject) == {1: SEALED, 2: OPEN, 3: OPEN, 4: OPEN}
    assert subject.partitions[0].end_offset == 10
    assert subject.groups[0].drained_ids == {1}
    assert subject.partitions_named == 4


def test_not_drained_before_the_end() -> None:
    """A group that has not acked a sealed partition to its end is granted that partition first."""
    subject = rebuilt(
        status(1, 0, 1024, sealed=True, token=1, cursor=9), status(2, 0, 1024, parents=(1,))
    )
    assert subject.groups[0].drained_ids == set()


def test_operation_before_the_first_seal_is_forgotten() -> None:
    """Children that were hosted and never opened are out of the route; their parents stay open."""
    subject = rebuilt(
        *HALVES,
        status(3, 0, 256, parents=(1,), messages=0),
        status(4, 256, 512, parents=(1,), messages=0),
    )
    assert states(subject) == {1: OPEN, 2: OPEN, 3: EXPIRED, 4: EXPIRED}
    assert subject.operation is None
    assert subject.canceled_operation is not None
    assert subject.canceled_operation.state is OperationState.CANCELED
    assert subject.canceled_operation.steps == {
        3: (StepAction.SEAL, False),
        4: (StepAction.SEAL, False),
    }
    assert subject.partitions_named == 4


def test_children_of_a_canceled_operation_are_never_opened() -> None:
    """A child that is sealed, empty and without children is left out; the operation after it
    continues.
    """
    canceled = status(3, 0, 1024, parents=(1, 2), messages=0, sealed=True)
    subject = rebuilt(*HALVES, canceled)
    assert states(subject) == {1: OPEN, 2: OPEN, 3: EXPIRED}
    subject = rebuilt(
        status(1, 0, 512, sealed=True),
        status(2, 512, 1024),
        canceled,
        status(4, 0, 1024, parents=(1, 2), messages=0),
    )
    assert states(subject) == {1: OPEN, 2: OPEN, 3: EXPIRED, 4: PLANNED}
    assert subject.operation is not None
    assert subject.operation.steps.keys() == {1, 2, 4}


def test_operation_continues_when_a_parent_is_sealed() -> None:
    """With one of two parents sealed the operation is journaled in SEAL."""
    subject = rebuilt(
        status(1, 0, 512, sealed=True),
        status(2, 512, 1024),
        status(3, 0, 1024, parents=(1, 2), messages=0),
    )
    assert states(subject) == {1: OPEN, 2: OPEN, 3: PLANNED}
    assert subject.operation is not None
    assert subject.operation.state is OperationState.SEAL
    assert subject.operation.steps == {
        1: (StepAction.SEAL, True),
        2: (StepAction.SEAL, False),
        3: (StepAction.HOST, True),
    }


def test_operation_is_done_when_every_parent_is_sealed() -> None:
    """With every parent sealed the children are open."""
    subject = rebuilt(
        status(1, 0, 512, sealed=True),
        status(2, 512, 1024, sealed=True),
        status(3, 0, 1024, parents=(1, 2), messages=0),
    )
    assert states(subject) == {1: SEALED, 2: SEALED, 3: OPEN}
    assert subject.operation is None


def test_source_that_was_given_up_is_still_fenced() -> None:
    """A parent that is open while its child has messages was evacuated without its source: it is
    still to be sealed.
    """
    subject = rebuilt(status(1, 0, 1024), status(2, 0, 1024, parents=(1,)))
    assert states(subject) == {1: SEALED, 2: OPEN}
    assert subject.partitions[0].abandoned
    assert subject.operation is None
    (fence,) = subject.fences
    assert fence.state is OperationState.FENCE


def test_interrupted_creation_continues() -> None:
    """A subject that is hosted in part and unused is planned again, if these are all brokers."""
    with pytest.raises(InvalidRequestError):
        plan_rebuild([source(status(1, 0, 512))], RebuildOptions(complete=True))
    origin = source(status(1, 0, 512, messages=0))
    (subject,) = plan_rebuild([origin], RebuildOptions(complete=True)).subjects
    assert not subject.opened
    assert [
        (
            partition.partition.partition_id,
            partition.partition.state,
            partition.partition.range_start,
        )
        for partition in subject.partitions
    ] == [(1, PLANNED, 0), (0, PLANNED, 512)]


CONTRADICTIONS = {
    "a hole": [source(status(1, 0, 512))],
    "a hole in a subject not used": [source(status(1, 0, 512, messages=0))],
    "a missing parent": [source(status(1, 0, 1024, parents=(9,)))],
    "two folders of one group": [source(*HALVES), source(broker_id="other")],
    "one folder twice": [source(*HALVES, broker_id="x"), source(group="g2", broker_id="x")],
    "one partition twice": [
        source(*HALVES),
        source(status(1, 0, 512, group="g2"), group="g2"),
    ],
    "a partition of another group": [source(status(1, 0, 1024, group="g2"))],
    "two strategies": [source(HALVES[0], status(2, 512, 1024, strategy=OrderStrategy.BEST_TRIED))],
    "no strategy": [source(status(1, 0, 1024, strategy=None))],
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused(case: str) -> None:
    """Contradictions are refused, not guessed away."""
    with pytest.raises(InvalidRequestError):
        plan_rebuild(CONTRADICTIONS[case])


def test_rebuild_reports_all_problems_at_once() -> None:
    """Every missing parent is named."""
    with pytest.raises(InvalidRequestError, match=r"partition 7, .*partition 8, "):
        plan_rebuild([source(status(9, 0, 1024, parents=(7, 8)))])


@pytest.mark.parametrize(
    "statuses",
    [
        HALVES,
        (
            status(1, 0, 512, sealed=True, token=3, cursor=10),
            status(2, 512, 1024, token=4, cursor=2),
            status(3, 0, 256, parents=(1,)),
            status(4, 256, 512, parents=(1,), token=5),
        ),
        (
            *HALVES,
            status(3, 0, 256, parents=(1,), messages=0),
            status(4, 256, 512, parents=(1,), messages=0, sealed=True),
        ),
    ],
)
def test_rebuilt_database_passes_every_check(engine: sa.Engine, statuses) -> None:
    """The database and the brokers it was made from agree in all thirteen checks."""
    origin = source(*statuses)
    with engine.begin() as connection:
        store_rebuilt(connection, plan_rebuild([origin]), route_version=VERSION)
        view = read_sql_view(connection)
        route = read_route(connection, "s")
    assert route.version == VERSION
    answer = BrokerAnswer(broker_group="g1", address=origin.address, hosted=origin.hosted)
    verified = verify(Views(before=view, answers=[answer], after=view))
    assert [check.violations for check in verified.checks if check.violations] == []


def test_new_partitions_get_new_numbers(engine: sa.Engine) -> None:
    """The next partition's id is above all ids at the brokers."""
    with engine.begin() as connection:
        statuses = [status(41, 0, 512), status(42, 512, 1024)]
        store_rebuilt(connection, plan_rebuild([source(*statuses)]), route_version=VERSION)
        statement = (
            "INSERT INTO partitions (subject_id, name, queue, range_start, range_end, broker_group,"
            " state) VALUES (1, 'x', 0, 0, 1, 'g1', 'planned') RETURNING partition_id"
        )
        assert connection.execute(sa.text(statement)).scalar_one() == 43


def test_operation_is_stored_as_its_driver_needs_it(engine: sa.Engine) -> None:
    """The continued operation has its steps: the seal of the other parent is left."""
    with engine.begin() as connection:
        statuses = (
            status(1, 0, 512, sealed=True),
            status(2, 512, 1024),
            status(3, 0, 1024, parents=(1, 2), messages=0),
        )
        store_rebuilt(connection, plan_rebuild([source(*statuses)]), route_version=VERSION)
        operation = read_operation(connection, 1)
    assert operation.state is OperationState.SEAL
    assert [partition.partition_id for partition in operation.targets] == [2]


def test_planned_creation_is_found_again(engine: sa.Engine) -> None:
    """A metaserver continues the unfinished creation."""
    with engine.begin() as connection:
        cluster = plan_rebuild(
            [source(status(1, 0, 512, messages=0))], RebuildOptions(complete=True)
        )
        store_rebuilt(connection, cluster, route_version=VERSION)
        assert [subject.name for subject in planned_subjects(connection)] == ["s"]


def test_database_that_is_not_empty_is_refused(engine: sa.Engine) -> None:
    """A second rebuild changes nothing."""
    cluster = plan_rebuild([source(*HALVES)])
    with engine.begin() as connection:
        store_rebuilt(connection, cluster, route_version=VERSION)
    with pytest.raises(ConfigError, match="not empty"), engine.begin() as connection:
        store_rebuilt(connection, cluster, route_version=VERSION + 1)
    with engine.begin() as connection:
        assert read_route(connection, "s").version == VERSION


def test_cordon_is_kept_when_it_was_given_before_the_rebuild(engine: sa.Engine) -> None:
    """A broker that reported itself to the empty database and was cordoned stays cordoned; the
    others do not.
    """
    report = BrokerHeartbeat(broker_group="g1", broker_id="id-g1", address="g1:1")
    with engine.begin() as connection:
        store_report(connection, report, ttl_ms=1_000)
        cordon_broker(connection, "g1", True)
        sources = [source(*HALVES), source(group="g2")]
        store_rebuilt(connection, plan_rebuild(sources), route_version=VERSION)
        views = broker_views(connection)
    assert {broker.broker_group: broker.cordoned for broker in views} == {"g1": True, "g2": False}
