"""Leases: grant, withdrawal, release and expiry; and the rule that parents are drained first."""

from __future__ import annotations

import dataclasses

import pytest

from keylane.metaserver.groups.leases import (
    GroupPartition,
    PartitionLease,
    Settlement,
    grant_lease,
    readable_partitions,
    release_lease,
    settle_leases,
)
from keylane.protocol.errors import TokenUnknownError
from keylane.protocol.ids import FencingToken, PartitionId, SessionId
from keylane.protocol.routing import PartitionState

A, B, C = SessionId("a"), SessionId("b"), SessionId("c")
Leases = dict[PartitionId, PartitionLease]


def readable(*ids: int) -> list[GroupPartition]:
    return [
        GroupPartition(partition_id=PartitionId(partition_id), state=PartitionState.OPEN)
        for partition_id in ids
    ]


def settled(
    leases: Leases, sessions: list[SessionId], ids: list[GroupPartition], last_token: int
) -> tuple[Leases, Settlement]:
    settlement = settle_leases(leases, sessions, ids, last_token=FencingToken(last_token))
    return leases | {lease.partition_id: lease for lease in settlement.leases}, settlement


def test_free_partitions_are_granted_at_once() -> None:
    """Each gets a token of its own."""
    leases, settlement = settled({}, [A], readable(1, 2, 3), 7)
    assert [lease.token for lease in leases.values()] == [8, 9, 10]
    assert settlement.last_token == 10
    assert settlement.sessions == {A}


def test_settling_again_changes_nothing() -> None:
    """No lease and no session changes."""
    leases, first = settled({}, [A, B], readable(1, 2, 3), 0)
    _, again = settled(leases, [A, B], readable(1, 2, 3), first.last_token)
    assert again == Settlement(leases=(), sessions=frozenset(), last_token=first.last_token)


def test_live_owner_keeps_its_partition_until_it_releases_it() -> None:
    """A partition that moves is withdrawn first, and granted after the release."""
    leases, _ = settled({}, [A], readable(1, 2), 0)
    leases, settlement = settled(leases, [A, B], readable(1, 2), 2)
    (moving,) = settlement.leases
    assert (moving.session, moving.wanted, moving.withdrawn) == (A, B, True)
    assert settlement.sessions == {A}
    assert settlement.last_token == 2

    free = release_lease(moving, A, moving.token)
    assert free is not None
    granted = grant_lease(free, last_token=settlement.last_token)
    assert granted is not None
    assert (granted.session, granted.token, granted.withdrawn) == (B, 3, False)


def test_withdrawn_lease_is_granted_again_with_a_new_token_only() -> None:
    """If the next owner dies during a hand-over, the old one gets the partition back only with a
    new token.
    """
    leases, _ = settled({}, [A], readable(1), 0)
    leases[PartitionId(1)] = PartitionLease(
        partition_id=PartitionId(1), token=FencingToken(1), session=A, wanted=B, withdrawn=True
    )
    leases, settlement = settled(leases, [A], readable(1), 1)
    lease = leases[PartitionId(1)]
    assert (lease.session, lease.wanted, lease.withdrawn, lease.token) == (A, A, True, 1)
    assert settlement.sessions == frozenset()
    free = release_lease(lease, A, 1)
    assert free is not None
    back = grant_lease(free, last_token=FencingToken(1))
    assert back is not None
    assert (back.session, back.token) == (A, 2)


def test_dead_owner_is_replaced_at_once() -> None:
    """The leases of a dead session, withdrawn or not, are granted to a live one with a higher
    token.
    """
    leases, _ = settled({}, [A], readable(1, 2), 0)
    leases, _ = settled(leases, [A, B], readable(1, 2), 2)
    leases, settlement = settled(leases, [B], readable(1, 2), 2)
    assert {lease.session for lease in leases.values()} == {B}
    assert {lease.token for lease in leases.values()} == {3, 4}
    assert not any(lease.withdrawn for lease in leases.values())
    assert settlement.sessions == {B}


def test_suspended_session_hands_over_and_gets_nothing() -> None:
    """It keeps its leases until it releases them to another session; if all are suspended, nothing
    is granted.
    """
    leases, settlement = settled({}, [A, B], readable(1, 2), 0)
    settlement = settle_leases(
        leases, [A, B], readable(1, 2), suspended={A}, last_token=settlement.last_token
    )
    (moving,) = settlement.leases
    assert (moving.session, moving.wanted, moving.withdrawn) == (A, B, True)
    assert settlement.sessions == {A}
    settlement = settle_leases(
        leases, [A, B], readable(1, 2), suspended={A, B}, last_token=settlement.last_token
    )
    assert {(lease.session, lease.wanted, lease.withdrawn) for lease in settlement.leases} == {
        (A, None, True),
        (B, None, True),
    }


def test_leases_are_free_and_keep_their_tokens_without_sessions() -> None:
    """Without sessions all leases are free, and keep their tokens."""
    leases, _ = settled({}, [A], readable(1), 0)
    leases, settlement = settled(leases, [], readable(1), 1)
    assert leases[PartitionId(1)] == PartitionLease(
        partition_id=PartitionId(1), token=FencingToken(1)
    )
    leases, settlement = settled(leases, [C], readable(1), settlement.last_token)
    assert leases[PartitionId(1)].token == 2


def test_drained_partition_is_withdrawn_and_its_children_granted() -> None:
    """The owner of a drained partition gets its children first."""
    leases, _ = settled({}, [A, B], readable(1, 2), 0)
    owner = leases[PartitionId(1)].session
    children = [
        GroupPartition(
            partition_id=PartitionId(partition_id),
            state=PartitionState.OPEN,
            parents=(PartitionId(1),),
        )
        for partition_id in (3, 4)
    ]
    leases, _ = settled(leases, [A, B], [*readable(2), *children], 2)
    assert leases[PartitionId(1)].withdrawn
    assert leases[PartitionId(1)].wanted is None
    assert [leases[PartitionId(partition_id)].session for partition_id in (3, 4)] == [owner, owner]


@pytest.mark.parametrize("token", [0, -1, 6, 10**9])
def test_release_is_refused_when_the_token_was_never_granted(token: int) -> None:
    """A token from the future, or none at all, is refused."""
    lease = PartitionLease(partition_id=PartitionId(1), token=FencingToken(5), session=A, wanted=A)
    with pytest.raises(TokenUnknownError):
        release_lease(lease, A, token)
    with pytest.raises(TokenUnknownError):
        release_lease(None, A, 1)


def test_repeated_release_changes_nothing() -> None:
    """A release that is repeated, or of an older grant, changes nothing."""
    lease = PartitionLease(partition_id=PartitionId(1), token=FencingToken(5), session=B, wanted=B)
    assert release_lease(lease, A, 4) is None
    free = release_lease(lease, B, 5)
    assert free is not None
    assert release_lease(free, B, 5) is None


def test_release_is_refused_when_another_session_holds_the_lease() -> None:
    """A session cannot release the lease of another one."""
    lease = PartitionLease(partition_id=PartitionId(1), token=FencingToken(5), session=B, wanted=B)
    with pytest.raises(TokenUnknownError):
        release_lease(lease, A, 5)


def test_child_is_readable_when_all_parents_are_drained() -> None:
    """All of them, each by itself; what is planned is not readable."""

    def facts(key: int, state: PartitionState, *parents: int) -> GroupPartition:
        return GroupPartition(
            partition_id=PartitionId(key),
            state=state,
            parents=tuple(PartitionId(parent) for parent in parents),
        )

    partitions = [
        facts(2, PartitionState.SEALED),
        facts(3, PartitionState.SEALED),
        facts(4, PartitionState.OPEN, 2, 3),
        facts(5, PartitionState.OPEN, 3),
        facts(6, PartitionState.PLANNED, 3),
    ]

    def ids(*drained: int) -> list[int]:
        passed = {PartitionId(key) for key in drained}
        return [partition.partition_id for partition in readable_partitions(partitions, passed)]

    assert ids() == [2, 3]
    assert ids(3) == [2, 5]
    assert ids(2) == [3]
    assert ids(2, 3) == [4, 5]


def chain(*between: GroupPartition) -> list[GroupPartition]:
    """1 is sealed, the others continue it in turn, and an open one at the end is number 9."""
    first = GroupPartition(partition_id=PartitionId(1), state=PartitionState.SEALED)
    parents = (between[-1].partition_id,)
    last = GroupPartition(partition_id=PartitionId(9), state=PartitionState.OPEN, parents=parents)
    return [first, *between, last]


def ids_of(partitions: list[GroupPartition], *drained: int) -> list[int]:
    passed = {PartitionId(key) for key in drained}
    return [partition.partition_id for partition in readable_partitions(partitions, passed)]


def test_ancestor_that_was_reset_alone_blocks_its_descendants_past_drained_ones() -> None:
    """Its messages come before theirs, and what it parks anew they take over; at any distance."""
    between = [
        GroupPartition(
            partition_id=PartitionId(number),
            state=PartitionState.SEALED,
            parents=(PartitionId(number - 1),),
        )
        for number in (2, 3)
    ]
    assert ids_of(chain(*between), 2, 3) == [1]
    assert ids_of(chain(*between), 1, 2, 3) == [9]


@pytest.mark.parametrize("ended", [False, True])
def test_abandoned_partition_blocks_nothing_past_a_drained_one(ended: bool) -> None:
    """The group has begun what is behind it."""
    abandoned = GroupPartition(
        partition_id=PartitionId(2),
        state=PartitionState.SEALED,
        parents=(PartitionId(1),),
        abandoned=True,
        ended=ended,
    )
    behind = GroupPartition(
        partition_id=PartitionId(3), state=PartitionState.SEALED, parents=(PartitionId(2),)
    )
    assert ids_of(chain(abandoned, behind), 1, 3) == [2, 9]
    assert ids_of(chain(abandoned, behind), 3) == [1]


def test_lineage_of_thousands_of_drained_partitions_is_read() -> None:
    between = [
        GroupPartition(
            partition_id=PartitionId(number),
            state=PartitionState.SEALED,
            parents=(PartitionId(number - 1),),
        )
        for number in range(2, 5_000)
    ]
    partitions = [*chain(*between)[:-1], chain(between[-1])[-1]]
    partitions[-1] = dataclasses.replace(partitions[-1], partition_id=PartitionId(5_000))
    assert ids_of(partitions, *range(1, 5_000)) == [5_000]
    assert ids_of(partitions, *range(2, 5_000)) == [1]


@pytest.mark.parametrize(
    ("ended", "begun", "expected"),
    [(False, False, [1, 2]), (True, False, [1]), (True, True, [1, 2])],
)
def test_abandoned_parent_blocks_only_when_its_end_is_known_and_the_child_not_begun(
    ended: bool, begun: bool, expected: list[int]
) -> None:
    """Once its end is known, the child waits for it, unless the group has begun the child."""
    partitions = [
        GroupPartition(
            partition_id=PartitionId(1), state=PartitionState.SEALED, abandoned=True, ended=ended
        ),
        GroupPartition(
            partition_id=PartitionId(2),
            state=PartitionState.OPEN,
            parents=(PartitionId(1),),
            assigned=begun,
        ),
    ]
    assert [
        partition.partition_id for partition in readable_partitions(partitions, set())
    ] == expected
    through = readable_partitions(partitions, {PartitionId(1)})
    assert [partition.partition_id for partition in through] == [2]
