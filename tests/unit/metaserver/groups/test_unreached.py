"""Partitions on brokers that a session cannot reach go to sessions that can, and stay there."""

from __future__ import annotations

import random

import pytest

from keylane.metaserver.groups.allocation import allocate, avoid_unreachable
from keylane.metaserver.groups.lease_rows import read_grants, release_leases, store_unreached
from keylane.metaserver.groups.sessions import join_group, leave_group
from keylane.protocol.control import Join, ReleaseGrant
from keylane.protocol.errors import SessionUnknownError
from keylane.protocol.ids import PartitionId, SessionId
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

A, B, C = (SessionId(letter * 16) for letter in "abc")
SIX = [PartitionId(number) for number in range(1, 7)]


@pytest.fixture
def rows() -> Rows:
    """Partitions 1 to 4 in turns at g1 and g2."""
    rows = Rows()
    rows.report("g1")
    rows.report("g2")
    rows.create("s", 4)
    return rows


def join(rows: Rows, session: str) -> int:
    ask = Join(subject="s", group="g", session=session)
    group_id: int = rows.run(join_group, ask, sessions_max=10).group_id
    rows.run(settle_group, group_id)
    return group_id


def hand_over(rows: Rows, session: str, before: dict[int, int]) -> None:
    """Release what was granted before and is not any more."""
    gone = before.keys() - granted(rows, session)
    asks = [ReleaseGrant(session=session, partition_id=each, token=before[each]) for each in gone]
    if asks:
        rows.run(release_leases, asks)


def granted(rows: Rows, session: str) -> dict[int, int]:
    return {
        int(grant.partition.partition_id): grant.token
        for grant in rows.run(read_grants, session).grants
    }


def at(rows: Rows, session: str, broker_group: str) -> int:
    """How many partitions at a broker group a session has."""
    grants = rows.run(read_grants, session).grants
    return sum(grant.partition.broker_group == broker_group for grant in grants)


def say(rows: Rows, session: str, *names: str) -> None:
    before = {each: granted(rows, each) for each in (A, B)}
    rows.run(settle_group, rows.run(store_unreached, session, names))
    for each, tokens in before.items():
        hand_over(rows, each, tokens)


def test_partitions_go_to_the_other_session_until_the_broker_is_reached(rows: Rows):
    join(rows, A)
    before = granted(rows, A)
    join(rows, B)
    hand_over(rows, A, before)
    assert (len(granted(rows, A)), len(granted(rows, B))) == (2, 2)
    say(rows, A, "g1")
    assert (at(rows, A, "g1"), at(rows, B, "g1")) == (0, 2)
    held = granted(rows, A)
    say(rows, A, "g1")
    assert granted(rows, A) == held, "a repeat moves nothing"
    say(rows, A)
    assert (len(granted(rows, A)), len(granted(rows, B))) == (2, 2)


def test_partitions_stay_when_no_session_reaches_their_broker(rows: Rows):
    join(rows, A)
    before = granted(rows, A)
    join(rows, B)
    hand_over(rows, A, before)
    say(rows, A, "g1")
    moved = granted(rows, B)
    say(rows, B, "g1")
    assert granted(rows, B) == moved
    rows.run(settle_group, rows.run(leave_group, B))
    assert len(granted(rows, A)) == 4, "the only session has all of them"


def test_session_that_has_ended_says_nothing(rows: Rows):
    join(rows, A)
    with pytest.raises(SessionUnknownError):
        rows.run(store_unreached, B, ["g1"])


def test_partition_moves_once_when_sessions_reach_brokers_or_not() -> None:
    """Settled again and again without news, nothing moves, and who reaches a broker has its
    partitions.
    """
    for seed in range(300):
        rng = random.Random(seed)
        sessions = [SessionId(f"{number}" * 16) for number in range(rng.randint(1, 5))]
        shut_out = {
            partition: {each for each in sessions if rng.random() < 0.4}
            for partition in SIX
            if rng.random() < 0.5
        }
        current = {partition: rng.choice(sessions) for partition in SIX if rng.random() < 0.8}
        for _ in range(len(SIX) + 1):
            before = current
            allocated = allocate(sessions, SIX, current=current, preferred={})
            current = avoid_unreachable(allocated, sessions, current=current, unreachable=shut_out)
            # What has moved is owned for the shortest time.
            stayed = {each: now for each, now in current.items() if before.get(each) == now}
            current = {key: current[key] for key in [each for each in before if each in stayed]} | {
                key: now for key, now in current.items() if key not in stayed
            }
        assert before == current, seed
        for partition, barred in shut_out.items():
            assert barred >= set(sessions) or current[partition] not in barred, seed


def test_allocation_is_as_before_when_every_broker_is_reached() -> None:
    allocated = allocate([A, B, C], SIX, current={}, preferred={})
    assert avoid_unreachable(allocated, [A, B, C], current={}, unreachable={}) == allocated
