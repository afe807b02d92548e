"""Stores the brokers to which sessions cannot connect. SQL, synchronous.

A consumer that a broker refuses, or that the network separates from it, can still renew its leases
at the metaserver. It reports the broker in its heartbeats, and its partitions there are granted to
sessions that can connect.
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

_set_unreached = sa.update(sessions).where(sessions.c.session == sa.bindparam("of_session"))
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
    Store the broker groups to which a session cannot connect, and mark its group unsettled; returns
    the group's id.

    Raises:
        SessionUnknownError: the session has ended.
    """
    group_id = live_session(connection, session).group_id
    lock_group(connection, group_id)
    live_session(connection, session)  # the session may have ended before the group was locked
    names = " ".join(sorted(set(broker_groups)))
    connection.execute(_set_unreached, {"of_session": session, "unreached": names})
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
