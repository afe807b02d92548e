"""What ends the reading of a subject, a stream or a planned range: rows that are gone, and
processes that cannot read.  Pure.
"""

from __future__ import annotations

from .base import Detail, KeylaneError, RetryRule
from .refusals import CorruptBatchError, OffsetOutOfRangeError


class ReadFilterError(KeylaneError):
    """The `where` of a reader failed for a message; the cause has what it raised."""

    code = 1280
    summary = "the reader's `where` failed"
    hint = (
        "Fix `where`: a plain function that takes a message and returns True or False.  If you "
        "continue, you get the next message."
    )
    partition_id = Detail(int)
    offset = Detail(int)


class RangeUnreadableError(KeylaneError):
    """A broker did not answer reads of a planned range for as long as a reader waits; the cause is
    the last error.
    """

    code = 1330
    retry = RetryRule.LATER
    summary = "the range could not be read"
    hint = (
        "Check that the partition's broker is running and that its subject is not deleted.  The "
        "range is fixed: repeat the read to get the same rows."
    )
    subject = Detail(str)
    partition_id = Detail(int)
    start = Detail(int)
    end = Detail(int)
    offset = Detail(int)
    """The first one that did not come."""
    seconds = Detail(int)
    """For how long nothing came."""


class JsonValueError(KeylaneError):
    """A value is not JSON of the schema that a reader was given."""

    code = 1331
    summary = "a value is not JSON of the schema"
    hint = (
        "Fix the schema, or read such values as null: in Spark with the option badValues=null, "
        "elsewhere with bad_values='null'."
    )
    partition_id = Detail(int)
    offset = Detail(int)


class DataLossError(OffsetOutOfRangeError):
    """Retention has removed rows that a read of a range, or a stream, asks for."""

    code = 1295
    summary = "retention has removed rows of the range"
    hint = "The option failOnDataLoss=false continues after the loss; or begin later."
    subject = Detail(str)
    lost_until = Detail(int)
    """One past the last lost offset; the first one is `offset`.  None: the end of the partition is
    not known.
    """
    rows = Detail(int)
    """How many rows are lost; None: not known."""
    stored_before_ms = Detail(int)
    """The lost rows were stored before this time, in milliseconds since 1970."""


class SparkProcessError(KeylaneError):
    """A process of Spark cannot run keylane: a package is missing or another version, or Java
    is.
    """

    code = 1296
    summary = "a process of Spark cannot run keylane"
    hint = "docs/SPARK.md says what each machine of a cluster needs."
    python = Detail(str)
    """The Python that runs the process."""
    missing = Detail(str)
    """The module that it lacks."""


class UnpackError(CorruptBatchError):
    """The checksum of a packed batch is right, and it does not unpack to what its lengths say: its
    sender packed it so.
    """

    code = 1163
    summary = "the packed batch does not unpack"
    retry = RetryRule.NEVER
    hint = (
        "The batch is damaged for every reader.  Skip its messages: open a Reader at offset + "
        "count; for a consumer group: keylane group reset SUBJECT GROUP --partition PARTITION --to "
        "OFFSET --live"
    )
    count = Detail(int)
    """Messages of the batch, of which `offset` is the first."""
    size_bytes = Detail(int)
    """What its lengths add up to."""
    unpacked_bytes = Detail(int)
