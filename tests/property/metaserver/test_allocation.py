"""Allocation of partitions over random groups: complete, balanced, sticky, with the least
movement.
"""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from keylane.metaserver.groups.allocation import allocate
from keylane.protocol.ids import PartitionId, SessionId

counts = st.integers(min_value=1, max_value=64)
rng = st.randoms(use_true_random=False)


def names(count: int) -> list[SessionId]:
    return [SessionId(f"session-{index}") for index in range(count)]


def ids(count: int) -> list[PartitionId]:
    return [PartitionId(index) for index in range(1, count + 1)]


def some_owners(
    rng: random.Random, sessions: list[SessionId], partitions: list[PartitionId]
) -> dict[PartitionId, SessionId]:
    """Any state a group may be in: some owners dead, some partitions free, in any order of age."""
    known = [*sessions, SessionId("dead-1"), SessionId("dead-2")]
    owned = [partition_id for partition_id in partitions if rng.random() < 0.8]
    rng.shuffle(owned)
    return {partition_id: rng.choice(known) for partition_id in owned}


def fewest_moves(
    owners: dict[PartitionId, SessionId], sessions: list[SessionId], partitions: int
) -> int:
    """The number of owned partitions that have to move, by quotas alone."""
    held = sorted((list(owners.values()).count(session) for session in sessions), reverse=True)
    share, larger = divmod(partitions, len(sessions))
    return sum(max(0, count - share - (index < larger)) for index, count in enumerate(held))


@given(counts, counts, rng)
def test_allocation_is_complete_and_balanced(
    sessions: int, partitions: int, rng: random.Random
) -> None:
    """Every partition has one live session, and shares differ by at most one."""
    live, all_ids = names(sessions), ids(partitions)
    heirs = some_owners(rng, live, all_ids)
    owners = some_owners(rng, live, all_ids)
    dealt = allocate(live, all_ids, current=owners, preferred=heirs)
    assert dealt.keys() == set(all_ids)
    shares = Counter(dealt.values())
    assert set(shares) <= set(live)
    loads = [shares[session] for session in live]
    assert max(loads) - min(loads) <= 1


@given(counts, counts, rng)
def test_allocation_moves_no_more_than_needed(
    sessions: int, partitions: int, rng: random.Random
) -> None:
    """No more partitions leave a live owner than the shares demand."""
    live, all_ids = names(sessions), ids(partitions)
    owners = some_owners(rng, live, all_ids)
    dealt = allocate(live, all_ids, current=owners, preferred={})
    moved = [
        partition_id
        for partition_id, owner in owners.items()
        if owner in live and dealt[partition_id] != owner
    ]
    assert len(moved) == fewest_moves(owners, live, partitions)


@given(counts, counts, rng)
def test_allocation_is_stable_when_repeated(
    sessions: int, partitions: int, rng: random.Random
) -> None:
    """The order of the sessions does not matter."""
    live, all_ids = names(sessions), ids(partitions)
    dealt = allocate(live, all_ids, current={}, preferred={})
    rng.shuffle(live)
    shuffled = dict(sorted(dealt.items(), key=lambda _: rng.random()))
    assert allocate(live, all_ids, current=shuffled, preferred={}) == dealt


@given(st.integers(2, 32), counts, rng)
def test_leaving_session_moves_only_its_own_partitions(
    sessions: int, partitions: int, rng: random.Random
) -> None:
    """When a session leaves, only its own partitions change hands."""
    live, all_ids = names(sessions), ids(partitions)
    before = allocate(live, all_ids, current={}, preferred={})
    gone = rng.choice(live)
    rest = [session for session in live if session != gone]
    after = allocate(rest, all_ids, current=before, preferred={})
    assert all(
        after[partition_id] == owner for partition_id, owner in before.items() if owner != gone
    )


@given(counts, counts, rng)
def test_free_partition_goes_to_its_parents_owner_up_to_its_share(
    sessions: int, partitions: int, rng: random.Random
) -> None:
    """Only as many as the owner's share allows."""
    live, all_ids = names(sessions), ids(partitions)
    heirs = {partition_id: rng.choice(live) for partition_id in all_ids}
    dealt = allocate(live, all_ids, current={}, preferred=heirs)
    share = -(-partitions // sessions)
    for session in live:
        liked = [partition_id for partition_id, heir in heirs.items() if heir == session]
        got = sum(dealt[partition_id] == session for partition_id in liked)
        assert got >= min(len(liked), partitions // sessions)
        assert got <= share
