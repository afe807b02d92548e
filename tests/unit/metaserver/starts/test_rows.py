"""New groups in SQL: where they begin is fixed once, and granted once their brokers have stored
it.
"""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.removals import complete_removals, pending_removals
from keylane.metaserver.cluster.subjects import read_route
from keylane.metaserver.groups.lease_rows import read_grants
from keylane.metaserver.groups.operators import suspend_members
from keylane.metaserver.groups.sessions import join_group
from keylane.metaserver.removals.begin import begin_group_deletion
from keylane.metaserver.resets.rows import begin_reset, read_reset_scope
from keylane.metaserver.sql.schema import drained, metadata
from keylane.metaserver.starts.rows import (
    PendingStart,
    begin_group,
    complete_starts,
    pending_starts,
    read_pending_starts,
    read_start_scope,
)
from keylane.protocol.control import DeleteGroup, Join
from keylane.protocol.errors import (
    GroupDeletedError,
    GroupUnknownError,
    Reason,
    SubjectUnknownError,
)
from keylane.protocol.groups import CreateGroup, GroupStart, StartAt, SuspendGroup
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.protocol.progress import ResetGroup, ResetTo
from keylane.protocol.routing import ConsumeStrategy, OrderStrategy
from support.raising import raises
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

A = "a" * 16
START = GroupStart(at=StartAt.LATEST)
LATEST = CreateGroup(start=START)


@pytest.fixture
def rows(rows: Rows) -> Rows:
    rows.create("s", 2)
    return rows


def make(rows: Rows, cursors: dict[int, int], *, fence: int = 0) -> list[PendingStart]:
    scope = rows.run(read_start_scope, "s", "g")
    assert rows.run(begin_group, scope, "g", LATEST, cursors=cursors, fence=fence)
    return list(rows.run(pending_starts, limit=100))


def join(rows: Rows, **more: Any) -> int:
    ask = Join(subject="s", group="g", session=A, **more)
    group_id: int = rows.run(join_group, ask, sessions_max=10).group_id
    rows.run(settle_group, group_id)
    return group_id


def granted(rows: Rows, group_id: int) -> set[int]:
    rows.run(settle_group, group_id)
    return {int(grant.partition.partition_id) for grant in rows.run(read_grants, A).grants}


def test_partition_is_granted_once_its_broker_has_stored_the_start(rows: Rows):
    """One by one: a broker that is silent keeps its own partitions only."""
    first, second = make(rows, {1: 100, 2: 50})
    assert [(first.cursor, first.token), (second.cursor, second.token)] == [(100, 1), (50, 2)]
    assert (first.subject, first.group, first.address) == ("s", "g", "g1:1")
    group_id = join(rows)
    assert granted(rows, group_id) == set()
    rows.run(complete_starts, group_id, [second])
    assert granted(rows, group_id) == {2}
    assert rows.run(read_pending_starts, group_id) == [first]
    assert rows.run(read_start_scope, "s", "g").settings.unstarted == (1,)
    rows.run(complete_starts, group_id, [first, second])  # a repeat
    assert granted(rows, group_id) == {1, 2}
    tokens = {grant.token for grant in rows.run(read_grants, A).grants}
    assert min(tokens) > second.token


def test_start_is_fixed_once(rows: Rows):
    """A second creation finds the group, and plans nothing; the first join keeps its start and
    strategy.
    """
    before = rows.run(read_start_scope, "s", "g")
    pending = make(rows, {1: 100, 2: 50})
    assert not rows.run(begin_group, before, "g", LATEST, cursors={1: 900, 2: 900})
    assert rows.run(pending_starts, limit=100) == pending
    ask = Join(subject="s", group="g", session=A, start=GroupStart())
    assert rows.run(join_group, ask, sessions_max=10).start == START
    with raises(Reason.GROUP_STRATEGY):
        join(rows, strategy=ConsumeStrategy.SHARED)


def test_creation_is_planned_again_when_the_partitions_have_changed(rows: Rows):
    """Between the brokers' answers and the transaction; children of a resize that comes later have
    no start.
    """
    scope = rows.run(read_start_scope, "s", "g")
    rows.resize("s", 3)
    assert not rows.run(begin_group, scope, "g", LATEST, cursors={1: 100, 2: 100})
    ids = [partition.partition_id for partition in rows.run(read_start_scope, "s", "g").partitions]
    pending = make(rows, dict.fromkeys(ids, 100))
    rows.resize("s", 4)
    assert rows.run(pending_starts, limit=100) == pending


def test_sealed_partition_is_drained_where_the_group_begins_at_its_end(rows: Rows):
    """So that its children are read at once; not one that has messages for the group."""
    rows.resize("s", 3)  # parents end at 100
    scope = rows.run(read_start_scope, "s", "g")
    ids = [int(partition.partition_id) for partition in scope.partitions]
    pending = make(rows, {number: 100 if number != 2 else 99 for number in ids})
    group_id = pending[0].group_id
    rows.run(complete_starts, group_id, pending)
    noted = rows.run(lambda connection: connection.execute(sa.select(drained)).all())
    assert [(row.group_id, row.partition_id) for row in noted] == [(group_id, 1)]


def unstarted(rows: Rows, subject: str) -> set[int]:
    return set(rows.run(read_start_scope, subject, "g").settings.unstarted)


def make_earliest(rows: Rows, subject: str) -> None:
    scope = rows.run(read_start_scope, subject, "g")
    assert rows.run(begin_group, scope, "g", CreateGroup(), cursors={})


def test_creation_waits_for_no_broker_of_a_sealed_partition(rows: Rows):
    """It gets no message that is sent afterwards."""
    rows.resize("s", 3)
    make_earliest(rows, "s")
    route = rows.run(read_route, "s")
    open_ids = {int(partition.partition_id) for partition in route.open_partitions()}
    assert len(route.partitions) > len(open_ids)
    assert unstarted(rows, "s") == open_ids


def test_creation_waits_for_an_abandoned_partition_only_until_it_is_sealed(rows: Rows):
    """Not for its broker while that is silent; once it is back, producers with an old route may
    still reach it.
    """
    rows.create("b", 3, order_strategy=OrderStrategy.BEST_TRIED)
    (left,) = (
        int(partition.partition_id)
        for partition in rows.run(read_route, "b").partitions
        if partition.broker_group == "g1"
    )
    rows.silence("g1")
    make_earliest(rows, "b")
    assert left in unstarted(rows, "b")
    leave = Reshape(kind=OperationKind.EVACUATE, broker_group="g1", without_source=True)
    operation_id = next(
        number for number, planned in rows.begin(leave) if planned.subject.name == "b"
    )
    assert rows.drive(operation_id) is OperationState.FENCE
    assert left not in unstarted(rows, "b")
    rows.report("g1")
    assert left in unstarted(rows, "b")
    assert rows.drive(operation_id) is None
    assert left not in unstarted(rows, "b")


def test_join_with_a_start_makes_no_group_by_itself(rows: Rows):
    """It would begin at the first message; the earliest start needs no plan."""
    with pytest.raises(GroupUnknownError):
        join(rows, start=START)
    join(rows, start=GroupStart())


def test_tokens_of_a_start_are_above_what_brokers_have_seen(rows: Rows):
    """A database restored from a copy may be behind them."""
    assert [start.token for start in make(rows, {1: 100, 2: 50}, fence=40)] == [41, 42]


def test_reset_takes_the_place_of_a_start(rows: Rows):
    """A broker that stored the start late would undo the reset, which has a higher token."""
    pending = make(rows, {1: 100, 2: 50})
    ask = ResetGroup(to=ResetTo.EARLIEST)
    scope = rows.run(read_reset_scope, "s", "g", ask)
    tokens = rows.run(begin_reset, scope, holder="h", lease_ms=1_000)
    assert rows.run(pending_starts, limit=100) == []
    assert min(tokens.values()) > max(start.token for start in pending)


def test_deleted_group_leaves_no_row(rows: Rows):
    """Of its start and of its switches; while it is being deleted, none of its name is made."""

    def counts() -> dict[str, int]:
        tables = (table for table in metadata.sorted_tables if table.name != "deletions")
        count = sa.func.count()
        return {
            table.name: rows.run(lambda c, t=table: c.scalar(sa.select(count).select_from(t)))
            for table in tables
        }

    before = counts()
    make(rows, {1: 100, 2: 50})
    rows.run(suspend_members, "s", "g", SuspendGroup(suspended=True, client="c"))
    assert counts() != before
    rows.run(begin_group_deletion, "s", "g", DeleteGroup())
    assert rows.run(pending_starts, limit=100) == []
    with pytest.raises(GroupDeletedError):
        rows.run(read_start_scope, "s", "g")
    done = {removal.key: removal.token for removal in rows.run(pending_removals, limit=100)}
    rows.run(complete_removals, done)
    assert counts() == before
    with pytest.raises(SubjectUnknownError):
        rows.run(read_start_scope, "other", "g")
