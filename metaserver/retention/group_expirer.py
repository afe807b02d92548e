"""Deletes consumer groups that no consumer has joined for a time, after a warning. Shell around
SQL.

    idle ─▶ nine tenths of the time: a warning ─▶ all of it: deleted, as `keylane group delete` does

A deletion that is refused, for example because a consumer has joined meanwhile, changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from ...protocol.control import DeleteGroup
from ...protocol.errors import KeylaneError
from ..settings import MetaserverSettings
from ..sql.database import Database
from ..sql.duties import take_duty
from .idle_rows import idle_groups, note_idle

log = logging.getLogger("keylane.metaserver")
DUTY = "group expiry"


class GroupExpirer:
    """
    Deletes groups that are idle for `group_expires_ms`.

    Args:
        delete: deletes a group of a subject, by their names.
        holder: id of this process, which no other metaserver has.
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
        self._logged: set[int] = set()
        """Ids of groups whose coming deletion was logged."""

    async def run_once(self) -> int:
        """Delete expired groups, and return their number; does nothing while the setting is 0.
        Raises StorageError.
        """
        if not self._expires_ms:
            return 0
        mine = await self._database.write(
            take_duty, DUTY, holder=self._holder, lease_ms=self._lease_ms
        )
        if not mine:
            return 0
        await self._database.write(note_idle)
        warn_ms = self._expires_ms * 9 // 10
        idle = await self._database.read(idle_groups, at_least_ms=warn_ms)
        deleted = 0
        for group in idle:
            if group.idle_ms >= self._expires_ms:
                deleted += await self._expire(group.subject, group.group, group.group_id)
            elif group.group_id not in self._logged:
                log.warning(
                    "group %s of %s has had no consumer for %.0f s, and will be deleted in %.0f s "
                    "unless one joins",
                    group.group,
                    group.subject,
                    group.idle_ms / 1000,
                    (self._expires_ms - group.idle_ms) / 1000,
                )
        self._logged = {group.group_id for group in idle}
        return deleted

    async def _expire(self, subject: str, group: str, group_id: int) -> bool:
        """Delete a group; returns False if that is refused, for example because a consumer has
        joined.
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
