"""What groups have not acked of sealed partitions."""

from keylane.admin.undrained import undrained_partitions
from keylane.protocol.control import GroupStatus, PartitionStatus
from keylane.protocol.parked import Failure, failing_message
from keylane.protocol.routing import Partition, PartitionState

FAILING = failing_message(12, Failure("E", "", "c", 5, 1), key_digest="no key", since_ms=5)


def sealed(partition_id: int) -> Partition:
    return Partition(
        partition_id=partition_id,
        name=f"s.p{partition_id}",
        queue=0,
        range_start=0,
        range_end=1024,
        broker_group="g1",
        state=PartitionState.SEALED,
    )


def status(partition_id: int, *groups: GroupStatus) -> PartitionStatus:
    return PartitionStatus(
        partition_id=partition_id,
        subject="s",
        name=f"s.p{partition_id}",
        state=PartitionState.SEALED,
        first_offset=10,
        next_offset=30,
        groups=groups,
    )


def test_partition_is_undrained_for_each_group_that_has_not_acked_all_of_it():
    """With the message that fails; a broker that does not answer leaves that unknown."""
    behind = GroupStatus(group="g", token=3, cursor=12, acked_above=2, lag=16, failing=FAILING)
    done = GroupStatus(group="done", token=3, cursor=30, acked_above=0, lag=0)
    statuses = {1: status(1, behind, done), 2: status(2, done), 3: "no answer"}
    first, unknown = undrained_partitions(map(sealed, (1, 2, 3)), statuses)
    assert (first.partition_id, first.name, first.group) == (1, "s.p1", "g")
    assert (first.offset, first.end_offset, first.lag) == (12, 30, 16)
    assert first.failing == FAILING
    assert (unknown.partition_id, unknown.group, unknown.problem) == (3, None, "no answer")
