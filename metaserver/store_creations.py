"""Creations of subjects that cannot come to their end, and databases that cannot take any.  SQL, synchronous.

Invariants
    A creation fails only while nothing of it is open; its name is free for another one then.
    Whatever of it a broker hosts is sealed there: no partition takes messages that no route names.
    A database that knows no subject, beside brokers with partitions, is a lost one: nothing is made of it by calls.
"""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..protocol.errors import DatabaseEmptyError
from ..protocol.operations import OperationKind, OperationState, StepAction
from ..protocol.routing import PartitionState
from .dialect import now_ms
from .schema import brokers, operations, partitions, steps, subjects

PROBLEM_CHARS_MAX = 1_024
_subjects = sa.exists(sa.select(subjects.c.subject_id))
_beside = (
    sa.select(brokers.c.broker_group, brokers.c.hosted)
    .where(brokers.c.hosted > 0, sa.not_(_subjects))
    .order_by(brokers.c.broker_group)
    .limit(1)
)


def is_empty(connection: Connection) -> bool:
    """Does the database know no subject."""
    return not connection.execute(sa.select(_subjects)).scalar_one()


def database_lost(connection: Connection) -> DatabaseEmptyError | None:
    """Why this database cannot be the one that the brokers' partitions come from; None if it may be."""
    row = connection.execute(_beside).one_or_none()
    if row is None:
        return None
    return DatabaseEmptyError(
        f"the database knows no subject, and broker group {row.broker_group!r} has "
        f"{row.hosted} partitions: it was lost, or is another one",
        broker_group=row.broker_group,
        partitions=row.hosted,
    )


def check_not_lost(connection: Connection) -> None:
    """Raises DatabaseEmptyError."""
    lost = database_lost(connection)
    if lost is not None:
        raise lost


def fail_creation(
    connection: Connection, subject_id: int, problem: str, *, in_use: Collection[int]
) -> bool:
    """
    Give a creation up; False if the subject is open meanwhile.

    Args:
        in_use: the partitions of these numbers at the brokers are others, and stay as they are.
    """
    here = subjects.c.subject_id == subject_id
    locked = sa.select(subjects.c.route_version).where(here).with_for_update()
    if connection.execute(locked).scalar_one() > 0:
        return False
    planned = sa.and_(
        partitions.c.subject_id == subject_id, partitions.c.state == PartitionState.PLANNED
    )
    ids = connection.execute(sa.select(partitions.c.partition_id).where(planned)).scalars().all()
    connection.execute(sa.update(partitions).where(planned).values(state=PartitionState.EXPIRED))
    said = {"problem": problem[:PROBLEM_CHARS_MAX]}
    connection.execute(sa.update(subjects).where(here).values(said))
    hosted = sorted(set(ids).difference(in_use))
    if hosted:
        _seal_soon(connection, subject_id, hosted)
    return True


def _seal_soon(connection: Connection, subject_id: int, ids: Collection[int]) -> None:
    """Journal that these partitions, which are never opened, are to be sealed wherever they are hosted."""
    operation_id = connection.execute(
        sa.insert(operations)
        .values(
            subject_id=subject_id,
            kind=OperationKind.RESIZE,
            state=OperationState.CANCELED,
            without_source=False,
            problem="",
            running=None,
            driver=None,
            driven_until=now_ms(),
        )
        .returning(operations.c.operation_id)
    ).scalar_one()
    todo = [
        {
            "operation_id": operation_id,
            "partition_id": one,
            "action": StepAction.SEAL,
            "done": False,
        }
        for one in ids
    ]
    connection.execute(sa.insert(steps), todo)
