"""Describes a message that blocks a consumer group on a partition: its position, the time, the
cause, and what an operator can do.
"""

from __future__ import annotations

from ..protocol.parked import FailingMessage
from ..protocol.scheduled.deliver_at import format_time
from ..protocol.text import counted, format_seconds, printable

TEXT_CHARS_SHOWN = 200


def failing_lines(
    subject: str, group: str, partition_id: int, failing: FailingMessage
) -> tuple[str, str]:
    """Return two lines: one that describes the failing or hanging message, and one with advice."""
    if failing.running_ms is not None:
        return _hanging_lines(subject, group, partition_id, failing)
    text = printable(failing.text)[:TEXT_CHARS_SHOWN]
    cause = f"{failing.kind}: {text}" if text else failing.kind
    summary = (
        f"partition {partition_id}: {group} fails at {_position(failing)}, "
        f"{failing.key_digest}, since "
        f"{format_time(failing.since_ms)}: {cause} ({counted(failing.attempts, 'try', 'tries')}, "
        f"last at {format_time(failing.at_ms)}, consumer {failing.client or 'without a name'})"
    )
    if failing.source is not None:
        return summary, (
            f"  it is redriven: skip it (keylane parked skip {subject} {group} --key KEY), or park "
            f"it again: keylane group set {subject} {group} --on-failure park --tries-max 5"
        )
    advice = (
        f"  keylane group set {subject} {group} --on-failure park sets its key aside (then: "
        "keylane parked redrive or skip), --on-failure dead sets only the message aside; or pass "
        f"it: keylane group reset {subject} {group} --partition {partition_id} "
        f"--to {failing.offset + 1} --live"
    )
    return summary, advice


def _hanging_lines(
    subject: str, group: str, partition_id: int, failing: FailingMessage
) -> tuple[str, str]:
    failures = f"{counted(failing.attempts, 'try', 'tries')} failed before, " * (
        failing.attempts > 0
    )
    summary = (
        f"partition {partition_id}: {group} waits at {_position(failing)}, "
        f"{failing.key_digest}, since "
        f"{format_time(failing.since_ms)}: {printable(failing.text)} for "
        f"{format_seconds(failing.running_ms or 0)} ({failures}seen last "
        f"at {format_time(failing.at_ms)}, consumer {failing.client or 'without a name'})"
    )
    if failing.source is not None:
        return summary, (
            f"  it is redriven: after it has ended, skip it (keylane parked skip {subject} {group} "
            "--key KEY); until then no policy applies: restart the consumer, and set a time limit "
            "for what its handler waits for"
        )
    return summary, (
        "  no policy applies before it has ended: restart the consumer, and set a time limit for "
        f"what its handler waits for; or pass it: keylane group reset {subject} {group} "
        f"--partition {partition_id} --to {failing.offset + 1} --live"
    )


def _position(failing: FailingMessage) -> str:
    if failing.source is None:
        return f"offset {failing.offset}"
    return f"parked offset {failing.offset} of partition {failing.source}"
