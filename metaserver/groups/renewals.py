"""Renews sessions: renewals of one moment share one UPDATE, and a row that another transaction has
locked delays no other session.

    renewals of one moment ─▶ one UPDATE without the locked rows ─▶ answer
                                    │ locked
                                    └─▶ one UPDATE for each of their groups, which waits ─▶ answer

A metaserver that stops in the middle of a transaction holds its row locks until PostgreSQL ends the
transaction; a person may hold one for hours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from ...protocol.errors import StorageError
from ...protocol.ids import SessionId
from ..sql.database import Database
from ..wakeups import SingleFlight
from .sessions import Renewed, SessionRow, renew_at_once, renew_sessions

AT_ONCE_MAX = 1_000
HELD_S = 0.25
"""Longest time, in seconds, for which renewals that are answered together wait for a locked row."""


class RenewedTogether(NamedTuple):
    """The result for the sessions of one call; a session that is in neither field has ended."""

    rows: dict[SessionId, SessionRow]
    held: frozenset[SessionId]
    """Sessions whose rows were locked for longer than HELD_S, or than the database waits."""


class Renewals:
    """Renews sessions, with as few statements as possible."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._renewing: SingleFlight[None, Sequence[SessionId], Renewed] = SingleFlight(
            self._renew_at_once
        )
        self._waiting: SingleFlight[int, Sequence[SessionId], dict[str, SessionRow]] = SingleFlight(
            self._renew_held
        )
        """Renewals that wait for locked rows, by group."""

    async def one(self, session: SessionId) -> SessionRow | None:
        """Renew a session as soon as its row is not locked; returns None if the session has ended.
        Raises StorageError.
        """
        renewed = await self._renewing.run(None, (session,))
        rows = renewed.rows
        if session in renewed.held:
            rows = await self._waiting.run(renewed.held[session], (session,))
        return rows.get(session)

    async def together(self, sessions: Sequence[SessionId]) -> RenewedTogether:
        """Renew sessions whose heartbeats are answered together.  Raises StorageError."""
        renewed = await self._renewing.run(None, sessions)  # also those of other calls
        rows = dict(renewed.rows)
        by_group: dict[int, list[SessionId]] = {}
        for session in sessions:
            if session in renewed.held:
                by_group.setdefault(renewed.held[session], []).append(session)
        late: set[SessionId] = set()
        if by_group:
            waits = {
                asyncio.create_task(self._waiting.run(group_id, members)): members
                for group_id, members in by_group.items()
            }
            try:
                done, left = await asyncio.wait(waits, timeout=HELD_S)
            finally:
                for wait in waits:
                    wait.cancel()  # the renewal itself continues
            for wait in done:
                try:
                    rows |= wait.result()
                except (
                    StorageError
                ):  # the database ended the wait: it is no reason to refuse the others
                    left.add(wait)
            late.update(chain.from_iterable(waits[wait] for wait in left))
        own = {session: rows[session] for session in sessions if session in rows}
        return RenewedTogether(own, frozenset(late))

    async def _renew_at_once(self, _key: None, asked: Sequence[Sequence[SessionId]]) -> Renewed:
        ordered = _in_order(asked)
        renewed = Renewed({}, {})
        for start in range(0, len(ordered), AT_ONCE_MAX):
            part = ordered[start : start + AT_ONCE_MAX]
            more = await self._database.renew(renew_at_once, part)
            renewed = Renewed(renewed.rows | more.rows, renewed.held | more.held)
        return renewed

    async def _renew_held(
        self, _group_id: int, asked: Sequence[Sequence[SessionId]]
    ) -> dict[str, SessionRow]:
        return await self._database.write_first(renew_sessions, _in_order(asked))


def _in_order(asked: Sequence[Sequence[SessionId]]) -> list[SessionId]:
    return sorted(set(chain.from_iterable(asked)))
