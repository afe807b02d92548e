"""What sessions say of brokers to which they get no connection.  SQL, synchronous.

A consumer that a broker refuses, or to which the network leads no more, renews its leases at the
metaserver all the same.  It says so in its heartbeats, and its partitions there are granted to
those that do get there.
"""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.ids import PartitionId, SessionId
from ...protocol.routing import PartitionState
from ..cluster.heard import mark_unsettled
from ..sql.schema import partitions, sessions
from .locked_group import lock_group
from .sessions import live_session

_said = sa.update(sessions).where(sessions.c.session == sa.bindparam("of_session"))
_unreached = sa.select(sessions.c.session, sessions.c.unreached).where(
    sessions.c.group_id == sa.bindparam("of_group"), sessions.c.unreached != ""
)
_hosted = sa.select(partitions.c.partition_id, partitions.c.broker_group).where(
    partitions.c.subject_id == sa.bindparam("of_subject"),
    partitions.c.broker_group.in_(sa.bindparam("names", expanding=True)),
    partitions.c.state.in_([PartitionState.OPEN, PartitionState.SEALED]),
)


def note_unreached(connection: Connection, session: str, broker_groups: Collection[str]) -> int:
    """
    Note the broker groups to which a session gets no connection, and mark its group unsettled;
    returns the group's id.

    Raises:
        SessionUnknownError: the session has ended.
    """
    group_id = live_session(connection, session).group_id
    lock_group(connection, group_id)
    live_session(connection, session)  # it may have been swept before the group was locked
    names = " ".join(sorted(set(broker_groups)))
    connection.execute(_said, {"of_session": session, "unreached": names})
    mark_unsettled(connection, group_id)
    return group_id


def read_unreached(
    connection: Connection, group_id: int, subject_id: int
) -> dict[PartitionId, set[SessionId]]:
    """Return partition → sessions of the group that get no connection to its broker."""
    rows = connection.execute(_unreached, {"of_group": group_id}).all()
    if not rows:
        return {}
    shut_out: dict[str, set[SessionId]] = {}
    for session, names in rows:
        for name in names.split():
            shut_out.setdefault(name, set()).add(SessionId(session))
    which = {"of_subject": subject_id, "names": sorted(shut_out)}
    hosted = connection.execute(_hosted, which)
    return {PartitionId(partition_id): shut_out[name] for partition_id, name in hosted}
