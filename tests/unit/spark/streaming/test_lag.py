"""The lag of a stream, from the two offsets in the progress of its query."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from keylane.spark.streaming.lag import QueryLag, StreamLag, lag_by_partition
from keylane.spark.streaming.offset import StreamOffset, to_json


def text(offsets: dict[int, int], waiting: dict[int, int] | None = None) -> str:
    offset = StreamOffset(subjects={"flights": 7}, offsets=offsets, waiting=waiting or {})
    return json.dumps(to_json(offset))


def progress(end: str | None, latest: str | None) -> Any:
    source = SimpleNamespace(endOffset=end, latestOffset=latest)
    return SimpleNamespace(
        progress=SimpleNamespace(id="query-1", name="copy", batchId=4, sources=[source])
    )


def test_lag_counts_what_is_stored_and_not_read():
    """Partitions that wait for their parents count from where they begin; a partition that is new
    from its start.
    """
    end = text({3: 120, 4: 80}, {9: 5})
    latest = text({3: 130, 4: 80, 9: 25, 11: 7})
    assert lag_by_partition([(end, latest)]) == {3: 10, 4: 0, 9: 20, 11: 7}


def test_lag_is_that_of_the_slower_stream_where_a_query_reads_a_partition_twice():
    slow, quick = (text({3: 2}), text({3: 9})), (text({3: 8}), text({3: 9}))
    assert lag_by_partition([slow, quick]) == lag_by_partition([quick, slow]) == {3: 7}


def test_lag_is_none_where_no_source_is_a_stream_of_keylane():
    """Offsets of other sources, and of a Spark that does not say what is stored."""
    assert lag_by_partition([('{"flights":{"0":23}}', '{"flights":{"0":25}}')]) is None
    assert lag_by_partition([(text({3: 1}), None), ("", ""), ("7", "8")]) is None


def test_listener_tells_the_lag_of_each_batch_until_the_query_ends():
    """The lag of the last batch stays until the query has ended."""
    told: list[QueryLag] = []
    listener = StreamLag(told.append)
    listener.onQueryProgress(progress(text({3: 1}), text({3: 4})))
    listener.onQueryProgress(progress("7", "8"))
    lag = listener.of("query-1")
    assert lag is not None
    assert told == [lag]
    assert (lag.messages, lag.name, lag.batch_id) == (3, "copy", 4)
    listener.onQueryTerminated(SimpleNamespace(id="query-1"))  # type: ignore[arg-type]
    assert listener.of("query-1") is None
