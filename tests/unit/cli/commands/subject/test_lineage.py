"""How the lineage of a subject's partitions is drawn."""

from __future__ import annotations

from typing import Any

from keylane.cli.commands.subject.subjects import lineage
from keylane.protocol.operations import PartitionHistory
from keylane.protocol.routing import Partition, PartitionState


def history_entry(
    number: int, start: int, end: int, *parents: int, **more: Any
) -> PartitionHistory:
    partition = Partition(
        partition_id=number,
        name=f"s.p{number - 1}",
        queue=number - 1,
        range_start=start,
        range_end=end,
        broker_group="g1",
        state=PartitionState.SEALED if more else PartitionState.OPEN,
        parents=parents,
    )
    return PartitionHistory(partition=partition, **more)


def test_parents_stand_above_their_children():
    """Trees in the order of ranges; a child of two stands under the oldest, the other one names
    it.
    """
    drawn = lineage(
        [
            history_entry(1, 512, 1024, end_offset=7),
            history_entry(2, 0, 512, end_offset=5, abandoned=True),
            history_entry(3, 0, 256, 2),
            history_entry(4, 256, 768, 1, 2, end_offset=3),
            history_entry(5, 768, 1024, 1),
            history_entry(6, 256, 768, 4),
        ]
    )
    assert drawn == [
        "s.p1 (id 2) [0, 512) on g1: sealed at 5, abandoned",
        "├─ s.p2 (id 3) [0, 256) on g1: open",
        "└─ s.p3, shown elsewhere",
        "s.p0 (id 1) [512, 1024) on g1: sealed at 7",
        "├─ s.p3 (id 4) [256, 768) on g1: sealed at 3",
        "│  └─ s.p5 (id 6) [256, 768) on g1: open",
        "└─ s.p4 (id 5) [768, 1024) on g1: open",
    ]


def test_very_many_generations_are_drawn():
    """A partition that was moved thousands of times is a tree as any other."""
    moves = 3_000
    history = [history_entry(1, 0, 1024, end_offset=1)]
    history += [
        history_entry(number, 0, 1024, number - 1, end_offset=1) for number in range(2, moves)
    ]
    drawn = lineage(history)
    assert len(drawn) == len(history)
    assert drawn[-1].lstrip() == f"└─ s.p{moves - 2} (id {moves - 1}) [0, 1024) on g1: sealed at 1"
