"""A message that holds a consumer group up on a partition, in words: where, since when, why, and what can be done."""

from __future__ import annotations

from ..protocol.parked import FailingMessage
from ..protocol.scheduled.deliver_at import shown
from ..protocol.text import counted, printable

TEXT_CHARS_SHOWN = 200


def failing_lines(
    subject: str, group: str, partition_id: int, failing: FailingMessage
) -> tuple[str, str]:
    """What fails, and what an operator can do about it."""
    text = printable(failing.text)[:TEXT_CHARS_SHOWN]
    why = f"{failing.kind}: {text}" if text else failing.kind
    where = f"offset {failing.offset}"
    if failing.source is not None:
        where = f"parked offset {failing.offset} of partition {failing.source}"
    what = (
        f"partition {partition_id}: {group} fails at {where}, {failing.key_digest}, since "
        f"{shown(failing.since_ms)}: {why} ({counted(failing.attempts, 'try', 'tries')}, last at "
        f"{shown(failing.at_ms)}, consumer {failing.client or 'without a name'})"
    )
    if failing.source is not None:
        return what, (
            f"  it is redriven: skip it (keylane parked skip {subject} {group} --key KEY), or have it parked again: "
            f"keylane group set {subject} {group} --on-failure park --tries-max 5"
        )
    advice = (
        f"  keylane group set {subject} {group} --on-failure park sets its key aside (then: keylane parked redrive or "
        f"skip), --on-failure dead the message alone; or pass it: keylane group reset {subject} {group} "
        f"--partition {partition_id} --to {failing.offset + 1} --live"
    )
    return what, advice
