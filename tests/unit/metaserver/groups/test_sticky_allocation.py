"""Allocation through SQL moves few partitions: joins, leaves, crashes, suspensions, rolling
restarts.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest
import sqlalchemy as sa

from keylane.metaserver.groups.lease_rows import read_grants, release_leases
from keylane.metaserver.groups.sessions import (
    join_group,
    leave_group,
    renew_sessions,
    suspend_session,
)
from keylane.metaserver.sql.schema import leases
from keylane.protocol.control import Join, ReleaseGrant, Suspend
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

TTL_MS = 30_000


class StickyGroup:
    """A consumer group whose sessions hand over at once; `moves` counts changes of owner by
    partition.
    """

    def __init__(self, partitions: int) -> None:
        self.rows = Rows()
        self.rows.report("g1")
        self.rows.create("s", partitions)
        self.group_id = 0
        self.moves: Counter[int] = Counter()
        self.before: dict[int, str] = {}
        self.names = 0

    def join(self) -> str:
        self.names += 1
        session = f"{self.names:032x}"
        ask = Join(subject="s", group="g", session=session, ttl_ms=TTL_MS)
        self.group_id = self.rows.run(join_group, ask, sessions_max=2_000).group_id
        return session

    def owners(self) -> dict[int, str]:
        """The owner of each partition that is not being handed over."""
        held = sa.select(leases.c.partition_id, leases.c.session).where(
            leases.c.session.is_not(None), sa.not_(leases.c.withdrawn)
        )
        return dict(self.rows.run(lambda connection: connection.execute(held).all()))

    def calm(self) -> dict[int, str]:
        """Settle, and release whatever is asked back, until nothing changes; the owners then."""
        asked = sa.select(leases.c.session, leases.c.partition_id, leases.c.token).where(
            leases.c.withdrawn, leases.c.session.is_not(None)
        )
        while True:
            self.rows.run(settle_group, self.group_id)
            back = self.rows.run(lambda connection: connection.execute(asked).all())
            if not back:
                break
            for session in back:
                ask = ReleaseGrant(
                    session=session.session, partition_id=session.partition_id, token=session.token
                )
                self.rows.run(release_leases, [ask])
        after = self.owners()
        self.moves.update(
            key for key, owner in after.items() if self.before.get(key, owner) != owner
        )
        self.before |= after
        return after

    def moved(self, before: dict[int, str]) -> list[int]:
        return [key for key, owner in self.owners().items() if before[key] != owner]


def balanced(owners: dict[int, str], sessions: list[str]) -> bool:
    loads = [list(owners.values()).count(session) for session in sessions]
    return max(loads) - min(loads) <= 1


@pytest.fixture
def sixteen() -> StickyGroup:
    return StickyGroup(16)


def test_fifth_consumer_moves_at_most_four_of_sixteen(sixteen: StickyGroup):
    """All moved partitions go to the new consumer."""
    live = [sixteen.join() for _ in range(4)]
    before = sixteen.calm()
    live.append(sixteen.join())
    after = sixteen.calm()
    assert len(sixteen.moved(before)) <= 4
    assert {after[partition_id] for partition_id in sixteen.moved(before)} == {live[-1]}
    assert balanced(after, live)


def test_rolling_restart_of_eight_moves_each_partition_at_most_twice(sixteen: StickyGroup):
    """Each consumer leaves gracefully and joins again, one after another; in between the shares
    stay even.
    """
    live = [sixteen.join() for _ in range(8)]
    sixteen.calm()
    for _ in range(8):
        sixteen.rows.run(leave_group, live.pop(0))
        assert balanced(sixteen.calm(), live)
        live.append(sixteen.join())
        assert balanced(sixteen.calm(), live)
    assert max(sixteen.moves.values()) <= 2, sixteen.moves


@pytest.mark.parametrize("order", ["newest first", "every other"])
def test_rolling_restart_in_any_order_moves_each_partition_at_most_twice(
    sixteen: StickyGroup, order: str
):
    """The order of the restarts does not matter."""
    live = [sixteen.join() for _ in range(8)]
    sixteen.calm()
    turns = live[::-1] if order == "newest first" else live[::2] + live[1::2]
    for session in turns:
        sixteen.rows.run(leave_group, session)
        sixteen.calm()
        sixteen.join()
        sixteen.calm()
    assert max(sixteen.moves.values()) <= 2, sixteen.moves


def test_graceful_leave_moves_only_the_leavers_partitions(sixteen: StickyGroup):
    """The partitions of the other consumers stay."""
    live = [sixteen.join() for _ in range(4)]
    before = sixteen.calm()
    sixteen.rows.run(leave_group, live[1])
    after = sixteen.calm()
    assert {before[partition_id] for partition_id in sixteen.moved(before)} == {live[1]}
    assert balanced(after, [session for session in live if session != live[1]])


def test_crash_moves_only_the_dead_consumers_partitions_after_its_ttl(sixteen: StickyGroup):
    """Nothing is granted before the ttl has passed, and everything right after it."""
    live = [sixteen.join() for _ in range(4)]
    before = sixteen.calm()
    sixteen.rows.clock.advance(TTL_MS - 1)
    sixteen.rows.run(renew_sessions, live[:3])
    assert sixteen.calm() == before
    sixteen.rows.clock.advance(1)
    after = sixteen.calm()
    assert {before[partition_id] for partition_id in sixteen.moved(before)} == {live[3]}
    assert balanced(after, live[:3])


def test_suspended_consumer_hands_over_and_gets_its_share_when_resumed(sixteen: StickyGroup):
    """The others share its partitions; on its return no more than its share moves."""
    live = [sixteen.join() for _ in range(4)]
    before = sixteen.calm()
    sixteen.rows.run(suspend_session, Suspend(session=live[0], suspended=True))
    without = sixteen.calm()
    assert live[0] not in without.values()
    assert {before[partition_id] for partition_id in sixteen.moved(before)} == {live[0]}
    sixteen.rows.run(suspend_session, Suspend(session=live[0], suspended=False))
    after = sixteen.calm()
    assert len(sixteen.moved(without)) == 4
    assert balanced(after, live)


def test_tokens_continue_when_consumers_return_to_an_empty_group(sixteen: StickyGroup):
    """Nothing is granted without consumers; later grants have tokens above all earlier ones."""
    first = sixteen.join()
    sixteen.calm()
    before = max(grant.token for grant in sixteen.rows.run(read_grants, first).grants)
    sixteen.rows.run(leave_group, first)
    assert sixteen.calm() == {}
    sixteen.rows.clock.advance(3_600_000)
    assert sixteen.calm() == {}
    second = sixteen.join()
    sixteen.calm()
    assert min(grant.token for grant in sixteen.rows.run(read_grants, second).grants) > before


def test_longest_waiting_consumer_is_granted_first():
    """Consumers without a share are served in the order in which they joined."""
    side = StickyGroup(1)
    live = [side.join() for _ in range(5)]
    served = []
    while live:
        (owner,) = side.calm().values()
        served.append(owner)
        side.rows.run(leave_group, owner)
        live.remove(owner)
    assert served == [f"{number:032x}" for number in range(1, 6)]


def test_thousand_consumers_share_a_thousand_partitions():
    """Each has one or two; one more join, leave or crash moves a handful, in about a second or less
    of work.
    """
    side = StickyGroup(1024)
    live = [side.join() for _ in range(1_000)]
    before = side.calm()
    assert balanced(before, live)
    started = time.process_time()
    side.rows.run(leave_group, live.pop(0))
    side.rows.run(settle_group, side.group_id)
    took_s = time.process_time() - started
    after = side.calm()
    assert len(side.moved(before)) <= 2
    assert balanced(after, live)
    live.append(side.join())
    side.calm()
    assert len(side.moved(after)) <= 2
    assert took_s < 3, f"settling took {took_s:.2f} s of processor time"
