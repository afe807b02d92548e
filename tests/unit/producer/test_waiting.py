"""Reports that messages wait."""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise

from keylane.producer.outgoing_batch import OutgoingBatch
from keylane.producer.waiting import PartitionWaits, WaitReport
from keylane.protocol.errors import NotSentError

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000


def test_wait_is_reported_at_growing_intervals():
    """After 5 s, 1 min, 2 min, 4 min …, then once an hour."""
    report = WaitReport()
    told = [second for second in range(10 * 3_600) if report.waits(second * SECOND, 0)]
    assert told[:8] == [5, 60, 120, 240, 480, 960, 1_920, 3_840]
    assert {later - earlier for earlier, later in pairwise(told[8:])} == {3_600}


def test_end_of_a_wait_is_reported_when_the_wait_was():
    """A short wait is not reported, neither its start nor its end; each wait is timed anew."""
    report = WaitReport()
    assert not report.waits(0, 0)
    assert report.over(4_999) is None
    assert not report.waits(10_000, 0)
    assert report.waits(15_000, 5_000)
    assert report.over(17_000) == 7_000
    assert report.over(18_000) is None


def test_wait_report_is_due_once_when_polls_are_rare():
    """Reports that were due between two polls are not repeated."""
    report = WaitReport()
    report.waits(0, 0)
    assert report.waits(10 * HOUR, 0)
    assert not report.waits(10 * HOUR + MINUTE, 0)


class SetClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_ms = 100_000

    def boot_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + self.now_ms


async def test_end_of_a_wait_is_not_shorter_than_its_report_when_the_first_try_took_long(caplog):
    """Both count from the moment at which the oldest message was sent, not from the try that failed 4 s later."""
    clock = SetClock()
    waits = PartitionWaits("p1", "g1", clock)
    batch = OutgoingBatch(asyncio.get_running_loop())
    batch.add(b"k", b"v", b"", clock.wall_ms() * 1_000_000)
    with caplog.at_level(logging.WARNING, logger="keylane.producer"):
        for after_ms in (4_000, 6_000):
            clock.now_ms += after_ms
            waits.begin(NotSentError("away"), clock.boot_ms(), [batch], "broker:1")
        clock.now_ms += 1_000
        waits.over()
    reported, ended = caplog.messages
    assert "the oldest for 10 s: away" in reported
    assert ended == "p1: messages wait no longer, after 11 s"
