"""A log has one line at once, some at growing intervals, and a last one; floods of different lines
are limited.
"""

from __future__ import annotations

from keylane.protocol.log_filter import (
    KEYS_MAX,
    TEXTS_MAX,
    Allowance,
    LineLimit,
    LogFilter,
)

NARROW, MIDDLE, ALL = Allowance(100, 1.0), Allowance(500, 1.0), Allowance(2_000, 2.0)


def test_trouble_is_logged_ever_more_seldom_when_it_lasts():
    """Met twice a second for an hour."""
    troubles = LogFilter()
    lines = {at: troubles.count_failure("no answer", at * 500) for at in range(7_200)}
    logged = {at // 2: line for at, line in lines.items() if line}
    assert list(logged) == [0, 10, 30, 70, 150, 310, 630, 1_270, 2_550]
    assert logged[0] == "no answer"
    assert logged[30] == "no answer (61 failures in 30 s)"


def test_end_of_trouble_is_logged_once_with_its_failures():
    troubles = LogFilter()
    assert troubles.end_failures(0) == "", "nothing has failed"
    for at_ms in (0, 1_000, 2_000):
        troubles.count_failure("a", at_ms)
        troubles.count_failure("b", at_ms)
    assert troubles.end_failures(4_000) == "6 failures in 4.0 s"
    assert troubles.end_failures(4_000) == ""


def test_troubles_end_apart_when_their_keys_differ():
    troubles = LogFilter()
    assert troubles.count_failure("no answer", 0, "x")
    assert troubles.count_failure("no answer", 0, "y")
    assert troubles.end_failures(1_000, "x") == "1 failure in 1.0 s"
    assert troubles.end_failures(1_000) == ""
    assert troubles.end_failures(1_000, "y", "z") == "1 failure in 1.0 s"


def test_lines_stay_few_when_tries_fail_and_succeed_in_turn():
    """Each failure and each success had a line: 14,400 an hour."""
    troubles = LogFilter()
    lines = []
    for at in range(7_200):
        lines += [troubles.count_failure("no answer", at * 500), troubles.end_failures(at * 500)]
    assert sum(map(bool, lines)) == 18


def test_trouble_is_new_when_it_was_over_for_long():
    troubles = LogFilter()
    troubles.count_failure("no answer", 0)
    troubles.end_failures(1_000)
    assert troubles.count_failure("no answer", 19_000) == "no answer (2 failures in 19 s)"
    troubles.end_failures(20_000)
    assert troubles.count_failure("no answer", 100_000) == "no answer"


def test_lines_stay_few_when_each_trouble_has_another_text():
    """As errors that name an address in memory."""
    troubles = LogFilter()
    lines = [
        troubles.count_failure(f"at {number}", 10 * number) for number in range(10 * TEXTS_MAX)
    ]
    assert TEXTS_MAX < sum(map(bool, lines)) <= TEXTS_MAX + 2
    assert troubles.count_failure("at last", 60_000).startswith("at last (")


def test_kind_has_a_line_after_a_while_with_the_number_of_those_left_out():
    limit = LineLimit(NARROW)
    told = [limit.admit(0, "a") for _ in range(10_000)]
    assert told == [0] * NARROW.burst + [None] * (10_000 - NARROW.burst)
    assert limit.left_out == 10_000 - NARROW.burst
    assert limit.admit(round(1000 / NARROW.per_s), "a") == limit.left_out
    assert limit.admit(round(1000 / NARROW.per_s), "a") is None


def test_flood_of_one_host_hides_no_other_host():
    limit = LineLimit(NARROW, MIDDLE, ALL)
    told = [limit.admit(0, number, "10.0.0.1", None) for number in range(10_000)]
    assert told.count(0) == MIDDLE.burst
    assert limit.admit(0, "a", "10.0.0.2", None) == 0


def test_many_hosts_get_no_more_lines_than_the_server_has():
    limit = LineLimit(NARROW, MIDDLE, ALL)
    day_s = 86_400
    told = sum(
        limit.admit(second * 1000, (second, number), f"10.0.{second}.{number}", None) is not None
        for second in range(0, day_s, 8)
        for number in range(20)
    )
    assert told <= ALL.burst + day_s * ALL.per_s
    assert len(limit) <= 2 * KEYS_MAX + 1
