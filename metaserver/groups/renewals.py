"""Renewals of sessions: those of one moment share one UPDATE, and a row that another transaction
holds keeps no other waiting.

    renewals of one moment ─▶ one UPDATE without the rows that are held ─▶ answer
                                    │ held
                                    └─▶ one UPDATE for each of their groups, which waits ─▶ answer

A metaserver that stops in the middle of a transaction holds its rows until PostgreSQL ends that; a
person may hold one for hours.
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
"""How long renewals that are answered together wait for one whose row is held."""


class RenewedTogether(NamedTuple):
    """What became of the sessions of one call; one that is in neither has ended."""

    rows: dict[SessionId, SessionRow]
    held: frozenset[SessionId]
    """Another transaction held their rows for longer than HELD_S, or than the database waits."""


class Renewals:
    """Renews sessions."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._renewing: SingleFlight[None, Sequence[SessionId], Renewed] = SingleFlight(
            self._renew_at_once
        )
        self._waiting: SingleFlight[int, Sequence[SessionId], dict[str, SessionRow]] = SingleFlight(
            self._renew_held
        )
        """By group."""

    async def one(self, session: SessionId) -> SessionRow | None:
        """Renew a session, as soon as no other transaction holds its row; None: it has ended.
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
                    wait.cancel()  # the renewal itself goes on
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
