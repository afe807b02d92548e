"""Changes the strategy of a consumer group for an operator. SQL, synchronous.

Invariants
    Sessions, strategy and tokens change in one transaction: no session that joined under the old
    strategy has a grant afterwards.
    Every later token is above all earlier ones, so that the first new Acquire of a partition fences
    its old owner.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.ids import SessionId
from ...protocol.routing import ConsumeStrategy
from ..cluster.heard import mark_unsettled
from ..cluster.subjects import open_subject_row
from ..sql.schema import groups, leases, sessions
from .lease_rows import NO_CHANGES, Changes
from .sessions import end_sessions
from .views import find_group


def switch_group(
    connection: Connection, subject: str, group: str, strategy: ConsumeStrategy
) -> Changes:
    """
    End the sessions of a group and give it another strategy; does nothing if it has that strategy.

    Raises:
        InvalidRequestError, SubjectUnknownError, GroupUnknownError
    """
    row = open_subject_row(connection, subject)
    group_id, _ = find_group(connection, row.subject_id, subject, group)
    here = groups.c.group_id == group_id
    locked = connection.execute(sa.select(groups.c.strategy).where(here).with_for_update()).one()
    if locked.strategy == strategy:
        return NO_CHANGES
    chosen = sa.select(sessions.c.session).where(sessions.c.group_id == group_id)
    ended = [SessionId(session) for session in connection.execute(chosen).scalars()]
    end_sessions(connection, ended)
    free = sa.update(leases).where(leases.c.group_id == group_id)
    connection.execute(free.values(session=None, wanted=None, withdrawn=False))
    connection.execute(sa.update(groups).where(here).values(strategy=strategy))
    mark_unsettled(connection, group_id)
    return Changes(versions={}, ended=ended)
