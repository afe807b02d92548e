"""Frames and records of scheduled messages with anything in them, and copies of the index of any
moment.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keylane.broker.scheduled import records as records_module
from keylane.broker.scheduled.old_journal import read_frame, scan
from keylane.broker.scheduled.records import (
    Canceled,
    Delivered,
    Place,
    Record,
    ScheduledMessageRecord,
    Taken,
    encode_records,
    read_changes,
)
from keylane.broker.scheduled.schedule_index import ScheduleIndex
from keylane.protocol.errors import CorruptLogError
from keylane.protocol.record import HEADER_BYTES, stamp_record
from support.old_journal import encode_frame

ids = st.binary(min_size=16, max_size=16)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
numbers = st.integers(-(2**63), 2**63 - 1)
records = st.one_of(
    st.builds(
        ScheduledMessageRecord,
        ids,
        numbers,
        texts,
        numbers,
        st.binary(max_size=40),
        st.binary(max_size=20),
    ),
    st.builds(Canceled, ids),
    st.builds(Taken, texts, texts, st.integers(0, 1023), st.lists(ids, max_size=4).map(tuple)),
    st.builds(Delivered, texts, st.lists(ids, max_size=4).map(tuple)),
)
frames = st.lists(st.lists(records, min_size=1, max_size=4), min_size=1, max_size=6)
u64 = st.integers(0, 2**64 - 1)


@given(st.lists(records, max_size=4), u64, u64, st.binary(max_size=20), st.binary(max_size=20))
@settings(deadline=None)
def test_frame_reads_back_where_it_was_written_and_nowhere_else(
    written, segment, position, before, after
):
    frame = encode_frame(written, segment=segment, position=position)
    around = before + frame + after
    assert read_frame(around, len(before), segment=segment, position=position) == (
        len(frame),
        written,
    )
    elsewhere = (position + 1) % 2**64
    assert read_frame(around, len(before), segment=segment, position=elsewhere) is None


@given(st.lists(records, min_size=1, max_size=4), st.data())
@settings(deadline=None)
def test_no_changed_bit_of_a_frame_is_read(written, data):
    frame = bytearray(encode_frame(written, segment=1, position=0))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    assert read_frame(bytes(frame), 0, segment=1, position=0) is None


@given(frames, st.data())
@settings(deadline=None)
def test_cut_segment_has_the_frames_before_the_cut(groups, data):
    """Whatever byte it is cut at, no frame is made up, and none is taken for damage."""
    segment, starts = b"", []
    for group in groups:
        starts.append(len(segment))
        segment += encode_frame(group, segment=3, position=len(segment))
    cut = data.draw(st.integers(0, len(segment)))
    read: list[list[Record]] = []
    scanned = scan(segment[:cut], 3, lambda _place, more: read.append(more))
    whole = sum(start <= cut for start in [*starts[1:], len(segment)])
    assert read == groups[:whole]
    assert not scanned.problem
    assert not scanned.newer


@given(st.binary(max_size=300), st.integers(1, 5))
@settings(deadline=None)
def test_any_bytes_are_read_without_a_fault(data, number):
    read: list[int] = []
    assert scan(data, number, lambda position, _more: read.append(position)).end <= len(data)


@given(st.lists(records, min_size=1, max_size=9), st.integers(60, 400))
@settings(deadline=None)
def test_records_of_the_log_read_back_in_their_order(written, limit):
    """However many they are; none is larger than it has to be."""
    with patch.object(records_module, "BODY_BYTES_MAX", limit):
        encoded = encode_records(written)
    assert [change for record in encoded for change in record.changes] == written
    for record in encoded:
        data = bytearray(record.data)
        stamp_record(data, base_offset=0, position=77, appended_at_ms=5)
        place = Place(77, len(data))
        assert read_changes(bytes(data), place) == list(record.changes)
        assert len(data) <= HEADER_BYTES + limit or len(record.changes) == 1
        with pytest.raises(CorruptLogError):
            read_changes(bytes(data), Place(78, len(data)))


@given(st.lists(records, max_size=30), st.integers(0, 30))
@example([Taken("", "", 0, (bytes(16),)), Taken("", "", 0, ())], 0)
@settings(deadline=None)
def test_copy_and_the_records_behind_it_lead_to_the_same_index(written, copied_at):
    """A copy of any moment, over which records from any earlier moment on are replayed again."""
    whole = ScheduleIndex()
    for position, record in enumerate(written):
        whole.replay(record, Place(position, 1))
    before = ScheduleIndex()
    for position, record in enumerate(written[:copied_at]):
        before.replay(record, Place(position, 1))
    again = ScheduleIndex()
    for image in before.images():
        again.restore(image)
    first = copied_at // 2
    for position, record in enumerate(written[first:], first):
        again.replay(record, Place(position, 1))
    for index in (whole, again):
        index.finish_replay()
    assert again.entries == whole.entries
    assert again.deliveries == whole.deliveries
    assert dict(again._settled_messages) == dict(whole._settled_messages)
