"""Refusals and failures of writes that become visible at once: hidden subjects, their publication,
order guards.  Pure.
"""

from __future__ import annotations

from .base import Detail, RetryRule
from .refusals import RefusedError


class SubjectHiddenError(RefusedError):
    """The subject is hidden: it has no consumer groups, and its partitions are not changed, before
    it is published.
    """

    code = 1310
    summary = "the subject is hidden"
    hint = (
        "Publish it (keylane subject publish HIDDEN NAME), or delete it (keylane "
        "subject delete HIDDEN)."
    )
    subject = Detail(str)
    target = Detail(str)
    """The subject that its messages become messages of."""


class PublishTargetError(RefusedError):
    """The subject cannot be published under this name: it is not hidden, or was made for another
    subject.
    """

    code = 1311
    summary = "the subject cannot be published under this name"
    hint = (
        "keylane subject list --hidden shows hidden subjects, each with the subject "
        "it was created for."
    )
    subject = Detail(str)
    target = Detail(str)
    published_id = Detail(int)
    """Of the subject that was published under this name before; not there: none was, or its id is
    not known.
    """


class HiddenTakenError(RefusedError):
    """Another job fills the hidden subject of this name; nothing was changed."""

    code = 1324
    retry = RetryRule.NEVER
    summary = "another job fills the hidden subject"
    hint = (
        "Give another name.  If that job will not be continued, delete what it left (keylane "
        "subject delete HIDDEN); if it is complete, publish its rows (keylane subject publish "
        "HIDDEN NAME)."
    )
    subject = Detail(str)
    """The hidden subject."""
    filled_by = Detail(str)
    """The other job."""


class PublishOutdatedError(RefusedError):
    """The partitions of the target have changed since the hidden subject was made; nothing was
    published.
    """

    code = 1312
    summary = "the target has changed since the hidden subject was made"
    hint = (
        "Delete the hidden subject and write its messages again; do not resize or move "
        "the target meanwhile."
    )
    subject = Detail(str)
    target = Detail(str)


class PublishGroupsError(RefusedError):
    """A subject is replaced, and it is not said where consumer groups of it go on."""

    code = 1313
    summary = "consumer groups have no position in the new messages"
    hint = (
        "Give each group its first unhandled offset in each new partition (Admin.publish_subject, "
        "starts), or delete it."
    )
    subject = Detail(str)
    groups = Detail(str)
    """Their names, with commas."""


class PublishCursorsError(RefusedError):
    """A subject is to be replaced, and a consumer group of it has changed since its cursors were
    looked at; nothing was changed.
    """

    code = 1325
    summary = "a consumer group has changed since its cursors were looked at"
    hint = (
        "Read its positions again (Admin.describe_group), and publish with them; leave the groups "
        "unchanged meanwhile."
    )
    subject = Detail(str)
    group = Detail(str)


class PublishBehindError(RefusedError):
    """A subject is to be replaced, and has messages of which the hidden subject has no rows;
    nothing was changed.
    """

    code = 1318
    summary = "messages of the target are not in the hidden subject"
    hint = (
        "Reprocess the subject up to its latest message, into a new folder and another hidden "
        "subject: nothing is deleted before every message has its rows."
    )
    subject = Detail(str)
    partition_id = Detail(int)
    from_offset = Detail(int)
    """The first message that is missing."""
    messages = Detail(int)
    """How many of this partition are missing."""


class RowsDifferError(RefusedError):
    """A task of a write was run twice, and its rows were others the second time; nothing of the job
    is published.
    """

    code = 1314
    retry = RetryRule.NEVER
    summary = "a repeated task gave other rows"
    hint = (
        "Make each task produce the same rows every time: read fixed ranges, and sort within each "
        "task (sortWithinPartitions), because a shuffle delivers rows in any order.  A stream "
        "whose checkpoint was restored from an older copy, or lost its offsets, has different rows "
        "under batch numbers that were already written: give it a new checkpointLocation."
    )
    task = Detail(int)
    partition_id = Detail(int)


class RowsRemovedError(RefusedError):
    """Retention has removed rows of a hidden subject before their publication; nothing of the job
    is published.
    """

    code = 1319
    retry = RetryRule.NEVER
    summary = "rows were removed before they were published"
    hint = (
        "Keep the target's messages for longer than the job takes (keylane subject set NAME "
        "--retention acked, or larger retention_ms and retention_bytes at the brokers), then write "
        "the rows again."
    )
    subject = Detail(str)
    """The hidden subject."""
    partition_id = Detail(int)
    rows = Detail(int)
    """How many of this partition are gone."""


class RowOrderError(RefusedError):
    """Rows of one source do not rise by their offset: the write would change the order of a key."""

    code = 1315
    retry = RetryRule.NEVER
    summary = "rows are not in the order of their source"
    hint = (
        "Restore the order with keylane.spark.ordered(df), keep the columns partition and offset, "
        'or declare that order does not matter with option("order", "none").'
    )
    task = Detail(int)
    row = Detail(int)
    offset = Detail(int)


class RowsInvalidError(RefusedError):
    """Columns or values cannot be sent; nothing of the job is published."""

    code = 1316
    retry = RetryRule.NEVER
    summary = "the rows cannot be sent"
    hint = (
        "The columns are value and, optionally, key (bytes or text), properties (a map of text) "
        "and timestamp."
    )
    column = Detail(str)
    row = Detail(int)
    task = Detail(int)


class CommitUnknownError(RefusedError):
    """The metaserver did not say whether a job is published."""

    code = 1317
    summary = "it is not known whether the job is published"
    hint = "keylane subject publish HIDDEN NAME publishes it, or says that it is already published."
    subject = Detail(str)
    target = Detail(str)
