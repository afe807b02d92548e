"""Deletes consumer groups that have had no consumers for `group_expires_ms`, after logging a
warning.

Invariants
    A group's idle time starts when a check first finds the group without a session. It is cleared
    by a session that begins or ends, and by a reset.
    Idle times are measured with the database's clock, and start again when that clock restarts.

    idle ─▶ 90 % of the time: a warning ─▶ 100 %: deleted, as `keylane group delete` does

If the deletion is refused, for example because a consumer has joined in the meantime, nothing is
changed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.control import DeleteGroup
from ...protocol.errors import KeylaneError
from ..settings import MetaserverSettings
from ..sql.database import Database
from ..sql.dialect import now_ms, split_ids
from ..sql.duties import take_duty
from ..sql.schema import groups, sessions, subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleGroup:
    """A consumer group without consumers, with its idle time."""

    group_id: int
    subject: str
    group: str
    idle_ms: int


_has_session = sa.exists().where(sessions.c.group_id == groups.c.group_id)
_without_session = sa.and_(
    groups.c.idle_since.is_(None), sa.not_(groups.c.deleting), sa.not_(_has_session)
)
_newly_idle = (
    sa.select(groups.c.group_id)
    .where(_without_session)
    .order_by(groups.c.group_id)
    .with_for_update()
)
_idle_ms = now_ms() - groups.c.idle_since
_idle = (
    sa.select(
        groups.c.group_id,
        groups.c.name.label("group"),
        subjects.c.name.label("subject"),
        _idle_ms.label("idle_ms"),
    )
    .join(subjects, subjects.c.subject_id == groups.c.subject_id)
    .where(
        _idle_ms >= sa.bindparam("at_least_ms", type_=sa.BigInteger),
        sa.not_(groups.c.deleting),
        sa.not_(subjects.c.deleting),
        sa.not_(_has_session),
    )
    .order_by(groups.c.group_id)
)


def start_idle_times(connection: Connection) -> None:
    """Start the idle times of groups that currently have no session."""
    ids = list(connection.execute(_newly_idle).scalars())
    for portion in split_ids(ids):
        # Check again under the locks, because a join that held one of them may have begun a
        # session.
        is_still_idle = sa.and_(groups.c.group_id.in_(portion), _without_session)
        connection.execute(sa.update(groups).where(is_still_idle).values(idle_since=now_ms()))


def list_idle_groups(connection: Connection, *, at_least_ms: int) -> list[IdleGroup]:
    """Return the groups that have been idle for at least `at_least_ms` milliseconds."""
    rows = connection.execute(_idle, {"at_least_ms": at_least_ms})
    return [
        IdleGroup(group_id=row.group_id, subject=row.subject, group=row.group, idle_ms=row.idle_ms)
        for row in rows
    ]


log = logging.getLogger("keylane.metaserver")
DUTY = "group expiry"


class GroupExpirer:
    """
    Deletes groups that have been idle for `group_expires_ms`.

    Args:
        delete: deletes a group, given the names of its subject and of the group.
        holder: this metaserver's unique id.
    """

    def __init__(
        self,
        database: Database,
        settings: MetaserverSettings,
        delete: Callable[[str, str, DeleteGroup], Awaitable[object]],
        *,
        holder: str,
    ) -> None:
        self._database = database
        self._expires_ms = settings.group_expires_ms
        self._lease_ms = 2 * settings.expire_ms
        self._delete = delete
        self._holder = holder
        self._warned: set[int] = set()
        """Ids of the groups for which a warning about their deletion has been logged."""

    async def run_once(self) -> int:
        """Delete expired groups and return their number. Does nothing if `group_expires_ms` is 0.
        Raises StorageError.
        """
        if not self._expires_ms:
            return 0
        has_duty = await self._database.write(
            take_duty, DUTY, holder=self._holder, lease_ms=self._lease_ms
        )
        if not has_duty:
            return 0
        await self._database.write(start_idle_times)
        warn_ms = self._expires_ms * 9 // 10
        idle_groups = await self._database.read(list_idle_groups, at_least_ms=warn_ms)
        deleted_count = 0
        for group in idle_groups:
            if group.idle_ms >= self._expires_ms:
                deleted_count += await self._expire(group.subject, group.group, group.group_id)
            elif group.group_id not in self._warned:
                log.warning(
                    "group %s of %s has had no consumer for %.0f s, and will be deleted in %.0f s "
                    "unless one joins",
                    group.group,
                    group.subject,
                    group.idle_ms / 1000,
                    (self._expires_ms - group.idle_ms) / 1000,
                )
        self._warned = {group.group_id for group in idle_groups}
        return deleted_count

    async def _expire(self, subject: str, group: str, group_id: int) -> bool:
        """Delete a group. Return False if the deletion is refused, for example because a consumer
        has joined.
        """
        log.warning(
            "deleting group %s of %s, which has had no consumer for too long", group, subject
        )
        try:
            await self._delete(subject, group, DeleteGroup(group_id=group_id))
        except KeylaneError as error:
            log.warning("cannot delete group %s of %s: %s", group, subject, error.message)
            return False
        return True
