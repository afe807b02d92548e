"""The line of a consumer in a program that never configured logging, and the line that tells what a
closing consumer waits for.
"""

from __future__ import annotations

import io
import logging
import sys

import pytest

from keylane.consumer.running import format_waiting, print_ready_line
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


@pytest.fixture
def unlogged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda _self: False)


def test_ready_line_is_printed_when_nothing_shows_the_log(
    unlogged: None, capsys: pytest.CaptureFixture[str]
):
    print_ready_line("consumer of s in group g")
    assert capsys.readouterr().err == "keylane: the consumer of s in group g is running\n"


def test_ready_line_is_left_out_when_logging_is_configured(capsys: pytest.CaptureFixture[str]):
    print_ready_line("consumer of s in group g")  # pytest has handlers
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("closed", [True, False])
def test_consumer_runs_when_standard_error_is_gone(
    unlogged: None, monkeypatch: pytest.MonkeyPatch, closed: bool
):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if closed else None)
    print_ready_line("consumer of s in group g")
