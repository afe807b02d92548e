"""What brokers and producers refuse of scheduled messages: impossible times, keys, unknown ids,
full stores.  Pure.
"""

from __future__ import annotations

from .base import Detail, RetryRule
from .refusals import RefusedError


class DeliverAtError(RefusedError):
    """A message cannot be delivered at the given time."""

    code = 1240
    summary = "not a time at which a message can be delivered"
    hint = (
        "Give deliver_at as a datetime with a time zone, or as milliseconds since "
        "1970: later than now, "
        "and at most 366 days ahead."
    )
    deliver_at_ms = Detail(int)
    now_ms = Detail(int)
    """The calendar of the program that refused."""


class DeliverAtKeyError(RefusedError):
    """A message with an order key has a time of delivery."""

    code = 1241
    summary = "a message with an order key cannot be delivered later"
    hint = (
        "Messages of a key are handled in the order they were sent, which a later delivery would "
        "break: send the message without a key, or send it when it is due."
    )


class ScheduleFullError(RefusedError):
    """
    A broker has as many scheduled messages, or bytes of them, as its settings allow, or a subject
    has its share.

    A subject may have half of what the other subjects leave; then the error has `subject`.  The
    subjects of a pattern may have a limit together (`keylane access quota`); then it has `pattern`.
    """

    code = 1242
    retry = RetryRule.LATER
    summary = "the broker takes no more scheduled messages"
    hint = (
        "Send it again later, or raise scheduled_count_max or scheduled_bytes_max in "
        "the broker's settings."
    )
    limit = Detail(int)
    broker_group = Detail(str)
    subject = Detail(str)
    pattern = Detail(str)


class ScheduledUnknownError(RefusedError):
    """A broker does not know the scheduled message that is to be canceled."""

    code = 1243
    summary = "the broker does not know this scheduled message"
    hint = (
        "It was delivered or canceled some time ago, or another broker has it: its receipt names "
        "the broker group."
    )
    scheduled_id = Detail(str)


class ScheduledTakenError(RefusedError):
    """A scheduled message that is to be canceled is on its way to its subject, which does not
    answer.
    """

    code = 1244
    retry = RetryRule.LATER
    summary = "the scheduled message is being delivered, and its outcome is not known yet"
    hint = (
        "Cancel it again later: by then it has been delivered, or it still waits "
        "and can be canceled."
    )
    scheduled_id = Detail(str)
