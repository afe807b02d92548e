"""Everything a broker knows, as a fold over its log.  Pure.

Invariants
    The same records give the same state, in recovery as in service.
    A record that does not fit the state before it is damage, and is never folded.
"""

from __future__ import annotations

from ..protocol.control import HostPartition
from ..protocol.errors import CorruptLogError, KeylaneError, PartitionUnknownError
from ..protocol.record import Header, Kind
from .partition import HostedPartition
from .records import CursorBody, FenceBody, decode_body


class BrokerState:
    """The hosted partitions, by id."""

    def __init__(self) -> None:
        self.partitions: dict[int, HostedPartition] = {}

    def partition(self, partition_id: int) -> HostedPartition:
        """The partition.  Raises PartitionUnknownError."""
        found = self.partitions.get(partition_id)
        if found is None:
            raise PartitionUnknownError(partition_id=partition_id)
        return found

    def apply(self, header: Header, body: memoryview) -> None:
        """
        Fold one durable record.

        Raises:
            CorruptLogError: it does not fit what came before it.
        """
        if header.kind == Kind.MESSAGES:
            partition = self._known(header)
            if header.base_offset != partition.next_offset:
                raise _misfit(
                    header, f"base offset {header.base_offset}, not {partition.next_offset}"
                )
            partition.apply_append(
                header, base_offset=header.base_offset, appended_at_ms=header.appended_at_ms
            )
            partition.readable_offset = partition.next_offset
            return
        said = decode_body(header, body)
        match said:
            case HostPartition():
                try:
                    self._host(said)
                except KeylaneError as error:
                    raise _misfit(header, error.message) from error
            case FenceBody():
                partition = self._known(header)
                partition.apply_fence(said)
                partition.groups[said.group].durable_fence = said.token
            case CursorBody():
                self._known(header).apply_cursor(said)
            case None:
                partition = self._known(header)
                partition.sealed = partition.ended = True

    def _host(self, facts: HostPartition) -> None:
        known = self.partitions.get(facts.partition.partition_id)
        if known is None:
            self.host(facts)
        else:
            known.check_same_facts(facts)

    def host(self, facts: HostPartition) -> HostedPartition:
        """A new partition with these facts."""
        partition = HostedPartition(facts)
        assert partition.partition_id not in self.partitions
        self.partitions[partition.partition_id] = partition
        return partition

    def unhost(self, partition_id: int) -> None:
        """Take back the newest partition."""
        del self.partitions[partition_id]

    def _known(self, header: Header) -> HostedPartition:
        found = self.partitions.get(header.partition_id)
        if found is None:
            raise _misfit(header, f"partition {header.partition_id} was never hosted")
        return found


def _misfit(header: Header, reason: str) -> CorruptLogError:
    return CorruptLogError(
        f"the record at position {header.position} does not fit the log before it: {reason}",
        position=header.position,
        partition_id=header.partition_id,
    )
