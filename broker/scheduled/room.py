"""Limits the scheduled messages of a broker, in total and per subject, so that no subject uses up
the quota of the others. Pure.

    limit of a subject = half of the quota that the other subjects do not use
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...protocol.access.quota import matching_limits
from ...protocol.access.rights import matches
from ...protocol.errors import OverloadedError, Reason
from .schedule_index import ScheduledAmount

SHARE_HINT = (
    "Quota is reserved for other subjects. Send it again when some of the subject's messages are "
    "delivered (keylane scheduled list --subject), cancel some, or raise scheduled_count_max or "
    "scheduled_bytes_max in the broker's settings."
)


NAMES_HINT = (
    "Quota is reserved for other names. Send it again when some are delivered, cancel some, or "
    "have the limit raised: "
    "keylane access quota set {!r} --for-subjects --scheduled-bytes N"
)


def check_name_limits(
    subject: str,
    requested_bytes: int,
    stored_bytes_of: Callable[[str], int],
    amounts_being_written: Mapping[str, ScheduledAmount],
    limits: Mapping[str, int],
    *,
    broker_group: str,
) -> None:
    """
    Check the limits of all patterns that match a subject.

    Args:
        requested_bytes: the size of the new messages, in bytes.
        stored_bytes_of: returns the bytes stored for a subject, or for all subjects that match a
            pattern.
        amounts_being_written: maps each subject to the amount that is being written, which counts
            as well.
        limits: maps each subject or pattern to the limit in bytes.

    Raises:
        OverloadedError: the limit of a pattern would be exceeded. The error names the first such
            pattern.
    """
    for pattern, limit in matching_limits(subject, limits):
        stored_bytes = stored_bytes_of(pattern) + sum(
            amount.bytes for name, amount in amounts_being_written.items() if matches(pattern, name)
        )
        if stored_bytes + requested_bytes > limit:
            error = OverloadedError(
                Reason.SCHEDULE_FULL,
                f"the broker stores {stored_bytes} bytes of scheduled messages of {pattern!r}; the "
                f"limit is {limit}",
                limit=limit,
                broker_group=broker_group,
                pattern=pattern,
            )
            error.hint = NAMES_HINT.format(pattern)
            raise error


def check_room(
    subject: str,
    requested_amount: ScheduledAmount,
    total: ScheduledAmount,
    of_subject: ScheduledAmount,
    limits: ScheduledAmount,
    *,
    broker_group: str,
) -> None:
    """
    Check the limits of the broker and of a subject.

    Args:
        total: the amount that the broker stores for all subjects.
        of_subject: the amount that it stores for this subject.
        limits: the amount that it may store.

    Raises:
        OverloadedError: the broker is full, or the subject has used its share.
    """
    for unit, requested_count, stored_count, stored_of_subject, limit in zip(
        ("scheduled messages", "bytes of scheduled messages"),
        requested_amount,
        total,
        of_subject,
        limits,
        strict=True,
    ):
        if stored_count + requested_count > limit:
            raise OverloadedError(
                Reason.SCHEDULE_FULL,
                f"the broker stores {stored_count} {unit}; the limit is {limit}",
                limit=limit,
                broker_group=broker_group,
            )
        share = (limit - (stored_count - stored_of_subject) + 1) // 2
        if stored_of_subject + requested_count > share:
            error = OverloadedError(
                Reason.SCHEDULE_FULL,
                f"the broker stores {stored_of_subject} {unit} of subject {subject!r}; the limit "
                f"is {share}, half of what other subjects do not use",
                limit=share,
                broker_group=broker_group,
                subject=subject,
            )
            error.hint = SHARE_HINT
            raise error
