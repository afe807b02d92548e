"""Allocation of partitions: individual cases."""

from __future__ import annotations

from collections import Counter

from keylane.metaserver.groups.allocation import allocate
from keylane.protocol.ids import PartitionId, SessionId

SIXTEEN = [PartitionId(index) for index in range(1, 17)]


def names(*numbers: int) -> list[SessionId]:
    return [SessionId(f"session-{number}") for number in numbers]


def test_fifth_consumer_moves_at_most_four() -> None:
    """From 4 to 5 sessions over 16 partitions moves 3, all of them to the new one."""
    before = allocate(names(1, 2, 3, 4), SIXTEEN, current={}, preferred={})
    after = allocate(names(1, 2, 3, 4, 5), SIXTEEN, current=before, preferred={})
    moved = [
        partition_id for partition_id in SIXTEEN if before[partition_id] != after[partition_id]
    ]
    assert len(moved) == 3
    assert {after[partition_id] for partition_id in moved} == set(names(5))


def test_rolling_restart_moves_each_partition_at_most_twice() -> None:
    """Eight consumers restart one after another: no partition moves more than twice."""
    live = names(*range(8))
    dealt = allocate(live, SIXTEEN, current={}, preferred={})
    moves: Counter[PartitionId] = Counter()

    def settle(
        sessions: list[SessionId], owners: dict[PartitionId, SessionId]
    ) -> dict[PartitionId, SessionId]:
        after = allocate(sessions, SIXTEEN, current=owners, preferred={})
        changed = [
            partition_id for partition_id in SIXTEEN if after[partition_id] != owners[partition_id]
        ]
        moves.update(changed)
        kept = {
            partition_id: owner
            for partition_id, owner in owners.items()
            if partition_id not in changed
        }
        return kept | {
            partition_id: after[partition_id] for partition_id in changed
        }  # what moved is the youngest

    for number in range(8):
        rest = [session for session in live if session != live[0]]
        dealt = settle(rest, dealt)
        live = [*rest, SessionId(f"restarted-{number}")]
        dealt = settle(live, dealt)
    assert max(moves.values()) <= 2


def test_allocation_is_empty_without_sessions() -> None:
    """Without sessions nothing is allocated."""
    assert allocate([], SIXTEEN, current={SIXTEEN[0]: names(1)[0]}, preferred={}) == {}


def test_allocation_is_empty_without_partitions() -> None:
    """A partition that is not readable is allocated to no session."""
    owners = dict.fromkeys(SIXTEEN, names(1)[0])
    assert allocate(names(1, 2), [], current=owners, preferred={}) == {}


def test_surplus_sessions_get_nothing() -> None:
    """A thousand sessions over 24 partitions: 24 of them have one each, the others none."""
    dealt = allocate(names(*range(1000)), SIXTEEN[:5], current={}, preferred={})
    assert sorted(Counter(dealt.values()).values()) == [1] * 5


def test_children_go_to_the_owner_of_their_parent() -> None:
    """When a partition is split, its owner gets the children up to its share."""
    first, second = names(1, 2)
    owners = {PartitionId(1): first, PartitionId(2): second}
    children = [PartitionId(3), PartitionId(4)]
    dealt = allocate(
        [first, second],
        [PartitionId(2), *children],
        current=owners,
        preferred=dict.fromkeys(children, first),
    )
    assert dealt == {PartitionId(2): second, PartitionId(3): first, PartitionId(4): first}
