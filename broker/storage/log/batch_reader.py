"""Reads batches of a partition from the log by way of the index.  Disk, through `CommitLog`; any thread.

Invariants
    Nothing wrong is served: every batch is checked, and compared with the unit that led to it.
    Batches that lie side by side in the log are read with one call.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....protocol.errors import CorruptLogError
from ....protocol.record import is_batch
from ..index.interface import ConsumeQueues, Unit
from .commit_log import CommitLog


class BatchReader:
    """Joins log and index for readers."""

    def __init__(self, log: CommitLog, queues: ConsumeQueues) -> None:
        self._log = log
        self._queues = queues

    def read(self, partition_id: int, offset: int, end: int, bytes_max: int) -> tuple[bytes, int]:
        """
        Whole batches from the one that holds `offset` on, begun below offset `end`, up to `bytes_max` bytes but
        at least one; and one past the last offset among them.

        Raises:
            CorruptLogError: the first of them is damaged, from `offset` to `end_offset` of its details; those before
                a damaged one are returned.
        """
        units = self._queues.find(partition_id, offset, end=end, bytes_max=bytes_max)
        if not units or units[0].base_offset > offset:
            raise CorruptLogError(
                f"the index of partition {partition_id} lacks offset {offset}",
                partition_id=partition_id,
            )
        parts: list[bytes] = []
        upto = offset
        runs = list(self._runs(units))
        ranges = [(run[0].position, run[-1].end_position - run[0].position) for run in runs]
        for run, data in zip(runs, self._log.read_each(ranges), strict=True):
            start = run[0].position
            for unit in run:
                if not _holds(data, unit.position - start, partition_id, unit):
                    parts.append(data[: unit.position - start])
                    if upto == offset:
                        raise CorruptLogError(
                            f"the batch at position {unit.position} is damaged",
                            position=unit.position,
                            partition_id=partition_id,
                            offset=unit.base_offset,
                            end_offset=unit.next_offset,
                        )
                    return b"".join(parts), upto
                upto = unit.next_offset
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts), upto

    def _runs(self, units: list[Unit]) -> Iterator[list[Unit]]:
        """Units that lie side by side in one segment, together."""
        first = 0
        while first < len(units):
            limit = self._log.segment_end(units[first].position)
            last = first + 1
            while (
                last < len(units) and units[last - 1].end_position == units[last].position < limit
            ):
                last += 1
            yield units[first:last]
            first = last


def _holds(data: bytes, start: int, partition_id: int, unit: Unit) -> bool:
    # Not the time: the index keeps it from falling.
    return is_batch(
        data,
        start,
        length=unit.length,
        count=unit.message_count,
        partition_id=partition_id,
        base_offset=unit.base_offset,
        position=unit.position,
    )
