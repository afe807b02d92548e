"""Logic queues of static subjects: the rows of their chains.  SQL, synchronous.

Invariants
    A child of a static subject has one parent, whose queue and range it has, and begins at the logic offset at which
    that one was sealed; behind a parent that is lost, with an end that nobody knows, above all that it can have had.
"""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import SubjectNotStaticError
from ...protocol.queues import QueueList, QueueView, SegmentView, start_behind_loss
from ...protocol.routing import Partition
from ..sql.dialect import begin_snapshot
from ..sql.schema import partition_parents, partitions
from .partitions import subject_partitions
from .subjects import SERVED, open_subject_row


def set_logic_starts(connection: Connection, children: Collection[int]) -> None:
    """Let these children begin where their parents end, which are sealed or lost."""
    parent, child = partitions.alias("parent"), partitions.alias("child")
    rows = connection.execute(
        sa.select(
            child.c.partition_id,
            child.c.name,
            parent.c.logic_start,
            parent.c.end_offset,
            parent.c.lost,
        )
        .select_from(partition_parents)
        .join(parent, parent.c.partition_id == partition_parents.c.parent_id)
        .join(child, child.c.partition_id == partition_parents.c.partition_id)
        .where(partition_parents.c.partition_id.in_(children))
    ).all()
    for row in rows:
        if row.end_offset is not None:
            start = row.logic_start + row.end_offset
        else:
            assert row.lost, f"a parent of {row.partition_id} has no end"
            start = start_behind_loss(row.name)
        here = partitions.c.partition_id == row.partition_id
        connection.execute(sa.update(partitions).where(here).values(logic_start=start))


def read_queues(connection: Connection, name: str) -> QueueList:
    """
    The queues of a static subject, with the partitions that still have data.

    Raises:
        InvalidNameError, SubjectUnknownError, SubjectNotStaticError
    """
    begin_snapshot(connection)
    row = open_subject_row(connection, name)
    if not row.static:
        raise SubjectNotStaticError(subject=name)
    chains: dict[int, list[Partition]] = {}
    for one in subject_partitions(connection, row.subject_id, SERVED):
        chains.setdefault(one.queue, []).append(one)
    ends = end_offsets(connection, row.subject_id)
    return QueueList(
        subject=row.name,
        route_version=row.route_version,
        queues=[_queue(chain, ends) for _, chain in sorted(chains.items())],
    )


def end_offsets(connection: Connection, subject_id: int) -> dict[int, int]:
    """Where the sealed partitions of a subject end, by id; those of which it is not known are left out."""
    found = sa.select(partitions.c.partition_id, partitions.c.end_offset).where(
        partitions.c.subject_id == subject_id, partitions.c.end_offset.is_not(None)
    )
    return {row.partition_id: row.end_offset for row in connection.execute(found)}


def _queue(chain: list[Partition], ends: dict[int, int]) -> QueueView:
    segments = []
    for one in sorted(chain, key=lambda one: (one.logic_start, one.partition_id)):
        end = ends.get(one.partition_id)
        logic_end = None if end is None else one.logic_start + end
        segments.append(SegmentView(partition=one, logic_end=logic_end))
    last = segments[-1].partition
    return QueueView(
        queue=last.queue,
        range_start=last.range_start,
        range_end=last.range_end,
        segments=tuple(segments),
    )
