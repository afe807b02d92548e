"""Decisions about leases: which partitions are readable, which session is granted which, when a
hand-over is done.  Pure.

    free ──grant, token + 1──▶ held ──another session is wanted──▶ withdrawn
     ▲                          │ session ends                       │ release, or session ends
     └──────────────────────────┴────────────────────────────────────┘

A group whose strategy is SHARED has no holders: each readable partition is granted to every
session, under one token.

Invariants
    A held or withdrawn lease is granted to another session only after it is free.
    A withdrawn lease never becomes held again: the same session gets it back only with a higher
    token. Every grant takes a token above all before it. A partition is granted only when the group
    has drained all its parents, and what is before them.  Instead of an abandoned parent, its own
    parents have to be drained. A partition is granted only when its broker knows the group, and has
    stored where the group begins on it.
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
"""The highest token that a fence can set.  Brokers that have seen no token accept as many grants
after it.  Grants alone never reach it.
"""
EVERYBODY = SessionId("*")
"""The `wanted` of a lease of a SHARED group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionLease:
    """The lease of one partition in one consumer group, held or free."""

    partition_id: PartitionId
    token: FencingToken = FencingToken(0)
    """The token of the last grant; 0 before the first."""
    session: SessionId | None = None
    wanted: SessionId | None = None
    """The session that is granted it once it is free."""
    withdrawn: bool = False
    """The holder was asked to hand it over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFacts:
    """The facts that decide whether a group may read a partition."""

    partition_id: PartitionId
    state: PartitionState
    parents: tuple[PartitionId, ...] = ()
    abandoned: bool = False
    """An operation continued without its broker: its children are readable although its end is
    unknown.
    """
    ended: bool = False
    """It was abandoned, and its broker came back and has sealed it: its end is known."""
    begun: bool = False
    """A session of the group holds it, or is about to."""
    lost: bool = False
    """Its loss was accepted: its data is gone; its parents may still be unread."""
    heard: bool = True
    """Its broker has the group on its disk, or retention is by time alone and does not wait for
    groups.
    """
    starting: bool = False
    """Its broker has not stored yet where the group begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The changes that settling a group's leases makes."""

    leases: tuple[PartitionLease, ...]
    """The changed leases."""
    sessions: frozenset[SessionId]
    """The sessions whose grants changed."""
    last_token: FencingToken


def readable_partitions(
    partitions: Iterable[PartitionFacts], drained: Collection[PartitionId]
) -> list[PartitionFacts]:
    """
    Return the partitions that a group may read now.

    These are OPEN or SEALED, not drained by the group, known as the group's to their broker with
    the group's start, and blocked by no parent. A parent blocks its children unless the group has
    drained it, its loss was accepted or it was abandoned. The parents of a lost or abandoned
    partition still block.  Once the end of an abandoned partition is known, it blocks the children
    that the group has not begun.  The parents of a drained partition block too, if they were reset
    without it; abandoned ones do not.

    Args:
        partitions: without those whose data has expired (`is_gone`), also as parents: they block
            nothing.
        drained: at least those of `partitions` and of their parents that the group has drained.
    """
    facts = {partition.partition_id: partition for partition in partitions}
    passed = set(drained)
    blocking: dict[bool, set[PartitionId]] = {True: set(), False: set()}
    """Whether the children are begun → partitions that block them, themselves or by what is before
    them.
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
    Return the partitions that a group has drained, of those whose end it has reached.

    A group drains a partition after all its parents.  An empty partition has its end at offset 0:
    counted as drained before its parents, it would unblock its children too early.

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
    Free the leases of ended sessions, allocate the readable partitions, withdraw and grant leases.

    Args:
        leases: all leases of the group.
        sessions: the live ones, in the order of joining.
        readable: the partitions that `readable_partitions` returned.
        suspended: live sessions that are granted nothing; their leases are withdrawn.
        unreached: partition → sessions that do not get at its broker; others have it, if there is
            one.
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
    """As `settle_leases`, for a SHARED group: every session is granted every readable partition;
    `sessions` is empty.
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
    Return the lease of a SHARED group under the next token, because its broker refuses `token`.

    Returns None if the lease has a newer token already.

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
    Return the token after which the group's tokens continue, when a broker is said to have seen
    `fence`.

    A database restored from a copy may be behind that fence.  The result stays so low that no
    broker refuses later tokens as impossible.
    """
    return FencingToken(max(last_token, min(fence, FENCE_BELIEVED_MAX)))


def release(lease: PartitionLease | None, session: SessionId, token: int) -> PartitionLease | None:
    """
    Return the lease as free; None if it was released before, so that a retry is harmless.

    Raises:
        TokenUnknownError: the token was never granted, or is another session's.
    """
    if lease is None or not 0 < token <= lease.token:
        raise TokenUnknownError(token=token)
    if lease.token != token or lease.session is None:
        return None
    if lease.session != session:
        raise TokenUnknownError("the grant of this token is another session's", token=token)
    return replace(lease, session=None, withdrawn=False)


def _owners(
    leases: Iterable[PartitionLease], live: Collection[SessionId]
) -> dict[PartitionId, SessionId]:
    """Return the present owner of each lease, the longest owned first; leases that are being handed
    over come last.
    """
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
    """Return the session that holds a parent, for each child with such a parent: it has state of
    the same keys.
    """
    heirs = {}
    for partition in readable:
        for parent in partition.parents:
            lease = leases.get(parent)
            if lease is not None and lease.session is not None and lease.session in live:
                heirs[partition.partition_id] = lease.session
    return heirs
