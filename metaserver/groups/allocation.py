"""Allocates partitions to sessions: sticky, balanced, with the least movement. Pure.

Invariants
    If there is a session, every partition is assigned to exactly one.
    The sessions' shares differ by at most one, unless a session cannot connect to the broker of a
    partition.
    Only as many partitions move as the shares require.

The algorithm sets a quota for each session, keeps current assignments up to the quota, then assigns
the rest, like Kafka's sticky assignor but without its search. A session loses its most recently
assigned partitions first, so a rolling restart keeps moving the same few.
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
        sessions: the live sessions; ties for a larger share go to the earlier one.
        partitions: the readable partitions; unowned ones are assigned in this order.
        current: partition → its current owner, longest owned first; unknown partitions and
            sessions are ignored.
        preferred: unowned partition → the session that gets it if its quota allows: the owner of
            a parent.

    Returns:
        Partition → its session; empty if there are no sessions.
    """
    if not sessions:
        return {}
    owned: dict[SessionId, list[PartitionId]] = {session: [] for session in sessions}
    preferred_by: dict[SessionId, list[PartitionId]] = {session: [] for session in sessions}
    distinct = dict.fromkeys(partitions)
    for partition, session in current.items():
        if session in owned and partition in distinct:
            owned[session].append(partition)
    for partition, session in preferred.items():
        if (
            session in preferred_by
            and partition in distinct
            and current.get(partition) not in owned
        ):
            preferred_by[session].append(partition)

    share, larger = divmod(len(distinct), len(sessions))
    # A larger share goes first to a session that would otherwise lose a partition, then to one
    # that would otherwise miss a child of a partition it owns.
    ranked = sorted(
        sessions,
        key=lambda session: (
            len(owned[session]) <= share,
            len(owned[session]) + len(preferred_by[session]) <= share,
        ),
    )
    vacancies = {}
    allocated: dict[PartitionId, SessionId] = {}
    for index, session in enumerate(ranked):
        quota = share + (index < larger)
        assigned = (owned[session] + preferred_by[session])[:quota]
        allocated |= dict.fromkeys(assigned, session)
        vacancies[session] = quota - len(assigned)
    unassigned = iter([partition for partition in distinct if partition not in allocated])
    for session in sessions:
        allocated |= {next(unassigned): session for _ in range(vacancies[session])}
    assert len(allocated) == len(distinct)
    return allocated


def avoid_unreachable(
    allocated: Mapping[PartitionId, SessionId],
    sessions: Sequence[SessionId],
    *,
    current: Mapping[PartitionId, SessionId],
    unreached: Mapping[PartitionId, Collection[SessionId]],
) -> dict[PartitionId, SessionId]:
    """
    Reassign partitions whose sessions cannot connect to their brokers.

    A partition stays with its current owner if that session can connect, so partitions do not
    move back and forth; otherwise it goes to the connected session with the fewest partitions. A
    partition that no session can reach stays where it is, because moving it would not help.

    Args:
        allocated: the result of `allocate`, which ignores `unreached`.
        sessions: the live sessions, as for `allocate`.
        current: partition → its current owner.
        unreached: partition → sessions that cannot connect to its broker.
    """
    result = dict(allocated)
    counts = Counter(result.values())
    for partition in sorted(unreached.keys() & result.keys()):
        session, cut_off = result[partition], unreached[partition]
        connectable = [candidate for candidate in sessions if candidate not in cut_off]
        if session in connectable:
            continue
        owner = current.get(partition, session)
        if owner in (connectable or sessions):
            target = owner
        else:
            target = min(connectable or [session], key=lambda candidate: counts[candidate])
        counts[session] -= 1
        counts[target] += 1
        result[partition] = target
    return result
