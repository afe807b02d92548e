"""Which session shall read which partition: sticky, balanced, with the least movement.  Pure.

Invariants
    Every partition goes to exactly one session, as long as there is one.
    The sessions' shares differ by at most one.
    No more partitions change their session than the shares demand.

Source: quotas first, then keep, then fill; as Kafka's sticky assignor, without its search.  What has to go is
what came last, so that a rolling restart hands the same few partitions on instead of stirring all of them.
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
    Deal the partitions out.

    Args:
        sessions: the live ones; among equals the earlier one gets the larger share.
        partitions: what may be read now, in the order in which it is dealt out.
        current: who has a partition now, the longest owned first; others than the above are left out.
        preferred: who should have a partition that nobody has, if its share allows: the owner of its parent.

    Returns:
        The session of each partition; empty without sessions.
    """
    if not sessions:
        return {}
    kept: dict[SessionId, list[PartitionId]] = {session: [] for session in sessions}
    liked: dict[SessionId, list[PartitionId]] = {session: [] for session in sessions}
    left = dict.fromkeys(partitions)
    for partition, session in current.items():
        if session in kept and partition in left:
            kept[session].append(partition)
    for partition, session in preferred.items():
        if session in liked and partition in left and current.get(partition) not in kept:
            liked[session].append(partition)

    share, larger = divmod(len(left), len(sessions))
    # A larger share goes where it saves a movement, then where it lets a child stay with its parent's owner.
    ranked = sorted(
        sessions,
        key=lambda one: (len(kept[one]) <= share, len(kept[one]) + len(liked[one]) <= share),
    )
    room = {}
    dealt: dict[PartitionId, SessionId] = {}
    for rank, session in enumerate(ranked):
        quota = share + (rank < larger)
        mine = (kept[session] + liked[session])[:quota]
        dealt |= dict.fromkeys(mine, session)
        room[session] = quota - len(mine)
    pool = iter([partition for partition in left if partition not in dealt])
    for session in sessions:
        dealt |= {next(pool): session for _ in range(room[session])}
    assert len(dealt) == len(left)
    return dealt
