"""What goes wrong in consumers: functions that cannot be called, filters that fail, or differ
between members.  Pure.
"""

from __future__ import annotations

from .base import Detail, KeylaneError, RetryRule
from .refusals import ConfigError, HandlerTypeError, RefusedError


class FilterError(KeylaneError):
    """The `filter` of a consumer failed for a message; the cause has what it raised."""

    code = 1286
    summary = "the consumer's filter failed"
    hint = (
        "Fix `filter`: a plain function that takes a message and returns True or False.  The "
        "message is retried, as after an error in a handler."
    )
    partition_id = Detail(int)
    offset = Detail(int)


class GroupFilterError(RefusedError):
    """Another consumer of the group leaves other messages out."""

    code = 1287
    retry = RetryRule.LATER
    summary = "the consumers of a group must have the same tags and filter"
    hint = (
        "Each message goes to one member: give all members the same filter, or give this one its "
        "own group.  To change the filter of a group, first stop the consumers "
        "that have the old one."
    )
    stored = Detail(str)
    """What the other consumer leaves out."""
    asked = Detail(str)
    client = Detail(str)
    """The name of the other consumer."""


class HandlerTwiceError(ConfigError):
    """A consumer of several subjects was given two functions for one subject and consumer group."""

    code = 1375
    summary = "a consumer has one handler for a subject and a group"
    hint = (
        "Each message goes to one member of the group, so only one of the two functions would get "
        "it.  Call both from one function, or give one of them its own group.  To handle more at "
        "once, raise concurrency."
    )
    subject = Detail(str)
    group = Detail(str)


class HandlerTimeoutError(KeylaneError):
    """A handler did not return within `handler_timeout_ms`: it was cancelled, and its try counts as
    failed.
    """

    code = 1378
    summary = "the handler did not return in time"
    hint = (
        "Give what the handler waits for a limit of its own; or set a longer handler_timeout_ms, "
        "or 0 for none, if it needs "
        "that long."
    )
    timeout_ms = Detail(int)


class CallbackTypeError(HandlerTypeError):
    """What is given as on_assigned, on_revoked or on_lost is no function of a list of partition
    ids.
    """

    code = 1376
    summary = "not a call-back"
    hint = "Give a function (def or async def) that takes one argument, the list of partition ids."
