"""Where records go in the log: positions without a gap, rolls between records, barriers where all before is durable."""

from __future__ import annotations

from keylane.broker.storage.log.commit_log import BARRIER, WritePlan, segment_path
from keylane.protocol.record import Header, read_record
from sim.machines.store import batch


def test_records_follow_each_other_and_segments_join():
    """Positions are contiguous, a record is never cut by a segment, and each segment begins with a barrier."""
    record = batch()
    length = len(record)
    plan = WritePlan(base=0, end=0, segment_bytes=2 * length + 10)
    positions = [plan.add(record, base_offset=2 * n, appended_at_ms=5)[0] for n in range(5)]

    assert positions == [n * length for n in range(5)]
    assert [base for base, _ in plan.chunks] == [0, 2 * length, 4 * length]
    flags = []
    for base, buffers in plan.chunks:
        data = b"".join(buffers)
        at = 0
        while at < len(data):
            header = read_record(data, at)
            assert isinstance(header, Header)
            assert header.position == base + at
            flags.append(bool(header.flags & BARRIER))
            at += header.length
    assert flags == [True, False, True, False, True]


def test_sender_cannot_set_the_barrier():
    """The barrier is the broker's word: a flag that comes with a batch is cleared."""
    record = bytearray(batch())
    record[15] |= BARRIER
    plan = WritePlan(base=0, end=0, segment_bytes=1 << 20)
    plan.add(batch(), base_offset=0, appended_at_ms=0)
    _, header = plan.add(record, base_offset=2, appended_at_ms=0)

    assert not header[15] & BARRIER


def test_record_longer_than_a_segment_gets_one_of_its_own():
    """A record may be longer than the segments are: it is alone in its own."""
    small, large = batch(), batch(count=200)
    plan = WritePlan(base=0, end=0, segment_bytes=len(small))
    for record in (large, small, large):
        plan.add(record, base_offset=0, appended_at_ms=0)

    assert [sum(map(len, buffers)) for _, buffers in plan.chunks] == list(
        map(len, (large, small, large))
    )


def test_segments_are_named_by_their_position():
    """Twenty digits, so that names sort as positions do."""
    assert segment_path(1 << 30) == "log/00000000001073741824.log"
