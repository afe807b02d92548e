"""Allocates partitions to sessions: the allocation is sticky, balanced, and moves as few partitions
as possible. Pure.

Invariants
    If there is at least one session, every partition is assigned to exactly one session.
    The sessions' shares differ by at most one, unless a session cannot connect to the broker of a
    partition.
    Only as many partitions are moved as the shares require.

The algorithm sets a quota for each session, keeps current assignments up to the quota, and then
assigns the rest. It works like Kafka's sticky assignor, but without its search. A session loses its
most recently assigned partitions first, so a rolling restart keeps moving the same few.
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
        sessions: the live sessions; of those with an equal claim to a larger share, the earliest
            gets it.
        partitions: the readable partitions; unassigned ones are assigned in this order.
        current: maps each partition to its current owner, longest owned first; unknown partitions
            and sessions are ignored.
        preferred: maps an unassigned partition to the session that gets it if its quota allows,
            which is the owner of a parent.

    Returns:
        A dict that maps each partition to its session; empty if there are no sessions.
    """
    if not sessions:
        return {}
    owned_partitions: dict[SessionId, list[PartitionId]] = {session: [] for session in sessions}
    preferred_partitions: dict[SessionId, list[PartitionId]] = {session: [] for session in sessions}
    distinct_ids = dict.fromkeys(partitions)
    for partition, session in current.items():
        if session in owned_partitions and partition in distinct_ids:
            owned_partitions[session].append(partition)
    for partition, session in preferred.items():
        if (
            session in preferred_partitions
            and partition in distinct_ids
            and current.get(partition) not in owned_partitions
        ):
            preferred_partitions[session].append(partition)

    share, larger_shares = divmod(len(distinct_ids), len(sessions))
    # A larger share goes first to a session that would otherwise lose a partition, then to one
    # that would otherwise miss a child of a partition it owns.
    ranked_sessions = sorted(
        sessions,
        key=lambda session: (
            len(owned_partitions[session]) <= share,
            len(owned_partitions[session]) + len(preferred_partitions[session]) <= share,
        ),
    )
    vacancies = {}
    allocated: dict[PartitionId, SessionId] = {}
    for index, session in enumerate(ranked_sessions):
        quota = share + (index < larger_shares)
        assigned = (owned_partitions[session] + preferred_partitions[session])[:quota]
        allocated |= dict.fromkeys(assigned, session)
        vacancies[session] = quota - len(assigned)
    unassigned = iter([partition for partition in distinct_ids if partition not in allocated])
    for session in sessions:
        allocated |= {next(unassigned): session for _ in range(vacancies[session])}
    assert len(allocated) == len(distinct_ids)
    return allocated


def avoid_unreachable(
    allocated: Mapping[PartitionId, SessionId],
    sessions: Sequence[SessionId],
    *,
    current: Mapping[PartitionId, SessionId],
    unreachable: Mapping[PartitionId, Collection[SessionId]],
) -> dict[PartitionId, SessionId]:
    """
    Reassign partitions whose sessions cannot connect to their brokers.

    A partition stays with its current owner if that session can connect, so that partitions do not
    move back and forth. Otherwise it goes to the session with the fewest partitions among those
    that can connect. A partition that no session can reach stays where it is, because moving it
    would not help.

    Args:
        allocated: the result of `allocate`, which ignores `unreachable`.
        sessions: the live sessions, as for `allocate`.
        current: maps each partition to its current owner.
        unreachable: maps a partition to the sessions that cannot connect to its broker.
    """
    result = dict(allocated)
    counts = Counter(result.values())
    for partition in sorted(unreachable.keys() & result.keys()):
        session, unreachable_sessions = result[partition], unreachable[partition]
        candidates = [candidate for candidate in sessions if candidate not in unreachable_sessions]
        if session in candidates:
            continue
        owner = current.get(partition, session)
        if owner in (candidates or sessions):
            new_owner = owner
        else:
            new_owner = min(candidates or [session], key=lambda candidate: counts[candidate])
        counts[session] -= 1
        counts[new_owner] += 1
        result[partition] = new_owner
    return result
