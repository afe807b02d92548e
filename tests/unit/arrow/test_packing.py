"""Each row is in one task, small ranges share tasks, parents come first, and ranges are split only
on request.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.arrow.packing import TASK_BYTES, TASK_ROWS, pack_tasks
from keylane.arrow.planner import PlannedRange
from keylane.arrow.selection import ReadOptions


def planned(number: int, rows: int, start: int = 0, **more) -> PlannedRange:
    return PlannedRange(
        **{
            "partition_id": number,
            "broker_group": "g",
            "address": "127.0.0.1:1",
            "start": start,
            "end": start + rows,
            "subject": "flights",
            "range_start": 0,
            "range_end": 1024,
            "queue": 0,
            "logic_start": 0,
            "epoch": 0,
            "lineage": number,
            **more,
        }
    )


def options(**more) -> ReadOptions:
    return ReadOptions(meta=("127.0.0.1:1",), subjects=("flights",), **more)


def ids(tasks) -> list[list[int]]:
    return [[each.partition_id for each in task] for task in tasks]


def test_empty_ranges_make_no_task():
    assert pack_tasks([planned(1, 0), planned(2, 0, start=7)], options()) == []
    assert ids(pack_tasks([planned(1, 0), planned(2, 3)], options())) == [[2]]


def test_small_ranges_share_tasks_when_there_are_many():
    """1,000 ranges of 1,000 rows make 4 tasks of equal size."""
    tasks = pack_tasks([planned(number, 1_000) for number in range(1, 1_001)], options())
    assert [sum(each.rows for each in task) for task in tasks] == [TASK_ROWS] * 4
    assert [number for task in ids(tasks) for number in task] == list(range(1, 1_001))


def test_large_messages_are_read_by_several_tasks():
    """Ranges with few rows and many bytes share a task only up to its limit of bytes."""
    ranges = [planned(number, 16, message_bytes=1 << 20) for number in range(1, 9)]
    assert ids(pack_tasks(ranges, options())) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert all(
        sum(each.size_bytes for each in task) <= TASK_BYTES
        for task in pack_tasks(ranges, options())
    )


def test_large_ranges_have_tasks_of_their_own_and_are_not_cut():
    assert ids(
        pack_tasks([planned(1, 10 * TASK_ROWS), planned(2, 5), planned(3, 5)], options())
    ) == [
        [1],
        [2, 3],
    ]


def test_partitions_that_continue_one_another_share_a_task_when_they_fit():
    """A small lineage is not divided, and parents come first."""
    ranges = [
        planned(5, 100, lineage=2, epoch=1),
        planned(1, TASK_ROWS - 150),
        planned(2, 100, lineage=2),
        planned(9, 50, lineage=2, epoch=2),
    ]
    assert ids(pack_tasks(ranges, options())) == [[1], [2, 5, 9]]


def test_ordered_keeps_a_lineage_in_one_task_whatever_its_size():
    ranges = [
        planned(4, TASK_ROWS, lineage=3, epoch=1),
        planned(3, TASK_ROWS, lineage=3),
        planned(8, 10),
    ]
    assert ids(pack_tasks(ranges, options())) == [[3], [4], [8]]
    assert ids(pack_tasks(ranges, options(ordered=True))) == [[3, 4], [8]]


def test_min_partitions_cuts_large_ranges():
    tasks = pack_tasks([planned(1, 1_000), planned(2, 10)], options(min_partitions=4))
    assert len(tasks) >= 4
    assert [(each.partition_id, each.start, each.end) for task in tasks for each in task] == [
        (1, 0, 250),
        (1, 250, 500),
        (1, 500, 750),
        (1, 750, 1_000),
        (2, 0, 10),
    ]
    assert len(pack_tasks([planned(1, 3)], options(min_partitions=100))) == 3


def test_task_bytes_cuts_and_packs():
    ranges = [planned(1, 100, message_bytes=1 << 20), planned(2, 2, message_bytes=1 << 20)]
    tasks = pack_tasks(ranges, options(task_bytes=32 << 20))
    assert [sum(each.rows for each in task) for task in tasks] == [25, 25, 25, 27]


@given(
    sizes=st.lists(
        st.tuples(
            st.integers(0, 3 * TASK_ROWS),
            st.integers(1, 4),
            st.integers(0, 3),
            st.integers(0, 9_999),
        ),
        max_size=12,
    ),
    cut=st.sampled_from([{}, {"ordered": True}, {"min_partitions": 7}, {"task_bytes": 1 << 20}]),
)
def test_every_row_is_in_one_task_and_in_order_there(sizes, cut):
    """Properties of any packing: no row is missing or twice in a task, and tasks are ordered by
    lineage, epoch and offset.
    """
    ranges = [
        planned(number, rows, lineage=lineage, epoch=epoch, message_bytes=size)
        for number, (rows, lineage, epoch, size) in enumerate(sizes, 1)
    ]
    tasks = pack_tasks(ranges, options(**cut))
    rows: Counter[int] = Counter()
    for task in tasks:
        assert task
        keys = [(each.lineage, each.epoch, each.partition_id, each.start) for each in task]
        assert keys == sorted(keys)
        for each in task:
            assert each.rows
            rows[each.partition_id] += each.rows
    assert rows == {each.partition_id: each.rows for each in ranges if each.rows}
    in_task = [each.partition_id for task in tasks for each in task]
    if "min_partitions" not in cut and "task_bytes" not in cut:
        assert len(in_task) == len(set(in_task)), "no partition is in two tasks"
    if cut.get("ordered"):
        homes = {(each.lineage, index) for index, task in enumerate(tasks) for each in task}
        assert len(homes) == len({lineage for lineage, _ in homes})


@pytest.mark.parametrize("rows", [1, 7, TASK_ROWS])
def test_range_alone_is_one_task(rows):
    assert pack_tasks([planned(1, rows, start=5)], options()) == [(planned(1, rows, start=5),)]
