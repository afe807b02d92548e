"""Of failing messages one is told of whole, then a count, whatever their number."""

from __future__ import annotations

from keylane.consumer.complaints import (
    COUNT_EVERY_MS,
    KINDS_MAX,
    WHOLE_EVERY_MS,
    Complaint,
    Complaints,
)


def test_whole_once_a_minute():
    """The first failure of a kind is told whole, and the next one after a minute, with the count between them."""
    complaints = Complaints()
    assert complaints.failed("ValueError", 5) == Complaint(True, 0)
    assert [complaints.failed("ValueError", 5 + n) for n in range(1_000)] == [None] * 1_000
    assert complaints.failed("ValueError", 5 + WHOLE_EVERY_MS) == Complaint(True, 1_000)
    assert complaints.close() == {}


def test_counts_in_between():
    """Within the minute a count is told from time to time; together they are the failures not told of."""
    complaints = Complaints()
    said = [complaints.failed("E", now_ms) for now_ms in range(0, WHOLE_EVERY_MS, 100)]
    told = [one for one in said if one is not None]
    assert told[0] == Complaint(True, 0)
    assert len(told) == WHOLE_EVERY_MS // COUNT_EVERY_MS
    assert not any(one.whole for one in told[1:])
    left = complaints.close()["E"]
    assert len(told) + sum(one.untold for one in told) + left == len(said)
    assert complaints.close() == {}


def test_kinds_apart():
    """Each kind of error has a minute of its own."""
    complaints = Complaints()
    assert complaints.failed("A", 0) == complaints.failed("B", 0) == Complaint(True, 0)
    assert complaints.failed("A", 1) is None


def test_kinds_are_limited():
    """Ever new kinds take no more than so much memory; the oldest are forgotten."""
    complaints = Complaints()
    for number in range(10 * KINDS_MAX):
        assert complaints.failed(str(number), number) == Complaint(True, 0)
        complaints.failed(str(number), number)
    assert len(complaints.close()) == KINDS_MAX
