"""Which segments retention lets go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keylane.broker.retention.policy import (
    DiskUse,
    Limits,
    SealedSegment,
    allowed_position,
    earliest_removal_ms,
    must_begin_segment,
    reason_to_refuse,
    wanted_position,
)

HOUR = 3_600_000
LIMITS = Limits(retention_ms=72 * HOUR, retention_bytes=0)
NOW = 1000 * HOUR
EMPTY = DiskUse(free_bytes=99, total_bytes=100)


def segments(*ages_h):
    """Sealed segments of 100 bytes, the oldest first."""
    return [
        SealedSegment(100 * n, 100 * n + 100, None if age is None else NOW - age * HOUR)
        for n, age in enumerate(ages_h)
    ]


def wanted(sealed, *, limits=LIMITS, disk=EMPTY):
    return wanted_position(sealed, limits, disk, end=100 * len(sealed) + 50, now_ms=NOW) // 100


def disk(percent, *, total=10_000):
    return DiskUse(free_bytes=total * (100 - percent) // 100, total_bytes=total)


def test_segments_are_deleted_when_they_reach_the_age():
    """What is 72 hours old goes, a millisecond younger stays, and nothing behind the first that
    stays.
    """
    assert wanted(segments(73, 72, 71)) == 2
    assert wanted(segments(71, 73)) == 0
    assert wanted(segments(80, None, 80)) == 1
    assert wanted(segments(80), limits=Limits(retention_ms=0, retention_bytes=0)) == 0
    assert wanted([]) == 0


def test_segment_is_begun_when_an_eighth_of_the_age_has_passed():
    """Not without messages, without an age, or where very many segments are kept already."""

    def begins(oldest_ms, *, limits=LIMITS, segments=1):
        return must_begin_segment(oldest_ms, limits, segments=segments, now_ms=NOW)

    assert begins(NOW - 9 * HOUR)
    assert not begins(NOW - 9 * HOUR + 1)
    assert not begins(None)
    assert not begins(NOW - 99 * HOUR, limits=Limits(retention_ms=0, retention_bytes=9))
    assert begins(NOW - 9 * HOUR, segments=1_000)
    assert not begins(NOW - 9 * HOUR, segments=1_001)


def test_oldest_segments_are_deleted_until_the_log_is_within_its_size():
    """The oldest go until the whole log is within its size."""
    limits = Limits(retention_ms=0, retention_bytes=250)
    assert wanted(segments(0, 0, 0, 0), limits=limits) == 2
    assert wanted(segments(0, 0), limits=limits) == 0


def test_three_quarters_full():
    """From 75 % on what has half its age goes, and no more once that is enough."""
    sealed = segments(40, 37, 30)
    assert wanted(sealed, disk=disk(74)) == 0
    assert wanted(sealed, disk=disk(75)) == 1
    assert wanted(sealed, disk=disk(76)) == 2
    assert wanted(sealed, disk=disk(84)) == 2


def test_85_percent_full():
    """From 85 % on the oldest go whatever their age, until the disk is below that again."""
    assert wanted(segments(1, 1, 1, 1), disk=disk(86, total=10_000)) == 2
    assert wanted(segments(1, 1, 1, 1), disk=disk(99, total=10_000)) == 4
    assert wanted(segments(1, 1), disk=disk(84)) == 0


def test_90_percent_full():
    """From 90 % on no messages are taken."""
    assert reason_to_refuse(disk(89)) == ""
    assert "90 % full" in reason_to_refuse(disk(90))


def test_segments_stay_when_a_group_needs_them():
    """Nothing goes from the segment on that holds the first message a group has not acked."""
    sealed = segments(80, 80, 80)
    assert allowed_position(sealed, 300, None) == 300
    assert allowed_position(sealed, 300, 300) == 300
    assert allowed_position(sealed, 300, 299) == 200
    assert allowed_position(sealed, 300, 100) == 100
    assert allowed_position(sealed, 300, 99) == 0


def test_message_may_be_removed_at_its_age_or_earlier_on_a_full_disk():
    def at(limits=LIMITS, use=EMPTY):
        return earliest_removal_ms(NOW - HOUR, limits, use, log_bytes=100, now_ms=NOW)

    assert at() == NOW + 71 * HOUR
    assert at(use=disk(75)) == NOW + 35 * HOUR
    assert at(use=disk(85)) == NOW
    assert at(Limits(retention_ms=0, retention_bytes=0)) is None
    assert at(Limits(retention_ms=0, retention_bytes=100)) is None
    assert at(Limits(retention_ms=0, retention_bytes=99)) == NOW


@given(
    st.lists(st.integers(0, 200), max_size=5),
    st.integers(0, 100),
    st.sampled_from([0, 24, 72]),
    st.sampled_from([0, 150, 400]),
)
def test_no_segment_goes_before_its_messages_may(ages, percent, hours, size):
    """What is told of a segment's newest message is no later than the policy removes the
    segment.
    """
    limits = Limits(retention_ms=hours * HOUR, retention_bytes=size)
    sealed = segments(*sorted(ages, reverse=True))
    end = 100 * len(sealed) + 50
    for segment in sealed[: wanted(sealed, limits=limits, disk=disk(percent))]:
        told = earliest_removal_ms(
            segment.newest_ms, limits, disk(percent), log_bytes=end, now_ms=NOW
        )
        assert told is not None
        assert told <= NOW
