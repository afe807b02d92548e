"""Rows that replaced messages: which ones a reader skips, and where they are in the lineage."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from keylane.consumer.reading.lineage_order import LineageOrder, ReplacingRows, WasRead
from keylane.protocol.errors import SubjectDeletedError
from keylane.protocol.message import Message, pack_properties
from keylane.protocol.reprocess.manifest import SOURCE
from keylane.protocol.routing import PartitionState
from unit.consumer.reading.test_lineage_order import OPEN, ids, past

CUT = [past(1, 0, 1024), past(3, 0, 1024, 1, state=OPEN)]
EXPIRED = past(1, 0, 1024, state=PartitionState.EXPIRED)
PUBLISHED = [EXPIRED, past(2, 0, 1024, 1), past(3, 0, 1024, 1, 2, state=OPEN)]


def row(partition_id: int, source: str = "", key: bytes = b"k") -> Message:
    properties = pack_properties({SOURCE: source} if source else {}, kept=[SOURCE])
    return Message("s", key, b"v", 0, partition_id, 0, packed_properties=properties)


def had_of(positions: dict[int, int]) -> WasRead:
    """Return the predicate of a reader with these positions."""
    return lambda partition_id, _start, end: end <= positions.get(partition_id, 0)


def test_row_is_left_out_when_its_message_was_given():
    rows = ReplacingRows()
    rows.update(PUBLISHED)
    had = had_of({1: 5})
    assert rows.is_source_read(row(2, "1/4"), had)
    assert not rows.is_source_read(row(2, "1/5"), had)
    assert not rows.is_source_read(row(2), had)
    assert not rows.is_source_read(row(3, "1/4"), had)


TWICE = [
    past(1, 0, 1024, state=PartitionState.EXPIRED),
    past(2, 0, 1024, 1, state=PartitionState.EXPIRED),
    past(3, 0, 1024, 1, 2, state=PartitionState.EXPIRED),
    past(4, 0, 1024, 3),
    past(5, 0, 1024, 3, 4, state=OPEN),
]
"""Rows 2 replaced messages 1, and rows 4 replaced rows 2 and messages 3."""


def test_row_of_a_row_is_left_out_when_all_messages_behind_it_were_given():
    rows = ReplacingRows()
    rows.update([replace(each, end_offset=8) for each in TWICE])
    assert rows.is_source_read(row(4, "2/6"), had_of({1: 8}))
    assert rows.is_source_read(row(4, "2/6"), had_of({1: 8, 2: 3}))
    assert rows.is_source_read(row(4, "2/6"), had_of({2: 7}))
    assert not rows.is_source_read(row(4, "2/6"), had_of({1: 7}))
    assert not rows.is_source_read(row(4, "2/6"), had_of({}))
    assert not rows.is_source_read(row(4, "3/6"), had_of({1: 8}))
    assert not rows.is_source_read(row(4, "9/6"), had_of({1: 8}))


def test_row_of_a_row_is_left_out_when_an_empty_partition_lies_between():
    rows = ReplacingRows()
    ends = {1: 8, 9: 0, 2: 8, 3: 8, 4: 8}
    between = past(9, 0, 1024, 1, state=PartitionState.EXPIRED)
    parents = {2: (9,), 3: (9, 2)}
    history = [
        replace(
            each,
            end_offset=ends.get(number),
            partition=replace(each.partition, parents=parents.get(number, each.partition.parents)),
        )
        for each in (*TWICE, between)
        for number in (int(each.partition.partition_id),)
    ]
    rows.update(history)
    assert rows.is_source_read(row(4, "2/6"), had_of({1: 8}))
    assert not rows.is_source_read(row(4, "2/6"), had_of({1: 7}))


@pytest.mark.parametrize("end", [0, 1])
def test_row_of_a_row_is_left_out_when_an_empty_partition_without_parents_lies_behind_it(end: int):
    """It has nothing that could be unread; with one message it has."""
    rows = ReplacingRows()
    ends = {1: 8, 2: 8, 3: 8, 4: 8, 9: end}
    first = past(9, 512, 1024, state=PartitionState.EXPIRED)
    parents = {2: (1, 9), 3: (1, 9, 2)}
    rows.update(
        replace(
            each,
            end_offset=ends.get(number),
            partition=replace(each.partition, parents=parents.get(number, each.partition.parents)),
        )
        for each in (*TWICE, first)
        for number in (int(each.partition.partition_id),)
    )
    assert rows.is_source_read(row(4, "2/6"), had_of({1: 8})) == (end == 0)
    assert not rows.is_source_read(row(4, "2/6"), had_of({1: 7}))


HALVES = [
    past(1, 0, 512, state=PartitionState.EXPIRED),
    past(2, 512, 1024, state=PartitionState.EXPIRED),
    past(3, 0, 512, 1, state=PartitionState.EXPIRED),
    past(4, 512, 1024, 2, state=PartitionState.EXPIRED),
    past(5, 0, 512, 1, 3, state=PartitionState.EXPIRED),
    past(6, 512, 1024, 2, 4, state=PartitionState.EXPIRED),
    past(7, 0, 512, 5),
    past(8, 512, 1024, 6),
    past(9, 0, 512, 5, 7, state=OPEN),
    past(10, 512, 1024, 6, 8, state=OPEN),
]
"""Rows 3 and 4 replaced messages 1 and 2, and rows 7 and 8 replaced those."""


@pytest.mark.parametrize("key", [b"k", b""])
def test_row_of_a_row_depends_only_on_what_its_partition_continues(key: bytes):
    """Whether it has a key or not."""
    rows = ReplacingRows()
    rows.update(replace(each, end_offset=8) for each in HALVES)
    had_left = had_of({1: 8, 2: 3})
    assert rows.is_source_read(row(7, "3/6", key), had_left)
    assert not rows.is_source_read(row(8, "4/6", key), had_left)


def test_rows_that_are_published_behind_messages_are_no_replacement():
    """A resize, and a publication without a cut."""
    rows = ReplacingRows()
    rows.update([past(1, 0, 1024), past(2, 0, 1024, 1), past(3, 0, 512, 2), past(4, 512, 1024, 2)])
    assert not rows.ids


def test_rows_are_read_before_what_continues_them_when_that_was_known_already():
    order = LineageOrder()
    order.update(CUT)
    order.update(PUBLISHED)
    order.finish(1)
    assert ids(order) == [2]
    order.finish(2)
    assert ids(order) == [3]


def test_history_is_refused_when_it_has_none_of_the_partitions():
    order = LineageOrder()
    order.check_subject("s", [past(9, 0, 1024)])
    order.update(CUT)
    with pytest.raises(SubjectDeletedError) as caught:
        order.check_subject("s", [past(9, 0, 1024)])
    assert caught.value.subject == "s"
    order.check_subject("s", [past(9, 0, 1024, 3)])
    order.check_subject("s", PUBLISHED)
