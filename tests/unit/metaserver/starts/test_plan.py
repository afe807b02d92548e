"""The first offsets of a new group, decided from what brokers say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keylane.metaserver.resets.cursors import PartitionOffsets
from keylane.metaserver.starts.plan import check_start, compute_start_cursors
from keylane.protocol.errors import (
    InvalidRequestError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    Reason,
)
from keylane.protocol.groups import GroupStart, StartAt
from keylane.protocol.ids import PartitionId
from keylane.protocol.operations import PartitionHistory
from keylane.protocol.routing import Partition, PartitionState
from support.raising import raises

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
    assert compute_start_cursors(LATEST, parts, static=False) == {1: 100, 2: 30}


def test_start_at_a_time_reads_all_children_of_what_it_reads():
    """A parent that has a message of that time is not at its end: what follows it is read from the
    first message.
    """
    parts = [offsets(1, offset_at_time=60), offsets(2, parents=(1,), end=30, offset_at_time=20)]
    assert compute_start_cursors(AT_TIME, parts, static=False) == {1: 60, 2: 10}
    late = [offsets(1), offsets(2, parents=(1,), end=30, offset_at_time=20)]
    assert compute_start_cursors(AT_TIME, late, static=False) == {1: 100, 2: 20}


def test_start_at_earliest_fixes_nothing():
    """A broker begins a group that it does not know at its first message."""
    assert compute_start_cursors(GroupStart(), [offsets(1)], static=False) == {}


def test_group_that_brokers_have_seen_goes_on_where_it_was():
    """The database was restored from a copy that lacks the group: none of its progress is passed
    over.
    """
    parts = [offsets(1, fence=7, cursor=20), offsets(2, parents=(1,))]
    assert compute_start_cursors(LATEST, parts, static=False) == {}


@pytest.mark.parametrize(
    "start", [GroupStart(at=StartAt.TIME), GroupStart(at=StartAt.LATEST, at_ms=5)]
)
def test_time_goes_with_a_start_at_a_time(start: GroupStart):
    """And only with it."""
    with pytest.raises(InvalidRequestError):
        check_start(start)
    check_start(AT_TIME)
    check_start(LATEST)


def behind(**cursors: int) -> GroupStart:
    """A start at the cursors p1=…, p2=…."""
    named = {int(name[1:]): cursor for name, cursor in cursors.items()}
    return GroupStart(at=StartAt.CURSORS, at_ms=5, cursors=named)


def first(number: int, *, parents: tuple[int, ...] = (), first_offset: int = 0) -> PartitionOffsets:
    return replace(offsets(number, parents=parents), first_offset=first_offset)


def test_start_behind_a_backfill_goes_on_at_its_ends():
    """A parent that was read half has its rest read; children that came later begin at their first
    message.
    """
    parts = [offsets(1), first(2, parents=(1,))]
    assert compute_start_cursors(behind(p1=40), parts, static=False) == {1: 40, 2: 0}
    assert compute_start_cursors(behind(p1=100), parts, static=False) == {1: 100, 2: 0}
    assert compute_start_cursors(behind(p1=100, p2=7), parts, static=True) == {1: 100, 2: 7}


def test_start_behind_a_backfill_passes_rows_of_what_the_backfill_has():
    """1 was cut, 2 has the rows, 3 is behind both; a backfill that ended before the cut has some of
    them.
    """
    rows, behind_cut = offsets(2, parents=(1,)), offsets(3, parents=(1, 2), end=30)
    parts = [replace(each, first_offset=0) for each in (rows, behind_cut)]
    history = [
        PartitionHistory(partition=offsets(1).partition, end_offset=100),
        PartitionHistory(partition=rows.partition, end_offset=100),
        PartitionHistory(partition=behind_cut.partition),
    ]
    more = {"static": False, "expired_ends": {1: 100}, "history": history}
    assert compute_start_cursors(behind(p1=100), parts, **more) == {2: 100, 3: 0}
    assert compute_start_cursors(behind(p1=0), parts, **more) == {}
    with raises(Reason.MANIFEST):
        compute_start_cursors(behind(p1=50), parts, **more)


def test_start_behind_a_backfill_is_refused_when_a_later_partition_has_expired():
    """Its messages were never read, and it is in no list of partitions any more."""
    with pytest.raises(OffsetOutOfRangeError, match="partition 2 has expired"):
        compute_start_cursors(
            behind(p1=100), [first(3, parents=(2,))], static=False, expired_ends={1: 100, 2: 7}
        )


def test_start_behind_a_backfill_leaves_out_what_expired_when_it_was_read_to_its_end():
    parts = [first(2, parents=(1,))]
    cursors = compute_start_cursors(
        behind(p1=100, p2=7), parts, static=False, expired_ends={1: 100}
    )
    assert cursors == {2: 7}
    assert compute_start_cursors(behind(p1=100), parts, static=False, expired_ends={1: 100}) == {}


@pytest.mark.parametrize(
    ("start", "parts", "expired"),
    [
        (behind(p1=5), [offsets(1)], {}),
        (behind(p1=101), [offsets(1)], {}),
        (behind(p1=40), [first(2, parents=(1,))], {1: 100}),
        (behind(p1=100), [offsets(1), first(2, parents=(1,), first_offset=3)], {}),
    ],
    ids=["removed", "behind the end", "expired", "removed from a child"],
)
def test_start_behind_a_backfill_is_refused_when_messages_between_are_gone(start, parts, expired):
    with pytest.raises(OffsetOutOfRangeError):
        compute_start_cursors(start, parts, static=False, expired_ends=expired)


def test_start_behind_a_backfill_is_refused_when_it_names_a_strange_partition():
    with pytest.raises(PartitionUnknownError):
        compute_start_cursors(behind(p9=5), [offsets(1)], static=False)
    for start in (
        GroupStart(at=StartAt.CURSORS, at_ms=5),
        GroupStart(at=StartAt.CURSORS, cursors={1: 2}),
        GroupStart(cursors={1: 2}),
    ):
        with pytest.raises(InvalidRequestError):
            check_start(start)
