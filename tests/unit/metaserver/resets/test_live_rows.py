"""The rows of a reset under live sessions: nothing is granted while it is pending, and it begins
once nothing is held.
"""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from keylane.metaserver.groups.lease_rows import read_grants, release_leases, store_drained
from keylane.metaserver.groups.sessions import join_group
from keylane.metaserver.resets.live import (
    abandon_live_reset,
    cancel_live_reset,
    find_same_reset,
    pending_live_resets,
    plan_live_reset,
    read_live_reset,
)
from keylane.metaserver.resets.rows import begin_reset, end_reset, read_reset_scope
from keylane.metaserver.sql.schema import drained, partitions
from keylane.protocol.control import Join, ReleaseGrant
from keylane.protocol.errors import Reason
from keylane.protocol.progress import ResetGroup, ResetTo
from keylane.protocol.routing import ConsumeStrategy, PartitionState
from support.raising import raises
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

A, B = "a" * 16, "b" * 16
ASK = ResetGroup(to=ResetTo.EARLIEST, live=True)
ANSWER = b'{"subject":"s","group":"g","cursors":[]}'.decode()


class LiveRows(Rows):
    """A subject of two partitions with group `g`."""

    def __init__(self) -> None:
        super().__init__()
        self.report("g1")
        self.create("s", 2)

    def join(self, session: str, strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE) -> None:
        ask = Join(subject="s", group="g", session=session, client=session[0], strategy=strategy)
        self.run(join_group, ask, sessions_max=9)
        self.settle()

    def settle(self) -> None:
        self.run(settle_group, 1)

    def held(self, session: str) -> dict[int, int]:
        grants = self.run(read_grants, session).grants
        return {int(grant.partition.partition_id): grant.token for grant in grants}

    def release(self, session: str, held: dict[int, int]) -> None:
        asks = [ReleaseGrant(session=session, partition_id=p, token=t) for p, t in held.items()]
        self.run(release_leases, asks)

    def begin(self, reset_id: int) -> Any:
        scope = self.run(read_reset_scope, "s", "g", ASK)
        known = {"holder": "h", "lease_ms": 2_000, "reset_id": reset_id}
        return self.run(begin_reset, scope, **known)

    def end(self, tokens: dict[int, int], reset_id: int) -> None:
        cursors = dict.fromkeys(tokens, 0)
        self.run(end_reset, 1, tokens, cursors, holder="h", recorded_answer=(reset_id, ANSWER))
        self.settle()


@pytest.fixture
def rows() -> LiveRows:
    return LiveRows()


def test_reset_begins_once_every_partition_is_handed_over(rows: LiveRows):
    """Also a member that joins meanwhile gets nothing; then all go on under tokens above those of
    the reset.
    """
    rows.join(A)
    before = rows.held(A)
    reset_id = rows.run(plan_live_reset, 1, ASK)
    rows.settle()
    rows.join(B)
    assert (rows.held(A), rows.held(B)) == ({}, {})
    assert rows.run(read_live_reset, reset_id).owners == ("a",)
    with raises(Reason.GROUP_BUSY, match="2 partitions"):
        rows.begin(reset_id)
    rows.release(A, before)
    assert rows.held(B) == {}, "a free partition is not granted"
    tokens = rows.begin(reset_id)
    rows.settle()
    assert rows.held(B) == {}
    rows.join("c" * 16)  # joins are refused by other resets only
    rows.end(tokens, reset_id)
    after = rows.held(A) | rows.held(B) | rows.held("c" * 16)
    assert after.keys() == before.keys()
    assert all(after[number] > tokens[number] > before[number] for number in before)
    assert rows.run(read_live_reset, reset_id).answer is not None
    assert rows.run(pending_live_resets) == []


def test_dead_member_delays_a_reset_until_its_ttl(rows: LiveRows):
    rows.join(A)
    reset_id = rows.run(plan_live_reset, 1, ASK)
    rows.settle()
    rows.clock.advance(60_000)
    rows.settle()
    assert rows.run(read_live_reset, reset_id).owners == ()
    assert rows.begin(reset_id)


def test_members_of_a_shared_group_hold_nothing(rows: LiveRows):
    """The reset begins at once; each partition is granted to all again under a token above its."""
    rows.join(A, ConsumeStrategy.SHARED)
    before = rows.held(A)
    reset_id = rows.run(plan_live_reset, 1, ASK)
    rows.settle()
    assert rows.held(A) == {}
    tokens = rows.begin(reset_id)
    rows.end(tokens, reset_id)
    after = rows.held(A)
    assert all(after[number] > tokens[number] > before[number] for number in before)


def test_second_reset_is_refused_and_the_same_is_the_same(rows: LiveRows):
    """Also one for a group without consumers; after the answer a repeat is another reset."""
    rows.join(A)
    held = rows.held(A)
    reset_id = rows.run(plan_live_reset, 1, ASK)
    assert rows.run(plan_live_reset, 1, ASK) == reset_id
    with raises(Reason.GROUP_BUSY):
        rows.run(plan_live_reset, 1, ResetGroup(to=ResetTo.LATEST, live=True))
    with raises(Reason.GROUP_BUSY, match="pending"):
        rows.begin(0)
    rows.settle()
    rows.release(A, held)
    rows.end(rows.begin(reset_id), reset_id)
    assert rows.run(plan_live_reset, 1, ASK) > reset_id


def test_reset_is_given_up_only_before_it_has_begun(rows: LiveRows):
    """Then the members get their partitions again; later a cursor may be set, and only the end
    helps.
    """
    rows.join(A)
    held = rows.held(A)
    reset_id = rows.run(plan_live_reset, 1, ASK)
    rows.settle()
    rows.release(A, held)
    assert rows.run(abandon_live_reset, reset_id, 1)
    rows.settle()
    assert rows.held(A).keys() == held.keys()
    reset_id = rows.run(plan_live_reset, 1, ASK)
    rows.settle()
    rows.release(A, {number: token + 2 for number, token in held.items()})
    rows.begin(reset_id)
    assert not rows.run(abandon_live_reset, reset_id, 1)
    assert rows.run(pending_live_resets) == [reset_id]


def test_late_report_of_a_drained_partition_is_ignored_after_a_reset(rows: LiveRows):
    """The session lives through the reset, and its report is of the cursor of before."""
    rows.join(A)
    before = rows.held(A)
    sealed = sa.update(partitions).values(state=PartitionState.SEALED, end_offset=10)
    rows.run(lambda connection: connection.execute(sealed))
    reset_id = rows.run(plan_live_reset, 1, ASK)
    rows.settle()
    rows.release(A, before)
    rows.end(rows.begin(reset_id), reset_id)
    after = rows.held(A)
    assert after.keys() == before.keys()
    late = set(before.items())
    assert rows.run(store_drained, A, list(before), (), late) is None
    assert rows.run(lambda connection: connection.execute(sa.select(drained)).all()) == []
    assert rows.run(store_drained, A, list(after), (), set(after.items())) == 1


def test_canceled_reset_changes_nothing_and_is_not_begun(rows: LiveRows):
    """What members have handed over they get again; a repeat of the cancellation is told the same,
    and a later reset begins.
    """
    rows.join(A)
    held = rows.held(A)
    reset_id = rows.run(plan_live_reset, 1, ASK)
    rows.settle()
    assert rows.run(cancel_live_reset, "s", "g") == (1, ASK)
    rows.release(A, held)
    rows.settle()
    assert rows.held(A).keys() == held.keys()
    assert rows.run(cancel_live_reset, "s", "g") == (1, ASK)
    assert rows.run(read_live_reset, reset_id).canceled
    assert rows.run(pending_live_resets) == []
    with raises(Reason.GROUP_BUSY, match="done"):
        rows.begin(reset_id)
    assert rows.run(plan_live_reset, 1, ASK) > reset_id


def test_cancellation_is_refused_when_cursors_may_be_set(rows: LiveRows):
    """Also when all are, and when there is no reset; nothing is changed by it."""
    rows.join(A)
    with raises(Reason.RESET_FORWARD, match="has no reset"):
        rows.run(cancel_live_reset, "s", "g")
    held = rows.held(A)
    reset_id = rows.run(plan_live_reset, 1, ASK)
    rows.settle()
    rows.release(A, held)
    tokens = rows.begin(reset_id)
    with raises(Reason.RESET_FORWARD, match="begun") as begun:
        rows.run(cancel_live_reset, "s", "g")
    assert begun.value.begun is True
    assert "continues automatically" in begun.value.hint
    rows.end(tokens, reset_id)
    with raises(Reason.RESET_FORWARD, match="is done"):
        rows.run(cancel_live_reset, "s", "g")
    assert rows.run(read_live_reset, reset_id).answer is not None


def test_request_is_known_while_its_reset_is_pending(rows: LiveRows):
    """Whatever fails for a repeat of it, the reset may be done."""
    rows.join(A)
    assert rows.run(find_same_reset, "s", "g", ASK) == 0
    reset_id = rows.run(plan_live_reset, 1, ASK)
    assert rows.run(find_same_reset, "s", "g", ASK) == reset_id
    other = ResetGroup(to=ResetTo.LATEST, live=True)
    assert rows.run(find_same_reset, "s", "g", other) == 0
    rows.run(cancel_live_reset, "s", "g")
    assert rows.run(find_same_reset, "s", "g", ASK) == 0
