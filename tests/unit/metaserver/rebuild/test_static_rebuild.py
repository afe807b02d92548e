"""A static subject is whole after a rebuild from the brokers; `meta verify` names broken chains."""

from __future__ import annotations

import msgspec
import pytest

from keylane.metaserver.cluster.rows import SubjectRow
from keylane.metaserver.rebuild.plan import plan_rebuild
from keylane.metaserver.verify.checks import verify
from keylane.metaserver.verify.views import PartitionView, SqlView, Views
from keylane.protocol.control import PartitionStatus
from keylane.protocol.errors import InvalidRequestError
from keylane.protocol.limits import PARTITION_MESSAGES_MAX
from keylane.protocol.operations import OperationState
from keylane.protocol.routing import OrderStrategy, PartitionState
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
    Brokers are not told where a partition begins in its queue; a chain of four gets the same logic starts as before.
    """
    assert starts(*CHAIN) == [(1, 0, SEALED), (2, 40, SEALED), (4, 41, SEALED), (7, 41, OPEN)]


def test_interrupted_move_continues():
    """A parent that is not sealed has no end: its child is planned, and gets its logic start when it opens."""
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
    """A contiguous chain passes. A gap, an overlap, a start other than 0, and another queue are each named."""
    assert broken(row(1, start=0, end=40), row(2, 1, start=40, end=1), row(3, 2, start=41)) == []
    assert "logic offset 50" in broken(row(1, start=0, end=40), row(2, 1, start=50))[0]
    assert "logic offset 39" in broken(row(1, start=0, end=40), row(2, 1, start=39))[0]
    assert "logic offset 5" in broken(row(1, start=5))[0]
    assert "another queue" in broken(row(1, start=0, end=4), row(2, 1, start=4, queue=1))[0]


def test_check_finds_a_chain_that_begins_before_a_loss():
    """The child of a lost partition begins where its name says; a child of a present parent may not."""
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
