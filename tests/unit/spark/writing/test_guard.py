"""The order guard: offsets rise within a source partition of a task, whatever else lies between."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from keylane.protocol.errors import Reason
from keylane.spark.writing.guard import OrderGuard, guarded_columns
from support.raising import raises

PAIR = ("partition", "offset")


def look(
    *batches: list[tuple[int, int]], subject: list[str] | None = None, of_one_key: bool = False
) -> dict[str, int]:
    """The sources after rows of (partition, offset), whose logical partition is their offset; or 7,
    of one key.
    """
    guard, first = OrderGuard(PAIR, task=2), 0
    for rows in batches:
        columns = {
            "partition": pa.array([row[0] for row in rows], pa.int32()),
            "offset": pa.array([row[1] for row in rows], pa.int64()),
        }
        if subject is not None:
            columns["subject"] = pa.array(subject)
        logical = np.array([7 if of_one_key else row[1] for row in rows], np.uint16)
        guard.check(pa.record_batch(columns), logical, np.ones(len(rows), np.bool_), first)
        first += len(rows)
    return guard.sources


def test_rows_of_several_partitions_may_alternate():
    """Each partition has offsets of its own; gaps are filtered rows."""
    assert look([(1, 5), (2, 0), (1, 9)], [(2, 3), (1, 10)]) == {
        "1": 1 << 5 | 1 << 9 | 1 << 10,
        "2": 1 << 0 | 1 << 3,
    }
    assert look([]) == {}


@pytest.mark.parametrize(
    ("batches", "row", "offset", "before"),
    [
        ([[(1, 5), (1, 4)]], 1, 4, 5),
        ([[(1, 5), (1, 5)]], 1, 5, 5),
        ([[(1, 5), (2, 1)], [(2, 2), (1, 5)]], 3, 5, 5),
        ([[(1, 5)], [(2, 9), (2, 3)]], 2, 3, 9),
    ],
)
def test_offset_that_does_not_rise_is_refused(batches, row: int, offset: int, before: int):
    """Within a record batch and from one to the next; the error names the row, and the offset
    before it.
    """
    with raises(Reason.ROW_ORDER) as caught:
        look(*batches, of_one_key=True)
    assert (caught.value.row, caught.value.offset, caught.value.task) == (row, offset, 2)
    assert caught.value.message.endswith(f", after offset {before}")


def test_rows_of_one_logical_partition_after_another_are_taken():
    """As `ordered` gives them: the order of each key is kept, whatever lies between; so from one
    record batch to the next.
    """
    assert look([(1, 5), (1, 4)], [(1, 3)]) == {"1": 1 << 3 | 1 << 4 | 1 << 5}


def test_partitions_of_two_subjects_are_two_sources():
    """Ids are of one cluster, but rows may come of two."""
    sources = look([(1, 5), (1, 4)], subject=["a", "b"])
    assert set(sources) == {"a/1", "b/1"}


def test_rows_without_key_are_in_no_logical_partition():
    """They are spread by chance, and two tasks of one source partition may spread them alike; their
    offsets rise still.
    """
    guard = OrderGuard(PAIR, task=2)
    columns = {"partition": pa.array([1, 1, 2]), "offset": pa.array([4, 5, 0])}
    logical, keyed = np.array([7, 8, 9], np.uint16), np.array([False, True, False])
    guard.check(pa.record_batch(columns), logical, keyed, 0)
    assert guard.sources == {"1": 1 << 8, "2": 0}
    with raises(Reason.ROW_ORDER):
        guard.check(pa.record_batch(columns), logical, keyed, 3)


def test_columns_are_looked_at_when_they_are_there():
    """A user who dropped one of them is told so, unless order does not matter."""
    assert guarded_columns(["key", "value"], "auto") is None
    assert guarded_columns(["value", "offset", "partition"], "auto") == PAIR
    assert guarded_columns(["value", "queue", "logic_offset"], "auto") == ("queue", "logic_offset")
    assert guarded_columns(["value", "offset"], "none") is None
    assert guarded_columns(["partition", "logic_offset"], "auto") == ("partition", "logic_offset")
    for half in ("partition", "offset", "queue", "logic_offset"):
        with raises(Reason.ROW_ORDER):
            guarded_columns(["value", half], "auto")
    for names, order in ((["partition", "queue"], "auto"), (["value"], "required")):
        with raises(Reason.ROW_ORDER):
            guarded_columns(names, order)


def test_columns_dropped_from_rows_of_a_subject_are_missed():
    """The key says that the rows had an order. Nothing is missed with order=none, or while the
    columns are there.
    """
    for names in (["key", "value"], ["key", "value", "partition"]):
        with raises(Reason.ROW_ORDER, match="partition and offset"):
            guarded_columns(names, "auto", key_was_read=True)
    assert guarded_columns(["key", "value"], "none", key_was_read=True) is None
    assert guarded_columns(["key", *PAIR], "auto", key_was_read=True) == PAIR


def test_source_that_is_no_number_is_refused():
    """Nulls come from an outer join, text from a cast."""
    for offsets in (pa.array([1, None]), pa.array(["1", "2"])):
        batch = pa.record_batch({"partition": pa.array([1, 1]), "offset": offsets})
        with raises(Reason.ROW_ORDER):
            OrderGuard(PAIR, task=0).check(batch, np.zeros(2, np.uint16), np.ones(2, np.bool_), 0)
