"""Describes a message that blocks a consumer group on a partition: its position, the time, the
cause, and what an operator can do.
"""

from __future__ import annotations

from ..protocol.groups import FailurePolicy, GroupPolicy
from ..protocol.parked import FailingMessage
from ..protocol.text import counted, format_seconds, format_time, printable

TEXT_CHARS_SHOWN = 200
RETRY_KIND = "Retry"
"""The kind of a failure whose handler has asked for another try."""
EFFECTS = {
    FailurePolicy.PARK: "sets its key aside (then: keylane parked redrive or skip)",
    FailurePolicy.DEAD: "sets only the message aside (then: keylane dead retry or skip)",
}
"""What the policies do that set a message aside."""


def failing_lines(
    subject: str,
    group: str,
    partition_id: int,
    failing: FailingMessage,
    *,
    policy: GroupPolicy | None = None,
    owned: bool = True,
) -> tuple[str, str, str]:
    """
    Return three lines: one that describes the failing or hanging message, one with the command that
    shows it, and one with advice.

    Args:
        policy: the policy that is stored for the group, if it is known.
        owned: True if a consumer has the partition.
    """
    source = partition_id if failing.source is None else failing.source
    shown_by = (
        f"  the message with its key: keylane read {subject} --partition {source} "
        f"--from {failing.offset} -n 1"
    )
    if failing.running_ms is not None:
        summary, advice = _hanging_lines(subject, group, partition_id, failing)
        return summary, shown_by, advice
    text = printable(failing.text)[:TEXT_CHARS_SHOWN]
    cause = f"{failing.kind}: {text}" if text else failing.kind
    summary = (
        f"partition {partition_id}: {group} fails at {_position(failing)}, "
        f"{failing.key_digest}, since "
        f"{format_time(failing.since_ms)}: {cause} ({counted(failing.attempts, 'try', 'tries')}, "
        f"last at {format_time(failing.at_ms)}, consumer {failing.client or 'without a name'})"
    )
    if failing.others_count:
        count = counted(failing.others_count, "more message")
        summary += f"; {count} of it {'fails' if failing.others_count == 1 else 'fail'} too"
    return summary, shown_by, _advice(subject, group, partition_id, failing, policy, owned=owned)


def _advice(
    subject: str,
    group: str,
    partition_id: int,
    failing: FailingMessage,
    policy: GroupPolicy | None,
    *,
    owned: bool,
) -> str:
    effect = None if policy is None or policy.on_failure is None else EFFECTS.get(policy.on_failure)
    stored = ""
    if policy is not None and effect is not None:
        when = _when_applied(failing, policy, owned=owned)
        stored = f"{when}, the stored policy {policy.on_failure} {effect}"
    if failing.source is not None:
        park = f"keylane group set {subject} {group} --on-failure park --tries-max 5"
        return (
            f"  it is redriven: wait: {stored}"
            if stored
            else f"  it is redriven: park it again ({park}), then skip it: "
            f"keylane parked skip {subject} {group} --key KEY"
        )
    policies = stored or (
        f"keylane group set {subject} {group} --on-failure park {EFFECTS[FailurePolicy.PARK]}, "
        f"--on-failure dead {EFFECTS[FailurePolicy.DEAD]}"
    )
    return (
        f"  {policies}; or pass it: keylane group reset {subject} {group} --partition "
        f"{partition_id} --to {failing.offset + 1} --live"
    )


def _when_applied(failing: FailingMessage, policy: GroupPolicy, *, owned: bool) -> str:
    """Say when a stored policy sets a failing message aside."""
    tries_max = policy.tries_max
    if failing.kind == RETRY_KIND:
        moment = "once its handler raises another error (Retry and NACK always get another try)"
    elif tries_max is None:
        moment = "after as many failed tries as its consumer allows"
    elif failing.attempts < tries_max:
        moment = f"after {counted(tries_max, 'failed try', 'failed tries')}"
    else:
        moment = "at its next failed try"
    return moment if owned else f"no consumer has the partition: once one does, {moment}"


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
            "  it is redriven: no policy applies before it has ended: restart the consumer, and "
            "set a time limit for what its handler waits for; once it is parked again, skip it: "
            f"keylane parked skip {subject} {group} --key KEY"
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
