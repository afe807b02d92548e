"""What a metaserver answers about the settings of consumer groups.  Pure."""

from __future__ import annotations

from .base import Detail, RetryRule
from .failures import UnreachableError
from .refusals import OverloadedError, RefusedError


class GroupExistsError(RefusedError):
    """A consumer group of this name was made before, with another start or strategy."""

    code = 1260
    summary = "a consumer group of this name exists"
    hint = (
        "`keylane group reset` moves a group that exists; `keylane group switch` "
        "changes its strategy."
    )
    stored = Detail(str)
    asked = Detail(str)


class GroupStartUnfinishedError(UnreachableError):
    """A group is made and its start fixed; a broker has not stored it yet."""

    code = 1261
    summary = "where the group begins is fixed, and not stored by every broker yet"
    hint = "The metaserver finishes it by itself; repeat the call to wait for it."
    partitions = Detail(int)
    partitions_set = Detail(int)


class PolicyInvalidError(RefusedError):
    """The stored failure policy of a group would have fields that cannot work together."""

    code = 1262
    summary = "the failure policy cannot work"
    hint = (
        "Give backoff_first_ms and backoff_max_ms together; the first must not exceed the second."
    )


class RetryPolicyError(RefusedError):
    """Messages that fail are to be set aside for retry, in a group whose order that would break."""

    code = 1253
    retry = RetryRule.NEVER
    summary = "on_failure='retry' is of best_tried subjects and of shared groups"
    hint = (
        'on_failure="park" keeps the order of each key; "dead" skips a message that failed too '
        "often.  Or change the subject: keylane subject set SUBJECT --order-strategy best_tried"
    )
    subject = Detail(str)
    group = Detail(str)


class SuspendedClientsError(RefusedError):
    """An operator has suspended as many clients of a group as may be."""

    code = 1263
    retry = RetryRule.NEVER
    summary = "no more clients of this group can be suspended by name"
    hint = (
        "Suspend the whole group, or resume clients that are gone: `keylane group "
        "describe` lists them."
    )
    limit = Detail(int)


class ResetCanceledError(RefusedError):
    """An operator has canceled a reset before any cursor was set."""

    code = 1255
    retry = RetryRule.NEVER
    summary = "the reset was canceled, and nothing was changed"
    hint = "The group continues where it was; another reset can begin."
    subject = Detail(str)
    group = Detail(str)


class ResetForwardError(RefusedError):
    """No reset of the group can be canceled: none waits for its consumers."""

    code = 1256
    retry = RetryRule.NEVER
    summary = "no reset of this group can be canceled"
    hint = (
        "`keylane group describe` shows where the group is; to undo a finished reset, reset the "
        "group again."
    )
    subject = Detail(str)
    group = Detail(str)
    begun = Detail(bool)
    """Cursors may be set: the reset only goes forward."""


def too_many_groups(where: str, limit: int) -> OverloadedError:
    """
    The refusal of one more consumer group.

    Args:
        where: what has as many as it may have: "the subject", or a partition.
        limit: how many that is.
    """
    error = OverloadedError(
        f"too many consumer groups: {where} has {limit}, and takes no more", limit=limit
    )
    error.hint = (
        "Delete groups that no program uses: keylane group delete SUBJECT GROUP.  One that clients "
        "have made at a broker alone "
        "is not listed: it is known, and can be deleted, after keylane group create SUBJECT GROUP"
    )
    return error
