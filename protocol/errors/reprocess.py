"""What goes wrong when messages are reprocessed.  Pure."""

from __future__ import annotations

from .base import Detail, KeylaneError
from .refusals import RefusedError


class ManifestError(RefusedError):
    """A manifest of reprocessed messages is missing, damaged, not complete, of another subject, or
    from before a cut-over.
    """

    code = 1320
    summary = "there is no usable manifest"
    hint = (
        "Run `keylane spark reprocess` again with the same arguments: it finishes what is missing."
    )
    path = Detail(str)
    partition_id = Detail(int)
    """With rows of messages that the backfill has and of others, which no start parts."""


class JobChangedError(RefusedError):
    """The folder has the output of another job, of other code, of another subject, or for another
    place.
    """

    code = 1321
    summary = "the folder has the output of another job"
    hint = "Choose a new folder, and compare the two with --compare."
    path = Detail(str)


class JobFailedError(KeylaneError):
    """The function of a job cannot be used, has raised, or has given something that is no table."""

    code = 1322
    summary = "the job failed"
    hint = (
        "Mend the function, and run the same command with --accept-code: pieces that are done "
        "stay.  Or have it set such "
        "messages aside, with --on-error park."
    )
    job = Detail(str)
    partition_id = Detail(int)
    start = Detail(int)
    """The first offset of the piece in which it failed."""


class CutOverError(RefusedError):
    """The rows of a job cannot take the place of the messages that they were made of: some would be
    missing.
    """

    code = 1323
    summary = "the rows do not cover the subject's messages"
    hint = (
        "Nothing is published.  Reprocess all of the subject into itself (--to the same subject, "
        "--hidden), from an earlier start."
    )
    partition_id = Detail(int)


class CompareError(RefusedError):
    """Two outputs of a job cannot be compared: rows are gone, or do not say what they were made
    of.
    """

    code = 1380
    summary = "the outputs cannot be compared"
    hint = (
        "Reprocess again into a new folder or another subject, with the column offset in the "
        "output, and compare the two."
    )
    path = Detail(str)
