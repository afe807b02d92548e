"""Allocates partitions to sessions: sticky, balanced, with the least movement.  Pure.

Invariants
    Every partition has exactly one session, if there is a session.
    The sessions' shares differ by at most one, unless a session does not get at the broker of a
    partition. No more partitions change their session than the shares demand.

Quotas first, then keep, then fill; as Kafka's sticky assignor, without its search.  A session gives
up the partitions that it got last, so a rolling restart moves the same few partitions again and
again, and leaves the others alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ...protocol.ids import PartitionId, SessionId


def allocate(
    sessions: Sequence[SessionId],
    partitions: Sequence[PartitionId],
    *,
    current: Mapping[PartitionId, SessionId],
    preferred: Mapping[PartitionId, SessionId],
) -> dict[PartitionId, SessionId]:
    """
    Allocate partitions to sessions.

    Args:
        sessions: the live ones; among equals the earlier one gets the larger share.
        partitions: the readable ones, in the order in which free ones are allocated.
        current: the present owner of a partition, the longest owned first; unknown partitions and
            sessions are ignored.
        preferred: the session that gets a free partition if its share allows: the owner of a
            parent.

    Returns:
        The session of each partition; empty without sessions.
    """
    if not sessions:
        return {}
    kept: dict[SessionId, list[PartitionId]] = {session: [] for session in sessions}
    liked: dict[SessionId, list[PartitionId]] = {session: [] for session in sessions}
    known = dict.fromkeys(partitions)
    for partition, session in current.items():
        if session in kept and partition in known:
            kept[session].append(partition)
    for partition, session in preferred.items():
        if session in liked and partition in known and current.get(partition) not in kept:
            liked[session].append(partition)

    share, larger = divmod(len(known), len(sessions))
    # A larger share goes where it saves a movement, then where it keeps a child with its parent's
    # owner.
    ranked = sorted(
        sessions,
        key=lambda session: (
            len(kept[session]) <= share,
            len(kept[session]) + len(liked[session]) <= share,
        ),
    )
    missing = {}
    allocated: dict[PartitionId, SessionId] = {}
    for rank, session in enumerate(ranked):
        quota = share + (rank < larger)
        mine = (kept[session] + liked[session])[:quota]
        allocated |= dict.fromkeys(mine, session)
        missing[session] = quota - len(mine)
    free = iter([partition for partition in known if partition not in allocated])
    for session in sessions:
        allocated |= {next(free): session for _ in range(missing[session])}
    assert len(allocated) == len(known)
    return allocated


def pass_on(
    allocated: Mapping[PartitionId, SessionId],
    sessions: Sequence[SessionId],
    *,
    current: Mapping[PartitionId, SessionId],
    unreached: Mapping[PartitionId, Collection[SessionId]],
) -> dict[PartitionId, SessionId]:
    """
    Pass partitions on from sessions that do not get at their brokers.

    One stays with its present owner if that gets at it, so nothing moves to and fro; else the
    session with the fewest gets it. Where no session gets at a partition, it stays where it is: a
    move would help none.

    Args:
        allocated: partition → session, without regard to `unreached`.
        sessions: the live ones, as for `allocate`.
        unreached: partition → sessions that do not get at it.
    """
    after = dict(allocated)
    counts = Counter(after.values())
    for partition in sorted(unreached.keys() & after.keys()):
        session, shut_out = after[partition], unreached[partition]
        able = [each for each in sessions if each not in shut_out]
        if session in able:
            continue
        owner = current.get(partition, session)
        if owner in (able or sessions):
            heir = owner
        else:
            heir = min(able or [session], key=lambda each: counts[each])
        counts[session] -= 1
        counts[heir] += 1
        after[partition] = heir
    return after
