"""The order that readers may rely on, restored after a shuffle.  Needs pyspark.

    (logical_partition, epoch, offset)

A key has one logical partition for ever.  Its messages lie in a chain of physical partitions, each
deeper in the lineage than the one before, and in each by offset.  So this sort is the order in
which the messages of a key were stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..protocol.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ORDER = ("logical_partition", "epoch", "offset")


def ordered(frame: DataFrame, tasks: int | None = None) -> DataFrame:
    """
    The rows of a DataFrame of keylane in `tasks` partitions, in which the messages of each key
    follow each other as stored.

    Takes more tasks than partitions, and restores the order after anything that has lost it, at the
    price of a shuffle.

    Args:
        frame: has the columns `logical_partition`, `epoch` and `offset`, and `subject` if it was
            read from several.
        tasks: how many partitions the result has, at most 1024 of them with rows of keys; None:
            what Spark is set to.

    Raises:
        ConfigError: a column is missing, which the option `columns` of the reader adds.
    """
    missing = [name for name in ORDER if name not in frame.columns]
    if missing:
        raise ConfigError(
            f"ordered() needs the columns {', '.join(missing)}: name them in the option `columns`"
        )
    if tasks is not None and (type(tasks) is not int or tasks < 1):
        raise ConfigError(f"tasks is a whole number above 0, not {tasks!r:.40}")
    keys = [name for name in ("subject",) if name in frame.columns] + ["logical_partition"]
    spread = frame.repartition(*keys) if tasks is None else frame.repartition(tasks, *keys)
    # Rows without a key have equal places in several partitions: a task that is repeated has to
    # give them in one order.
    ties = [name for name in ("partition", "queue") if name in frame.columns]
    return spread.sortWithinPartitions(*keys, *ORDER[1:], *ties)
