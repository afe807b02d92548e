"""Whether a group's partitions move more than the members' shares demand, judged at each settling,
whatever has decided it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from keylane.metaserver.groups import lease_rows

PROBLEMS_MAX = 8


def needed(counts: Sequence[int], partitions: int) -> int:
    """The fewest partitions that members give up, of those that they have, for shares that differ
    by one at most.
    """
    share, larger = divmod(partitions, len(counts))
    quotas = [share + (rank < larger) for rank in range(len(counts))]
    return sum(max(0, count - quotas[rank]) for rank, count in enumerate(sorted(counts)[::-1]))


def moved_for_nothing(
    leases: Mapping[Any, Any],
    sessions: Collection[Any],
    readable: Collection[Any],
    unreached: Mapping[Any, Collection[Any]],
    wanted: Mapping[Any, Any],
) -> str:
    """
    What is wrong with a settling; "" if nothing is.

    A member that does not get at a partition's broker leaves it to one that does; where none does,
    it stays.

    Args:
        leases: of the group, as before.
        sessions: the members that may be granted something.
        readable: ids of the partitions that the group may read.
        wanted: partition → the member for which the settling has it.
    """
    if not sessions:
        return ""
    owners = {}
    for key in readable:
        lease = leases.get(key)
        if lease is None:
            continue
        moving = (lease.withdrawn or lease.session is None) and lease.wanted in sessions
        owner = lease.wanted if moving else lease.session
        if owner in sessions:
            owners[key] = owner
    counts = Counter(owners.values())
    most = needed([counts[session] for session in sessions], len(readable))
    moved = []
    for key, owner in owners.items():
        shut_out = unreached.get(key, ())
        leaves = owner in shut_out and not all(session in shut_out for session in sessions)
        if leaves and wanted.get(key) in shut_out:
            return f"partition {key} stays with a member that does not get at it"
        if wanted.get(key) == owner or leaves:
            continue
        if owner in shut_out:
            return f"partition {key} moves, and no member gets at it"
        moved.append(key)
    if len(moved) > most:
        return f"partitions {moved} move, and {most} of {len(readable)} need to"
    return ""


@contextmanager
def watched_movements(problems: list[str]) -> Iterator[None]:
    """Add what is wrong with settlings to `problems`."""
    real = lease_rows.settle_leases

    def settle(
        leases: Any,
        sessions: Any,
        readable: Any,
        *,
        suspended: Any = (),
        unreachable: Any,
        **kw: Any,
    ) -> Any:
        done = real(leases, sessions, readable, suspended=suspended, unreachable=unreachable, **kw)
        after = {key: lease.wanted for key, lease in leases.items()}
        after |= {lease.partition_id: lease.wanted for lease in done.leases}
        able = [session for session in sessions if session not in suspended]
        ids = [partition.partition_id for partition in readable]
        said = moved_for_nothing(leases, able, ids, unreachable, after)
        if said and len(problems) < PROBLEMS_MAX:
            problems.append(said)
        return done

    lease_rows.settle_leases = settle
    try:
        yield
    finally:
        lease_rows.settle_leases = real
