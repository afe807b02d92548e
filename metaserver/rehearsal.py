"""A consumer's opening, done once before any client asks for it, and undone: so its statements are compiled and known.

SQLAlchemy compiles a statement when it is first executed.  The first opening has a hundred of them, and took five times
as long as each later one.
"""

from __future__ import annotations

import logging
import secrets

from sqlalchemy.engine import Connection

from ..protocol.control import BrokerHeartbeat, CreateSubject, Join
from ..protocol.errors import KeylaneError
from ..protocol.ids import MAX_I64
from .cluster.brokers import renew_broker, report_broker
from .cluster.heard import note_heard
from .cluster.subjects import open_subject, plan_subject, read_subject
from .groups.lease_rows import read_grants, settle_group
from .groups.sessions import join_group, leave_group, renew_sessions
from .groups.views import grants_versions, group_versions
from .sql.database import Database

log = logging.getLogger("keylane.metaserver")
TTL_MS = 60_000
PARTITIONS = 2
"""Rows of one partition and of several are stored by different statements."""


class _UndoneError(Exception):
    """Rolls the transaction back."""


async def rehearse(database: Database) -> None:
    """Do it all and undo it; a failure is no harm."""
    try:
        await database.write(_open_and_undo)
    except _UndoneError:
        pass
    except KeylaneError as error:
        log.debug("no rehearsal: %s", error.message)


def _open_and_undo(connection: Connection) -> None:
    """
    Make a broker, a subject, a group and a session under names that no user has.

    Raises:
        _UndoneError: always, if nothing else is raised.
    """
    name = f"rehearsal-{secrets.token_hex(16)}"
    broker = BrokerHeartbeat(broker_group=name, broker_id=name, address="127.0.0.1:1")
    report_broker(connection, broker, ttl_ms=TTL_MS)
    renew_broker(connection, broker, ttl_ms=TTL_MS)
    subject = CreateSubject(subject=name, partitions=PARTITIONS)
    plan_subject(connection, subject, subjects_max=MAX_I64)
    open_subject(connection, name)
    read_subject(connection, name)
    session = secrets.token_hex(16)
    ask = Join(subject=name, group=name, session=session, client=name, ttl_ms=TTL_MS)
    joined = join_group(connection, ask, sessions_max=1)
    note_heard(connection, joined.unheard, settling=joined.group_id)
    settle_group(connection, joined.group_id, anew=True)
    read_grants(connection, session)
    renew_sessions(connection, [session])
    group_versions(connection, [joined.group_id])
    grants_versions(connection, [joined.group_id])
    leave_group(connection, session)
    raise _UndoneError
