"""Log lines about failing and hanging messages: at once, at growing intervals, and at the end, but
never a flood.
"""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from keylane.consumer.dispatch.handler_log import (
    LINES_PER_MINUTE,
    SEALED_WAITS,
    TRACEBACK_EVERY_MS,
    HandlerLog,
    LogLine,
)
from keylane.consumer.log_names import message_name
from keylane.protocol.message import Delivery, Message
from keylane.protocol.parked import HANGS_MS

NOW_MS = 1_000_000


def message(offset: int, key: bytes = b"k", attempt: int = 1) -> Message:
    return Message("orders", key, b"", offset, 3, 0, attempt=attempt)


def text_of(line: LogLine | None) -> str:
    assert line is not None
    return line.text


def test_line_of_a_failing_message_names_partition_offset_and_next_try():
    """The line has the subject, partition, offset, key digest, attempt, seconds, error and next
    attempt, but not the key.
    """
    handler_log = HandlerLog()
    failing = message(7, b"alice@example.org")
    line = handler_log.record_failure(failing, "ValueError", NOW_MS, 150)
    assert line == LogLine(
        "handler failed with ValueError on orders partition 3 offset 7 (key digest "
        "7bf0f7b81adae8b4): "
        "attempt 1, 0.0 s since the first; it is tried again in 0.1 s, later "
        "messages of its key wait",
        traceback=True,
    )
    assert "alice" not in text_of(line)
    keyless = text_of(handler_log.record_failure(message(8, b""), "ValueError", NOW_MS, 150))
    assert "no key" in keyless
    assert "later messages" not in keyless


def test_line_names_no_waiting_messages_when_the_group_is_shared():
    """Nor for a message that is handled separately from its key, such as a redriven dead letter."""
    shared = HandlerLog(ordered=False)
    failed = text_of(shared.record_failure(message(7), "ValueError", NOW_MS, 150))
    hangs = text_of(shared.record_running(message(8), NOW_MS - HANGS_MS, NOW_MS))
    apart = Message(
        "orders", b"k", b"", 9, 3, 0, delivery=Delivery("orders", 0, 0, None, is_loose=True)
    )
    loose = text_of(HandlerLog().record_failure(apart, "ValueError", NOW_MS, 150))
    assert not [line for line in (failed, hangs, loose) if "later messages" in line]
    assert failed.endswith("it is tried again in 0.1 s")
    waits = text_of(HandlerLog().record_running(message(8), NOW_MS - HANGS_MS, NOW_MS))
    assert waits.endswith("; later messages of its key wait")


def test_line_has_the_text_of_the_error_and_what_a_sealed_partition_holds_up():
    """The text is shortened to one line; the advice appears only if other partitions wait."""
    handler_log = HandlerLog()
    line = handler_log.record_failure(
        message(7), "ValueError", NOW_MS, 150, text=f"no\ntown {'x' * 500}"
    )
    assert "later messages of its key wait; the error says: no\\ntown xxx" in text_of(line)
    assert len(text_of(line)) < 480
    line = handler_log.record_failure(message(8), "ValueError", NOW_MS, 150, sealed=True)
    assert text_of(line).endswith(SEALED_WAITS)


def test_failing_message_is_logged_at_growing_intervals_and_at_its_end():
    """An hour of attempts every second produces ten lines, at intervals that double."""
    handler_log = HandlerLog()
    failing = message(7)
    told_s = []
    for second in range(3_600):
        failing.attempt = second + 1
        now_ms = NOW_MS + 1_000 * second
        if handler_log.record_failure(failing, "ValueError", now_ms, 1_000) is not None:
            told_s.append(second)
    assert told_s == [0, 10, 30, 70, 150, 310, 630, 1270, 2550]
    failing.attempt = 3_601
    text = text_of(handler_log.record_handled(failing, NOW_MS + 3_600_000))
    assert text.endswith("is handled after 3601 attempts and 3600 s")
    assert handler_log.record_handled(failing, NOW_MS + 3_600_000) is None
    assert handler_log.build_summary(NOW_MS + 3_700_000, last=True) is None


def test_given_up_message_is_logged():
    """The line has the number of attempts and the time since the first one."""
    handler_log = HandlerLog()
    failing = message(7, attempt=2)
    handler_log.record_failure(failing, "ValueError", NOW_MS, 100)
    text = text_of(handler_log.record_given_up(failing, NOW_MS + 4_500))
    assert "is given up here" in text
    assert "is given up here after 2 attempts and 4.5 s, because" in text
    assert handler_log.record_given_up(message(8), NOW_MS) is None, "it neither failed nor hung"


def test_cancelled_handler_is_logged_with_what_becomes_of_its_messages():
    """One that has failed has its usual last line; above the limit they are counted."""
    handler_log = HandlerLog()
    text = text_of(handler_log.record_cancelled(message(7), 1, NOW_MS, again=True))
    assert text == (
        f"handler of {message_name(message(7))} was cancelled, because its lease has ended or its "
        "partition is handed over; the next owner handles it again"
    )
    text = text_of(handler_log.record_cancelled(message(7), 3, NOW_MS, again=False))
    assert " and 2 more messages was cancelled" in text
    assert text.endswith("the next owner does not handle them again: acked already")
    failed = message(8)
    handler_log.record_failure(failed, "ValueError", NOW_MS, 100)
    text = text_of(handler_log.record_cancelled(failed, 1, NOW_MS, again=True))
    assert "is given up here after 1 attempt" in text
    lines = [
        handler_log.record_cancelled(message(each), 1, NOW_MS, again=True)
        for each in range(100, 120)
    ]
    assert 0 < lines.count(None) < 20
    summary = text_of(handler_log.build_summary(NOW_MS, last=True))
    assert summary.endswith(f"0 were handled since, {lines.count(None)} given up here")


def test_hanging_handler_is_logged_while_it_runs_and_at_its_end():
    """After ten seconds, at doubling intervals, and once at the end."""
    handler_log = HandlerLog()
    hanging = message(7)
    told_s = [
        second
        for second in range(200)
        if handler_log.record_running(hanging, NOW_MS, NOW_MS + 1_000 * second) is not None
    ]
    assert told_s == [HANGS_MS // 1000, 20, 40, 80, 160]
    text = text_of(*handler_log.record_stopped([], NOW_MS + 200_000))
    assert text.endswith("is handled after 1 attempt and 200 s")


def test_hanging_handler_that_fails_is_logged_as_one_trouble():
    """The failure continues the intervals of the hang, and the end is logged once."""
    handler_log = HandlerLog()
    hanging = message(7)
    text = text_of(handler_log.record_running(hanging, NOW_MS, NOW_MS + 12_000))
    assert "has been running for 12 s" in text
    handler_log.record_failure(hanging, "TimeoutError", NOW_MS + 13_000, 100)
    assert not handler_log.record_stopped([], NOW_MS + 14_000), "it waits for its next try"
    hanging.attempt = 2
    assert "2 attempts and 15 s" in text_of(handler_log.record_handled(hanging, NOW_MS + 15_000))


def summed(text: str) -> int:
    """Return the messages of a summary."""
    match = re.search(r": (\d+) more messages", text)
    assert match is not None
    return int(match[1])


def test_thousand_failing_messages_do_not_flood_the_log():
    """Some get lines of their own; the others are in summaries with their errors and the oldest
    message.
    """
    handler_log = HandlerLog()
    failing = [message(offset, b"%d" % offset) for offset in range(1_000)]
    lines: list[LogLine] = []
    for second in range(60):
        now_ms = NOW_MS + 1_000 * second
        for failed in failing:
            failed.attempt = second + 1
            kind = "TimeoutError" if failed.offset % 3 else "ValueError"
            lines.append(handler_log.record_failure(failed, kind, now_ms, 1_000))
        lines.append(handler_log.build_summary(now_ms))
    told = [line.text for line in lines if line is not None]
    assert len(told) <= 2 * LINES_PER_MINUTE + 2 + 3
    assert sum(line.traceback for line in lines if line is not None) == 2
    sums = [text for text in told if "more messages" in text]
    assert len(sums) == 2, "after 10 and 30 s"
    first = sums[0]
    assert first.startswith("broadcast consumer of orders: ")
    count = summed(first)
    assert 970 <= count <= 990
    counted = re.search(r"\(TimeoutError (\d+), ValueError (\d+)\)", first)
    assert counted is not None
    assert int(counted[1]) + int(counted[2]) == count
    assert "the oldest is orders partition 3 offset" in first
    ends = [handler_log.record_handled(failed, NOW_MS + 60_000) for failed in failing]
    assert sum(end is not None for end in ends) == 1_000 - summed(sums[-1])
    last = text_of(handler_log.build_summary(NOW_MS + 60_000, last=True))
    assert last.endswith(
        f": of the other messages that failed, hung or were cancelled {summed(sums[-1])} were handled since, 0 "
        f"given up here"
    )
    assert handler_log.build_summary(NOW_MS + 900_000) is None


def test_traceback_is_logged_once_a_minute_for_each_kind_of_error():
    """Each kind of error gets its own traceback, but a thousand kinds do not exceed the limit."""
    handler_log = HandlerLog()
    first = handler_log.record_failure(message(1), "A", NOW_MS, 1)
    again = handler_log.record_failure(message(2), "A", NOW_MS, 1)
    other = handler_log.record_failure(message(3), "B", NOW_MS, 1)
    later = handler_log.record_failure(message(4), "A", NOW_MS + TRACEBACK_EVERY_MS, 1)
    told = [line is not None and line.traceback for line in (first, again, other, later)]
    assert told == [True, False, True, True]
    many = HandlerLog()
    kinds = [many.record_failure(message(n), f"E{n}", NOW_MS, 1) for n in range(1_000)]
    assert sum(line is not None for line in kinds) == 2 * LINES_PER_MINUTE


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["failed", "running", "stopped", "handled", "given_up", "sum"]),
            st.integers(0, 30),
            st.integers(0, 20_000),
        ),
        max_size=300,
    )
)
def test_every_logged_trouble_ends_once(steps: list[tuple[str, int, int]]):
    """For any order of calls, every end follows a first line, and nothing is kept after the end."""
    handler_log = HandlerLog()
    now_ms = NOW_MS
    told: set[int] = set()
    for call, offset, wait_ms in steps:
        now_ms += wait_ms
        trouble = message(offset)
        if call == "failed":
            if handler_log.record_failure(trouble, "E", now_ms, 5):
                told.add(offset)
        elif call == "running":
            if handler_log.record_running(trouble, now_ms - HANGS_MS, now_ms):
                told.add(offset)
        elif call == "sum":
            handler_log.build_summary(now_ms)
        elif call == "stopped":
            others = [message(number) for number in range(31) if number != offset]
            if handler_log.record_stopped(others, now_ms):
                assert offset in told
                told.discard(offset)
        else:
            if getattr(handler_log, f"record_{call}")(trouble, now_ms) is not None:
                assert offset in told
            told.discard(offset)
    for offset in range(31):
        handler_log.record_handled(message(offset), now_ms)
    handler_log.build_summary(now_ms, last=True)
    assert handler_log.build_summary(now_ms + 10_000_000, last=True) is None


def test_line_of_a_retry_names_its_reason_once():
    """The same line used to contain the reason twice."""
    line = HandlerLog().record_failure(
        message(7),
        "Retry",
        NOW_MS,
        1_000,
        text="the till is closed",
        asked_for="the till is closed",
    )
    assert text_of(line).count("the till is closed") == 1
