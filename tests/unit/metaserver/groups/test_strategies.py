"""Exclusive and shared groups in SQL: the strategy, refusals, and switches."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from keylane.metaserver.groups.lease_rows import (
    read_grants,
    release_leases,
    store_drained,
)
from keylane.metaserver.groups.operators import switch_group
from keylane.metaserver.groups.sessions import join_group, leave_group, suspend_session
from keylane.metaserver.groups.views import list_groups, read_group
from keylane.metaserver.sql.dialect import now_ms
from keylane.metaserver.sql.schema import groups, leases, sessions
from keylane.protocol.control import Join, ReleaseGrant, Suspend
from keylane.protocol.errors import (
    GroupUnknownError,
    Reason,
    SessionUnknownError,
    TokenUnknownError,
)
from keylane.protocol.routing import ConsumeStrategy
from support.raising import raises
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

EXCLUSIVE, SHARED = ConsumeStrategy.EXCLUSIVE, ConsumeStrategy.SHARED
A, B, C = "a" * 16, "b" * 16, "c" * 16


@pytest.fixture
def rows() -> Rows:
    rows = Rows()
    rows.report("g1")
    rows.create("s", 4)
    return rows


def join(rows: Rows, session: str, strategy: ConsumeStrategy) -> int:
    ask = Join(subject="s", group="g", session=session, strategy=strategy)
    group_id: int = rows.run(join_group, ask, sessions_max=10).group_id
    rows.run(settle_group, group_id)
    return group_id


def tokens(rows: Rows, session: str) -> dict[int, int]:
    grants = rows.run(read_grants, session).grants
    return {grant.partition.partition_id: grant.token for grant in grants}


def switch(rows: Rows, strategy: ConsumeStrategy) -> Any:
    return rows.run(switch_group, "s", "g", strategy)


@pytest.mark.parametrize("first", ConsumeStrategy)
def test_first_join_decides_the_strategy(rows: Rows, first: ConsumeStrategy):
    """A join with another strategy is refused and changes nothing; the error has the stored one."""
    join(rows, A, first)
    other = SHARED if first is EXCLUSIVE else EXCLUSIVE
    with raises(Reason.GROUP_STRATEGY, match="keylane group switch s g STRATEGY") as refused:
        join(rows, B, other)
    assert (refused.value.stored, refused.value.asked) == (first.value, other.value)
    assert [
        (summary.group, summary.strategy, summary.sessions)
        for summary in rows.run(list_groups, "s").summaries
    ] == [("g", first, 1)]
    assert rows.run(read_group, "s", "g").strategy is first


def test_shared_group_grants_every_partition_to_every_session(rows: Rows):
    """Each partition has one token for all; joins and leaves move nothing."""
    group_id = join(rows, A, SHARED)
    join(rows, B, SHARED)
    mine = tokens(rows, A)
    assert len(mine) == 4
    assert sorted(mine.values()) == [1, 2, 3, 4]
    assert tokens(rows, B) == mine
    rows.run(leave_group, A)
    rows.run(settle_group, group_id)
    join(rows, C, SHARED)
    assert tokens(rows, B) == tokens(rows, C) == mine


@pytest.mark.parametrize("first", ConsumeStrategy)
def test_switch_ends_all_sessions_and_tokens(rows: Rows, first: ConsumeStrategy):
    """Old sessions are unknown, new ones have tokens above all before, in one transaction."""
    other = SHARED if first is EXCLUSIVE else EXCLUSIVE
    join(rows, A, first)
    before = tokens(rows, A)
    changes = switch(rows, other)
    assert set(changes.ended_sessions) == {A}
    with pytest.raises(SessionUnknownError):
        rows.run(read_grants, A)
    with raises(Reason.GROUP_STRATEGY):
        join(rows, B, first)
    join(rows, B, other)
    after = tokens(rows, B)
    assert after.keys() == before.keys()
    assert min(after.values()) > max(before.values())
    assert switch(rows, other).ended_sessions == (), "again changes nothing"
    assert tokens(rows, B) == after


def test_two_switches_leave_no_old_token_valid(rows: Rows):
    """Two switches without a session in between end every old token."""
    join(rows, A, SHARED)
    before = max(tokens(rows, A).values())
    switch(rows, EXCLUSIVE)
    switch(rows, SHARED)
    join(rows, B, SHARED)
    assert min(tokens(rows, B).values()) > before


def test_switch_of_an_unknown_group_is_refused(rows: Rows):
    """A group exists from its first consumer on."""
    with pytest.raises(GroupUnknownError):
        switch(rows, SHARED)


def test_refused_shared_token_is_replaced_once(rows: Rows):
    """The first report gives all sessions the next token; later ones change nothing."""
    join(rows, A, SHARED)
    join(rows, B, SHARED)
    (partition_id, token), *_ = tokens(rows, A).items()
    ask = ReleaseGrant(session=A, partition_id=partition_id, token=token)
    assert set(rows.run(release_leases, [ask]).changes.versions) == {A, B}
    renewed = tokens(rows, B)[partition_id]
    assert renewed == 5
    ask = ReleaseGrant(session=B, partition_id=partition_id, token=token)
    assert rows.run(release_leases, [ask]).changes.versions == {}
    assert tokens(rows, A)[partition_id] == renewed
    never = ReleaseGrant(session=B, partition_id=partition_id, token=99)
    assert isinstance(rows.run(release_leases, [never]).errors[never], TokenUnknownError)
    seen = ReleaseGrant(session=A, partition_id=partition_id, token=renewed, fence=70)
    rows.run(release_leases, [seen])
    assert tokens(rows, A)[partition_id] == 71, "above what the broker has seen"
    highest = rows.run(lambda c: c.execute(sa.select(groups.c.last_token)).scalar_one())
    assert highest == max(tokens(rows, A).values())


def test_drained_parent_unblocks_its_children_for_every_session(rows: Rows):
    """One session's report that the parent is drained is enough."""
    group_id = join(rows, A, SHARED)
    join(rows, B, SHARED)
    rows.resize("s", 2)
    rows.run(settle_group, group_id)
    sealed = set(tokens(rows, A))
    assert rows.run(store_drained, B, sorted(sealed)[:2]) == group_id
    rows.run(settle_group, group_id)
    assert len(set(tokens(rows, A)) - sealed) == 1
    assert tokens(rows, A) == tokens(rows, B)
    assert rows.run(store_drained, A, sorted(sealed)[:2]) is None
    held = rows.run(lambda c: c.execute(sa.select(leases.c.session)).scalars().all())
    assert set(held) == {None}


def test_suspended_session_of_a_shared_group_is_granted_nothing(rows: Rows):
    """It is granted nothing until it resumes; the others keep their partitions."""
    join(rows, A, SHARED)
    join(rows, B, SHARED)
    before = rows.run(read_grants, A).version
    rows.run(suspend_session, Suspend(session=A, suspended=True))
    assert tokens(rows, A) == {}
    assert rows.run(read_grants, A).version > before
    assert len(tokens(rows, B)) == 4
    rows.run(suspend_session, Suspend(session=A, suspended=False))
    assert tokens(rows, A) == tokens(rows, B)


def test_group_tells_for_how_long_none_is_heard_when_its_consumer_is_silent(rows: Rows):
    """Once a metaserver has looked; while a consumer is heard it tells nothing."""
    group_id = join(rows, A, EXCLUSIVE)
    assert rows.run(read_group, "s", "g").silent_ms is None
    rows.run(leave_group, A)
    assert rows.run(read_group, "s", "g").silent_ms is None
    rows.run(
        lambda connection: connection.execute(
            sa.update(groups)
            .where(groups.c.group_id == group_id)
            .values(idle_since=now_ms() - 7_000)
        )
    )
    told = rows.run(read_group, "s", "g")
    assert told.sessions == 0
    assert told.silent_ms is not None
    assert 7_000 <= told.silent_ms < 60_000


def test_group_tells_who_left_from_who_died_and_who_waits(rows: Rows):
    """Of five members, the first has all four partitions, and leaves; the next is heard no more."""
    names = [letter * 16 for letter in "abcde"]
    for name in names:
        group_id = join(rows, name, EXCLUSIVE)
    view = rows.run(read_group, "s", "g")
    assert [member.partitions for member in view.members] == [4, 0, 0, 0, 0]
    assert view.ended is None
    assert all(member.heard_ms <= 30_000 - member.expires_in_ms for member in view.members)
    rows.run(leave_group, names[0])
    rows.run(settle_group, group_id)
    left = rows.run(read_group, "s", "g")
    assert [member.partitions for member in left.members] == [1, 1, 1, 1]
    assert left.ended is not None
    assert left.ended.left
    assert left.ended.ended_ms is not None
    assert left.ended.ended_ms < 60_000

    def silence(connection: sa.Connection, *, left_ms: int) -> None:
        query = sa.update(sessions).where(sessions.c.session == names[1])
        connection.execute(query.values(expires_at=now_ms() + left_ms))

    rows.run(silence, left_ms=5_000)
    (silent,) = [
        member
        for member in rows.run(read_group, "s", "g").members
        if member.heard_ms > member.expires_in_ms
    ]
    assert 20_000 < silent.heard_ms <= 30_000
    rows.run(silence, left_ms=-1)
    rows.run(settle_group, group_id)
    died = rows.run(read_group, "s", "g")
    assert len(died.members) == 3
    assert died.ended is not None
    assert not died.ended.left
