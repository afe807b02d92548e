"""A grant names the member that had the partition before, and says how that member's lease ended."""

from __future__ import annotations

import pytest

from keylane.metaserver.groups.lease_rows import read_grants, release_leases
from keylane.metaserver.groups.operators import switch_group
from keylane.metaserver.groups.sessions import (
    join_group,
    leave_group,
    renew_sessions,
    suspend_session,
)
from keylane.protocol.control import Join, LeaseEnd, PreviousOwner, ReleaseGrant, Suspend
from keylane.protocol.routing import ConsumeStrategy
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

A, B = "a" * 16, "b" * 16


class LeasedGroup:
    """A group of two partitions whose member `vm:1` has both."""

    def __init__(self) -> None:
        self.rows = Rows()
        self.rows.report("g1")
        self.rows.create("s", 2)
        self.group_id = 0
        self.join(A, "vm:1")

    def join(self, session: str, client: str, instance: str = "") -> None:
        ask = Join(subject="s", group="g", session=session, client=client, instance=instance)
        self.group_id = self.rows.run(join_group, ask, sessions_max=10).group_id
        self.settle()

    def settle(self) -> None:
        self.rows.run(settle_group, self.group_id)

    def previous(self, session: str) -> dict[int, PreviousOwner | None]:
        grants = self.rows.run(read_grants, session).grants
        return {int(grant.partition.partition_id): grant.previous for grant in grants}

    def release(self, session: str, tokens: dict[int, int]) -> None:
        for partition_id, token in tokens.items():
            release = ReleaseGrant(session=session, partition_id=partition_id, token=token)
            self.rows.run(release_leases, [release])
        self.settle()


@pytest.fixture
def group() -> LeasedGroup:
    return LeasedGroup()


def after(end: LeaseEnd, *ids: int, client: str = "vm:1") -> dict[int, PreviousOwner]:
    return {key: PreviousOwner(client=client, end=end) for key in ids}


def test_first_grant_names_nobody(group: LeasedGroup):
    assert group.previous(A) == {1: None, 2: None}


def test_grant_names_the_dead_member_when_its_session_expired(group: LeasedGroup):
    group.rows.clock.advance(31_000)
    group.join(B, "vm:2")
    assert group.previous(B) == after(LeaseEnd.EXPIRED, 1, 2)


def test_grant_names_nobody_when_the_member_had_no_name(group: LeasedGroup):
    group.rows.run(leave_group, A)
    group.join("c" * 16, "")
    group.rows.run(leave_group, "c" * 16)
    group.join(B, "vm:2")
    assert group.previous(B) == {1: None, 2: None}


def test_grant_names_the_dead_member_when_it_died_during_a_rebalance(group: LeasedGroup):
    group.join(B, "vm:2")
    group.rows.clock.advance(29_000)
    group.rows.run(renew_sessions, [B])
    group.rows.clock.advance(2_000)
    group.settle()
    assert group.previous(B) == after(LeaseEnd.EXPIRED, 1, 2)


def test_grant_names_the_member_that_handed_over_in_a_rebalance(group: LeasedGroup):
    group.join(B, "vm:2")
    (moving,) = {1, 2} - group.previous(A).keys()
    group.release(A, {moving: moving})
    assert group.previous(B) == after(LeaseEnd.REBALANCE, moving)
    assert group.previous(A) == {3 - moving: None}


def test_grant_names_the_member_that_released_while_it_was_leaving(group: LeasedGroup):
    group.join(B, "vm:2")
    group.rows.run(suspend_session, Suspend(session=A))
    group.settle()
    group.release(A, {1: 1, 2: 2})
    assert group.previous(B) == after(LeaseEnd.RELEASED, 1, 2)


def test_grant_names_its_own_member_when_a_broker_refused_the_token(group: LeasedGroup):
    group.release(A, {1: 1})
    assert group.previous(A) == {2: None} | after(LeaseEnd.RELEASED, 1)


def test_grant_names_the_member_that_left(group: LeasedGroup):
    group.rows.run(leave_group, A)
    group.join(B, "vm:2")
    assert group.previous(B) == after(LeaseEnd.LEFT, 1, 2)


def test_grant_names_the_instance_that_was_replaced(group: LeasedGroup):
    group.rows.run(leave_group, A)
    group.join("c" * 16, "vm:3", instance="one")
    group.join("c0" * 8, "vm:4", instance="one")
    assert group.previous("c0" * 8) == after(LeaseEnd.REPLACED, 1, 2, client="vm:3")


def test_grant_names_the_member_whose_session_an_operator_ended(group: LeasedGroup):
    for strategy in (ConsumeStrategy.SHARED, ConsumeStrategy.EXCLUSIVE):
        group.rows.run(switch_group, "s", "g", strategy)
        group.settle()
    group.join(B, "vm:2")
    assert group.previous(B) == after(LeaseEnd.ENDED, 1, 2)
