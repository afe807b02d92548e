"""Determines which subjects and groups a call to a metaserver refers to: by its path, its body, or
its consumer session, which is looked up in SQL.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.control import CreateSubject, Join
from ...protocol.endpoints import ACCEPT_FOLDER, CANCEL_OPERATION, CORDON
from ...protocol.http.endpoint import Endpoint
from ...protocol.operations import OperationKind, Reshape
from ...protocol.text import parse_number
from ...rpc.access.caller import AccessTarget
from ..sql.database import Database
from ..sql.schema import groups, operations, sessions, subjects

SESSIONS_MAX = 100_000
_BROKER_PATHS = frozenset({CORDON.path, ACCEPT_FOLDER.path})
"""Paths in which {group} is a broker group."""
_SUBJECT_KINDS = frozenset({OperationKind.RESIZE, OperationKind.GROW})
"""Operations whose body names a subject. The others name partitions or a broker group, and require
rights on all subjects.
"""
_CANCELABLE = _SUBJECT_KINDS | {OperationKind.SET}
"""Operations that an administrator of a single subject may begin and cancel."""
_WHOLE_CLUSTER = (AccessTarget(),)


class MetaserverTargets:
    """Determines the access targets of calls."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._sessions: OrderedDict[str, AccessTarget] = OrderedDict()
        """Maps each session to its subject and group, which never change; ordered by the time of
        insertion.
        """

    async def __call__(
        self, endpoint: Endpoint[Any], body: Any, params: Mapping[str, str]
    ) -> Sequence[AccessTarget]:
        """
        Return the subjects and groups to which a call refers.

        An unknown session has no target; the call itself will report that it is unknown.
        """
        if endpoint.path in _BROKER_PATHS:
            return _WHOLE_CLUSTER
        if endpoint is CANCEL_OPERATION:
            subject = await self._database.read(_read_operation_subject, parse_number(params["id"]))
            return (
                _WHOLE_CLUSTER
                if subject is None
                else (AccessTarget(subject, "", "this operation"),)
            )
        if "{subject}" in endpoint.path:
            # Only the path counts; a query parameter with the same name means something else.
            group = params["group"] if "{group}" in endpoint.path else ""
            second_subject = getattr(body, "hidden", None) or getattr(body, "target", None)
            targets = [AccessTarget(params["subject"], group)]
            if isinstance(second_subject, str):
                targets.append(AccessTarget(second_subject))
            return targets
        if isinstance(body, Reshape):
            return (AccessTarget(body.subject),) if body.kind in _SUBJECT_KINDS else _WHOLE_CLUSTER
        if isinstance(body, CreateSubject | Join):
            return (AccessTarget(body.subject, getattr(body, "group", "")),)
        session = getattr(body, "session", None)
        if isinstance(session, str):
            target = await self._session_target(session)
            return () if target is None else (target,)
        return _WHOLE_CLUSTER

    async def _session_target(self, session: str) -> AccessTarget | None:
        target = self._sessions.get(session)
        if target is None:
            target = await self._database.read(_read_session, session)
            if target is None:
                return None
            self._sessions[session] = target
            if len(self._sessions) > SESSIONS_MAX:
                self._sessions.popitem(last=False)
        return target


_session_query = (
    sa.select(subjects.c.name.label("subject"), groups.c.name.label("group_name"))
    .select_from(sessions)
    .join(groups, groups.c.group_id == sessions.c.group_id)
    .join(subjects, subjects.c.subject_id == groups.c.subject_id)
    .where(sessions.c.session == sa.bindparam("of_session"))
)


def _read_session(connection: Connection, session: str) -> AccessTarget | None:
    row = connection.execute(_session_query, {"of_session": session}).one_or_none()
    return None if row is None else AccessTarget(row.subject, row.group_name, "this session")


def _read_operation_subject(connection: Connection, operation_id: int | None) -> str | None:
    """Return the subject of an operation that an administrator of the subject may cancel; None for
    all other operations.
    """
    query = (
        sa.select(subjects.c.name)
        .join(operations, operations.c.subject_id == subjects.c.subject_id)
        .where(operations.c.operation_id == operation_id, operations.c.kind.in_(_CANCELABLE))
    )
    return connection.execute(query).scalar_one_or_none()
