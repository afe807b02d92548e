"""Rows that took the place of messages: which a reader leaves out, and where they stand in the lineage."""

from __future__ import annotations

from keylane.consumer.reading.lineage_order import LineageOrder
from keylane.consumer.reading.replacing_rows import ReplacingRows
from keylane.protocol.message import Message, pack_properties
from keylane.protocol.reprocess.sources import SOURCE
from keylane.protocol.routing import PartitionState
from unit.consumer.reading.test_lineage_order import OPEN, ids, past

CUT = [past(1, 0, 1024), past(3, 0, 1024, 1, state=OPEN)]
EXPIRED = past(1, 0, 1024, state=PartitionState.EXPIRED)
PUBLISHED = [EXPIRED, past(2, 0, 1024, 1), past(3, 0, 1024, 1, 2, state=OPEN)]


def row(partition_id: int, source: str = "") -> Message:
    properties = pack_properties({SOURCE: source} if source else {})
    return Message("s", b"k", b"v", 0, partition_id, 0, packed_properties=properties)


def test_row_is_left_out_when_its_message_was_given():
    rows = ReplacingRows()
    rows.learn(PUBLISHED)
    had = lambda partition_id, offset: (partition_id, offset) < (1, 5)  # noqa: E731 - as short as it is
    assert rows.needs_no(row(2, "1/4"), had)
    assert not rows.needs_no(row(2, "1/5"), had)
    assert not rows.needs_no(row(2), had)
    assert not rows.needs_no(row(3, "1/4"), had)


def test_rows_that_are_published_behind_messages_are_no_replacement():
    """A resize, and a publication without a cut."""
    rows = ReplacingRows()
    rows.learn([past(1, 0, 1024), past(2, 0, 1024, 1), past(3, 0, 512, 2), past(4, 512, 1024, 2)])
    assert not any(number in rows for number in range(5))


def test_rows_are_read_before_what_continues_them_when_that_was_known_already():
    order = LineageOrder()
    order.learn(CUT)
    order.learn(PUBLISHED)
    order.finish(1)
    assert ids(order) == [2]
    order.finish(2)
    assert ids(order) == [3]


def test_history_is_of_another_subject_when_it_has_none_of_the_partitions():
    order = LineageOrder()
    assert not order.is_of_another([past(9, 0, 1024)])
    order.learn(CUT)
    assert order.is_of_another([past(9, 0, 1024)])
    assert not order.is_of_another([past(9, 0, 1024, 3)])
    assert not order.is_of_another(PUBLISHED)
