"""The lag of a partition in messages and in seconds, from what was pulled and acked."""

from __future__ import annotations

from types import SimpleNamespace

from keylane.consumer.progress import TIMES_MAX, PullProgress

S = 1_000_000_000


def header(next_offset: int, first_s: int, last_s: int) -> SimpleNamespace:
    return SimpleNamespace(
        base_offset=next_offset - 10,
        count=10,
        first_sent_at_ns=first_s * S,
        last_sent_at_ns=last_s * S,
    )


def test_lag_is_the_age_of_the_oldest_batch_that_is_not_acked():
    progress = PullProgress()
    assert progress.position(-1, 0, 100 * S).lag_s == 0.0
    progress.record_pull(header(10, 50, 52))
    progress.record_pull(header(20, 60, 63))
    progress.end_offset = 35
    assert progress.position(20, 0, 100 * S).lag_s == 50.0
    progress.record_acks(9)
    assert progress.position(20, 9, 100 * S).lag_s == 50.0
    progress.record_acks(10)
    position = progress.position(20, 10, 100 * S)
    assert (position.lag_messages, position.lag_s) == (25, 40.0)
    progress.record_acks(20)
    assert progress.position(20, 20, 100 * S).lag_s == 37.0, "what was pulled last; the rest is not"
    progress.record_acks(35)
    position = progress.position(35, 35, 100 * S)
    assert (position.lag_messages, position.lag_s) == (0, 0.0)


def test_end_is_not_below_the_next_offset_before_the_first_pull_is_answered():
    """A partition that was acquired again at its end."""
    position = PullProgress().position(10, 10, 100 * S)
    assert (position.end_offset, position.lag_messages) == (10, 0)


def test_lag_is_not_negative_when_the_senders_calendar_is_ahead():
    progress = PullProgress()
    progress.record_pull(header(10, 500, 500))
    assert progress.position(10, 0, 100 * S).lag_s == 0.0


def test_few_times_are_kept_when_one_message_holds_the_cursor_for_long():
    """A message that took hours had a consumer keep the time of each batch that was pulled
    meanwhile.
    """
    progress = PullProgress()
    count = 50 * TIMES_MAX
    for number in range(1, count + 1):
        progress.record_pull(header(10 * number, number, number))
        assert len(progress._unacked) <= TIMES_MAX
    end, now_ns = 10 * count, (count + 1) * S
    assert progress.position(end, 0, now_ns).lag_s == count
    for acked in range(0, count, 777):
        progress.record_acks(10 * acked)
        late_s = progress.position(end, 10 * acked, now_ns).lag_s - (count - acked)
        assert 0 <= late_s <= count / 400
    for number in range(count + 1, count + 3 * TIMES_MAX):  # from here on the consumer keeps up
        progress.record_pull(header(10 * number, number, number))
        progress.record_acks(10 * number - 10)
    assert progress.position(10 * number, 10 * number - 10, (number + 1) * S).lag_s == 1.0
