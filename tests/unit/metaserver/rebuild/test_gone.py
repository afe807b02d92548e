"""A rebuild without a broker group that is gone for good: no message overtakes another, and every
loss is named.
"""

from __future__ import annotations

import msgspec
import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.brokers import broker_views, store_report
from keylane.metaserver.groups.lease_rows import read_grants
from keylane.metaserver.groups.sessions import join_group
from keylane.metaserver.groups.views import read_group
from keylane.metaserver.rebuild.plan import plan_rebuild
from keylane.metaserver.rebuild.rows import RebuildOptions, RebuiltSubject
from keylane.metaserver.rebuild.writer import store_rebuilt
from keylane.metaserver.sql.duties import rebuilt_duty, release_duty
from keylane.metaserver.verify.checks import BrokerAnswer, Views, verify
from keylane.metaserver.verify.service import read_sql_view
from keylane.protocol.control import BrokerHeartbeat, Join, PartitionStatus
from keylane.protocol.errors import InvalidRequestError, Reason
from keylane.protocol.ids import ConsumerGroup
from keylane.protocol.limits import PARTITION_MESSAGES_MAX
from support.raising import raises
from support.sql.kept_by_brokers import EXPIRED, OPEN, SEALED, heard, source, states, status
from support.sql.told_groups import settle_group

GONE = RebuildOptions(gone=("g1",))
LOSE = RebuildOptions(gone=("g1",), lose_unread=True)
SESSION = "a" * 16


def rebuilt(*statuses: PartitionStatus, options: RebuildOptions = GONE) -> RebuiltSubject:
    (subject,) = plan_rebuild([source(*statuses, group="g2")], options).subjects
    return subject


def part(number: int, *parents: int, **more) -> PartitionStatus:
    """A partition of the whole range on broker group g2."""
    return status(number, 0, 1024, parents=parents, group="g2", **more)


def emptied(partition: PartitionStatus) -> PartitionStatus:
    """The same after retention has removed every message."""
    return msgspec.structs.replace(partition, first_offset=partition.next_offset)


def brought_by_operator(partition: PartitionStatus) -> PartitionStatus:
    groups = tuple(msgspec.structs.replace(each, by_operator=True) for each in partition.groups)
    return msgspec.structs.replace(partition, groups=groups)


def granted_after_a_ttl(connection: sa.Connection) -> list[int]:
    """The partitions of a consumer that joins beside broker group g2, when old sessions have
    ended.
    """
    report = BrokerHeartbeat(broker_group="g2", broker_id="id-g2", address="g2:1")
    store_report(connection, report, ttl_ms=60_000)
    ask = Join(subject="s", group="g", session=SESSION)
    group_id = join_group(connection, ask, sessions_max=10).group_id
    assert release_duty(connection, rebuilt_duty(group_id), holder="rebuild")  # a ttl later
    settle_group(connection, group_id)
    grants = read_grants(connection, SESSION).grants
    return [grant.partition.partition_id for grant in grants]


def test_rebuild_succeeds_without_an_evacuated_broker(engine: sa.Engine) -> None:
    """The children of a gone partition are granted, the partition is expired, and every check
    holds.
    """
    answer = source(part(2, 1, token=5), group="g2")
    with pytest.raises(InvalidRequestError, match="--gone"):
        plan_rebuild([answer], RebuildOptions(complete=True))
    cluster = plan_rebuild([answer], GONE)
    (subject,) = cluster.subjects
    assert states(subject) == {1: EXPIRED, 2: OPEN}
    (gone,) = subject.gone
    assert (gone.partition.partition_id, gone.unread_by) == (1, ())
    assert subject.canceled_operation is None
    assert subject.operation is None
    with engine.begin() as connection:
        store_rebuilt(connection, cluster, route_version=1_000_000)
        view = read_sql_view(connection)
        assert {broker.broker_group: broker.cordoned for broker in broker_views(connection)} == {
            "g1": True,
            "g2": False,
        }
        granted = granted_after_a_ttl(connection)
    assert granted == [2]
    answers = [
        BrokerAnswer(broker_group="g2", address="g2:1", hosted=answer.hosted),
        BrokerAnswer(broker_group="g1", address="", hosted=None, problem="silent"),
    ]
    verified = verify(Views(before=view, answers=answers, after=view))
    assert [check.violations for check in verified.checks if check.violations] == []


@pytest.mark.parametrize(
    "child", [heard(part(2, 1)), brought_by_operator(part(2, 1, token=5)), part(2, 1)]
)
def test_unread_messages_are_given_up_only_with_lose_unread(child: PartitionStatus) -> None:
    """
    A group is named if it has not reached a child, was only set there by an operator, or is known
    on other partitions alone.
    """
    left, right = (
        msgspec.structs.replace(
            child,
            facts=msgspec.structs.replace(
                child.facts,
                partition=msgspec.structs.replace(child.facts.partition, range_end=512),
            ),
        ),
        status(3, 512, 1024, group="g2", token=4),
    )
    with pytest.raises(InvalidRequestError, match=r"partition 1 is gone, and g may"):
        rebuilt(left, right)
    subject = rebuilt(left, right, options=LOSE)
    assert states(subject) == {1: EXPIRED, 2: OPEN, 3: OPEN}
    assert [gone.unread_by for gone in subject.gone] == [("g",)]


def test_given_up_messages_stay_known_when_a_rebuild_has_lost_them(engine: sa.Engine) -> None:
    """The group that may not have read the gone partition is described with it, without a
    number.
    """
    cluster = plan_rebuild([source(heard(part(2, 1)), group="g2")], LOSE)
    with engine.begin() as connection:
        store_rebuilt(connection, cluster, route_version=1_000_000)
        (lost,) = read_group(connection, cluster.subjects[0].name, ConsumerGroup("g")).given_up
    assert (lost.partition_id, lost.broker_group, lost.messages_max) == (1, "g1", None)


def test_group_counts_as_through_when_it_was_granted_a_later_partition() -> None:
    """The group was granted a grandchild of the gone partition, so it has drained the gone
    partition too.
    """
    subject = rebuilt(part(2, 1, sealed=True), part(3, 2, token=7))
    assert [gone.unread_by for gone in subject.gone] == [()]
    assert states(subject) == {1: EXPIRED, 2: SEALED, 3: OPEN}


def test_rebuild_is_refused_when_messages_are_left_before_a_gone_partition() -> None:
    """A later group would read messages before the gone partition beside the messages after it."""
    before = part(1, sealed=True, token=1, cursor=10)
    after = part(3, 2, token=2)
    for options in (GONE, LOSE):
        with pytest.raises(InvalidRequestError, match="partition 1 has messages left"):
            rebuilt(before, after, options=options)
    assert states(rebuilt(emptied(before), after)) == {1: SEALED, 2: EXPIRED, 3: OPEN}
    middle = emptied(part(2, 1, sealed=True))
    with pytest.raises(InvalidRequestError, match="partition 1 has messages left"):
        rebuilt(before, middle, part(4, 3, token=2))
    half = status(2, 512, 1024, parents=(1,), group="g2", token=3)
    other = status(4, 0, 512, parents=(3,), group="g2", token=4)
    with pytest.raises(InvalidRequestError, match="partition 1 has messages left"):
        rebuilt(before, half, other)
    assert states(rebuilt(emptied(before), half, other))[3] is EXPIRED


@pytest.mark.parametrize("left", [1, 2])
def test_rebuild_is_refused_for_messages_left_of_keys_that_the_gone_partition_had(
    left: int,
) -> None:
    """1 and 2 were merged into 3, and 3 was split into 4 and 5, which is gone. Of 1, which has no
    key of 5, all waits as before.
    """
    first = status(1, 0, 512, sealed=True, group="g2", token=4)
    second = status(2, 512, 1024, sealed=True, group="g2", token=4)
    parts = [
        first if left == 1 else emptied(first),
        second if left == 2 else emptied(second),
        emptied(part(3, 1, 2, sealed=True, token=5)),
        status(4, 0, 512, parents=(3,), group="g2", token=6),
        status(6, 512, 1024, parents=(5,), group="g2", token=7),
    ]
    if left == 1:
        assert states(rebuilt(*parts))[5] == EXPIRED
        return
    with pytest.raises(InvalidRequestError, match="partition 2 has messages left"):
        rebuilt(*parts)


def test_rebuild_is_refused_when_an_open_partition_is_gone() -> None:
    """A range without an open partition is refused; so is a broker that answers although it is said
    to be gone.
    """
    with pytest.raises(InvalidRequestError, match="do not cover"):
        rebuilt(status(2, 512, 1024, group="g2"), options=LOSE)
    merge = status(3, 0, 1024, parents=(1, 2), group="g2", messages=0)
    with pytest.raises(InvalidRequestError, match="do not cover"):
        rebuilt(status(2, 512, 1024, group="g2"), merge, options=LOSE)
    with pytest.raises(InvalidRequestError, match="--gone names as gone"):
        plan_rebuild([source(part(2), group="g2")], RebuildOptions(gone=("g2",)))
    with raises(Reason.NAME_INVALID):
        rebuilt(part(2), options=RebuildOptions(gone=("",)))


def test_static_queue_begins_behind_a_gone_partition() -> None:
    """
    The gone partition begins at the offset that its name says, above all earlier offsets; its child
    counts on from there.
    """
    child = part(2, 1, static=True, queue=0, sealed=True, messages=10)
    subject = rebuilt(child, part(3, 2, static=True, queue=0), options=LOSE)
    starts = {
        partition.partition.partition_id: partition.partition.logic_start
        for partition in subject.partitions
    }
    assert starts == {1: 0, 2: PARTITION_MESSAGES_MAX, 3: PARTITION_MESSAGES_MAX + 10}


def test_static_queue_keeps_its_order_over_a_gone_partition(engine: sa.Engine) -> None:
    """Partition 1 has messages, 2 was its child, 3 is empty and 4 open: none is granted before 1 is
    drained.
    """
    before = part(1, static=True, queue=0, sealed=True, messages=40, token=3, cursor=20)
    empty = part(3, 2, static=True, queue=0, sealed=True, messages=0, token=4)
    answer = source(before, empty, part(4, 3, static=True, queue=0), group="g2")
    cluster = plan_rebuild([answer], LOSE)
    (subject,) = cluster.subjects
    assert {
        partition.partition.partition_id: partition.partition.parents
        for partition in subject.partitions
    } == {
        1: (),
        2: (1,),
        3: (2,),
        4: (3,),
    }
    with engine.begin() as connection:
        store_rebuilt(connection, cluster, route_version=1_000_000)
        view = read_sql_view(connection)
        granted = granted_after_a_ttl(connection)
    assert granted == [1]
    verified = verify(Views(before=view, answers=[], after=view)).checks
    assert [check.violations for check in verified if check.code == "V02"] == [[]]


def test_gone_group_changes_nothing_when_no_partition_is_missing(engine: sa.Engine) -> None:
    """A gone broker group without partitions gets no row."""
    with engine.begin() as connection:
        cluster = plan_rebuild([source(part(2), group="g2")], GONE)
        store_rebuilt(connection, cluster, route_version=1_000_000)
        assert [broker.broker_group for broker in broker_views(connection)] == ["g2"]
