"""Refusals because a subject or a consumer group was deleted: a later one of the same name is
another one.  Pure.
"""

from __future__ import annotations

from .base import Detail
from .refusals import RefusedError


class SubjectDeletedError(RefusedError):
    """The subject is being deleted, or it was: a subject of its name is another one."""

    code = 1114
    summary = "the subject was deleted"
    hint = (
        "A subject created under this name later (keylane subject create NAME) is a different one: "
        "restart its consumers, and send its messages again."
    )
    subject = Detail(str)
    left = Detail(int)
    """The number of partitions that brokers still have to drop."""


class GroupDeletedError(RefusedError):
    """The consumer group is being deleted, or it was: a group of its name is another one."""

    code = 1115
    summary = "the consumer group was deleted"
    hint = "A consumer started now begins a new group at the first message that is still stored."
    subject = Detail(str)
    group = Detail(str)
    left = Detail(int)
    """The number of partitions whose brokers still have to forget the group."""
