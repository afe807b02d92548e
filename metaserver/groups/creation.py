"""Inserts the row of a new consumer group. SQL, synchronous."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors.refusals import too_many_groups
from ...protocol.groups import GroupStart
from ...protocol.limits import GROUPS_PER_SUBJECT_MAX
from ...protocol.routing import ConsumeStrategy
from ..cluster.lost_database import check_not_lost
from ..cluster.rows import SubjectRow
from ..cluster.subjects import check_not_hidden
from ..sql.dialect import insert_new
from ..sql.schema import accepted_folders, groups

EARLIEST = GroupStart()
_facts = sa.select(
    sa.select(sa.func.count())
    .where(groups.c.subject_id == sa.bindparam("of_subject"))
    .scalar_subquery()
    .label("known"),
    sa.select(sa.func.coalesce(sa.func.max(accepted_folders.c.fence), 0))
    .scalar_subquery()
    .label("fence"),
)
"""Number of groups of a subject, and the fence up to which brokers refuse tokens; see
catalogue/accepted.py.
"""


def insert_group(
    connection: Connection,
    subject: SubjectRow,
    name: str,
    *,
    strategy: ConsumeStrategy,
    start: GroupStart = EARLIEST,
    version: int = 0,
) -> bool:
    """
    Insert an unsettled group; does nothing if the name exists.

    Returns:
        True if it was inserted.

    Raises:
        ConflictError: the subject is hidden.
        OverloadedError: the subject has the maximum number of groups.
        UnavailableError: the database lacks what brokers have.
    """
    check_not_hidden(subject)
    check_not_lost(connection)
    facts = connection.execute(_facts, {"of_subject": subject.subject_id}).one()
    if facts.known >= GROUPS_PER_SUBJECT_MAX:
        raise too_many_groups("the subject", GROUPS_PER_SUBJECT_MAX)
    row = {
        "subject_id": subject.subject_id,
        "name": name,
        "strategy": strategy,
        "last_token": max(facts.fence, subject.tokens_above),
        "version": version,
        "settled": False,
        "route_version": 0,
        "start_at": start.at,
        "start_ms": start.at_ms,
    }
    return insert_new(connection, groups, row) > 0
