"""Frames of scheduled messages with anything in them; and a machine that stops at any step of the
journal.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.broker.scheduled.journal import ScheduledJournal
from keylane.broker.scheduled.records import (
    Canceled,
    Delivered,
    Place,
    Record,
    ScheduledMessageRecord,
    Taken,
    encode_frame,
    read_frame,
    scan,
)
from keylane.broker.scheduled.schedule_index import ScheduleIndex
from keylane.testing.machines.disk import Crashed, SimDisk
from support.running.examples import examples

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
    read: list[Place] = []
    assert scan(data, number, lambda place, _more: read.append(place)).end <= len(data)


@given(st.integers(1, 120), st.integers(0, 2**32))
@settings(deadline=None, max_examples=examples(200))
def test_synced_frames_are_there_after_a_crash_at_any_step(crash_at, seed):
    """Each frame that `append` has returned; after it at most the one that was being written."""
    rng = random.Random(seed)
    disk = SimDisk()
    disk.crash_at = crash_at
    journal = ScheduledJournal.open(disk, lambda _place, _more: None, segment_bytes=600)
    kept: list[ScheduledMessageRecord] = []
    under_way: list[ScheduledMessageRecord] = []
    try:
        for number in range(40):
            value = rng.randbytes(rng.randrange(200))
            under_way = [ScheduledMessageRecord(number.to_bytes(16), number, "s", 0, value, b"")]
            journal.append(under_way)
            kept += under_way
    except Crashed:
        disk = disk.disk_after_crash(rng)
    read: list[Record] = []
    again = ScheduledJournal.open(disk, lambda _place, more: read.extend(more), segment_bytes=600)
    assert again.problems == []
    assert read[: len(kept)] == kept
    assert read[len(kept) :] in ([], under_way)
    last = ScheduledMessageRecord(bytes(16), 1, "s", 0, b"last", b"")
    again.append([last])
    schedule_index = ScheduleIndex()
    read.clear()
    ScheduledJournal.open(disk, lambda _place, more: read.extend(more), segment_bytes=600)
    assert read[-1] == last
    for record in read:
        schedule_index.replay(record, Place(1, 0, 1))
    assert len(schedule_index.entries) >= len(kept)
