"""Renews sessions: renewals of one moment share one UPDATE, and a row that another transaction has
locked delays no other session.

    renewals of one moment ─▶ one UPDATE without the locked rows ─▶ answer
                                    │ locked
                                    └─▶ one UPDATE for each of their groups, which waits ─▶ answer

A metaserver that stops in the middle of a transaction holds its row locks until PostgreSQL ends the
transaction; a person may hold one for hours.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...protocol.ids import SessionId
from ..sql.database import Database
from ..wakeups import SingleFlight
from .sessions import Renewed, SessionRow, renew_at_once, renew_sessions

AT_ONCE_MAX = 1_000


class Renewals:
    """Renews sessions, with as few statements as possible."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._renewing: SingleFlight[int | None, SessionId, Renewed] = SingleFlight(self._renew)
        """By the group whose rows are held; None: renewals that wait for no row."""

    async def one(self, session: SessionId) -> SessionRow | None:
        """Renew a session as soon as its row is not locked; returns None if the session has ended.
        Raises StorageError.
        """
        renewed = await self._renewing.run(None, session)
        if session in renewed.held:
            renewed = await self._renewing.run(renewed.held[session], session)
        return renewed.rows.get(session)

    async def _renew(self, held_group: int | None, asked: Sequence[SessionId]) -> Renewed:
        ordered = sorted(set(asked))
        if held_group is not None:
            rows = await self._database.write_first(renew_sessions, ordered)
            return Renewed(rows, {})
        renewed = Renewed({}, {})
        for start in range(0, len(ordered), AT_ONCE_MAX):
            part = ordered[start : start + AT_ONCE_MAX]
            more = await self._database.renew(renew_at_once, part)
            renewed = Renewed(renewed.rows | more.rows, renewed.held | more.held)
        return renewed
