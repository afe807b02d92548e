"""Stores and reads the logic queues of static subjects: chains of partitions. Runs SQL
synchronously.

Invariants
    A child in a static subject has one parent, and possibly a second one in a hidden subject whose
    messages will be published before its own.
    A child that continues its parent's queue starts at the logic offset at which the parent was
    sealed; if the parent was lost and its end is unknown, the child starts above every offset that
    the parent can have had.
    A child whose queue differs from its parent's is the first partition of a new queue, and starts
    at logic offset 0.
"""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import ConflictError, Reason
from ...protocol.queues import QueueList, QueueView, SegmentView, start_behind_loss
from ...protocol.routing import Partition
from ..sql.dialect import begin_snapshot
from ..sql.schema import partition_parents, partitions
from .partitions import subject_partitions
from .subjects import SERVED, open_subject_row


def set_logic_starts(connection: Connection, children: Collection[int]) -> None:
    """
    Set the logic offset at which each of these children starts, which is the end of its sealed or
    lost parent.

    A child that begins a new queue keeps logic offset 0.
    """
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
        .where(
            partition_parents.c.partition_id.in_(children),
            child.c.queue == parent.c.queue,
            child.c.subject_id == parent.c.subject_id,  # not a parent in a hidden subject
        )
    ).all()
    for row in rows:
        if row.end_offset is not None:
            logic_start = row.logic_start + row.end_offset
        else:
            assert row.lost, f"a parent of {row.partition_id} has no end"
            logic_start = start_behind_loss(row.name)
        is_child = partitions.c.partition_id == row.partition_id
        connection.execute(sa.update(partitions).where(is_child).values(logic_start=logic_start))


def shift_logic_offsets(
    connection: Connection, subject_id: int, published: Collection[int]
) -> None:
    """
    Recompute the logic offsets of published partitions and of all partitions that follow them in
    their queues.

    Args:
        published: partitions of a hidden subject; their logic offsets continue those of the
            partitions that they replace.
    """
    set_logic_starts(connection, published)
    is_newer = sa.and_(
        partitions.c.subject_id == subject_id, partitions.c.partition_id >= min(published)
    )
    rows = connection.execute(sa.select(partitions).where(is_newer)).all()
    by_id = {row.partition_id: row for row in rows}
    lineage_query = sa.select(partition_parents).where(partition_parents.c.partition_id.in_(by_id))
    parent_ids: dict[int, int] = {}
    for lineage_row in connection.execute(lineage_query):
        parent = by_id.get(lineage_row.parent_id)
        if parent is not None and parent.queue == by_id[lineage_row.partition_id].queue:
            parent_ids[lineage_row.partition_id] = parent.partition_id
    logic_starts = {row.partition_id: row.logic_start for row in rows}
    for partition_id in sorted(parent_ids):  # parents have lower ids
        parent = by_id[parent_ids[partition_id]]
        if parent.end_offset is None:
            continue  # lost: its child already starts above every possible offset
        logic_starts[partition_id] = logic_starts[parent.partition_id] + parent.end_offset
        condition = partitions.c.partition_id == partition_id
        connection.execute(
            sa.update(partitions).where(condition).values(logic_start=logic_starts[partition_id])
        )


def read_queues(connection: Connection, name: str) -> QueueList:
    """
    Return the queues of a static subject, including those partitions that still have data.

    Raises:
        InvalidRequestError, SubjectUnknownError, ConflictError
    """
    begin_snapshot(connection)
    row = open_subject_row(connection, name)
    if not row.static:
        raise ConflictError(Reason.SUBJECT_NOT_STATIC, subject=name)
    chains: dict[int, list[Partition]] = {}
    for partition in subject_partitions(connection, row.subject_id, SERVED):
        chains.setdefault(partition.queue, []).append(partition)
    end_offsets_by_id = end_offsets(connection, row.subject_id)
    return QueueList(
        subject=row.name,
        route_version=row.route_version,
        queues=[_build_queue(chain, end_offsets_by_id) for _, chain in sorted(chains.items())],
    )


def end_offsets(connection: Connection, subject_id: int) -> dict[int, int]:
    """Return a dict that maps each partition of a subject whose end is known to its end offset."""
    query = sa.select(partitions.c.partition_id, partitions.c.end_offset).where(
        partitions.c.subject_id == subject_id, partitions.c.end_offset.is_not(None)
    )
    return {row.partition_id: row.end_offset for row in connection.execute(query)}


def _build_queue(chain: list[Partition], end_offsets: dict[int, int]) -> QueueView:
    segments = []
    for partition in sorted(chain, key=lambda member: (member.logic_start, member.partition_id)):
        end = end_offsets.get(partition.partition_id)
        logic_end = None if end is None else partition.logic_start + end
        segments.append(SegmentView(partition=partition, logic_end=logic_end))
    last = segments[-1].partition
    return QueueView(
        queue=last.queue,
        range_start=last.range_start,
        range_end=last.range_end,
        segments=tuple(segments),
    )
