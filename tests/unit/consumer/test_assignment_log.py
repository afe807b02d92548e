"""The lines about a consumer's partitions and its lag."""

from __future__ import annotations

from keylane.consumer.assignment_log import LAG_EACH_MS, LINE_MS_MIN, AssignmentLog


def test_line_names_partitions_when_they_change():
    log = AssignmentLog()
    assert log.format_partitions({3, 1}, 0) == "has partitions 1, 3"
    assert log.format_partitions({1, 3}, 9_000) == ""
    assert log.format_partitions({1, 4}, 10_000) == "has partitions 1, 4; got 4; no longer has 3"
    assert log.format_partitions({1}, 20_000) == "has partition 1; no longer has 4"


def test_line_says_that_a_member_waits_when_it_has_no_partition():
    log = AssignmentLog()
    assert (
        log.format_partitions((), 0)
        == "has no partition yet; other members have them, or leases of dead ones must end"
    )
    assert log.format_partitions({2}, 5_000) == "has partition 2"
    assert (
        log.format_partitions((), 9_000)
        == "has no partition now; other members have them, or leases of dead ones must end; no longer has 2"
    )


def test_lines_of_a_rebalance_are_one_when_they_come_at_once():
    log = AssignmentLog()
    assert log.format_partitions({1}, 0)
    assert log.format_partitions({1, 2}, LINE_MS_MIN - 1) == ""
    assert log.format_partitions({1, 2, 3}, LINE_MS_MIN) == "has partitions 1, 2, 3; got 2, 3"


def test_lag_is_logged_ever_more_rarely_while_it_lasts():
    log = AssignmentLog()
    assert log.format_lag(5, 1.0, 0) == ""
    assert log.format_lag(1, 31.0, 0) == "is 1 message behind; the oldest has waited 31 s"
    assert log.format_lag(9, 40.0, LAG_EACH_MS - 1) == ""
    assert log.format_lag(9, 90.0, LAG_EACH_MS).startswith("is 9 messages behind")
    assert log.format_lag(9, 150.0, 2 * LAG_EACH_MS) == ""
    assert log.format_lag(0, 0.0, 2 * LAG_EACH_MS) == ""
    assert log.format_lag(3, 60.0, 3 * LAG_EACH_MS)
    assert log.format_lag(3, 120.0, 4 * LAG_EACH_MS)
