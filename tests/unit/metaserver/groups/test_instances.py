"""A restarted instance of a group gets the leases of its predecessor."""

from __future__ import annotations

import pytest

from keylane.metaserver.groups.lease_rows import read_grants, release_leases
from keylane.metaserver.groups.sessions import SessionRow, join_group, renew_sessions
from keylane.protocol.control import Join, ReleaseGrant
from keylane.protocol.errors import (
    Reason,
    SessionUnknownError,
)
from support.raising import raises
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

A, A_AGAIN, A_LATER, B = ("a" * 16, "a0" * 8, "a1" * 8, "b" * 16)


@pytest.fixture
def rows() -> Rows:
    rows = Rows()
    rows.report("g1")
    rows.create("s", 4)
    return rows


def join(
    rows: Rows, session: str, instance: str, *, again: bool = False, sessions_max: int = 10
) -> SessionRow:
    ask = Join(subject="s", group="g", session=session, instance=instance, again=again)
    row: SessionRow = rows.run(join_group, ask, sessions_max=sessions_max)
    rows.run(settle_group, row.group_id)
    return row


def tokens(rows: Rows, session: str) -> dict[int, int]:
    grants = rows.run(read_grants, session).grants
    return {grant.partition.partition_id: grant.token for grant in grants}


def shared_out(rows: Rows) -> None:
    """A has two of the four partitions, and B the others."""
    join(rows, A, "a")
    join(rows, B, "b")
    held = set(tokens(rows, A))
    for partition_id, token in [(key, key) for key in range(1, 5) if key not in held]:
        rows.run(release_leases, [ReleaseGrant(session=A, partition_id=partition_id, token=token)])
    assert (len(tokens(rows, A)), len(tokens(rows, B))) == (2, 2)


def test_restarted_instance_gets_the_partitions_of_its_predecessor(rows: Rows):
    """Immediately, with new tokens. The other consumer keeps its partitions, and the predecessor's
    session has ended.
    """
    shared_out(rows)
    before, others = tokens(rows, A), tokens(rows, B)
    row = join(rows, A_AGAIN, "a")
    assert row.replaced_sessions == (A,)
    after = tokens(rows, A_AGAIN)
    assert after.keys() == before.keys()
    assert min(after.values()) > max(before.values())
    assert tokens(rows, B) == others
    assert rows.run(renew_sessions, [A]) == {}
    with pytest.raises(SessionUnknownError):
        tokens(rows, A)


def test_restarted_instance_gets_what_its_predecessor_waited_for(rows: Rows):
    """B joins and is to get two partitions of A; it restarts before A hands them over, and then
    gets them.
    """
    join(rows, A, "a")
    join(rows, B, "b")
    left = set(tokens(rows, A))
    again = "b0" * 8
    join(rows, again, "b")
    assert tokens(rows, A).keys() == left
    for key in {1, 2, 3, 4} - left:
        rows.run(release_leases, [ReleaseGrant(session=A, partition_id=key, token=key)])
    assert tokens(rows, again).keys() == {1, 2, 3, 4} - left


def test_process_that_joins_again_does_not_take_its_place_back(rows: Rows):
    """It is fenced; the process that started later continues. Once that has left, the name
    is free.
    """
    join(rows, A, "a")
    join(rows, A_AGAIN, "a")
    rows.run(renew_sessions, [A_AGAIN])
    with raises(Reason.INSTANCE_TAKEN):
        join(rows, A_LATER, "a", again=True)
    assert len(tokens(rows, A_AGAIN)) == 4
    rows.clock.advance(31_000)
    assert join(rows, A_LATER, "a", again=True).replaced_sessions == (A_AGAIN,)
    assert len(tokens(rows, A_LATER)) == 4


def test_process_that_lost_its_place_to_a_session_that_is_never_heard_goes_on_after_its_ttl(
    rows: Rows,
):
    """A late join of a process that no longer exists must not fence the process that works."""
    join(rows, A, "a")
    rows.run(renew_sessions, [A])
    join(rows, A_AGAIN, "a")
    with raises(Reason.GROUP_BUSY, match="not sent a heartbeat yet"):
        join(rows, A_LATER, "a", again=True)
    rows.clock.advance(31_000)
    assert join(rows, A_LATER, "a", again=True).replaced_sessions == (A_AGAIN,)


def test_late_call_of_a_replaced_session_does_not_begin_it_again(rows: Rows):
    """Nor that of the one before it."""
    join(rows, A, "a")
    join(rows, A_AGAIN, "a")
    join(rows, A_LATER, "a")
    for late in (A, A_AGAIN):
        with raises(Reason.INSTANCE_TAKEN):
            join(rows, late, "a")
    assert len(tokens(rows, A_LATER)) == 4


def test_repeated_join_of_an_instance_is_harmless(rows: Rows):
    """The first reply may be lost; the session continues."""
    join(rows, A, "a")
    before = tokens(rows, A)
    assert join(rows, A, "a", again=True).replaced_sessions == ()
    assert tokens(rows, A) == before


def test_instances_of_other_names_and_none_stand_beside_each_other(rows: Rows):
    """Also in a group that is full, a restarted one has a place."""
    for session, instance in ((A, "a"), (B, ""), (A_LATER, "")):
        assert join(rows, session, instance, sessions_max=3).replaced_sessions == ()
    assert join(rows, A_AGAIN, "a", sessions_max=3).replaced_sessions == (A,)


def test_instance_has_a_legal_name(rows: Rows):
    with raises(Reason.NAME_INVALID):
        join(rows, A, "no spaces")
