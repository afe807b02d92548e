"""The line that tells what a closing consumer waits for."""

from __future__ import annotations

from keylane.consumer.closing_line import format_waiting
from keylane.protocol.message import Message


def message_at(offset: int) -> Message:
    return Message("orders", b"k", b"paid", offset, 2, 0)


def test_line_names_the_message_the_limit_and_the_second_signal():
    line = format_waiting(
        "consumer of orders in group billing",
        [(message_at(17), 3_000)],
        runner="handler",
        limit="it waits 5.0 s at most",
        is_signaled=True,
    )
    assert line == (
        "consumer of orders in group billing waits for 1 handler to end: orders partition 2 "
        "offset 17, running for 3.0 s; it waits 5.0 s at most; a second signal ends the process "
        "at once, and these messages are handled again"
    )


def test_line_names_the_three_oldest_and_no_signal_when_none_arrived():
    line = format_waiting(
        "consumer",
        [(message_at(offset), 1_000 * offset) for offset in range(5)],
        runner="handler",
        limit="handlers in threads cannot be cancelled",
        is_signaled=False,
    )
    assert line == (
        "consumer waits for 5 handlers to end: orders partition 2 offset 4, running for 4.0 s; "
        "orders partition 2 offset 3, running for 3.0 s; orders partition 2 offset 2, running for "
        "2.0 s; and 2 more; handlers in threads cannot be cancelled"
    )
