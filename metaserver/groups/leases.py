"""Decides which partitions a group may read, which session gets the lease of each, and when a
hand-over is complete. Pure.

    free ──grant, token + 1──▶ held ──wanted by another session──▶ withdrawn
     ▲                          │ session ends                       │ release, or session ends
     └──────────────────────────┴────────────────────────────────────┘

In a SHARED group, leases have no holder: each readable partition is granted to every session, with
the same token.

Invariants
    A held or withdrawn lease must become free before it is granted to another session.
    A withdrawn lease is never held again with the same token: its session can only get a new grant,
    with a higher token.
    The token of every grant is higher than all earlier tokens of the group.
    A partition is granted only when the group has drained all of its parents and their ancestors.
    If a parent is abandoned, its own parents must have been drained instead.
    A partition is granted only when its broker knows the group and has stored the offset at which
    the group starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ...protocol.control import LeaseEnd, PreviousOwner
from ...protocol.errors import TokenUnknownError
from ...protocol.ids import FencingToken, PartitionId, SessionId
from ...protocol.limits import TOKEN_STEP_MAX
from ...protocol.routing import PartitionState
from .allocation import allocate, avoid_unreachable

FENCE_ACCEPTED_MAX = TOKEN_STEP_MAX // 2
"""Highest token that a reported fence can lead to. It leaves room for as many further grants before
brokers refuse tokens as impossible, and is never reached by grants alone.
"""
EVERYBODY = SessionId("*")
"""The value of `wanted` in the leases of a SHARED group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionLease:
    """The lease of one partition by one consumer group, held or free."""

    partition_id: PartitionId
    token: FencingToken = FencingToken(0)
    """Token of the last grant; 0 before the first grant."""
    session: SessionId | None = None
    wanted: SessionId | None = None
    """The session that will be granted the lease once it is free."""
    withdrawn: bool = False
    """True if the holder has been asked to release it."""
    previous: PreviousOwner | None = None
    """The member that held it before; None if there was none or it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPartition:
    """A partition from the point of view of one group, with the facts that decide whether the group
    may read it.
    """

    partition_id: PartitionId
    state: PartitionState
    parents: tuple[PartitionId, ...] = ()
    abandoned: bool = False
    """True if an operation continued without its broker. Its children are readable even though its
    end offset is unknown.
    """
    ended: bool = False
    """True if it was abandoned, but its broker has returned and sealed it since, so its end offset
    is known.
    """
    assigned: bool = False
    """True if its lease is held by, or promised to, a session of the group."""
    lost: bool = False
    """True if an operator has accepted its loss. Its data is gone, but its parents may not have
    been read yet.
    """
    is_announced: bool = True
    """True if its broker has stored the group, or if retention is purely time-based and does not
    wait for groups.
    """
    start_pending: bool = False
    """True if its broker has not yet stored the group's start offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The result of settling a group's leases."""

    leases: tuple[PartitionLease, ...]
    """The leases that changed."""
    sessions: frozenset[SessionId]
    """The sessions whose grants changed."""
    last_token: FencingToken


def readable_partitions(
    partitions: Iterable[GroupPartition], drained: Collection[PartitionId]
) -> list[GroupPartition]:
    """
    Return the partitions that a group may read now.

    These are the partitions that are OPEN or SEALED, that the group has not drained, whose broker
    knows the group and its start offset, and that are not blocked by an ancestor.

    A partition blocks its children until the group has drained it, unless it is lost or abandoned.
    The parents of a lost or abandoned partition still block its children. Once the end of an
    abandoned partition is known, it blocks those children that are not yet assigned to a session.
    The parents of a drained partition also block its children if they were reset without it, unless
    they are abandoned.

    Args:
        partitions: the subject's partitions, except those whose data has expired
            (`is_expired_by_retention`), which block nothing. Each parent must be in `partitions` or
            in `drained`.
        drained: the partitions that the group has drained; only `partitions` and their parents are
            relevant.
    """
    by_id = {partition.partition_id: partition for partition in partitions}
    drained_ids = set(drained)
    blockers_by_assigned: dict[bool, set[PartitionId]] = {True: set(), False: set()}
    """Maps whether a child is assigned to the set of partitions that block such a child, directly
    or through an ancestor.
    """

    def blocks(parent_id: PartitionId, assigned: bool) -> bool:
        return parent_id in blockers_by_assigned[assigned] or not (
            parent_id in by_id or parent_id in drained_ids
        )

    for partition_id, candidate in sorted(by_id.items()):  # parents have lower ids
        for assigned, blockers in blockers_by_assigned.items():
            blocks_itself = partition_id not in drained_ids and (
                not candidate.abandoned or (candidate.ended and not assigned)
            )
            assigned_below = assigned or partition_id in drained_ids
            if blocks_itself or any(
                blocks(parent_id, assigned_below) for parent_id in candidate.parents
            ):
                blockers.add(partition_id)

    return [
        partition
        for partition in by_id.values()
        if partition.state in {PartitionState.OPEN, PartitionState.SEALED}
        and partition.partition_id not in drained_ids
        and (partition.is_announced or partition.assigned)
        and not partition.start_pending
        and not any(blocks(parent_id, partition.assigned) for parent_id in partition.parents)
    ]


def drained_after_parents(
    at_end_ids: Collection[int], parents: Mapping[int, Collection[int]]
) -> frozenset[int]:
    """
    Return those partitions in `at_end_ids` that a group has drained.

    A partition counts as drained only after all of its parents. Without this rule, an empty
    partition would unblock its children too early, because a group is always at its end.

    Args:
        at_end_ids: ids of the partitions whose end the group has reached.
        parents: maps each partition id to the parents that may block it.
    """
    drained_ids: set[int] = set()
    for partition_id in sorted(at_end_ids):  # parents have lower ids
        if drained_ids.issuperset(parents.get(partition_id, ())):
            drained_ids.add(partition_id)
    return frozenset(drained_ids)


def settle_leases(
    leases: Mapping[PartitionId, PartitionLease],
    sessions: Sequence[SessionId],
    readable: Sequence[GroupPartition],
    *,
    suspended: Collection[SessionId] = (),
    unreachable: Mapping[PartitionId, Collection[SessionId]] = MappingProxyType({}),
    last_token: FencingToken,
) -> Settlement:
    """
    Free the leases of sessions that have ended, allocate the readable partitions, and withdraw and
    grant leases accordingly.

    Args:
        leases: all leases of the group.
        sessions: the live sessions, in the order in which they joined.
        readable: the result of `readable_partitions`.
        suspended: live sessions that get no grants and whose leases are withdrawn.
        unreachable: maps a partition to the sessions that cannot connect to its broker; it is
            granted to other sessions, if there are any.
        last_token: the highest token ever granted in the group.
    """
    live_sessions = set(sessions)
    updated_leases = {
        key: lease
        if lease.session is None or lease.session in live_sessions
        else replace(lease, session=None, withdrawn=False, previous=None)
        for key, lease in leases.items()
    }
    active_sessions = [session for session in sessions if session not in suspended]
    owners = _current_owners(updated_leases.values(), set(active_sessions))
    target_owners = allocate(
        active_sessions,
        [partition.partition_id for partition in readable],
        current=owners,
        preferred=_preferred_owners(updated_leases, readable, set(active_sessions)),
    )
    target_owners = avoid_unreachable(
        target_owners, active_sessions, current=owners, unreachable=unreachable
    )
    changed_sessions: set[SessionId] = set()
    for partition_id in updated_leases.keys() | target_owners.keys():
        lease = updated_leases.get(partition_id) or PartitionLease(partition_id=partition_id)
        wanted_session = target_owners.get(partition_id)
        if lease.session is not None and lease.session != wanted_session and not lease.withdrawn:
            changed_sessions.add(lease.session)
            lease = replace(lease, withdrawn=True)
        updated_leases[partition_id] = replace(lease, wanted=wanted_session)
    for partition_id in sorted(target_owners):
        granted_lease = grant_lease(updated_leases[partition_id], last_token=last_token)
        if granted_lease is not None:
            updated_leases[partition_id] = granted_lease
            last_token = granted_lease.token
            changed_sessions.add(target_owners[partition_id])
    changed_leases = tuple(
        lease for key, lease in sorted(updated_leases.items()) if lease != leases.get(key)
    )
    return Settlement(
        leases=changed_leases, sessions=frozenset(changed_sessions), last_token=last_token
    )


def settle_shared_leases(
    leases: Mapping[PartitionId, PartitionLease],
    readable: Sequence[GroupPartition],
    *,
    last_token: FencingToken,
) -> Settlement:
    """Settle the leases of a SHARED group, whose sessions are all granted every readable partition.
    The result does not list any sessions.
    """
    readable_ids = {partition.partition_id for partition in readable}
    changed_leases = []
    for partition_id in sorted(leases.keys() | readable_ids):
        stored_lease = leases.get(partition_id)
        lease = stored_lease or PartitionLease(partition_id=partition_id)
        wanted_session = EVERYBODY if partition_id in readable_ids else None
        lease = replace(lease, session=None, wanted=wanted_session, withdrawn=False)
        if wanted_session is not None and (
            stored_lease is None or stored_lease.wanted != EVERYBODY
        ):
            last_token = FencingToken(last_token + 1)
            lease = replace(lease, token=last_token)
        if lease != stored_lease:
            changed_leases.append(lease)
    return Settlement(leases=tuple(changed_leases), sessions=frozenset(), last_token=last_token)


def renew_token(
    lease: PartitionLease | None, token: int, *, last_token: FencingToken
) -> PartitionLease | None:
    """
    Return the lease of a SHARED group with the next token, because its broker refuses `token`.

    Returns:
        The new lease; None if the lease already has a newer token.

    Raises:
        TokenUnknownError: the token was never granted.
    """
    if lease is None or not 0 < token <= lease.token:
        raise TokenUnknownError(token=token)
    if lease.token != token or lease.wanted != EVERYBODY:
        return None
    return replace(lease, token=FencingToken(last_token + 1))


def grant_lease(lease: PartitionLease, *, last_token: FencingToken) -> PartitionLease | None:
    """Return the lease as granted, with the next token, to the session that wants it. Return None
    if it is not free or no session wants it.
    """
    if lease.session is not None or lease.wanted is None:
        return None
    token = FencingToken(last_token + 1)
    return replace(lease, session=lease.wanted, token=token, withdrawn=False)


def raise_token_floor(last_token: FencingToken, fence: int) -> FencingToken:
    """
    Return the token from which the group's tokens must continue, given the fence reported by a
    broker.

    Tokens in a database that was restored from a backup may be lower than the fence. The result is
    capped so that no broker refuses later tokens as impossible.
    """
    return FencingToken(max(last_token, min(fence, FENCE_ACCEPTED_MAX)))


def release_lease(
    lease: PartitionLease | None,
    session: SessionId,
    token: int,
    *,
    client: str = "",
    suspended: bool = False,
) -> PartitionLease | None:
    """
    Return the freed lease, or None if it was already released, so that a retry is harmless.

    Args:
        client: the display name of the session's member; "" if it is unknown.
        suspended: whether the session is suspended, as it is while it leaves.

    Raises:
        TokenUnknownError: the token was never granted, or was granted to another session.
    """
    if lease is None or not 0 < token <= lease.token:
        raise TokenUnknownError(token=token)
    if lease.token != token or lease.session is None:
        return None
    if lease.session != session:
        raise TokenUnknownError("the token was granted to another session", token=token)
    rebalanced = lease.withdrawn and lease.wanted not in {None, session} and not suspended
    end = LeaseEnd.REBALANCE if rebalanced else LeaseEnd.RELEASED
    previous = PreviousOwner(client=client, end=end) if client else None
    return replace(lease, session=None, withdrawn=False, previous=previous)


def _current_owners(
    leases: Iterable[PartitionLease], live_sessions: Collection[SessionId]
) -> dict[PartitionId, SessionId]:
    """Return a dict that maps each partition to its current owner, longest owned first. Leases
    promised to a session come last.
    """
    owned_leases = []
    promised_leases = []
    for lease in leases:
        if lease.withdrawn and lease.wanted in live_sessions:
            promised_leases.append(lease)
        elif lease.session is not None:
            owned_leases.append(lease)
        elif lease.wanted in live_sessions:
            promised_leases.append(lease)
    owned_leases.sort(key=lambda lease: lease.token)
    promised_leases.sort(key=lambda lease: lease.partition_id)
    owners = {lease.partition_id: lease.session for lease in owned_leases}
    owners |= {lease.partition_id: lease.wanted for lease in promised_leases}
    return {key: session for key, session in owners.items() if session is not None}


def _preferred_owners(
    leases: Mapping[PartitionId, PartitionLease],
    readable: Sequence[GroupPartition],
    live_sessions: Collection[SessionId],
) -> dict[PartitionId, SessionId]:
    """Return a dict that maps a partition to the session that holds one of its parents and
    therefore has state for its keys.
    """
    preferred_sessions = {}
    for partition in readable:
        for parent in partition.parents:
            lease = leases.get(parent)
            if lease is not None and lease.session is not None and lease.session in live_sessions:
                preferred_sessions[partition.partition_id] = lease.session
    return preferred_sessions
