"""The options that only a stream can have, and the check for options that a stream cannot have.
Pure.

    option              meaning                                    default
    maxRowsPerTrigger   limit for the rows in a batch              no limit
    end                 where the stream ends, as in a batch       it does not end
    commitGroup         a group whose cursors follow the sink      no cursor moves

All three require PySpark 4.2. Older versions do not pass the start of a batch, so a batch cannot be
limited, and the sink's progress is unknown.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ...arrow.selection import ReadOptions
from ...protocol.errors import InvalidRequestError, KeylaneError, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """The options that only a stream can have."""

    rows_max: int | None = None
    """The maximum number of rows in a batch; None for no limit."""
    has_end: bool = False
    """True if the option `end` was given."""
    error: KeylaneError | None = None
    """The error if the options cannot be used for a stream. The reader's first call raises it,
    because PySpark hides errors that are raised in `streamReader`.
    """


def stream_settings(
    options: ReadOptions, given_options: Collection[str], *, has_read_limits: bool
) -> StreamSettings:
    """
    Return the settings of a stream.

    Args:
        given_options: the names of the given options.
        has_read_limits: True if this PySpark version supports read limits.

    Raises:
        InvalidRequestError: an option requires a newer PySpark, or is only valid for a batch.
    """
    has_end = "end" in {name.lower() for name in given_options}
    rows_max = options.max_rows_per_trigger
    limits = {
        "maxRowsPerTrigger": rows_max is not None,
        "end": has_end,
        "commitGroup": options.commit_group is not None,
    }
    for option, is_set in limits.items():
        if is_set and not has_read_limits:
            raise InvalidRequestError(
                Reason.NOT_STREAMABLE,
                f"the option {option} of a stream needs PySpark 4.2 or newer",
                option=option,
            )
    for option, is_set in (
        ("minPartitions", options.min_partitions is not None),
        ("taskBytes", options.task_bytes is not None),
    ):
        if is_set:
            raise InvalidRequestError(
                Reason.NOT_STREAMABLE,
                f"the option {option} is valid only for a batch: a stream cuts no partitions",
                option=option,
            )
    return StreamSettings(rows_max=rows_max, has_end=has_end)
