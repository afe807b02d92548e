"""The rows of a reset: exclusion, drained partitions, tokens."""

import dataclasses
from typing import Any

import pytest
import sqlalchemy as sa
from msgspec import structs

from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.cluster.subjects import open_subject, plan_subject
from keylane.metaserver.groups.lease_rows import read_grants, store_drained
from keylane.metaserver.groups.operators import switch_group
from keylane.metaserver.groups.sessions import join_group, leave_group
from keylane.metaserver.resets.cursors import PartitionOffsets, compute_cursors, order_generations
from keylane.metaserver.resets.rows import ResetScope, begin_reset, end_reset, read_reset_scope
from keylane.metaserver.sql.duties import (
    duty_left_ms,
    forget_duties,
    release_duty,
    take_duty,
)
from keylane.metaserver.sql.schema import drained, groups, leases, partition_parents, partitions
from keylane.protocol.control import BrokerHeartbeat, CreateSubject, Join
from keylane.protocol.errors import Reason
from keylane.protocol.progress import ResetGroup, ResetTo
from keylane.protocol.routing import ConsumeStrategy, PartitionState
from support.raising import raises
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

A, B = "a" * 16, "b" * 16
TTL_MS = 5_000


class ResetRows(Rows):
    """A subject of two partitions in memory, the first of them sealed at 10 and drained by group
    `g`.
    """

    def __init__(self) -> None:
        super().__init__()
        body = BrokerHeartbeat(broker_group="g1", broker_id="x", address="g1:1")
        self.run(store_report, body, ttl_ms=10**9)
        self.run(plan_subject, CreateSubject(subject="s", partitions=2), subjects_max=9)
        self.run(open_subject, "s")
        self.join(A)
        self.run(leave_group, A)
        sealed = sa.update(partitions).where(partitions.c.partition_id == 1)
        self.say(sealed.values(state=PartitionState.SEALED, end_offset=10))
        self.say(sa.insert(drained).values(group_id=1, partition_id=1))

    def say(self, statement: Any) -> Any:
        return self.run(lambda connection: connection.execute(statement))

    def join(self, session: str) -> None:
        ask = Join(subject="s", group="g", session=session, ttl_ms=TTL_MS)
        self.run(join_group, ask, sessions_max=9)
        self.run(settle_group, 1)

    def begin(self, holder: str = "one", **ask: Any) -> dict[int, int]:
        """Of all partitions, unless `ask` says else."""
        scope = self.scope(**ask)
        return self.run(begin_reset, scope, holder=holder, lease_ms=2_000)

    def scope(self, **ask: Any) -> ResetScope:
        asked = ResetGroup(to=ResetTo.EARLIEST, **ask)
        scope: ResetScope = self.run(read_reset_scope, "s", "g", asked)
        return scope

    def end(self, tokens: dict[int, int], cursors: dict[int, int], holder: str = "one") -> None:
        self.run(end_reset, 1, tokens, cursors, holder=holder)

    def drained(self) -> list[int]:
        rows = self.run(lambda connection: connection.execute(sa.select(drained)).all())
        return [row.partition_id for row in rows]

    def last_token(self) -> int:
        return int(
            self.run(lambda connection: connection.execute(sa.select(groups)).one()).last_token
        )


@pytest.fixture
def rows() -> ResetRows:
    return ResetRows()


def test_scope_is_the_partitions_with_data(rows: ResetRows):
    """Sealed and open partitions; not planned or expired ones."""
    scope = rows.scope()
    assert [partition.partition_id for partition in scope.partitions] == [1, 2]
    rows.say(sa.update(partitions).where(partitions.c.partition_id == 1).values(state="expired"))
    scope = rows.scope()
    assert [partition.partition_id for partition in scope.partitions] == [2]


def test_reset_tokens_are_above_all_granted_ones(rows: ResetRows):
    """Each partition has a token of its own, and the next grant is above them."""
    before = rows.last_token()
    tokens = rows.begin()
    assert sorted(tokens.values()) == [before + 1, before + 2]
    rows.end(tokens, {1: 0, 2: 0})
    rows.join(B)
    grants = rows.run(read_grants, B).grants
    assert min(grant.token for grant in grants) > max(tokens.values())
    assert [grant.partition.partition_id for grant in grants] == [1, 2]


def test_reset_tokens_continue_above_the_brokers_fence(rows: ResetRows):
    """A database restored from a copy does not give tokens that every broker would refuse."""
    seen = rows.last_token() + 1_000
    tokens = rows.run(begin_reset, rows.scope(), holder="one", lease_ms=1_000, fence=seen)
    assert min(tokens.values()) == seen + 1


def test_reset_is_planned_anew_when_partitions_opened_since(rows: ResetRows):
    """A consumer may have read the new ones, so nothing is set. A reset of one partition does not
    depend on others.
    """
    all_of_them, alone = rows.scope(), rows.scope(partition_id=2)
    child = {"subject_id": 1, "name": "s.p2", "queue": 2, "range_start": 0, "range_end": 512}
    rows.say(sa.insert(partitions).values(**child, broker_group="g1", state="open"))
    before = rows.last_token()
    assert rows.run(begin_reset, all_of_them, holder="one", lease_ms=2_000) is None
    assert (rows.last_token(), rows.drained()) == (before, [1])
    assert set(rows.begin()) == {1, 2, 3}
    assert set(rows.run(begin_reset, alone, holder="one", lease_ms=2_000)) == {2}


def test_reset_is_planned_anew_when_the_strategy_changed(rows: ResetRows):
    """Brokers are told the present strategy."""
    before = rows.scope()
    rows.run(switch_group, "s", "g", ConsumeStrategy.SHARED)
    assert rows.run(begin_reset, before, holder="one", lease_ms=2_000) is None
    assert rows.scope().strategy is ConsumeStrategy.SHARED
    assert set(rows.begin()) == {1, 2}


def test_reset_is_refused_while_a_session_lives_or_another_reset_runs(rows: ResetRows):
    """No token is taken; an expired session does not count, and a crashed reset's lease ends."""
    rows.join(B)
    before = rows.last_token()
    with raises(Reason.GROUP_BUSY, match=r"has 1 live consumer: .* live=True \(--live\)"):
        rows.begin()
    assert rows.last_token() == before
    rows.clock.advance(TTL_MS)
    rows.begin("one")
    with raises(Reason.GROUP_BUSY):
        rows.begin("two")
    rows.clock.advance(2_000)
    rows.begin("two")


def test_join_is_refused_while_a_reset_runs(rows: ResetRows):
    """A consumer may join after the reset, or when the reset's lease has ended."""
    tokens = rows.begin()
    with raises(Reason.GROUP_BUSY, match="join again"):
        rows.join(B)
    rows.end(tokens, {})
    rows.join(B)
    rows.run(leave_group, B)
    rows.begin()
    rows.clock.advance(2_000)
    rows.join(A)


def test_partition_is_drained_when_its_cursor_was_set_to_its_end(rows: ResetRows):
    """It is forgotten first, and noted again only for the sealed partition whose cursor is at its
    end.
    """
    tokens = rows.begin()
    assert rows.drained() == []
    rows.end(tokens, {1: 10, 2: 10})
    assert rows.drained() == [1]
    tokens = rows.begin()
    rows.end(tokens, {1: 9, 2: 0})
    assert rows.drained() == []


def test_empty_partition_is_drained_after_its_parents(rows: ResetRows):
    """It is at its end, and still blocks while its parents are read again; so do its children."""
    rows.say(sa.insert(partition_parents).values(partition_id=2, parent_id=1))
    empty = sa.update(partitions).where(partitions.c.partition_id == 2)
    rows.say(empty.values(state=PartitionState.SEALED, end_offset=0))
    rows.end(rows.begin(), {1: 0, 2: 0})
    assert rows.drained() == []
    rows.end(rows.begin(), {1: 10, 2: 0})
    assert rows.drained() == [1, 2]
    tokens = rows.begin(partition_id=2)
    rows.end(tokens, {2: 0})
    assert rows.drained() == [1, 2], "the parent was drained before"
    rows.say(sa.delete(drained))
    rows.say(sa.update(partitions).where(partitions.c.partition_id == 1).values(state="expired"))
    tokens = rows.begin(partition_id=2)
    rows.end(tokens, {2: 0})
    assert rows.drained() == [2], "of the parent nothing is left"


def test_reset_leaves_partitions_granted_since_to_their_owners(rows: ResetRows):
    """The reset's lease had ended and a consumer was granted the partition: its own report
    counts.
    """
    tokens = rows.begin()
    rows.clock.advance(2_000)
    rows.join(B)
    rows.end(tokens, {1: 10, 2: 0})
    assert rows.drained() == []
    held = rows.run(lambda connection: connection.execute(sa.select(leases)).all())
    assert {row.session for row in held} == {B}


def test_duty_has_one_holder_until_it_ends(rows: ResetRows):
    """The holder renews it, gives it back or loses it; a restart of the times ends all."""
    assert rows.run(take_duty, "x", holder="one", lease_ms=100)
    assert not rows.run(take_duty, "x", holder="two", lease_ms=100)
    rows.clock.advance(60)
    assert rows.run(take_duty, "x", holder="one", lease_ms=100)
    rows.clock.advance(60)
    assert rows.run(duty_left_ms, "x") == 40
    rows.run(release_duty, "x", holder="two")
    assert not rows.run(take_duty, "x", holder="two", lease_ms=100)
    rows.run(release_duty, "x", holder="one")
    assert rows.run(duty_left_ms, "x") == 0
    assert rows.run(take_duty, "x", holder="two", lease_ms=100)
    rows.clock.advance(100)
    assert rows.run(take_duty, "x", holder="one", lease_ms=100)
    rows.run(forget_duties)
    assert rows.run(take_duty, "x", holder="two", lease_ms=100)


@pytest.mark.parametrize(("cursor", "through"), [(4, []), (10, [1, 4])])
def test_empty_partition_behind_a_loss_waits_for_its_grandparents(
    rows: ResetRows, cursor: int, through: list[int]
):
    """1 ends at 10, 3 continued it and is lost, 4 is sealed empty behind that: it is drained with
    1, not before.
    """
    rows.begin()
    for number, state, end in ((3, PartitionState.EXPIRED, None), (4, PartitionState.SEALED, 0)):
        values = {
            "partition_id": number,
            "subject_id": 1,
            "name": f"s.p{number - 1}",
            "queue": number,
            "range_start": 0,
            "range_end": 512,
            "broker_group": "g1",
            "state": state,
            "end_offset": end,
            "abandoned": end is None,
            "lost": end is None,
        }
        rows.say(sa.insert(partitions).values(values))
    lineage = [{"partition_id": 3, "parent_id": 1}, {"partition_id": 4, "parent_id": 3}]
    rows.say(sa.insert(partition_parents).values(lineage))
    rows.say(sa.delete(drained))
    rows.clock.advance(10_000)
    tokens = rows.begin("two")
    rows.end(tokens, {1: cursor, 2: 0, 4: 0}, "two")
    assert rows.drained() == through


def test_reset_of_a_partition_alone_names_the_children_that_keep_what_they_took_over(
    rows: ResetRows,
):
    """Of a reset of the whole subject there are none: its children forget it too."""
    rows.say(sa.insert(partition_parents).values(partition_id=2, parent_id=1))
    (parent,) = rows.scope(partition_id=1).partitions
    (child,) = rows.scope(partition_id=2).partitions
    kept = ((child.range_start, child.range_end),)
    assert rows.scope(partition_id=1).kept_children(parent) == kept
    assert rows.scope(partition_id=2).kept_children(child) == ()
    assert rows.scope().kept_children(parent) == ()


def test_reset_of_a_queue_names_the_descendants_that_keep_what_they_took_over(rows: ResetRows):
    """They may have it by way of a child that is set with the parent."""
    parent, child = rows.scope().partitions
    child = structs.replace(child, parents=(1,))
    kept = structs.replace(child, partition_id=3, parents=(2,))
    lineage = {child.partition_id: child.parents, kept.partition_id: kept.parents}
    chosen = {"partitions": (parent, child), "others": (kept,), "lineage": lineage}
    scope = dataclasses.replace(rows.scope(), **chosen)
    ranges = ((kept.range_start, kept.range_end),)
    assert scope.kept_children(parent) == ranges
    assert scope.kept_children(child) == ranges


def add_descendants(rows: ResetRows) -> None:
    """3 and 4 are one after the other behind the sealed 1; 3 is empty."""
    for number, state, end in ((3, PartitionState.SEALED, 0), (4, PartitionState.OPEN, None)):
        values = {
            "partition_id": number,
            "subject_id": 1,
            "name": f"s.p{number - 1}",
            "queue": number,
            "range_start": 0,
            "range_end": 512,
            "broker_group": "g1",
            "state": state,
            "end_offset": end,
        }
        rows.say(sa.insert(partitions).values(values))
    lineage = [{"partition_id": 3, "parent_id": 1}, {"partition_id": 4, "parent_id": 3}]
    rows.say(sa.insert(partition_parents).values(lineage))


def test_reset_of_a_partition_alone_names_its_descendants_behind_a_lost_one(rows: ResetRows):
    """They took over by way of it what the partition had parked, and need the messages still."""
    add_descendants(rows)
    lost = {"state": PartitionState.EXPIRED, "lost": True, "abandoned": True, "end_offset": None}
    rows.say(sa.update(partitions).where(partitions.c.partition_id == 3).values(lost))
    scope = rows.scope(partition_id=1)
    assert scope.kept_children(scope.partitions[0]) == ((0, 512),)
    scope = rows.scope(partition_id=4)
    assert scope.kept_parents(scope.partitions[0]) == (1, 3)


def test_reset_sets_what_is_behind_a_lost_partition_as_behind_its_parents(rows: ResetRows):
    """It is set before them, and no further than its first message while they are not at their
    end.
    """
    add_descendants(rows)
    lost = {"state": PartitionState.EXPIRED, "lost": True, "abandoned": True, "end_offset": None}
    rows.say(sa.update(partitions).where(partitions.c.partition_id == 3).values(lost))
    scope = rows.scope()
    assert order_generations(scope.partitions) == [[4], [1, 2]]
    parts = [
        PartitionOffsets(partition=each, first_offset=0, next_offset=10, offset_at_time=5)
        for each in scope.partitions
    ]
    ask = ResetGroup(to=ResetTo.TIME, at_ms=1)
    assert compute_cursors(ask, parts, static=False) == {1: 5, 2: 5, 4: 0}


def test_reset_of_a_partition_alone_names_all_ancestors_that_it_leaves_alone(rows: ResetRows):
    """It may have taken over what one of them had parked anew, past its parent."""
    add_descendants(rows)
    scope = rows.scope(partition_id=4)
    assert scope.kept_parents(scope.partitions[0]) == (1, 3)
    assert rows.scope().kept_parents(scope.partitions[0]) == ()


def parked_rows(rows: ResetRows) -> dict[int, bool]:
    """Drained partition → whether it leaves something to its children."""
    noted = rows.run(lambda connection: connection.execute(sa.select(drained)).all())
    return {row.partition_id: row.parked for row in noted}


def test_partition_that_is_reset_to_its_end_is_noted_with_what_it_leaves_to_its_children(
    rows: ResetRows,
):
    tokens = rows.begin(partition_id=1)
    rows.run(end_reset, 1, tokens, {1: 10}, holder="one", parked_ids=[1])
    assert parked_rows(rows) == {1: True}


def test_partition_that_is_reset_to_its_end_has_an_owner_when_its_parent_leaves_something(
    rows: ResetRows,
):
    """Noted as drained it would take nothing over, and its children ask it, not its parent."""
    add_descendants(rows)
    rows.say(sa.update(drained).values(parked=True))
    tokens = rows.begin(partition_id=3)
    rows.end(tokens, {3: 0})
    assert parked_rows(rows) == {1: True}
    rows.join(B)
    granted = rows.run(read_grants, B).grants
    assert [int(grant.partition.partition_id) for grant in granted] == [2, 3]
    assert [int(parent.partition_id) for parent in granted[1].parked_parents] == [1]


def test_partitions_that_are_reset_to_their_end_together_wait_for_what_the_first_leaves(
    rows: ResetRows,
):
    add_descendants(rows)
    sealed = sa.update(partitions).where(partitions.c.partition_id == 4)
    rows.say(sealed.values(state=PartitionState.SEALED, end_offset=0))
    tokens = rows.begin()
    rows.run(end_reset, 1, tokens, {1: 10, 2: 0, 3: 0, 4: 0}, holder="one", parked_ids=[1])
    assert parked_rows(rows) == {1: True}
    rows.clock.advance(10_000)
    tokens = rows.begin("two")
    rows.end(tokens, {1: 10, 2: 0, 3: 0, 4: 0}, "two")
    assert parked_rows(rows) == {1: False, 3: False, 4: False}


def test_descendants_wait_for_an_ancestor_that_is_reset_alone_and_take_over_what_it_parks(
    rows: ResetRows,
):
    """Also behind a drained child, which has no owner any more; their tokens are above those of its
    owners.
    """
    add_descendants(rows)
    rows.say(sa.insert(drained).values(group_id=1, partition_id=3, parked=True))
    tokens = rows.begin(partition_id=1)
    rows.end(tokens, {1: 4})
    rows.join(B)
    first = {grant.partition.partition_id: grant.token for grant in rows.run(read_grants, B).grants}
    assert set(first) == {1, 2}
    rows.run(store_drained, B, [1], [1])
    rows.run(settle_group, 1)
    grants = {grant.partition.partition_id: grant for grant in rows.run(read_grants, B).grants}
    assert set(grants) == {2, 4}
    last = grants[4]
    assert [int(parent.partition_id) for parent in last.parked_parents] == [3, 1]
    assert (last.parked_tokens[1], last.parked_ranges) == (first[1], ((), ((0, 512),)))
    assert last.token > first[1]
