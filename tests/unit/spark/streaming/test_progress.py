"""Where a group is whose stream is at an offset; that it is set there is in
tests/integration/reading/test_stream_progress.py.
"""

from __future__ import annotations

from keylane.protocol.operations import PartitionHistory
from keylane.protocol.routing import Partition, PartitionState
from keylane.spark.streaming.lineage import Lineage, StoredOffsets, View, branches_of
from keylane.spark.streaming.offset import StreamOffset
from keylane.spark.streaming.progress import committed_cursors

SUBJECTS = {"flights": 1}


def view() -> View:
    """1 is gone, 2 and 3 continue it; 3 is sealed at 30, and 4 continues it."""
    parts = [
        (1, (), PartitionState.EXPIRED, 90),
        (2, (1,), PartitionState.OPEN, None),
        (3, (1,), PartitionState.SEALED, 30),
        (4, (3,), PartitionState.OPEN, None),
    ]
    history = [
        PartitionHistory(
            partition=Partition(
                partition_id=number,
                name=f"p{number}",
                queue=0,
                range_start=0,
                range_end=1024,
                broker_group="g1",
                state=state,
                parents=parents,
            ),
            end_offset=end,
        )
        for number, parents, state, end in parts
    ]
    stored = {
        2: StoredOffsets(0, 50, False),
        3: StoredOffsets(0, 30, True),
        4: StoredOffsets(0, 9, False),
    }
    return View(Lineage(branches_of("flights", history)), stored)


def test_group_is_at_the_offset_and_behind_what_is_finished():
    """A partition that is gone has no cursor; one that was read to its end, and left the offset,
    has its end.
    """
    offset = StreamOffset(subjects=SUBJECTS, offsets={2: 20, 4: 5})
    assert committed_cursors(view(), offset) == {2: 20, 3: 30, 4: 5}
    assert committed_cursors(view(), StreamOffset(subjects=SUBJECTS, offsets={2: 20, 3: 7})) == {
        2: 20,
        3: 7,
    }


def test_group_stays_where_it_is_until_a_first_batch_is_committed():
    """A start at the end of what is stored is no progress."""
    assert (
        committed_cursors(view(), StreamOffset(subjects=SUBJECTS, offsets={2: 50}, initial=True))
        == {}
    )
