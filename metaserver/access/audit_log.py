"""Stores audit events of this metaserver and of brokers in SQL, lists them, and removes them by age
and number.
"""

from __future__ import annotations

import asyncio
import logging

from ...protocol.clock import Clock
from ...protocol.control import Done
from ...protocol.endpoints import AUDIT, NOTE_AUDIT
from ...protocol.errors import StorageError
from ...protocol.http.audit import (
    EVENTS_MAX,
    AuditPage,
    NoteAudit,
)
from ...protocol.ids import MAX_I64
from ...rpc.access.audit_buffer import AuditBuffer
from ...rpc.server import ControlRoute, Params, check_params, whole_number
from ..sql.database import Database
from .audit_rows import AuditSearch, append_events, read_events, remove_events

log = logging.getLogger("keylane.metaserver")

STORE_S = 0.5
REMOVE_S = 60.0


class AuditLog:
    """
    The audit log of one database.

    Args:
        retention_ms: older events are removed, in milliseconds.
        rows_max: most events; the oldest above it are removed.
    """

    def __init__(
        self, database: Database, *, clock: Clock, retention_ms: int, rows_max: int
    ) -> None:
        self._database = database
        self._clock = clock
        self.retention_ms = retention_ms
        self.rows_max = rows_max
        self.buffer = AuditBuffer("metaserver")

    async def run(self) -> None:
        """Store new events and remove old ones until cancelled; then store the rest."""
        removed_ms = 0
        try:
            while True:
                await asyncio.sleep(STORE_S)
                await self.store()
                if self._clock.boot_ms() - removed_ms >= REMOVE_S * 1000:
                    began_ms = self._clock.boot_ms()
                    if not await self._remove():
                        removed_ms = began_ms
        finally:
            await self.store()

    async def store(self) -> None:
        """Store the events in the buffer; they stay there while the database does not answer."""
        while events := self.buffer.take():
            try:
                await self._database.write(append_events, events)
            except StorageError as error:
                self.buffer.put_back(events)
                log.warning("cannot store audit events: %s", error.message)
                return

    async def _remove(self) -> bool:
        """Remove a portion of the old events; returns True if more are left for the next turn, so
        that new events are stored in between.
        """
        oldest_ms = self._clock.wall_ms() - self.retention_ms
        try:
            return await self._database.write(
                remove_events, older_than_ms=oldest_ms, rows_max=self.rows_max
            )
        except StorageError as error:
            log.warning("cannot remove old events of the audit log: %s", error.message)
            return False

    def routes(self) -> list[ControlRoute]:
        """Return the routes of the audit calls."""
        return [ControlRoute(NOTE_AUDIT, self._note), ControlRoute(AUDIT, self._list)]

    async def _note(self, body: NoteAudit, _params: Params) -> Done:
        await self._database.write(append_events, body.events)
        return Done()

    async def _list(self, _body: object, params: Params) -> AuditPage:
        check_params(AUDIT, params)
        await self.store()
        search = AuditSearch(
            who=params.get("who"),
            subject=params.get("subject"),
            outcome=params.get("outcome"),
            since_ms=whole_number(params, "since_ms", 0),
            before=whole_number(params, "before", MAX_I64),
            limit=whole_number(params, "limit", 100, low=1, high=EVENTS_MAX),
        )
        return await self._database.read(read_events, search)
