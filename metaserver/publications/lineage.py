"""Finds the parents of a hidden subject's partitions, and checks that they are the open partitions
of its target. SQL, synchronous.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import BusyError, PublishError, Reason
from ..cluster.rows import SubjectRow
from ..cluster.subjects import check_not_hidden
from ..operations.plan_inputs import open_partitions, running_operation
from ..sql.schema import partition_parents


def parents_of(connection: Connection, row: SubjectRow) -> dict[int, set[int]]:
    """Return partition id → its parents, for the open partitions of a hidden subject."""
    ids = [partition.partition_id for partition in open_partitions(connection, row)]
    parents: dict[int, set[int]] = {partition_id: set() for partition_id in ids}
    chosen = sa.select(partition_parents).where(partition_parents.c.partition_id.in_(ids))
    for line in connection.execute(chosen):
        parents[line.partition_id].add(line.parent_id)
    return parents


def check_continues(
    connection: Connection, row: SubjectRow, target: SubjectRow, parents: Mapping[int, set[int]]
) -> None:
    """
    Check that a hidden subject continues the present open partitions of its target.

    Raises:
        ConflictError, BusyError
        PublishError: the target's partitions have changed.
    """
    check_not_hidden(target)
    running = running_operation(connection, target.subject_id)
    if running is not None:
        raise BusyError(Reason.OPERATION_RUNNING, subject=target.name, operation_id=running)
    now = {partition.partition_id for partition in open_partitions(connection, target)}
    if now != set().union(*parents.values()):
        raise outdated(
            row,
            "its partitions were resized, moved or set"
            if any(parents.values())
            else "a subject of this name was created",
        )


def outdated(row: SubjectRow, what: str) -> PublishError:
    """Make the error for a hidden subject that continues other partitions than the open ones of its
    target.
    """
    return PublishError(
        Reason.PUBLISH_OUTDATED,
        f"{row.name!r} cannot be published in {row.hidden_for!r}: {what} since it was made",
        subject=row.name,
        target=row.hidden_for,
    )
