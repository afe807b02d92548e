"""The results of renewing sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from keylane.metaserver.groups.renewals import SessionRenewer
from keylane.metaserver.groups.sessions import (
    RenewalResult,
    SessionRow,
    join_group,
    renew_sessions,
    renew_unlocked,
)
from keylane.metaserver.sql.database import Database
from keylane.protocol.control import Join
from keylane.protocol.errors import StorageError
from keylane.protocol.ids import SessionId
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

A, B, ELSEWHERE = "a" * 16, "b" * 16, "e" * 16


def test_renewal_asks_only_the_session_whose_lease_is_withdrawn_to_hand_over():
    """Each heartbeat of a session that is asked writes once more, so the others must not be
    asked.
    """
    rows = Rows()
    rows.report("g1")
    rows.create("s", 2)
    for session, group in ((A, "g"), (ELSEWHERE, "h"), (B, "g")):
        joined = rows.run(
            join_group, Join(subject="s", group=group, session=session), sessions_max=10
        )
        rows.run(settle_group, joined.group_id)
    renewed = rows.run(renew_sessions, [A, B, ELSEWHERE])
    assert {session for session, row in renewed.items() if row.handing_over} == {A}
    assert not rows.run(renew_sessions, [ELSEWHERE])[ELSEWHERE].handing_over


ROW = SessionRow(session=SessionId(B), group_id=2, ttl_ms=1_000, grants_version=1, suspended=False)


class DatabaseThatGivesUp:
    """A database that times out while it waits for the locked row of A."""

    async def renew(self, work: Callable[..., object], ids: Sequence[str]) -> object:
        if work is renew_unlocked:
            return RenewalResult({B: ROW} if B in ids else {}, {A: 1} if A in ids else {})
        raise AssertionError

    async def write_urgent(self, _work: Callable[..., object], _ids: Sequence[str]) -> object:
        raise StorageError("no answer in time", operation="query")


async def test_session_is_renewed_when_the_wait_for_the_held_row_of_another_one_fails():
    """Both are in the statement that skips locked rows."""
    renewer = SessionRenewer(cast("Database", DatabaseThatGivesUp()))
    held, free = await asyncio.gather(
        renewer.renew(SessionId(A)), renewer.renew(SessionId(B)), return_exceptions=True
    )
    assert isinstance(held, StorageError)
    assert free == ROW
