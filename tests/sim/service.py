"""Whether consumer groups are served once everything is healed: all messages in the end, and no
partition late.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from keylane.broker.partition.partition import HostedPartition
from sim.actors.consumers import ConsumerHost
from sim.actors.hosts import META_SETTINGS, BrokerHost

PATIENCE_S = 10.0
"""Seconds for calls under way to silent programs, and for the pauses of retries: a few each."""


IDLE_LOOKS = 4
"""So often in a row a consumer may have been seen with messages that no worker looks at: between
two looks it turns.
"""


class Idleness:
    """Whether consumers leave messages unhandled while their workers are in no handler; looked at
    throughout the seed.
    """

    def __init__(self) -> None:
        self._looks: dict[str, int] = {}
        self.problems: dict[str, str] = {}

    def look(self, consumers: Sequence[ConsumerHost]) -> None:
        """Note the consumers that are idle although messages wait."""
        for host in consumers:
            looks = self._looks.get(host.name, 0) + 1 if host.is_idle_beside_work() else 0
            self._looks[host.name] = looks
            if looks >= IDLE_LOOKS:
                self.problems[host.name] = (
                    f"{host.name} has messages and idle workers, and no handler starts"
                )


class Service:
    """
    Looks at the brokers' partitions from time to time.

    A partition may be read when it has something unread, and its group is through with all that it
    continues. Then it waits, from the moment it is seen so or from the group's last progress
    there, for no longer than a silent owner takes to expire and a silent broker to be found, each
    by a clock that drifts, and `PATIENCE_S`.
    """

    def __init__(
        self, brokers: Sequence[BrokerHost], groups: list[str], *, ttl_ms: int, subject: str = ""
    ) -> None:
        """`subject`: look at its partitions alone; at all of them by default."""
        self._brokers = brokers
        self._subject = subject
        self.groups = groups
        self.limit_s = 1.1 * (ttl_ms + META_SETTINGS.broker_ttl_ms) / 1000 + PATIENCE_S
        self._since: dict[tuple[str, int], tuple[int, float]] = {}
        """Where a group stands in a partition that it may read, and since when."""
        self.problems: dict[tuple[str, int], str] = {}
        self._lost: dict[int, set[int]] = {}
        """What partitions on lost disks continue."""

    def lost(self, partitions: Iterable[HostedPartition]) -> None:
        """Note partitions that no broker has any more; their parents are still read first."""
        for partition in partitions:
            facts = partition.facts.partition
            self._lost[int(facts.partition_id)] = {int(parent) for parent in facts.parents}

    def expect(self, group: str) -> None:
        """Add a group that has to be served."""
        self.groups.append(group)

    def _hosted(self) -> Iterator[HostedPartition]:
        for broker in self._brokers:
            if broker.running and broker.store is not None:
                for partition in broker.store.state.partitions.values():
                    if self._subject in {"", partition.facts.subject}:
                        yield partition

    @property
    def drained(self) -> bool:
        """Whether every broker runs, every message is durable, and every group has acked all of
        them.
        """
        if not all(broker.running and broker.store is not None for broker in self._brokers):
            return False
        return all(
            partition.next_offset == partition.readable_offset
            and all(
                cursor_of(partition, group) >= partition.readable_offset for group in self.groups
            )
            for partition in self._hosted()
        )

    def may_read(self, group: str, name: int) -> bool:
        """Whether a group has acked all ancestors of a partition."""
        partitions = {
            int(partition.facts.partition.partition_id): partition for partition in self._hosted()
        }
        before = [
            partitions[partition_id]
            for partition_id in self._before(name, partitions)
            if partition_id in partitions
        ]
        return all(cursor_of(partition, group) >= partition.readable_offset for partition in before)

    def look(self, now_s: float) -> None:
        """Note how long partitions wait."""
        partitions = {
            int(partition.facts.partition.partition_id): partition for partition in self._hosted()
        }
        before = {name: self._before(name, partitions) for name in partitions}
        for group in self.groups:
            unread = {
                name
                for name, partition in partitions.items()
                if cursor_of(partition, group) < partition.readable_offset
            }
            for name, partition in partitions.items():
                if name in unread and unread.isdisjoint(before[name]):
                    self._waits((group, name), cursor_of(partition, group), now_s)
                else:
                    self._since.pop((group, name), None)

    def _waits(self, who: tuple[str, int], cursor: int, now_s: float) -> None:
        seen, since_s = self._since.setdefault(who, (cursor, now_s))
        if seen != cursor:
            self._since[who] = (cursor, now_s)
        elif now_s - since_s > self.limit_s:
            self.problems[who] = (
                f"{who[0]} is not served on partition {who[1]} from {cursor} on for "
                f"{now_s - since_s:.1f} s; {self.limit_s:.1f} s are allowed"
            )

    def _before(self, name: int, partitions: dict[int, HostedPartition]) -> set[int]:
        """All that a partition continues, near and far, as far as brokers have it, or had it on a
        lost disk.
        """
        ancestors: set[int] = set()
        left = [name]
        while left:
            partition_id = left.pop()
            partition = partitions.get(partition_id)
            parents = self._lost.get(partition_id, set())
            if partition is not None:
                parents = {int(parent) for parent in partition.facts.partition.parents}
            left += sorted(parents - ancestors)
            ancestors |= parents
        return ancestors


def cursor_of(partition: HostedPartition, group: str) -> int:
    progress = partition.groups.get(group)
    return partition.first_offset if progress is None else progress.acked.cursor
