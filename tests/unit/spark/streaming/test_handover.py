"""Where a stream begins behind a backfill, and what it is told was removed in between."""

from __future__ import annotations

from keylane.arrow.selection import EARLIEST, ReadBound, ReadOptions
from keylane.protocol.errors import Reason
from keylane.protocol.operations import PartitionHistory
from keylane.protocol.reprocess.manifest import Manifest, SourceRange
from keylane.protocol.routing import Partition, PartitionState
from keylane.spark.reprocess.folder import MANIFEST, OutputFolder
from keylane.spark.streaming.batches import LostRange
from keylane.spark.streaming.handover import lost_after_start, resolve_backfill_start
from keylane.spark.streaming.lineage import Lineage, View, branches_of
from support.raising import raises


def view(*partitions: tuple[int, tuple[int, ...], int | None]) -> View:
    """Of each partition its id, its parents, and its end if it is gone."""
    history = [
        PartitionHistory(
            partition=Partition(
                partition_id=number,
                name=f"p{number}",
                queue=0,
                range_start=0,
                range_end=1024,
                broker_group="g1",
                state=PartitionState.OPEN if end is None else PartitionState.EXPIRED,
                parents=parents,
            ),
            end_offset=end,
        )
        for number, parents, end in partitions
    ]
    return View(Lineage(branches_of("flights", history)))


def test_partition_that_is_gone_is_lost_unless_the_backfill_has_it():
    """1 was gone before the backfill, 2 was read by half, 3 wholly, 4 was opened later; 5 is
    there.
    """
    gone = view((1, (), 90), (2, (1,), 80), (3, (1,), 70), (4, (2,), 60), (5, (4, 3), None))
    start = ReadBound(0, {2: 50, 3: 70}, manifest="backfill")
    assert list(lost_after_start(gone, start)) == [LostRange(2, 50, 80), LostRange(4, 0, 60)]
    assert list(lost_after_start(gone, EARLIEST)) == []


def test_start_is_where_the_backfill_ended(tmp_path):
    options = ReadOptions(meta=("a:1",), subjects=("flights",))
    assert resolve_backfill_start(options) == options
    behind = ReadOptions(
        meta=("a:1",), subjects=("flights",), start=ReadBound(0, manifest=str(tmp_path))
    )
    with raises(Reason.MANIFEST):
        resolve_backfill_start(behind)
    manifest = Manifest(
        job="j",
        code="c",
        subject="flights",
        planned_at_ms=1,
        ranges=(SourceRange(partition_id=3, start=7, end=7),),
        piece_rows=10,
    )
    OutputFolder(str(tmp_path)).write(MANIFEST, manifest)
    assert resolve_backfill_start(behind).start == ReadBound(0, {3: 7}, manifest=str(tmp_path))
