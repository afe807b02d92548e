"""Stores audit events of this metaserver and of brokers in SQL, lists them, and removes old and
excess ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from msgspec.structs import asdict
from sqlalchemy.engine import Connection

from ...protocol.clock import Clock
from ...protocol.control import Done
from ...protocol.endpoints import AUDIT, NOTE_AUDIT
from ...protocol.errors import StorageError
from ...protocol.http.access import EVENTS_MAX, AuditEvent, AuditPage, AuditRow, NoteAudit
from ...protocol.ids import MAX_I64
from ...rpc.access.audit_events import AuditBuffer
from ...rpc.server import ControlRoute, Params, check_params, whole_number
from ..sql.database import Database
from ..sql.schema import access_audit

ROWS_AT_ONCE = 10_000
"""Maximum number of rows that one transaction deletes: statements on PostgreSQL time out after
10 s, and other writers have to wait.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSearch:
    """The filter of a listing; None matches any value."""

    who: str | None
    subject: str | None
    outcome: str | None
    since_ms: int
    before: int
    """Exclusive upper limit of the event ids."""
    limit: int


def append_events(connection: Connection, events: Sequence[AuditEvent]) -> None:
    """Store audit events with one statement."""
    if events:
        connection.execute(sa.insert(access_audit), [asdict(event) for event in events])


def read_events(connection: Connection, search: AuditSearch) -> AuditPage:
    """Return a page of events, newest first."""
    columns = access_audit.c
    query = sa.select(access_audit).where(
        columns.audit_id < search.before, columns.at_ms >= search.since_ms
    )
    for name in ("who", "subject", "outcome"):
        value = getattr(search, name)
        if value is not None:
            query = query.where(columns[name] == value)
    page = query.order_by(columns.audit_id.desc()).limit(search.limit + 1)
    rows = [
        AuditRow(
            audit_id=row["audit_id"],
            event=AuditEvent(**{name: row[name] for name in AuditEvent.__struct_fields__}),
        )
        for row in connection.execute(page).mappings()
    ]
    has_more = len(rows) > search.limit
    rows = rows[: search.limit]
    return AuditPage(rows=rows, before=rows[-1].audit_id if has_more else None)


def remove_events(connection: Connection, *, older_than_ms: int, rows_max: int) -> bool:
    """
    Remove a batch of events that are too old or exceed `rows_max`.

    Returns:
        True if more remain; the caller should continue in another transaction.
    """
    columns = access_audit.c
    newest = connection.execute(sa.select(sa.func.max(columns.audit_id))).scalar_one() or 0
    is_old = (columns.at_ms < older_than_ms) | (columns.audit_id <= newest - rows_max)
    query = sa.select(columns.audit_id).where(is_old).limit(ROWS_AT_ONCE)
    ids = list(connection.execute(query).scalars())
    if ids:
        connection.execute(sa.delete(access_audit).where(columns.audit_id.in_(ids)))
    return len(ids) == ROWS_AT_ONCE


log = logging.getLogger("keylane.metaserver")

STORE_S = 0.5
REMOVE_S = 60.0


class AuditLog:
    """
    The audit log of one database.

    Args:
        retention_ms: events older than this many milliseconds are removed.
        rows_max: maximum number of events in the database; the oldest excess events are removed.
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
        """Store new events and remove old ones until cancelled, then store the remaining events."""
        last_removal_ms = 0
        try:
            while True:
                await asyncio.sleep(STORE_S)
                await self.store()
                if self._clock.boot_ms() - last_removal_ms >= REMOVE_S * 1000:
                    removal_started_ms = self._clock.boot_ms()
                    if not await self._remove_old():
                        last_removal_ms = removal_started_ms
        finally:
            await self.store()

    async def store(self) -> None:
        """Store the buffered events. They stay in the buffer while the database does not
        respond.
        """
        while events := self.buffer.pop_oldest():
            try:
                await self._database.write(append_events, events)
            except StorageError as error:
                self.buffer.requeue(events)
                log.warning("cannot store audit events: %s", error.message)
                return

    async def _remove_old(self) -> bool:
        """Remove a batch of old events. Return True if more remain, so that the caller can store
        new events before it continues.
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
        return [ControlRoute(NOTE_AUDIT, self._add_events), ControlRoute(AUDIT, self._list_events)]

    async def _add_events(self, body: NoteAudit, _params: Params) -> Done:
        """Store the audit events sent by a broker."""
        await self._database.write(append_events, body.events)
        return Done()

    async def _list_events(self, _body: object, params: Params) -> AuditPage:
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
