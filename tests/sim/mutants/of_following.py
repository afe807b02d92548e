"""Bugs of readers and broadcast consumers that follow a subject: their order, their positions, what
they pass over.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from keylane.consumer.group.broadcast import Broadcast
from keylane.consumer.reading.lineage_order import LineageOrder
from keylane.consumer.reading.reader import Reader
from keylane.protocol import endpoints
from keylane.protocol.offsets import AckedOffsets
from keylane.protocol.routing import PartitionState
from sim.mutants.mutant import Breaks, Patches


def readers_wait_for_no_parents(patches: Patches) -> None:
    """A partition is read before what it continues is sealed and read."""
    patches.set(LineageOrder, "readable", lambda self: list(self._unread.values()))


def positions_forget_finished_partitions(patches: Patches) -> None:
    """A reader that goes on reads ancestors again."""

    def finish(self: Any, partition_id: int) -> None:
        real(self, partition_id)
        self._positions.pop(partition_id, None)

    real = patches.set(Reader, "_finish", finish)


def positions_count_what_was_not_given(patches: Patches) -> None:
    """Positions are behind what was read, which the program has not got yet."""

    def positions(self: Any) -> Any:
        read = {number: place.next_offset for number, place in self._read_states.items()}
        return MappingProxyType(self._positions | read)

    patches.set(Reader, "positions", property(positions))


def tail_of_a_sealed_partition_is_skipped(patches: Patches) -> None:
    """A partition counts as read to its end with the first chunk that says it is sealed."""

    async def chunk(self: Any, partition_id: int) -> None:
        place = self._read_states[partition_id]
        broker = self._broker(place.partition)
        await real(self, partition_id)
        status = await broker.control(endpoints.PARTITION, id=partition_id)
        if partition_id in self._read_states and status.state is PartitionState.SEALED:
            self._finish(partition_id)

    real = patches.set(Reader, "_read_chunk", chunk)


def rows_are_repeated_when_a_broker_returns(patches: Patches) -> None:
    """An open reader goes back by a message when a broker did not answer."""

    def look_anew(self: Any, history: Any) -> bool:
        gone: bool = real(self, history)
        for place in self._read_states.values():
            place.next_offset = max(0, place.next_offset - 1)
        return gone

    real = patches.set(Reader, "_refresh_partitions", look_anew)


def chunks_beside_a_failure_are_dropped(patches: Patches) -> None:
    """What was read of other partitions is given up when a broker does not answer."""

    async def wait_for_servers(self: Any, now_ms: int) -> None:
        self._buffer.clear()
        await real(self, now_ms)

    real = patches.set(Reader, "_wait_for_servers", wait_for_servers)


def broadcasts_begin_children_late(patches: Patches) -> None:
    """A broadcast consumer begins a partition that it finds later behind its first message."""

    def find_acks(self: Any, partition_id: int) -> Any:
        self._handled.acked.setdefault(partition_id, AckedOffsets(1))
        return real(self, partition_id)

    real = patches.set(Broadcast, "find_acks", find_acks)


BREAKS: tuple[Breaks, ...] = (
    readers_wait_for_no_parents,
    positions_forget_finished_partitions,
    positions_count_what_was_not_given,
    tail_of_a_sealed_partition_is_skipped,
    rows_are_repeated_when_a_broker_returns,
    chunks_beside_a_failure_are_dropped,
    broadcasts_begin_children_late,
)
