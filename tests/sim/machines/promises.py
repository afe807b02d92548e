"""What brokers and SQL promise at any moment: sealed partitions, durable ends, the claims of
consumer groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from keylane.broker.store.store import Store
from keylane.protocol.frames import Answer, Batches, Handed, Request


class SealingHost(Protocol):
    """The members of a simulated broker that `is_sealed` uses."""

    store: Store | None
    copied: bool

    @property
    def running(self) -> bool: ...


def is_sealed(hosts: Iterable[SealingHost], partition_id: int) -> bool | None:
    """
    True if its broker has told its end; None if no running broker has it.

    A broker that runs on an older copy of its folder is left out: the copy may be older than the
    seal, and it is refused.
    """
    for host in hosts:
        store = host.store if host.running and not host.copied else None
        partition = None if store is None else store.state.partitions.get(partition_id)
        if partition is not None:
            return partition.ended
    return None


class DurableEnds:
    """One past the last message that a store's commits have made durable, of each partition."""

    def __init__(self, store: Store) -> None:
        partitions = store.state.partitions.items()
        self._ends = {number: partition.readable_offset for number, partition in partitions}
        self._then = store._on_stored
        store._on_stored = self._stored  # type: ignore[method-assign]

    def _stored(self, partition: Any, entry: Any) -> None:
        self._ends[entry.partition_id] = entry.base_offset + entry.count
        self._then(partition, entry)

    def told_early(self, request: Request, answer: Answer) -> str:
        """What a reader is about to be told too early; "" if all of it is durable."""
        match answer:
            case Batches():
                upto = max(answer.upto, answer.next_offset)
            case Handed():
                upto = max((end for _, end in answer.ranges), default=0)
            case _:
                return ""
        end = self._ends.get(request.partition_id, 0)
        if upto <= end:
            return ""
        return f"partition {request.partition_id} is read up to {upto}, and is durable up to {end}"


_OPENED = "SELECT partition_id, subject_id FROM partitions WHERE state IN ('open', 'sealed')"
_GROUPS = "SELECT subject_id, name FROM groups"
_GRANTED = (
    "SELECT groups.name, leases.partition_id FROM leases JOIN groups USING (group_id) "
    "WHERE leases.session IS NOT NULL"
)
_HEARD = "SELECT groups.name, heard.partition_id FROM heard JOIN groups USING (group_id)"


class Claims:
    """
    The consumer groups to which the metaserver's database promises a partition's messages, known to
    its broker or not.

    A group that was there when a partition opened is promised all of it; a younger one what is left
    of it when it is granted the partition, or when the database says that the broker has heard of
    it.
    """

    def __init__(self) -> None:
        self._opened: set[int] = set()
        self._claims: dict[int, set[str]] = {}

    def note(self, ask: Callable[[str], Iterable[Sequence[Any]]]) -> None:
        """Note the claims at the end of a transaction."""
        new = [row for row in ask(_OPENED) if row[0] not in self._opened]
        if new:
            groups = list(ask(_GROUPS))
            for partition_id, subject_id in new:
                self._opened.add(partition_id)
                names = {name for subject, name in groups if subject == subject_id}
                self._claims.setdefault(partition_id, set()).update(names)
        for statement in (_GRANTED, _HEARD):
            for name, partition_id in ask(statement):
                if partition_id in self._opened:
                    self._claims[partition_id].add(name)

    def of(self, partition_id: int) -> tuple[str, ...]:
        """The groups that are promised what this partition has."""
        return tuple(sorted(self._claims.get(partition_id, ())))
