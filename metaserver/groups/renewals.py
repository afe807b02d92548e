"""Renews sessions in batches, in such a way that a row locked by another transaction delays no
other session.

    concurrent renewals ─▶ one UPDATE that skips locked rows ─▶ reply
                               │ locked
                               └─▶ per group, one UPDATE that waits for the locks ─▶ reply

A metaserver that hangs in the middle of a transaction holds its row locks until PostgreSQL ends the
transaction, and a person at an SQL prompt may hold one for hours.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...protocol.ids import SessionId
from ..sql.database import Database
from ..wakeups import SingleFlight
from .sessions import RenewalResult, SessionRow, renew_sessions, renew_unlocked

BATCH_MAX = 1_000


class SessionRenewer:
    """Renews sessions; concurrent renewals share a statement."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._renew_flight: SingleFlight[int | None, SessionId, RenewalResult] = SingleFlight(
            self._renew
        )
        """Keyed by the group whose rows are locked; None is the key of renewals that do not wait
        for locks.
        """

    async def renew(self, session: SessionId) -> SessionRow | None:
        """Renew a session, waiting for its row if it is locked. Return None if it has ended. Raises
        StorageError.
        """
        result = await self._renew_flight.run(None, session)
        if session in result.locked_groups:
            result = await self._renew_flight.run(result.locked_groups[session], session)
        return result.rows.get(session)

    async def _renew(
        self, locked_group: int | None, requested_sessions: Sequence[SessionId]
    ) -> RenewalResult:
        """Renew a batch of sessions, waiting for locks only if `locked_group` is given."""
        sessions = sorted(set(requested_sessions))
        if locked_group is not None:
            rows = await self._database.write_urgent(renew_sessions, sessions)
            return RenewalResult(rows, {})
        total = RenewalResult({}, {})
        for start in range(0, len(sessions), BATCH_MAX):
            chunk = sessions[start : start + BATCH_MAX]
            result = await self._database.renew(renew_unlocked, chunk)
            total = RenewalResult(
                total.rows | result.rows, total.locked_groups | result.locked_groups
            )
        return total
