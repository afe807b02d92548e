"""Decides about leases: which partitions a group may read, which session gets which, and when a
hand-over is done. Pure.

    free ──grant, token + 1──▶ held ──another session is wanted──▶ withdrawn
     ▲                          │ session ends                       │ release, or session ends
     └──────────────────────────┴────────────────────────────────────┘

A group whose strategy is SHARED has no holders: each readable partition is granted to every
session, under one token.

Invariants
    A held or withdrawn lease is granted to another session only after it is free.
    A withdrawn lease never becomes held again: the same session gets it back only with a higher
    token.
    Every grant takes a token above all earlier ones.
    A partition is granted only when the group has drained all its parents and their ancestors.
    Instead of an abandoned parent, that parent's own parents have to be drained.
    A partition is granted only when its broker knows the group, and has stored where the group
    begins on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ...protocol.errors import TokenUnknownError
from ...protocol.ids import FencingToken, PartitionId, SessionId
from ...protocol.limits import TOKEN_STEP_MAX
from ...protocol.routing import PartitionState
from .allocation import allocate, pass_on

FENCE_BELIEVED_MAX = TOKEN_STEP_MAX // 2
"""Highest token that a reported fence can set. Brokers accept as many grants after it even if they
have seen no token, and grants alone never reach it.
"""
EVERYBODY = SessionId("*")
"""The `wanted` of a lease of a SHARED group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionLease:
    """The lease of one partition in one consumer group, held or free."""

    partition_id: PartitionId
    token: FencingToken = FencingToken(0)
    """Token of the last grant; 0 before the first."""
    session: SessionId | None = None
    wanted: SessionId | None = None
    """Session to which the lease is granted once it is free."""
    withdrawn: bool = False
    """True if the holder was asked to hand it over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFacts:
    """The facts that decide whether a group may read a partition."""

    partition_id: PartitionId
    state: PartitionState
    parents: tuple[PartitionId, ...] = ()
    abandoned: bool = False
    """True if an operation continued without its broker: its children are readable although its end
    is unknown.
    """
    ended: bool = False
    """True if it was abandoned, and its broker has returned and sealed it, so that its end is
    known.
    """
    begun: bool = False
    """True if a session of the group holds it or is about to."""
    lost: bool = False
    """True if its loss was accepted: its data is gone, but its parents may still be unread."""
    heard: bool = True
    """True if its broker has the group on its disk, or if retention is by time alone and does not
    wait for groups.
    """
    starting: bool = False
    """True if its broker has not stored yet where the group begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The changes that settling a group's leases makes."""

    leases: tuple[PartitionLease, ...]
    sessions: frozenset[SessionId]
    """The sessions whose grants changed."""
    last_token: FencingToken


def readable_partitions(
    partitions: Iterable[PartitionFacts], drained: Collection[PartitionId]
) -> list[PartitionFacts]:
    """
    Return the partitions that a group may read now.

    These are OPEN or SEALED, and not drained by the group; their broker knows the group and its
    start; and no parent blocks them.

    A parent blocks its children unless the group has drained it, its loss was accepted, or it was
    abandoned. The parents of a lost or abandoned partition still block. Once the end of an
    abandoned partition is known, it blocks the children that the group has not begun. The parents
    of a drained partition block too if they were reset without it, unless they are abandoned.

    Args:
        partitions: the partitions of the subject, and as parents only partitions among them or
            drained ones; those whose data has expired (`is_gone`) are left out, because they block
            nothing.
        drained: the partitions that the group has drained; those that are neither in `partitions`
            nor parents of them may be left out.
    """
    facts = {partition.partition_id: partition for partition in partitions}
    passed = set(drained)
    blocking: dict[bool, set[PartitionId]] = {True: set(), False: set()}
    """Whether the children are begun → partitions that block them, by themselves or by their
    ancestors.
    """

    def blocks(parent_id: PartitionId, begun: bool) -> bool:
        return parent_id in blocking[begun] or not (parent_id in facts or parent_id in passed)

    for number, each in sorted(facts.items()):  # parents have lower ids
        for begun, those in blocking.items():
            stays = number not in passed and (not each.abandoned or (each.ended and not begun))
            seen_begun = begun or number in passed
            if stays or any(blocks(parent_id, seen_begun) for parent_id in each.parents):
                those.add(number)

    return [
        partition
        for partition in facts.values()
        if partition.state in {PartitionState.OPEN, PartitionState.SEALED}
        and partition.partition_id not in passed
        and (partition.heard or partition.begun)
        and not partition.starting
        and not any(blocks(parent_id, partition.begun) for parent_id in partition.parents)
    ]


def drained_through(
    at_end: Collection[int], parents: Mapping[int, Collection[int]]
) -> frozenset[int]:
    """
    Return those partitions that a group has drained, among the ones whose end it has reached.

    A group drains a partition after all its parents. An empty partition has its end at offset 0: if
    it counted as drained before its parents, it would unblock its children too early.

    Args:
        at_end: ids of the partitions whose end the group has reached.
        parents: partition id → its parents that may block.
    """
    through: set[int] = set()
    for partition_id in sorted(at_end):  # parents have lower ids
        if through.issuperset(parents.get(partition_id, ())):
            through.add(partition_id)
    return frozenset(through)


def settle_leases(
    leases: Mapping[PartitionId, PartitionLease],
    sessions: Sequence[SessionId],
    readable: Sequence[PartitionFacts],
    *,
    suspended: Collection[SessionId] = (),
    unreached: Mapping[PartitionId, Collection[SessionId]] = MappingProxyType({}),
    last_token: FencingToken,
) -> Settlement:
    """
    Free the leases of ended sessions, allocate the readable partitions, and withdraw and grant
    leases.

    Args:
        leases: all leases of the group.
        sessions: the live sessions, in the order of joining.
        readable: the partitions that `readable_partitions` returned.
        suspended: live sessions that are granted nothing; their leases are withdrawn.
        unreached: partition → sessions that cannot connect to its broker; others get it, if there
            are any.
        last_token: the highest token that the group was ever granted.
    """
    live = set(sessions)
    after = {
        key: lease
        if lease.session is None or lease.session in live
        else replace(lease, session=None, withdrawn=False)
        for key, lease in leases.items()
    }
    able = [session for session in sessions if session not in suspended]
    owners = _owners(after.values(), set(able))
    target = allocate(
        able,
        [partition.partition_id for partition in readable],
        current=owners,
        preferred=_heirs(after, readable, set(able)),
    )
    target = pass_on(target, able, current=owners, unreached=unreached)
    changed: set[SessionId] = set()
    for partition_id in after.keys() | target.keys():
        lease = after.get(partition_id) or PartitionLease(partition_id=partition_id)
        wanted = target.get(partition_id)
        if lease.session is not None and lease.session != wanted and not lease.withdrawn:
            changed.add(lease.session)
            lease = replace(lease, withdrawn=True)
        after[partition_id] = replace(lease, wanted=wanted)
    for partition_id in sorted(target):
        granted = grant(after[partition_id], last_token=last_token)
        if granted is not None:
            after[partition_id] = granted
            last_token = granted.token
            changed.add(target[partition_id])
    rows = tuple(lease for key, lease in sorted(after.items()) if lease != leases.get(key))
    return Settlement(leases=rows, sessions=frozenset(changed), last_token=last_token)


def settle_shared(
    leases: Mapping[PartitionId, PartitionLease],
    readable: Sequence[PartitionFacts],
    *,
    last_token: FencingToken,
) -> Settlement:
    """Return `settle_leases` for a SHARED group: every session is granted every readable partition,
    and `sessions` of the result is empty.
    """
    open_to_all = {partition.partition_id for partition in readable}
    changed = []
    for partition_id in sorted(leases.keys() | open_to_all):
        before = leases.get(partition_id)
        lease = before or PartitionLease(partition_id=partition_id)
        wanted = EVERYBODY if partition_id in open_to_all else None
        lease = replace(lease, session=None, wanted=wanted, withdrawn=False)
        if wanted is not None and (before is None or before.wanted != EVERYBODY):
            last_token = FencingToken(last_token + 1)
            lease = replace(lease, token=last_token)
        if lease != before:
            changed.append(lease)
    return Settlement(leases=tuple(changed), sessions=frozenset(), last_token=last_token)


def renew_token(
    lease: PartitionLease | None, token: int, *, last_token: FencingToken
) -> PartitionLease | None:
    """
    Return a SHARED group's lease under the next token, because its broker refuses `token`.

    Returns:
        None if the lease has a newer token already.

    Raises:
        TokenUnknownError: the token was never granted.
    """
    if lease is None or not 0 < token <= lease.token:
        raise TokenUnknownError(token=token)
    if lease.token != token or lease.wanted != EVERYBODY:
        return None
    return replace(lease, token=FencingToken(last_token + 1))


def grant(lease: PartitionLease, *, last_token: FencingToken) -> PartitionLease | None:
    """Return the lease as granted to its wanted session under the next token; None if it is not
    free.
    """
    if lease.session is not None or lease.wanted is None:
        return None
    token = FencingToken(last_token + 1)
    return replace(lease, session=lease.wanted, token=token, withdrawn=False)


def raise_token_floor(last_token: FencingToken, fence: int) -> FencingToken:
    """
    Return the token after which the group's tokens continue, given that a broker is said to have
    seen `fence`.

    The tokens of a database that was restored from a copy may be below that fence. The result is so
    low that no broker refuses later tokens as impossible.
    """
    return FencingToken(max(last_token, min(fence, FENCE_BELIEVED_MAX)))


def release(lease: PartitionLease | None, session: SessionId, token: int) -> PartitionLease | None:
    """
    Return the lease as free; None if it was released already, so that a retry is harmless.

    Raises:
        TokenUnknownError: the token was never granted, or was granted to another session.
    """
    if lease is None or not 0 < token <= lease.token:
        raise TokenUnknownError(token=token)
    if lease.token != token or lease.session is None:
        return None
    if lease.session != session:
        raise TokenUnknownError("the token was granted to another session", token=token)
    return replace(lease, session=None, withdrawn=False)


def _owners(
    leases: Iterable[PartitionLease], live: Collection[SessionId]
) -> dict[PartitionId, SessionId]:
    """Return partition → present owner, the longest owned first, and leases in a hand-over last."""
    held = []
    moving = []
    for lease in leases:
        if lease.withdrawn and lease.wanted in live:
            moving.append(lease)
        elif lease.session is not None:
            held.append(lease)
        elif lease.wanted in live:
            moving.append(lease)
    held.sort(key=lambda lease: lease.token)
    moving.sort(key=lambda lease: lease.partition_id)
    owners = {lease.partition_id: lease.session for lease in held}
    owners |= {lease.partition_id: lease.wanted for lease in moving}
    return {key: session for key, session in owners.items() if session is not None}


def _heirs(
    leases: Mapping[PartitionId, PartitionLease],
    readable: Sequence[PartitionFacts],
    live: Collection[SessionId],
) -> dict[PartitionId, SessionId]:
    """Return child partition → the session that holds a parent of it, because that session has
    state of the same keys.
    """
    heirs = {}
    for partition in readable:
        for parent in partition.parents:
            lease = leases.get(parent)
            if lease is not None and lease.session is not None and lease.session in live:
                heirs[partition.partition_id] = lease.session
    return heirs
