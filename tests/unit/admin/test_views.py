"""What an administrator sees of a group and a subject, joined from a metaserver's and the brokers'
answers.
"""

import msgspec

from keylane.admin import views
from keylane.protocol.control import (
    GroupStatus,
    GroupView,
    OwnerView,
    PartitionStatus,
    SubjectView,
)
from keylane.protocol.routing import OrderStrategy, Partition, PartitionState, Route


def partition(partition_id: int, start: int = 0, end: int = 1024) -> Partition:
    return Partition(
        partition_id=partition_id,
        name=f"s.p{partition_id}",
        queue=0,
        range_start=start,
        range_end=end,
        broker_group="g1",
        state=PartitionState.OPEN,
        address="127.0.0.1:7101",
    )


def status(partition_id: int, *groups: GroupStatus) -> PartitionStatus:
    return PartitionStatus(
        partition_id=partition_id,
        subject="s",
        name=f"s.p{partition_id}",
        state=PartitionState.OPEN,
        first_offset=10,
        next_offset=30,
        groups=groups,
    )


def group_view(*owners: OwnerView) -> GroupView:
    return GroupView(subject="s", group="g", sessions=1, owners=owners)


def test_group_that_never_pulled_is_at_the_first_message():
    view = group_view(OwnerView(partition=partition(1), token=0))
    described = views.describe_group(view, {1: status(1)})
    (progress,) = described.partitions
    assert (progress.offset, progress.next_offset, progress.lag) == (10, 30, 20)
    assert (progress.owner, progress.removed_unread) == (None, 0)
    assert described.lag == 20


def test_group_progress_is_that_of_its_own_name():
    other = GroupStatus(group="other", token=9, cursor=30, acked_above=0, lag=0)
    own = GroupStatus(group="g", token=3, cursor=12, acked_above=2, lag=16, removed_unread=1)
    owner = OwnerView(partition=partition(1), token=3, session="ab", client="host-1")
    described = views.describe_group(group_view(owner), {1: status(1, other, own)})
    (progress,) = described.partitions
    assert (progress.offset, progress.acked_above, progress.lag) == (12, 2, 16)
    assert (progress.owner, progress.session, progress.removed_unread) == ("host-1", "ab", 1)


def test_owner_without_a_name_is_shown_as_its_session():
    owner = OwnerView(partition=partition(1), token=3, session="ab", client="")
    described = views.describe_group(group_view(owner), {1: status(1)})
    assert described.partitions[0].owner == "ab"


def test_lag_is_unknown_when_one_partition_is():
    owners = [OwnerView(partition=partition(number), token=0) for number in (1, 2)]
    described = views.describe_group(group_view(*owners), {1: status(1), 2: "no answer"})
    assert described.lag is None
    assert [partition.lag for partition in described.partitions] == [20, None]
    assert [partition.problem for partition in described.partitions] == [None, "no answer"]


def test_partitions_of_a_group_are_in_the_order_in_which_they_are_read():
    """By range, and a sealed one, which is told apart, before those that continue it."""
    sealed = msgspec.structs.replace(partition(3, 0, 512), state=PartitionState.SEALED)
    parts = [partition(5, 0, 256), partition(2, 512, 1024), partition(4, 256, 512), sealed]
    owners = [OwnerView(partition=each, token=0) for each in parts]
    statuses = {each.partition_id: status(each.partition_id) for each in parts}
    described = views.describe_group(group_view(*owners), statuses).partitions
    assert [each.partition_id for each in described] == [3, 5, 4, 2]
    assert [each.state for each in described] == ["sealed", "open", "open", "open"]


def test_subject_is_described_by_range():
    route = Route(
        subject="s",
        version=3,
        order_strategy=OrderStrategy.STRICT,
        partitions=(partition(7, 512, 1024), partition(5, 0, 512)),
    )
    view = SubjectView(subject="s", order_strategy=OrderStrategy.STRICT, route=route)
    described = views.describe_subject(view, {5: status(5), 7: "no answer"})
    assert [partition.partition_id for partition in described.partitions] == [5, 7]
    assert [partition.next_offset for partition in described.partitions] == [30, None]
    assert [partition.problem for partition in described.partitions] == [None, "no answer"]
    assert described.route_version == 3
