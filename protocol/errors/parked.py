"""What brokers refuse of parked messages: full stores, and those that the children of a partition
have.  Pure.
"""

from __future__ import annotations

from .base import Detail, RetryRule
from .refusals import RefusedError


class ParkFullError(RefusedError):
    """A consumer group has as many parked keys or messages on a partition as it may have."""

    code = 1250
    retry = RetryRule.LATER
    summary = "the group can park no more on this partition"
    hint = (
        "Failing messages block their keys until there is room: look at `keylane parked list`, "
        "then redrive or skip some."
    )
    limit = Detail(int)


class ParkMovedError(RefusedError):
    """The children of a sealed partition have taken its parked messages over."""

    code = 1251
    retry = RetryRule.AFTER_NEW_ROUTE
    summary = "the children of this partition have its parked messages"
    hint = "Try again: `keylane parked list SUBJECT GROUP` shows the partition that has them now."
    partition_id = Detail(int)


class ParkedKeyUnknownError(RefusedError):
    """A consumer group has parked no message of this key on the partition."""

    code = 1252
    summary = "no message of this key is parked"
    hint = (
        "It may have been handled by now: `keylane parked list SUBJECT GROUP` shows parked "
        "messages, `keylane dead list SUBJECT GROUP` dead letters."
    )
    partition_id = Detail(int)


class ParkedMessageUnknownError(RefusedError):
    """A consumer group has not parked this message."""

    code = 1268
    summary = "this message is not parked"
    hint = (
        "`keylane parked show SUBJECT GROUP --key KEY` lists the parked messages of a key, with "
        "their partitions and offsets."
    )
    partition_id = Detail(int)
    """The partition that stores it."""
    offset = Detail(int)


class EditsFullError(RefusedError):
    """A consumer group has as many edited messages, or bytes of them, on a partition as it may
    have.
    """

    code = 1269
    retry = RetryRule.LATER
    summary = "the group has too many edited messages on this partition"
    hint = (
        "Redrive the ones that are ready: edited messages are kept until they are "
        "handled or skipped."
    )
    limit = Detail(int)


class ParkedRedrivenError(RefusedError):
    """A parked message is to be edited while consumers handle messages of its key."""

    code = 1275
    retry = RetryRule.LATER
    summary = "the messages of this key are being redriven"
    hint = "Edit it once it is parked again: a consumer may already have its old value."
    partition_id = Detail(int)


class ParkedKeyAmbiguousError(RefusedError):
    """A key is parked on several partitions of which none continues the other, so that none of its
    messages is the first.
    """

    code = 1276
    summary = "the key is parked on several partitions, and none of them comes first"
    hint = (
        "Name one with `--partition` or `partition_id=`; `keylane parked list SUBJECT GROUP --key "
        "KEY` shows them."
    )
    partition_ids = Detail(str)
