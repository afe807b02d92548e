"""What is known of a subject and a consumer group when somebody asks why nothing arrives. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from msgspec import Struct

from ...protocol.control import BrokerView, Health, PartitionStatus
from ...protocol.operations import OperationView
from ...protocol.parked import ParkedTotals
from ...protocol.reading.newest import NewestMessage
from ...protocol.routing import Partition, PartitionState, logical_partition
from ...protocol.scheduled.receipt import ScheduledPage
from ..parked_views import ParkedKeyView
from ..views import GroupDescription, PartitionProgress
from .lag import STUCK_MS


class LagPace(Struct, frozen=True, kw_only=True):
    """What has happened in a partition between two looks at it."""

    over_ms: int
    stored: int
    """The number of messages that were stored."""
    acked: int
    """The number of messages that the group has acked."""
    oldest_ms: int = STUCK_MS
    """How long the oldest message that it has not acked has waited at least, in milliseconds."""


class Facts(Struct, frozen=True, kw_only=True, dict=True):
    """What servers have answered within the time limit. A mapping lacks those that have not."""

    group: GroupDescription
    """The group, with only the partitions that may have the messages in question."""
    partitions: tuple[Partition, ...]
    """These partitions, as the route has them: parents before children."""
    key: bytes | None = None
    """The order key in question; None: any."""
    statuses: Mapping[int, PartitionStatus] = {}
    """By partition, its status with only this group."""
    paces: Mapping[int, LagPace] = {}
    """By partition, for those of which two looks were taken."""
    newest: Mapping[int, NewestMessage] = {}
    """By partition, the newest message of the key; without a key, the newest message."""
    parked: tuple[ParkedKeyView, ...] = ()
    """The first parked messages of the key; of any key, if none is in question."""
    parked_totals: Mapping[int, ParkedTotals] = {}
    """By partition, for those with more parked keys than are in `parked`."""
    is_parked_partial: bool = False
    """True if there are more parked keys, and it is not known how many."""
    brokers: tuple[BrokerView, ...] = ()
    """The brokers of these partitions, as the metaserver knows them."""
    health: Mapping[str, Health] = {}
    """By broker group, what its broker says of itself."""
    silent: Mapping[str, str] = {}
    """By broker group whose broker is silent, such as "has not answered within 0.6 s"."""
    accepts: Mapping[str, bool] = {}
    """By broker group whose broker is silent, whether something accepts connections at its address,
    as far as that is known.
    """
    clocks_ms: Mapping[str, int] = {}
    """By broker group, how far its clock is ahead of that of the asking machine, in milliseconds;
    negative if it is behind.
    """
    scheduled: tuple[ScheduledPage, ...] = ()
    """The next scheduled messages of the subject, by broker."""
    operations: tuple[OperationView, ...] = ()
    """The latest operations on the subject."""
    now_ms: int = 0
    """The time of the asking machine, in milliseconds since 1970."""
    unknown: tuple[str, ...] = ()
    """What could not be asked, a sentence each."""

    @property
    def progress(self) -> Sequence[PartitionProgress]:
        """The group's progress on the partitions, parents before children."""
        return self.group.partitions

    def broker_of(self, broker_group: str) -> BrokerView | None:
        """Return the metaserver's view of a broker group."""
        return next((each for each in self.brokers if each.broker_group == broker_group), None)

    def partitions_on(self, broker_group: str) -> tuple[int, ...]:
        """Return the partitions in question that a broker group has."""
        return tuple(p.partition_id for p in self.partitions if p.broker_group == broker_group)

    def unread_parents(self, progress: PartitionProgress) -> list[PartitionProgress]:
        """Return the sealed ancestors of a partition that the group has not read to their ends, or
        of which that is not known, parents before children.
        """
        if not self._unread:
            return []
        ancestors = self._ancestors(progress.partition_id)
        return [each for number, each in self._unread.items() if number in ancestors]

    @cached_property
    def _unread(self) -> dict[int, PartitionProgress]:
        """By partition, the progress on sealed ones that are not read to their ends."""
        return {
            each.partition_id: each
            for each in self.progress
            if each.state is PartitionState.SEALED and each.lag != 0
        }

    @cached_property
    def _parents(self) -> dict[int, tuple[int, ...]]:
        return {each.partition_id: each.parents for each in self.partitions}

    def _ancestors(self, partition_id: int) -> set[int]:
        found: set[int] = set()
        waiting: list[int] = [*self._parents.get(partition_id, ())]
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += self._parents.get(number, ())
        return found


def partitions_of_key(partitions: Collection[Partition], key: bytes) -> list[Partition]:
    """Return the partitions whose ranges contain a key: the open one and its ancestors."""
    number = logical_partition(key)
    return [each for each in partitions if each.range_start <= number < each.range_end]
