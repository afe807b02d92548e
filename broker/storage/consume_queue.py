"""Consume queues: where the batches of each partition lie in the commit log.  The interface; no I/O here.

Invariants
    Derived: whatever is in it can be deleted and comes back from the log.
    It holds durable batches only, each once, in the order of their offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Unit(NamedTuple):
    """One batch: offsets `[base_offset, base_offset + message_count)`, `length` bytes of log from `position` on."""

    base_offset: int
    message_count: int
    position: int
    length: int
    appended_at_ms: int
    """Never falls within a partition."""

    @property
    def next_offset(self) -> int:
        """One past the last offset of the batch."""
        return self.base_offset + self.message_count

    @property
    def end_position(self) -> int:
        """Position after the batch."""
        return self.position + self.length


class ConsumeQueues(Protocol):
    """The consume queues of all partitions of a broker.  One thread writes, many read; all calls block."""

    def dispatch(self, units: Sequence[tuple[int, Unit]]) -> None:
        """Add the batches of one group commit: pairs of (partition id, unit), each partition's in order."""
        ...

    def find(self, partition_id: int, offset: int, *, end: int, bytes_max: int) -> list[Unit]:
        """
        Batches from the one that holds `offset` on, those that begin below offset `end`, up to `bytes_max`
        bytes but at least one.  Contiguous; empty if there is none.
        """
        ...

    def truncate(self, position: int) -> None:
        """Forget every unit at or after this log position; 0 forgets all."""
        ...

    def recover(self, position: int) -> int:
        """
        Called once, before the first dispatch, with the log position that the replay begins at.

        Forgets what it cannot vouch for, and everything at or after the position it returns unless dispatching
        it again is harmless.

        Returns:
            The log position from which units have to be dispatched again, `<= position`; 0 to be rebuilt whole.
        """
        ...

    def checkpoint(self, position: int) -> None:
        """
        Make durable what was dispatched below this log position: a snapshot that stands for it follows.

        Called in a thread of its own while another dispatches and others read.
        """
        ...

    def flush(self) -> None:
        """Write out what is still in memory."""
        ...

    def close(self) -> None:
        """Flush and let go of everything."""
        ...
