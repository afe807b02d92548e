"""Says to a program's user that a consumer is running, and what its close waits for."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence

from ..protocol.message import Message
from ..protocol.text import counted, format_seconds

QUIET_CLOSE_S = 1.0
"""The number of seconds after which a closing consumer logs what it waits for."""
NAMED_MAX = 3
"""The maximum number of messages that the line names."""


def print_ready_line(name: str) -> None:
    """Print one line to standard error, if no log handler would show it and standard error is
    writable.
    """
    if sys.stderr is None or logging.getLogger("keylane.consumer").hasHandlers():
        return
    with contextlib.suppress(OSError, ValueError):  # it is closed
        sys.stderr.write(f"keylane: the {name} is running\n")


def format_waiting(
    name: str,
    running: Sequence[tuple[Message, int]],
    *,
    runner: str,
    limit: str,
    is_signaled: bool,
) -> str:
    """
    Format the line.

    Args:
        name: the consumer's name.
        running: the messages in hand, each with the milliseconds since when it has been.
        runner: what handles the messages, such as "handler".
        limit: what ends the wait, as a clause.
        is_signaled: True if a signal closes the consumer.
    """
    named = [
        f"{message.subject} partition {message.partition_id} offset {message.offset}, running for "
        f"{format_seconds(running_ms)}"
        for message, running_ms in sorted(running, key=lambda each: -each[1])[:NAMED_MAX]
    ]
    if more := len(running) - len(named):
        named.append(f"and {more} more")
    signal = (
        "; a second signal ends the process at once, and these messages are handled again"
        if is_signaled
        else ""
    )
    return (
        f"{name} waits for {counted(len(running), runner)} to end: {'; '.join(named)}; "
        f"{limit}{signal}"
    )
