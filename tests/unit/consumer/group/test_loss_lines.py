"""The reason of a lost lease, in a line that says what to look for."""

from __future__ import annotations

from keylane.consumer.group.log_lines import (
    FENCED,
    STALL_LINE_EVERY_MS,
    Losses,
    Stalls,
    lapse_reason,
)


def test_blocked_event_loop_is_named_as_the_reason():
    """Also while the measuring task has not woken yet."""
    stalls = Stalls()
    stalls.record_sleep(1_000, 1_000)
    assert stalls.total_ms(0, 60_000) == 58_000
    assert stalls.record_wake(60_000) == 58_000
    stalls.record_sleep(60_000, 1_000)
    assert stalls.record_wake(61_010) == 0, "some milliseconds are no stall"
    assert stalls.total_ms(1_500, 61_010) == 58_000
    assert stalls.total_ms(60_000, 61_010) == 0, "it ended before"
    text = lapse_reason(silent_ms=59_000, stalled_ms=stalls.total_ms(1_500, 61_010))
    assert text.startswith("the event loop did not run for 58 s")


def test_silent_metaserver_is_named_as_the_reason():
    """The line adds how long the event loop was blocked meanwhile, if it was."""
    assert lapse_reason(silent_ms=31_000, stalled_ms=0) == (
        "the metaserver answered no heartbeat for 31 s"
    )
    text = lapse_reason(silent_ms=31_000, stalled_ms=2_500)
    assert "for 31 s, of which the event loop did not run for 2.5 s: code in this" in text
    assert "threads=" in text


def test_stall_is_logged_before_it_costs_a_lease_and_once_a_minute():
    """A stall of a third of the ttl is logged, and no second one within the minute."""
    stalls = Stalls()
    assert stalls.line(9_000, 0, ttl_ms=30_000, margin_ms=3_000) == ""
    line = stalls.line(12_000, 0, ttl_ms=30_000, margin_ms=3_000)
    assert "did not run for 12 s" in line
    assert "leases end 27 s after the last answered heartbeat was sent" in line
    assert stalls.line(12_000, STALL_LINE_EVERY_MS - 1, ttl_ms=30_000, margin_ms=3_000) == ""
    assert stalls.line(12_000, STALL_LINE_EVERY_MS, ttl_ms=30_000, margin_ms=3_000)


def test_stalls_are_logged_together_when_each_is_short():
    """A handler that blocks for 3 s each time stops heartbeats as one that blocks for 12 s does."""
    stalls, now_ms, lines = Stalls(), 1_000_000, []
    for _ in range(6):
        stalls.record_sleep(now_ms, 1_000)
        now_ms += 3_000
        late_ms = stalls.record_wake(now_ms)
        lines.append(stalls.line(late_ms, now_ms, ttl_ms=30_000, margin_ms=3_000))
    assert [bool(line) for line in lines] == [False, False, False, False, True, False]
    assert "did not run for 10 s of the last 30 s: code in this program blocked it" in lines[4]
    assert stalls.total_ms(now_ms - 7_000, now_ms) == 6_000
    text = lapse_reason(silent_ms=18_000, stalled_ms=stalls.total_ms(1_000_000, now_ms))
    assert text.startswith("the event loop did not run for 12 s: code in this program")


def test_leases_lost_together_share_a_line():
    """A thousand partitions are one line for each reason."""
    losses = Losses()
    for partition_id in range(1_000):
        losses.add(partition_id, 7, "the reason")
    losses.add(5_000, 8, FENCED, fence=9)
    five = ", ".join(f"{partition_id} (token 7)" for partition_id in range(5))
    assert losses.take_lines(0) == [
        f"lost the lease of partitions {five} and 995 more: the reason",
        f"lost the lease of partition 5000 (token 8, newer token 9): {FENCED}",
    ]
    assert losses.take_lines(1) == []


def test_leases_that_a_blocked_event_loop_loses_share_a_line_a_minute():
    """Each message of a handler that blocks cost a line; the last one leaves none out."""
    losses = Losses()
    lines = []
    for second in range(0, 90, 9):
        losses.add(1, second, lapse_reason(silent_ms=9_000, stalled_ms=8_000))
        lines += losses.take_lines(1_000 * second)
    first, second = lines
    assert first.startswith("lost the lease of partition 1 (token 0): the event loop did not run")
    assert "1 (token 45) and 2 more: the event loop did not run for 8.0 s" in second
    losses.add(2, 7, FENCED)
    (other,) = losses.take_lines(90_000)
    assert other.endswith(FENCED)
    (last,) = losses.take_lines(90_000, last=True)
    assert "partitions 1 (token 72), 1 (token 81)" in last
    assert losses.take_lines(900_000, last=True) == []
