"""After a rebuild a group has drained a partition only if it has drained all of its ancestors."""

from __future__ import annotations

import sqlalchemy as sa
from msgspec.structs import replace

from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.groups.lease_rows import read_grants, store_drained
from keylane.metaserver.groups.sessions import join_group
from keylane.metaserver.rebuild.plan import plan_rebuild
from keylane.metaserver.rebuild.writer import store_rebuilt
from keylane.metaserver.sql.duties import rebuilt_duty, release_duty
from keylane.protocol.control import BrokerHeartbeat, Join, PartitionStatus
from support.sql.kept_by_brokers import heard, rebuilt, source, status
from support.sql.told_groups import settle_group

SESSION = "a" * 16


def chain(cursor: int, middle: PartitionStatus) -> tuple[PartitionStatus, ...]:
    """Ten messages of which the group has acked `cursor`, a child of the partition, and ten more
    messages.
    """
    return (
        status(1, 0, 1024, sealed=True, token=1, cursor=cursor),
        middle,
        heard(status(3, 0, 1024, parents=(2,), messages=10)),
    )


EMPTY = status(2, 0, 1024, parents=(1,), sealed=True, messages=0)


def test_empty_partition_still_blocks_its_children_until_its_parent_is_drained(
    engine: sa.Engine,
) -> None:
    """The group is granted the first partition, then the empty one, then the last: one at a time,
    in order.
    """
    granted = []
    with engine.begin() as connection:
        cluster = plan_rebuild([source(*chain(5, heard(EMPTY)))])
        store_rebuilt(connection, cluster, route_version=1_000_000)
        report = BrokerHeartbeat(broker_group="g1", broker_id="id-g1", address="g1:1")
        store_report(connection, report, ttl_ms=60_000)
        ask = Join(subject="s", group="g", session=SESSION)
        group_id = join_group(connection, ask, sessions_max=10).group_id
        settle_group(connection, group_id)
        assert read_grants(connection, SESSION).grants == ()
        assert release_duty(connection, rebuilt_duty(group_id), holder="rebuild")  # a ttl later
        for _ in range(3):
            settle_group(connection, group_id)
            grants = read_grants(connection, SESSION).grants
            ids = [int(grant.partition.partition_id) for grant in grants]
            granted.append(ids)
            store_drained(connection, SESSION, ids, ())
    assert granted == [[1], [2], [3]]


def test_children_take_over_what_one_of_them_has_begun_to_after_a_rebuild() -> None:
    """The partition is frozen, so nothing counts as parked there; its other child has taken nothing
    over.
    """
    first = status(1, 0, 1024, sealed=True, token=1, cursor=10)
    (group,) = first.groups
    frozen = replace(first, groups=(replace(group, left_to_children=True),))
    child = status(2, 0, 1024, parents=(1,))
    assert rebuilt(first, child).groups[0].parked_ids == set()
    assert rebuilt(frozen, child).groups[0].parked_ids == {1}


def test_partition_that_children_took_over_counts_as_drained_though_its_parent_was_reset_alone() -> (
    None
):
    """An owner of it could take over nothing of what the parent parks anew, and would wait for
    ever.
    """
    middle = status(2, 0, 1024, parents=(1,), sealed=True, messages=10, token=2, cursor=10)
    (group,) = middle.groups
    frozen = replace(group, left_to_children=True, frozen=True)
    assert rebuilt(*chain(5, middle)).groups[0].drained_ids == set()
    assert rebuilt(*chain(5, replace(middle, groups=(frozen,)))).groups[0].drained_ids == {2}


def test_partition_counts_as_drained_when_it_was_granted_and_its_parents_are() -> None:
    """A group at the end of a partition by a token of its own, as after a reset, still waits for
    the parent.
    """
    brought = status(2, 0, 1024, parents=(1,), sealed=True, messages=0, token=12)
    assert rebuilt(*chain(5, brought)).groups[0].drained_ids == set()
    assert rebuilt(*chain(10, brought)).groups[0].drained_ids == {1, 2}
    assert rebuilt(*chain(10, heard(EMPTY))).groups[0].drained_ids == {1}
