"""The first offsets of a new group, decided from what brokers say."""

from __future__ import annotations

import pytest

from keylane.metaserver.resets.cursors import PartitionOffsets
from keylane.metaserver.starts.plan import check_start, start_cursors
from keylane.protocol.errors import InvalidRequestError
from keylane.protocol.groups import GroupStart, StartAt
from keylane.protocol.ids import PartitionId
from keylane.protocol.routing import Partition, PartitionState

LATEST = GroupStart(at=StartAt.LATEST)
AT_TIME = GroupStart(at=StartAt.TIME, at_ms=5)


def offsets(
    number: int, *, parents: tuple[int, ...] = (), end: int = 100, **more: int
) -> PartitionOffsets:
    state = PartitionState.OPEN if parents or number > 1 else PartitionState.SEALED
    partition = Partition(
        partition_id=PartitionId(number),
        name=f"p{number}",
        range_start=0,
        range_end=1024,
        broker_group="g1",
        state=state,
        parents=tuple(map(PartitionId, parents)),
        queue=0,
        address="g1:1",
    )
    return PartitionOffsets(partition=partition, first_offset=10, next_offset=end, **more)


def test_start_at_latest_is_behind_the_last_message():
    """Of a parent and of its child, each for itself."""
    parts = [offsets(1), offsets(2, parents=(1,), end=30)]
    assert start_cursors(LATEST, parts, static=False) == {1: 100, 2: 30}


def test_start_at_a_time_reads_all_children_of_what_it_reads():
    """A parent that has a message of that time is not at its end: what follows it is read from the first message."""
    parts = [offsets(1, at_time=60), offsets(2, parents=(1,), end=30, at_time=20)]
    assert start_cursors(AT_TIME, parts, static=False) == {1: 60, 2: 10}
    late = [offsets(1), offsets(2, parents=(1,), end=30, at_time=20)]
    assert start_cursors(AT_TIME, late, static=False) == {1: 100, 2: 20}


def test_start_at_earliest_fixes_nothing():
    """A broker begins a group that it does not know at its first message."""
    assert start_cursors(GroupStart(), [offsets(1)], static=False) == {}


def test_group_that_brokers_have_seen_goes_on_where_it_was():
    """The database was restored from a copy that lacks the group: none of its progress is passed over."""
    parts = [offsets(1, fence=7, cursor=20), offsets(2, parents=(1,))]
    assert start_cursors(LATEST, parts, static=False) == {}


@pytest.mark.parametrize(
    "start", [GroupStart(at=StartAt.TIME), GroupStart(at=StartAt.LATEST, at_ms=5)]
)
def test_time_goes_with_a_start_at_a_time(start: GroupStart):
    """And only with it."""
    with pytest.raises(InvalidRequestError):
        check_start(start)
    check_start(AT_TIME)
    check_start(LATEST)
