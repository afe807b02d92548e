"""Refusals because a subject or a consumer group was deleted: a later one of the same name is another one.  Pure."""

from __future__ import annotations

from .base import Detail
from .refusals import RefusedError


class SubjectDeletedError(RefusedError):
    """The subject is being deleted, or it was: a subject of its name is another one."""

    code = 1114
    summary = "the subject was deleted"
    hint = (
        "A subject that is created under this name (keylane subject create NAME) is another one: start consumers "
        "of it anew, and send what is meant for it."
    )
    subject = Detail(str)
    left = Detail(int)
    """The number of partitions that brokers still have to drop."""


class GroupDeletedError(RefusedError):
    """The consumer group is being deleted, or it was: a group of its name is another one."""

    code = 1115
    summary = "the consumer group was deleted"
    hint = "A consumer that is started now begins a new group, at the first message that is still stored."
    subject = Detail(str)
    group = Detail(str)
    left = Detail(int)
    """The number of partitions whose brokers still have to forget the group."""
