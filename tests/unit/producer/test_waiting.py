"""Reports that messages wait."""

from itertools import pairwise

from keylane.producer.waiting import WaitReport

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000


def test_wait_is_reported_at_growing_intervals():
    """After 5 s, 1 min, 2 min, 4 min …, then once an hour."""
    report = WaitReport()
    told = [second for second in range(10 * 3_600) if report.waits(second * SECOND)]
    assert told[:8] == [5, 60, 120, 240, 480, 960, 1_920, 3_840]
    assert {later - earlier for earlier, later in pairwise(told[8:])} == {3_600}


def test_end_of_a_wait_is_reported_when_the_wait_was():
    """A short wait is not reported, neither its start nor its end; each wait is timed anew."""
    report = WaitReport()
    assert not report.waits(0)
    assert report.over(4_999) is None
    assert not report.waits(10_000)
    assert report.waits(15_000)
    assert report.over(17_000) == 7_000
    assert report.over(18_000) is None


def test_wait_report_is_due_once_when_polls_are_rare():
    """Reports that were due between two polls are not repeated."""
    report = WaitReport()
    report.waits(0)
    assert report.waits(10 * HOUR)
    assert not report.waits(10 * HOUR + MINUTE)
