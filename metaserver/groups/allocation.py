"""Allocates partitions to sessions: sticky, balanced, with the least movement. Pure.

Invariants
    Every partition has exactly one session, if there is a session.
    The sessions' shares differ by at most one, unless a session cannot connect to the broker of a
    partition.
    Only as many partitions change their session as the shares require.

It sets quotas, then keeps partitions, then fills up, as Kafka's sticky assignor does, but without
its search. A session gives up the partitions that it got last, so that a rolling restart moves the
same few partitions repeatedly, and no others.
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
        sessions: the live sessions; among equals the earlier one gets the larger share.
        partitions: the readable partitions, in the order in which free ones are allocated.
        current: partition → its present owner, the longest owned first; unknown partitions and
            sessions are ignored.
        preferred: partition → the session that gets it when it is free, if its share allows: the
            owner of a parent.

    Returns:
        Partition → its session; empty without sessions.
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
    Reassign partitions whose sessions cannot connect to their brokers.

    A partition stays with its present owner if that can connect, so that nothing moves back and
    forth; else the session with the fewest partitions gets it. A partition to which no session can
    connect stays where it is, because a move would not help.

    Args:
        allocated: partition → session, without regard to `unreached`.
        sessions: the live sessions, as for `allocate`.
        unreached: partition → sessions that cannot connect to its broker.
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
