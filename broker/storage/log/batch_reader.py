"""Reads batches of a partition from the log, in which the index finds them. Disk, through
`CommitLog`; any thread.

Invariants
    Every batch is checked, and compared with its unit in the index, before it is served.
    Adjacent batches in the log are read with one call.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....protocol.errors import CorruptLogError
from ....protocol.record import is_batch
from ..index.interface import ConsumeQueues, Unit
from .commit_log import CommitLog


class BatchReader:
    """Reads batches by offset, with the index and the log."""

    def __init__(self, log: CommitLog, queues: ConsumeQueues) -> None:
        self._log = log
        self._queues = queues

    def read(self, partition_id: int, offset: int, end: int, bytes_max: int) -> tuple[bytes, int]:
        """
        Read whole batches: at least one, and up to `bytes_max` bytes.

        The first batch contains the message at `offset`; the last begins below offset `end`.

        Returns:
            The batches, and the offset after their last message. They end before a damaged batch.

        Raises:
            CorruptLogError: the first batch is damaged. The details `offset` and `end_offset` are
                those of the batch.
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
                if not _matches(data, unit.position - start, partition_id, unit):
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
        """Yield runs of units that are adjacent in a segment."""
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


def _matches(data: bytes, start: int, partition_id: int, unit: Unit) -> bool:
    # Times are not compared: the index stores times that never fall.
    return is_batch(
        data,
        start,
        length=unit.length,
        count=unit.message_count,
        partition_id=partition_id,
        base_offset=unit.base_offset,
        position=unit.position,
    )
