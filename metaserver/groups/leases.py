"""How leases change hands: what is readable, who is granted what, when a hand-over is over.  Pure.

    free ──grant, token + 1──▶ held ──another session is wanted──▶ withdrawn
     ▲                          │ session ends                       │ release, or session ends
     └──────────────────────────┴────────────────────────────────────┘

A group whose strategy is SHARED has no holders: each readable partition is granted to everybody, under one token.

Invariants
    A held or withdrawn lease is granted to nobody else before it is free.
    A withdrawn lease never becomes held again: the same session gets it back only with a higher token.
    Every grant takes a token above all before it.
    A partition is granted only when the group has drained all its parents; in the place of a abandoned one stand those
    which that continues.
    A partition is granted only when its broker has heard of the group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...protocol.errors import TokenUnknownError
from ...protocol.ids import FencingToken, PartitionId, SessionId
from ...protocol.limits import TOKEN_STEP_MAX
from ...protocol.routing import PartitionState
from .allocation import allocate

FENCE_BELIEVED_MAX = TOKEN_STEP_MAX // 2
"""As high as a fence may set the tokens: brokers that have seen none still take as many grants again.  Grants alone
never come so far, wherever a database was restored from."""
EVERYBODY = SessionId("*")
"""Who shall hold the leases of a SHARED group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One consumer group's lease of one partition, held or not."""

    partition_id: PartitionId
    token: FencingToken = FencingToken(0)
    """Of the last grant; 0 before the first."""
    session: SessionId | None = None
    wanted: SessionId | None = None
    """Who shall hold it once it is free."""
    withdrawn: bool = False
    """The holder was asked to hand it over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFacts:
    """What decides if a group may read a partition."""

    partition_id: PartitionId
    state: PartitionState
    parents: tuple[PartitionId, ...] = ()
    abandoned: bool = False
    """Its broker was left behind, and its children go on although its end is not known; declared by whoever ordered it."""
    ended: bool = False
    """Of a abandoned one: its broker came back and has sealed it, so that its end is known."""
    begun: bool = False
    """A session of the group has it, or is about to."""
    lost: bool = False
    """Its loss was accepted: its data is gone, and what it continued may still be unread."""
    heard: bool = True
    """Its broker has the group on its disk, or removes nothing that a group may need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What to write after the leases of a group were settled."""

    leases: tuple[Lease, ...]
    """Those that changed."""
    sessions: frozenset[SessionId]
    """Those whose grants changed."""
    last_token: FencingToken


def readable_partitions(
    partitions: Iterable[PartitionFacts], drained: Collection[PartitionId]
) -> list[PartitionFacts]:
    """
    The partitions a group may read now: there is data or may come some, the group is not through with it,
    is through with all it continues, and its broker has heard of the group: what goes before that is not the group's.

    A parent blocks its children unless its data has expired, its loss was accepted or it was abandoned; the parents of a
    lost or abandoned one still block.  Once the end of a abandoned one is known, a group that has not begun with the child
    reads the parent first; a group that has begun with the child is left at it.
    """
    known = {one.partition_id: one for one in partitions}
    gone = {
        one.partition_id
        for one in known.values()
        if one.state is PartitionState.EXPIRED and not one.lost
    }
    passed = gone | set(drained)

    def lets_by(parent: PartitionId, begun: bool) -> bool:
        one = known.get(parent)
        if parent in passed or one is None or not one.abandoned or (one.ended and not begun):
            return parent in passed
        return all(lets_by(each, begun) for each in one.parents)

    return [
        one
        for one in known.values()
        if one.state in {PartitionState.OPEN, PartitionState.SEALED}
        and one.partition_id not in passed
        and (one.heard or one.begun)
        and all(lets_by(parent, one.begun) for parent in one.parents)
    ]


def drained_through(
    at_end: Collection[int], parents: Mapping[int, Collection[int]]
) -> frozenset[int]:
    """
    Of the partitions that a group is at the end of, those of which it has also drained all that they continue.

    An empty partition is at its end wherever its parents are: drained before them, it would let the group past them.

    Args:
        parents: of each partition those that are not known to hold nobody up.
    """
    through: set[int] = set()
    for partition_id in sorted(at_end):  # parents have lower ids
        if through.issuperset(parents.get(partition_id, ())):
            through.add(partition_id)
    return frozenset(through)


def settle_leases(
    leases: Mapping[PartitionId, Lease],
    sessions: Sequence[SessionId],
    readable: Sequence[PartitionFacts],
    *,
    suspended: Collection[SessionId] = (),
    last_token: FencingToken,
) -> Settlement:
    """
    Free what the dead held, decide who shall hold what, withdraw and grant.

    Args:
        leases: all rows of the group.
        sessions: the live ones, in the order of joining.
        readable: what `readable_partitions` lets through.
        suspended: those of the live ones that get nothing; what they hold is withdrawn.
        last_token: the highest token the group was ever given.
    """
    live = set(sessions)
    after = {
        key: lease
        if lease.session is None or lease.session in live
        else replace(lease, session=None, withdrawn=False)
        for key, lease in leases.items()
    }
    able = [session for session in sessions if session not in suspended]
    target = allocate(
        able,
        [one.partition_id for one in readable],
        current=_owners(after.values(), set(able)),
        preferred=_heirs(after, readable, set(able)),
    )
    changed: set[SessionId] = set()
    for partition_id in after.keys() | target.keys():
        lease = after.get(partition_id) or Lease(partition_id=partition_id)
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
    leases: Mapping[PartitionId, Lease],
    readable: Sequence[PartitionFacts],
    *,
    last_token: FencingToken,
) -> Settlement:
    """As `settle_leases`, for a SHARED group: what is readable is everybody's; `sessions` stays empty."""
    open_to_all = {one.partition_id for one in readable}
    changed = []
    for partition_id in sorted(leases.keys() | open_to_all):
        before = leases.get(partition_id)
        lease = before or Lease(partition_id=partition_id)
        wanted = EVERYBODY if partition_id in open_to_all else None
        lease = replace(lease, session=None, wanted=wanted, withdrawn=False)
        if wanted is not None and (before is None or before.wanted != EVERYBODY):
            last_token = FencingToken(last_token + 1)
            lease = replace(lease, token=last_token)
        if lease != before:
            changed.append(lease)
    return Settlement(leases=tuple(changed), sessions=frozenset(), last_token=last_token)


def renew_token(lease: Lease | None, token: int, *, last_token: FencingToken) -> Lease | None:
    """
    The lease of a SHARED group under the next token, because its broker takes `token` no more; None if it has a
    newer one already.

    Raises:
        TokenUnknownError: a token that was never granted.
    """
    if lease is None or not 0 < token <= lease.token:
        raise TokenUnknownError(token=token)
    if lease.token != token or lease.wanted != EVERYBODY:
        return None
    return replace(lease, token=FencingToken(last_token + 1))


def grant(lease: Lease, *, last_token: FencingToken) -> Lease | None:
    """The lease in the hands of the session that is wanted, with the next token; None if it is not free."""
    if lease.session is not None or lease.wanted is None:
        return None
    token = FencingToken(last_token + 1)
    return replace(lease, session=lease.wanted, token=token, withdrawn=False)


def raise_token_floor(last_token: FencingToken, fence: int) -> FencingToken:
    """
    The token to count on from, when a broker is said to have seen `fence`: a database restored from a copy is behind it.

    However high that is: no broker refuses what is granted then because it would be from the future.
    """
    return FencingToken(max(last_token, min(fence, FENCE_BELIEVED_MAX)))


def release(lease: Lease | None, session: SessionId, token: int) -> Lease | None:
    """
    The lease after its holder let go of it; None if that had happened before, so that a retry is harmless.

    Raises:
        TokenUnknownError: a token that was never granted.
    """
    if lease is None or not 0 < token <= lease.token:
        raise TokenUnknownError(token=token)
    if lease.token != token or lease.session is None:
        return None
    if lease.session != session:
        raise TokenUnknownError("the grant of this token is another session's", token=token)
    return replace(lease, session=None, withdrawn=False)


def _owners(leases: Iterable[Lease], live: Collection[SessionId]) -> dict[PartitionId, SessionId]:
    """Who is to keep what, the longest owned first; what is on its way to its next owner comes last."""
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
    leases: Mapping[PartitionId, Lease],
    readable: Sequence[PartitionFacts],
    live: Collection[SessionId],
) -> dict[PartitionId, SessionId]:
    """For each child whose parent somebody holds: that session; it has the keys' state at hand."""
    heirs = {}
    for one in readable:
        for parent in one.parents:
            lease = leases.get(parent)
            if lease is not None and lease.session is not None and lease.session in live:
                heirs[one.partition_id] = lease.session
    return heirs
