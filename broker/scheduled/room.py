"""Limits how much a broker keeps for later delivery, in total and for one subject, so that no
subject takes the room of others. Pure.

room of a subject = half of what the other subjects leave; if there is no other, half of all
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...protocol.access.quota import limits_of
from ...protocol.access.rights import matches
from ...protocol.errors import OverloadedError, Reason
from .schedule_index import ScheduledAmount

SHARE_HINT = (
    "Other subjects keep room. Send it again when some of the subject's are delivered (keylane "
    "scheduled list --subject), "
    "cancel some, or raise scheduled_count_max or scheduled_bytes_max in the broker's settings."
)


NAMES_HINT = (
    "Other names keep room. Send it again when some are delivered, cancel some, or "
    "have the limit raised: "
    "keylane access quota set {!r} --subject --scheduled-bytes N"
)


def check_names(
    subject: str,
    wanted: int,
    kept_of: Callable[[str], int],
    writing: Mapping[str, ScheduledAmount],
    limits: Mapping[str, int],
    *,
    broker_group: str,
) -> None:
    """
    Check that the subjects of each pattern that matches this one have room together.

    Args:
        wanted: the bytes of messages of the subject.
        kept_of: returns the bytes that are kept of a subject, or of all subjects that a pattern
            matches.
        writing: the amounts that are being written, by subject; they count as well.
        limits: subject or pattern → bytes.

    Raises:
        OverloadedError: a pattern has no room; the error names the first one.
    """
    for pattern, limit in limits_of(subject, limits):
        kept = kept_of(pattern) + _bytes_of(writing, pattern)
        if kept + wanted > limit:
            error = OverloadedError(
                Reason.SCHEDULE_FULL,
                f"the broker keeps {kept} bytes of scheduled messages of {pattern!r}, and takes "
                f"{limit} at most",
                limit=limit,
                broker_group=broker_group,
                pattern=pattern,
            )
            error.hint = NAMES_HINT.format(pattern)
            raise error


def _bytes_of(shares: Mapping[str, ScheduledAmount], pattern: str) -> int:
    return sum(amount.bytes for name, amount in shares.items() if matches(pattern, name))


def check_room(
    subject: str,
    wanted: ScheduledAmount,
    kept: ScheduledAmount,
    own: ScheduledAmount,
    most: ScheduledAmount,
    *,
    broker_group: str,
) -> None:
    """
    Check that there is room for messages of a subject.

    Args:
        kept: the amount that the broker keeps of all subjects.
        own: the amount that it keeps of this subject.
        most: the amount that it may keep.

    Raises:
        OverloadedError: the broker is full, or the subject has used its share.
    """
    for what, new, all_kept, own_kept, limit in zip(
        ("scheduled messages", "bytes of scheduled messages"), wanted, kept, own, most, strict=True
    ):
        if all_kept + new > limit:
            raise OverloadedError(
                Reason.SCHEDULE_FULL,
                f"the broker keeps {all_kept} {what}, and takes {limit} at most",
                limit=limit,
                broker_group=broker_group,
            )
        share = (limit - (all_kept - own_kept) + 1) // 2
        if own_kept + new > share:
            error = OverloadedError(
                Reason.SCHEDULE_FULL,
                f"the broker keeps {own_kept} {what} of subject {subject!r}, and takes {share} at "
                f"most: half of what other "
                "subjects leave",
                limit=share,
                broker_group=broker_group,
                subject=subject,
            )
            error.hint = SHARE_HINT
            raise error
