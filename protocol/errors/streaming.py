"""What ends a stream of Spark.  Pure."""

from __future__ import annotations

from .base import Detail, KeylaneError


class NotStreamableError(KeylaneError):
    """The options are of a batch, or need a newer PySpark: they cannot be streamed."""

    code = 1306
    summary = "this cannot be streamed"
    hint = "Leave the option out, or use spark.read instead of spark.readStream."
    option = Detail(str)


class CheckpointMismatchError(KeylaneError):
    """The offsets in a stream's checkpoint are not of the subjects that it reads."""

    code = 1307
    summary = "the checkpoint is of another stream"
    hint = (
        "Give this stream its own checkpointLocation, or read the subject that the checkpoint "
        "belongs to."
    )
    checkpoint_of = Detail(str)
    """What the checkpoint is of."""
    reads = Detail(str)
    """What the stream reads."""
    partition_id = Detail(int)
    offset = Detail(int)
    """The next offset that the checkpoint has, beyond the end of the partition."""
    next_offset = Detail(int)
