"""Allocates partitions to sessions: sticky, balanced, with the least movement.  Pure.

Invariants
    Every partition has exactly one session, if there is a session.
    The sessions' shares differ by at most one.
    No more partitions change their session than the shares demand.

Quotas first, then keep, then fill; as Kafka's sticky assignor, without its search.  A session gives up the partitions
that it got last, so a rolling restart moves the same few partitions again and again, and leaves the others alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
        current: the present owner of a partition, the longest owned first; unknown partitions and sessions are ignored.
        preferred: the session that gets a free partition if its share allows: the owner of a parent.

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
    # A larger share goes where it saves a movement, then where it keeps a child with its parent's owner.
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
