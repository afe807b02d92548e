"""A static subject is whole after a rebuild from the brokers; `meta verify` names broken chains."""

from __future__ import annotations

import msgspec
import pytest

from keylane.metaserver.cluster.rows import SubjectRow
from keylane.metaserver.rebuild.plan import plan_rebuild
from keylane.metaserver.rebuild.rows import RebuildOptions
from keylane.metaserver.verify.checks import PartitionView, SqlView, Views, verify
from keylane.protocol.control import PartitionStatus
from keylane.protocol.errors import InvalidRequestError
from keylane.protocol.limits import PARTITION_MESSAGES_MAX
from keylane.protocol.operations import OperationState
from keylane.protocol.routing import OrderStrategy, Partition, PartitionState
from support.sql.kept_by_brokers import OPEN, SEALED, source, status


def segment(
    number: int, *parents: int, messages: int, sealed: bool = False, static: bool = True
) -> PartitionStatus:
    """A partition of the one queue of subject `s`, as its broker has it."""
    return status(
        number,
        0,
        1024,
        parents=parents,
        messages=messages,
        sealed=sealed,
        queue=0,
        wanted=1,
        static=static,
    )


CHAIN = (
    segment(1, messages=40, sealed=True),
    segment(2, 1, messages=1, sealed=True),
    segment(4, 2, messages=0, sealed=True),
    segment(7, 4, messages=9),
)


def starts(*statuses: PartitionStatus) -> list[tuple[int, int, PartitionState]]:
    (subject,) = plan_rebuild([source(*statuses)]).subjects
    assert subject.static
    rows = [row.partition for row in subject.partitions]
    return [(partition.partition_id, partition.logic_start, partition.state) for partition in rows]


def test_logic_starts_follow_from_the_ends_of_the_parents():
    """
    Brokers are not told where a partition begins in its queue; a chain of four gets the same logic
    starts as before.
    """
    assert starts(*CHAIN) == [(1, 0, SEALED), (2, 40, SEALED), (4, 41, SEALED), (7, 41, OPEN)]


def half(
    number: int, *parents: int, queue: int, of: tuple[int, int], messages: int, sealed: bool = False
) -> PartitionStatus:
    """A partition of a queue with the range `of`, of a subject that was made with one queue."""
    return status(
        number,
        *of,
        parents=parents,
        messages=messages,
        sealed=sealed,
        queue=queue,
        wanted=1,
        static=True,
    )


GROWN = {
    1: half(1, queue=0, of=(0, 1024), messages=40, sealed=True),
    2: half(2, 1, queue=0, of=(0, 512), messages=3, sealed=True),
    3: half(3, 1, queue=1, of=(512, 1024), messages=7, sealed=True),
    4: half(4, 2, queue=0, of=(0, 512), messages=0),
    5: half(5, 3, queue=1, of=(512, 768), messages=1),
    6: half(6, 3, queue=2, of=(768, 1024), messages=5),
}
"""Queue 0 was split, and moved since; the new queue was split again."""


def test_logic_starts_of_split_queues_follow_from_the_queues_of_the_parents():
    """A partition that continues its parent's queue begins at the parent's end, the first one of a
    new queue at 0.
    """
    assert starts(*GROWN.values()) == [
        (1, 0, SEALED),
        (2, 40, SEALED),
        (3, 0, SEALED),
        (4, 43, OPEN),
        (5, 7, OPEN),
        (6, 0, OPEN),
    ]


@pytest.mark.parametrize("sealed", [False, True])
def test_interrupted_growth_continues_when_its_parent_is_sealed(sealed: bool):
    """Before the seal it is canceled, and the queue continues whole; after the seal both halves
    open.
    """
    whole = half(1, queue=0, of=(0, 1024), messages=40, sealed=sealed)
    first = half(2, 1, queue=0, of=(0, 512), messages=0)
    second = half(3, 1, queue=1, of=(512, 1024), messages=0)
    now = [(number, state) for number, _, state in starts(whole, first, second)]
    if sealed:
        assert now == [(1, SEALED), (2, OPEN), (3, OPEN)]
        assert starts(whole, first, second)[1][1] == 40
    else:
        assert now == [(1, OPEN), (2, PartitionState.EXPIRED), (3, PartitionState.EXPIRED)]


def without(*statuses: PartitionStatus) -> dict[int, Partition]:
    """The rows by id after a rebuild in which other brokers are gone."""
    options = RebuildOptions(gone=("g2",))
    (subject,) = plan_rebuild([source(*statuses)], options).subjects
    return {row.partition.partition_id: row.partition for row in subject.partitions}


def test_gone_parent_of_both_halves_is_inferred():
    """The first half continues its queue behind the loss; the second half begins its own at 0."""
    rows = without(
        half(2, 1, queue=0, of=(0, 512), messages=3),
        half(3, 1, queue=1, of=(512, 1024), messages=7),
    )
    assert (rows[1].queue, rows[1].range_start, rows[1].range_end) == (0, 0, 1024)
    assert (rows[2].logic_start, rows[3].logic_start) == (PARTITION_MESSAGES_MAX, 0)


def test_gone_first_partition_of_a_new_queue_continues_the_split_one():
    """What the split queue has of the keys is read before what continues behind the gone
    partition.
    """
    rows = without(*(status for number, status in GROWN.items() if number != 3))
    assert (rows[3].queue, rows[3].range_start, rows[3].range_end) == (1, 512, 1024)
    assert rows[3].parents == (1,)
    assert (rows[5].logic_start, rows[6].logic_start) == (4 * PARTITION_MESSAGES_MAX, 0)


def test_gone_partition_that_one_half_alone_tells_of_is_inferred_from_it():
    """Both queues continue behind a loss, after what the split queue has left."""
    moved = half(7, 5, queue=1, of=(512, 768), messages=2)
    rows = without(GROWN[1], GROWN[2], GROWN[4], GROWN[6], moved)
    assert (rows[3].parents, rows[5].parents) == ((1,), (1,))
    assert (rows[6].logic_start, rows[7].logic_start) == (
        5 * PARTITION_MESSAGES_MAX,
        6 * PARTITION_MESSAGES_MAX,
    )


def test_interrupted_move_continues():
    """A parent that is not sealed has no end: its child is planned, and gets its logic start when
    it opens.
    """
    (subject,) = plan_rebuild(
        [source(CHAIN[0], segment(2, 1, messages=5), segment(3, 2, messages=0))]
    ).subjects
    rows = {row.partition.partition_id: row.partition for row in subject.partitions}
    assert (rows[2].logic_start, rows[2].state) == (40, OPEN)
    assert rows[3].state is PartitionState.EXPIRED
    assert subject.operation is None or subject.operation.state is OperationState.SEAL


def test_rebuild_is_refused_when_brokers_disagree_on_static():
    """A subject is static on every broker, or on none."""
    with pytest.raises(InvalidRequestError, match="static"):
        plan_rebuild([source(CHAIN[0], segment(2, 1, messages=1, static=False))])


def broken(*parts: PartitionView) -> list[str]:
    subject = SubjectRow(
        subject_id=1,
        name="s",
        order_strategy=OrderStrategy.STRICT,
        partitions_wanted=1,
        partitions_named=9,
        route_version=1,
        static=True,
    )
    sql = SqlView(
        subjects={1: subject},
        partitions={row.partition.partition_id: row for row in parts},
    )
    checks = verify(Views(before=sql, answers=[], after=sql)).checks
    (violations,) = [check.violations for check in checks if check.code == "V02"]
    return violations


def row(number: int, *parents: int, start: int, end: int | None = None, **more) -> PartitionView:
    facts = segment(number, *parents, messages=0).facts
    assert facts is not None
    partition = msgspec.structs.replace(
        facts.partition, logic_start=start, state=OPEN if end is None else SEALED, **more
    )
    return PartitionView(subject_id=1, partition=partition, end_offset=end)


def test_check_finds_a_gap_in_a_chain():
    """A contiguous chain passes. A gap, an overlap, a start other than 0, and another queue are
    each named.
    """
    assert broken(row(1, start=0, end=40), row(2, 1, start=40, end=1), row(3, 2, start=41)) == []
    assert "logic offset 50" in broken(row(1, start=0, end=40), row(2, 1, start=50))[0]
    assert "logic offset 39" in broken(row(1, start=0, end=40), row(2, 1, start=39))[0]
    assert "logic offset 5" in broken(row(1, start=5))[0]
    assert "has queue 1" in broken(row(1, start=0, end=4), row(2, 1, start=4, queue=1))[0]


def test_check_finds_queues_that_were_split_wrongly():
    """The first half of a range continues its queue, the second half begins another one at 0; each
    deviation is named.
    """
    whole = row(1, start=0, end=4)

    def halves(first: int, second: int, *, begins: int = 0) -> list[str]:
        return broken(
            whole,
            row(2, 1, start=4, queue=first, range_end=512),
            row(3, 1, start=begins, queue=second, range_start=512),
        )

    assert halves(0, 1) == []
    assert "partition 3 begins at logic offset 4" in halves(0, 1, begins=4)[0]
    assert "partition 3 has queue 0" in halves(0, 0, begins=4)[0]
    assert "partition 2 has queue 1" in halves(1, 0)[0]


def test_check_finds_a_chain_that_begins_before_a_loss():
    """The child of a lost partition begins where its name says; a child of a present parent may
    not.
    """
    gone = PartitionView(
        subject_id=1,
        partition=msgspec.structs.replace(
            row(2, 1, start=40).partition, state=PartitionState.EXPIRED
        ),
        abandoned=True,
    )
    first, span = row(1, start=0, end=40), PARTITION_MESSAGES_MAX
    assert (
        broken(first, gone, row(3, 2, start=2 * span, end=5), row(4, 3, start=2 * span + 5)) == []
    )
    assert "logic offset 40" in broken(first, gone, row(3, 2, start=40))[0]
    assert "logic offset" in broken(first, gone, row(3, 2, start=2 * span + 1))[0]
    assert "ends at 40" in broken(first, row(3, 1, start=2 * span))[0]
