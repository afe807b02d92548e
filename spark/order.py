"""Restores the order of each key's messages after a shuffle. Requires pyspark.

    (logical_partition, epoch, offset)

A key always has the same logical partition. Its messages are in a chain of physical partitions,
each of which is one epoch deeper in the lineage and ordered by offset. So sorting by these columns
yields the order in which a key's messages were stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..protocol.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ORDER = ("logical_partition", "epoch", "offset")


def ordered(frame: DataFrame, tasks: int | None = None) -> DataFrame:
    """
    Repartition a DataFrame that was read from keylane, so that the messages of each key are in one
    partition, in the order in which they were stored.

    This allows more tasks than the subject has partitions, and restores the order after an
    operation that has lost it. It requires a shuffle.

    Args:
        frame: a DataFrame with the columns `logical_partition`, `epoch` and `offset`, and `subject`
            if it was read from several subjects.
        tasks: the number of partitions in the result, of which at most 1024 have rows with keys;
            None uses Spark's configured number of shuffle partitions.

    Raises:
        ConfigError: a column is missing (use the reader's option `columns` to add it), or `tasks`
            is not a positive integer.
    """
    missing_columns = [name for name in ORDER if name not in frame.columns]
    if missing_columns:
        raise ConfigError(
            f"ordered() needs the columns {', '.join(missing_columns)}: name them in the option "
            "`columns`"
        )
    if tasks is not None and (type(tasks) is not int or tasks < 1):
        raise ConfigError(f"tasks is a whole number above 0, not {tasks!r:.40}")
    hash_columns = [name for name in ("subject",) if name in frame.columns] + ["logical_partition"]
    shuffled = (
        frame.repartition(*hash_columns)
        if tasks is None
        else frame.repartition(tasks, *hash_columns)
    )
    # Rows without a key may have the same offset in several partitions, but a retried task must
    # return them in the same order.
    tie_breakers = [name for name in ("partition", "queue") if name in frame.columns]
    return shuffled.sortWithinPartitions(*hash_columns, *ORDER[1:], *tie_breakers)
