"""What the renewal of sessions tells of each of them."""

from __future__ import annotations

from keylane.metaserver.groups.sessions import join_group, renew_sessions
from keylane.protocol.control import Join
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

A, B, ELSEWHERE = "a" * 16, "b" * 16, "e" * 16


def test_renewal_asks_only_the_session_whose_lease_is_withdrawn_to_hand_over():
    """Each heartbeat of a session that is asked writes once more, so the others must not be asked."""
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
