"""The reason of a lost lease, in a line that says what to look for."""

from __future__ import annotations

from keylane.consumer.pulling.losses import (
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
    assert stalls.longest_ms(0, 60_000) == 58_000
    assert stalls.record_wake(60_000) == 58_000
    stalls.record_sleep(60_000, 1_000)
    assert stalls.record_wake(61_010) == 0, "some milliseconds are no stall"
    assert stalls.longest_ms(1_500, 61_010) == 58_000
    assert stalls.longest_ms(60_000, 61_010) == 0, "it ended before"
    text = lapse_reason(silent_ms=59_000, stalled_ms=stalls.longest_ms(1_500, 61_010))
    assert text.startswith("the event loop did not run for 58 s")


def test_silent_metaserver_is_named_as_the_reason():
    """The line adds how long the event loop was blocked meanwhile, if it was."""
    assert lapse_reason(silent_ms=31_000, stalled_ms=0) == (
        "the metaserver answered no heartbeat for 31 s"
    )
    text = lapse_reason(silent_ms=31_000, stalled_ms=2_500)
    assert text.endswith("for 31 s, of which the event loop did not run for 2.5 s")


def test_stall_is_logged_before_it_costs_a_lease_and_once_a_minute():
    """A stall of a third of the ttl is logged; a series of them is not."""
    stalls = Stalls()
    assert stalls.line(9_000, 0, ttl_ms=30_000, margin_ms=3_000) == ""
    line = stalls.line(12_000, 0, ttl_ms=30_000, margin_ms=3_000)
    assert "did not run for 12 s" in line
    assert "leases end 27 s after the last answered heartbeat was sent" in line
    assert stalls.line(12_000, STALL_LINE_EVERY_MS - 1, ttl_ms=30_000, margin_ms=3_000) == ""
    assert stalls.line(12_000, STALL_LINE_EVERY_MS, ttl_ms=30_000, margin_ms=3_000)


def test_leases_lost_together_share_a_line():
    """A thousand partitions are one line for each reason."""
    losses = Losses()
    for partition_id in range(1_000):
        losses.add(partition_id, 7, "the reason")
    losses.add(5_000, 8, FENCED, fence=9)
    five = ", ".join(f"{partition_id} (token 7)" for partition_id in range(5))
    assert losses.take_lines() == [
        f"lost the lease of partitions {five} and 995 more: the reason",
        f"lost the lease of partition 5000 (token 8, newer token 9): {FENCED}",
    ]
    assert losses.take_lines() == []
