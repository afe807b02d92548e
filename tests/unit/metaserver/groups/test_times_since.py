"""Since when what an operator sees of a group has been so."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from keylane.metaserver.groups.lease_rows import store_unreached
from keylane.metaserver.groups.operators import group_settings, suspend_members
from keylane.metaserver.groups.sessions import end_expired_sessions, join_group, leave_group
from keylane.metaserver.groups.views import read_group
from keylane.metaserver.resets.live import plan_live_reset
from keylane.metaserver.sql.clock_restart import restart_times
from keylane.metaserver.sql.schema import groups, live_resets, partitions, suspended_clients
from keylane.protocol.control import GroupView, Join
from keylane.protocol.groups import GroupSettings, SuspendGroup
from keylane.protocol.progress import ResetGroup, ResetTo
from support.sql.rows import Rows

A = "a" * 16
TTL_MS = 30_000


@pytest.fixture
def rows(rows: Rows) -> Rows:
    rows.create("s", 1)
    rows.run(join_group, Join(subject="s", group="g", session=A, client="c"), sessions_max=10)
    return rows


def switch(rows: Rows, *, suspended: bool, client: str | None = None) -> GroupSettings:
    """Suspend or resume; a second passes after it."""
    rows.run(suspend_members, "s", "g", SuspendGroup(suspended=suspended, client=client))
    rows.clock.advance(1_000)
    return rows.run(group_settings, "s", "g")


def view(rows: Rows) -> GroupView:
    return rows.run(read_group, "s", "g")


def test_group_is_suspended_since_the_first_of_repeated_calls(rows: Rows):
    assert switch(rows, suspended=True).suspended_ms == 1_000
    assert switch(rows, suspended=True).suspended_ms == 2_000
    assert switch(rows, suspended=False).suspended_ms is None
    assert switch(rows, suspended=True).suspended_ms == 1_000


def test_clients_are_suspended_since_the_last_of_them_was(rows: Rows):
    assert switch(rows, suspended=True, client="a").clients_suspended_ms == 1_000
    assert switch(rows, suspended=True, client="a").clients_suspended_ms == 2_000
    assert switch(rows, suspended=True, client="b").clients_suspended_ms == 1_000
    rows.run(lambda connection: connection.execute(sa.update(suspended_clients).values(since=None)))
    assert switch(rows, suspended=False, client="b").clients_suspended_ms is None, (
        "older metaserver"
    )
    assert switch(rows, suspended=False, client="a").clients_suspended_ms is None


def test_each_unreached_broker_has_the_time_of_its_own_first_report(rows: Rows):
    rows.run(store_unreached, A, ["g1"])
    rows.clock.advance(1_000)
    rows.run(store_unreached, A, ["g0", "g1"])
    rows.clock.advance(500)
    [member] = view(rows).members
    assert (member.unreached, member.unreached_ms) == (("g0", "g1"), (500, 1_500))
    rows.run(store_unreached, A, [])
    [member] = view(rows).members
    assert (member.unreached, member.unreached_ms) == ((), ())


def test_consumer_that_left_was_heard_at_its_last_heartbeat(rows: Rows):
    rows.clock.advance(2_000)
    rows.run(leave_group, A)
    rows.clock.advance(500)
    ended = view(rows).ended
    assert (ended.client, ended.left, ended.ended_ms, ended.heard_ms) == ("c", True, 500, 2_500)


def test_consumer_whose_lease_ended_was_heard_its_ttl_before(rows: Rows):
    rows.clock.advance(TTL_MS + 2_000)
    rows.run(end_expired_sessions, 1)
    ended = view(rows).ended
    assert (ended.left, ended.ended_ms, ended.heard_ms) == (False, 0, TTL_MS + 2_000)
    rows.run(restart_times, broker_ttl_ms=1_000)
    ended = view(rows).ended
    assert (ended.ended_ms, ended.heard_ms) == (None, None), "the clock has restarted"


def test_last_of_several_that_expired_together_is_the_one_that_was_heard_last(rows: Rows):
    rows.clock.advance(1_000)
    ask = Join(subject="s", group="g", session="b" * 16, client="another")
    rows.run(join_group, ask, sessions_max=10)
    rows.clock.advance(2 * TTL_MS)
    rows.run(end_expired_sessions, 1)
    ended = view(rows).ended
    assert (ended.client, ended.heard_ms) == ("another", 2 * TTL_MS)


def test_reset_that_waits_says_when_it_was_asked_for(rows: Rows):
    rows.run(plan_live_reset, 1, ResetGroup(to=ResetTo.LATEST, live=True))
    rows.clock.advance(1_000)
    assert view(rows).reset.asked_ms == 1_000
    rows.run(lambda connection: connection.execute(sa.update(live_resets).values(asked_at=None)))
    assert view(rows).reset.asked_ms is None


def test_partition_says_for_how_long_it_has_been_open(rows: Rows):
    rows.clock.advance(1_000)
    rows.resize("s", 2)
    rows.clock.advance(500)
    assert {each.age_ms for each in view(rows).owners} == {1_500, 500}
    rows.run(lambda connection: connection.execute(sa.update(partitions).values(opened_at=None)))
    assert {each.age_ms for each in view(rows).owners} == {None}, "its database was rebuilt"


def test_group_of_an_older_metaserver_is_suspended_since_an_unknown_time(rows: Rows):
    rows.run(
        lambda connection: connection.execute(
            sa.update(groups).values(suspended=True, suspended_since=None)
        )
    )
    assert view(rows).settings.suspended_ms is None
