"""Computes the lag of streams from the query progress that Spark reports. Requires pyspark.

    lag = StreamLag(print)
    spark.streams.addListener(lag)

Spark does not ask Python sources for metrics, so the lag is computed from the two offsets in a
query's progress.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from ...protocol.errors import CheckpointMismatchError
from .offset import from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLag:
    """The number of messages that a query had not read after a batch."""

    query_id: str
    name: str | None
    batch_id: int
    by_partition: Mapping[int, int]
    """The number of stored messages that have not been read yet, by partition id. Partitions that
    were read to their end are omitted.
    """

    @property
    def messages(self) -> int:
        """The total lag of all partitions, in messages."""
        return sum(self.by_partition.values())


class StreamLag(StreamingQueryListener):
    """
    Tracks the lag of each query that streams a subject. Other queries are ignored.

    Args:
        callback: called with the lag after each batch, in Spark's listener thread.
    """

    def __init__(self, callback: Callable[[QueryLag], object] = lambda _: None) -> None:
        self._callback = callback
        self._lags: dict[str, QueryLag] = {}

    def of(self, query_id: str) -> QueryLag | None:
        """Return the latest lag of the query with this id (`str(query.id)`), or None before its
        first batch and after its end.
        """
        return self._lags.get(query_id)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - PySpark's name
        """Record the lag after a batch."""
        progress = event.progress
        offsets = [(source.endOffset, source.latestOffset) for source in progress.sources]
        by_partition = lag_by_partition(offsets)
        if by_partition is None:
            return
        lag = QueryLag(
            query_id=str(progress.id),
            name=progress.name,
            batch_id=progress.batchId,
            by_partition=by_partition,
        )
        self._lags[lag.query_id] = lag
        self._callback(lag)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - PySpark's name
        """Drop the lag of a query that has ended."""
        self._lags.pop(str(event.id), None)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - PySpark's name
        """Do nothing, because the lag is not known yet."""

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - PySpark's name
        """Do nothing, because the lag does not change."""


def lag_by_partition(offsets: Iterable[tuple[str | None, str | None]]) -> dict[int, int] | None:
    """
    Return the lag over all sources of a query, by partition id.

    Args:
        offsets: for each source, the end of its last batch and the end of the stored messages, as
            JSON.

    Returns:
        The lag, or None if no source is a keylane stream that reports the stored end, which
        requires PySpark 4.2.
    """
    lags: dict[int, int] | None = None
    for end, latest in offsets:
        try:
            read_offsets, stored_offsets = (
                from_json(_parse_json(end)),
                from_json(_parse_json(latest)),
            )
        except CheckpointMismatchError:
            continue
        lags = lags or {}
        for partition_id, stored_end in stored_offsets.offsets.items():
            # If two streams read the same partition, as in a self-join, the slower one counts.
            lags[partition_id] = max(
                lags.get(partition_id, 0), stored_end - read_offsets.at(partition_id)
            )
    return lags


def _parse_json(text: str | None) -> Any:
    try:
        return json.loads(text or "")
    except ValueError:
        return None
