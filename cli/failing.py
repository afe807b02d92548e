"""Describes a message that blocks a consumer group on a partition: where, since when, why, and what
an operator can do.
"""

from __future__ import annotations

from ..protocol.parked import FailingMessage
from ..protocol.scheduled.deliver_at import shown
from ..protocol.text import counted, printable, seconds

TEXT_CHARS_SHOWN = 200


def failing_lines(
    subject: str, group: str, partition_id: int, failing: FailingMessage
) -> tuple[str, str]:
    """Return a line about what fails or hangs, and a line with what an operator can do."""
    if failing.running_ms is not None:
        return _hanging_lines(subject, group, partition_id, failing)
    text = printable(failing.text)[:TEXT_CHARS_SHOWN]
    why = f"{failing.kind}: {text}" if text else failing.kind
    what = (
        f"partition {partition_id}: {group} fails at {_where(failing)}, "
        f"{failing.key_digest}, since "
        f"{shown(failing.since_ms)}: {why} ({counted(failing.attempts, 'try', 'tries')}, last at "
        f"{shown(failing.at_ms)}, consumer {failing.client or 'without a name'})"
    )
    if failing.source is not None:
        return what, (
            f"  it is redriven: skip it (keylane parked skip {subject} {group} --key KEY), or park "
            f"it again: keylane group set {subject} {group} --on-failure park --tries-max 5"
        )
    advice = (
        f"  keylane group set {subject} {group} --on-failure park sets its key aside (then: "
        "keylane parked redrive or skip), --on-failure dead sets only the message aside; or pass "
        f"it: keylane group reset {subject} {group} --partition {partition_id} "
        f"--to {failing.offset + 1} --live"
    )
    return what, advice


def _hanging_lines(
    subject: str, group: str, partition_id: int, failing: FailingMessage
) -> tuple[str, str]:
    before = f"{counted(failing.attempts, 'try', 'tries')} failed before, " * (failing.attempts > 0)
    what = (
        f"partition {partition_id}: {group} waits at {_where(failing)}, "
        f"{failing.key_digest}, since "
        f"{shown(failing.since_ms)}: {printable(failing.text)} for "
        f"{seconds(failing.running_ms or 0)} ({before}seen last "
        f"at {shown(failing.at_ms)}, consumer {failing.client or 'without a name'})"
    )
    if failing.source is not None:
        return what, (
            f"  it is redriven: after it has ended, skip it (keylane parked skip {subject} {group} "
            "--key KEY); until then no policy applies: restart the consumer, and set a time limit "
            "for what its handler waits for"
        )
    return what, (
        "  no policy applies before it has ended: restart the consumer, and set a time limit for "
        f"what its handler waits for; or pass it: keylane group reset {subject} {group} "
        f"--partition {partition_id} --to {failing.offset + 1} --live"
    )


def _where(failing: FailingMessage) -> str:
    if failing.source is None:
        return f"offset {failing.offset}"
    return f"parked offset {failing.offset} of partition {failing.source}"
