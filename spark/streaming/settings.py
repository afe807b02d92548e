"""What a stream is asked for beside what it reads, and what cannot be streamed.  Pure.

maxRowsPerTrigger   the most rows of a batch                     no limit; PySpark 4.2
end                 where the stream ends: as of a batch         it does not end; PySpark 4.2
commitGroup         a group whose cursors follow the sink         no cursor moves; PySpark 4.2

Older versions of PySpark do not tell where a batch begins, so it cannot be limited, and what the
sink has is not known.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ...arrow.selection import ReadOptions
from ...protocol.errors import InvalidRequestError, KeylaneError, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """What a stream is asked for, beside what it reads."""

    rows_max: int | None = None
    """The most rows of a batch."""
    bounded: bool = False
    """The option `end` was given."""
    refused: KeylaneError | None = None
    """Why this cannot be streamed: raised by the first call, because PySpark hides what
    `streamReader` raises.
    """


def stream_settings(
    options: ReadOptions, given: Collection[str], *, limited: bool
) -> StreamSettings:
    """
    The settings of a stream.

    Args:
        given: names of the options that were given.
        limited: this PySpark has read limits.

    Raises:
        InvalidRequestError: an option needs a newer PySpark.
    """
    bounded = "end" in {name.lower() for name in given}
    rows_max = options.max_rows_per_trigger
    limits = {
        "maxRowsPerTrigger": rows_max is not None,
        "end": bounded,
        "commitGroup": options.commit_group is not None,
    }
    for option, wanted in limits.items():
        if wanted and not limited:
            raise InvalidRequestError(
                Reason.NOT_STREAMABLE,
                f"the option {option} of a stream needs PySpark 4.2 or newer",
                option=option,
            )
    for option, wanted in (
        ("minPartitions", options.min_partitions is not None),
        ("taskBytes", options.task_bytes is not None),
    ):
        if wanted:
            raise InvalidRequestError(
                Reason.NOT_STREAMABLE,
                f"the option {option} is of a batch: a stream cuts no partition",
                option=option,
            )
    return StreamSettings(rows_max=rows_max, bounded=bounded)
