"""Finds and reads the messages in the log of a copy. Does disk I/O through `Files`.

    the copy is durable up to p, and so is the broker ─▶ headers of the log up to p ─▶ index
    Read ─┬─ the index has the offset ─▶ batches
          ╰─ it has not ─▶ refused: the broker has it, or nobody

Invariants
    The index has only what no promotion cuts away.
    It is derived: it is begun anew where it does not fit the log, and by a promotion.
    One thread calls `advance` and `close`; many may call `read`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ...protocol.errors import CorruptLogError, WrongBrokerError
from ...protocol.frames import Batches
from ..storage.files import Files
from ..storage.index.interface import ConsumeQueues
from ..storage.index.kinds import open_index
from ..storage.log.commit_log import CommitLog
from ..storage.log.log_reader import BatchReader, read_segment_headers
from ..store.replay import Dispatch

STEP_BYTES = 32 << 20
"""How many bytes of the log are indexed at once."""
CHECKPOINT_BYTES = 256 << 20
"""How many bytes of the log a start indexes again at most."""


class CopiedBatches:
    """
    The messages of a copy.

    Attributes:
        position: the position up to which the log is indexed; -1 while nothing is.
    """

    def __init__(self, files: Files, kind: str) -> None:
        self._files = files
        self._kind = kind
        self.position = -1
        self._saved_position = 0
        self._queues: ConsumeQueues | None = None
        self._log = CommitLog(files, segment_bytes=1, bases=(), end=0)

    def advance(self, bases: Sequence[int], end: int) -> bool:
        """
        Index more of a log whose segments begin at `bases`, at most STEP_BYTES.

        Args:
            end: where a record ends.

        Returns:
            True if more is left before `end`.

        Raises:
            StorageError: the next call goes on, or begins anew if the index is damaged.
        """
        if not bases or end <= bases[0]:
            return False
        try:
            self._advance(bases, end)
        except CorruptLogError:
            self.position = -1
            raise
        return end - self.position >= STEP_BYTES

    def _advance(self, bases: Sequence[int], end: int) -> None:
        if self._queues is None:
            self._queues = open_index(self._files, self._kind)
            self.position = self._queues.recover(end, first_position=bases[0])
        if self.position < bases[0]:  # the copy was begun anew, or retention was quicker
            self._queues.truncate(0)
            self.position = self._saved_position = bases[0]
        if list(bases) != self._log.bases:
            self._log = CommitLog(self._files, segment_bytes=1, bases=bases, end=self.position)
            for _ in self._queues.retain(bases[0]):
                pass
        self._dispatch(self._queues, bases, min(end, self.position + STEP_BYTES))
        self._log.end = self.position
        if self.position - self._saved_position >= CHECKPOINT_BYTES:
            self._queues.checkpoint(self.position)
            self._saved_position = self.position

    def _dispatch(self, queues: ConsumeQueues, bases: Sequence[int], end: int) -> None:
        """Add the records before `end` to the index."""
        dispatch = Dispatch(queues, start=self.position)
        position = self.position
        for base, following in pairwise([*bases, max(end, bases[-1])]):
            if following <= position or base >= end:
                continue
            for header in read_segment_headers(self._files, base, start=position):
                if header.position + header.length > end:
                    position = min(end, header.position)
                    break
                dispatch.on_record(header)
                position = header.position + header.length
            else:
                position = min(following, end)  # its last bytes may be damaged
        dispatch.flush()
        self.position = position

    def read(self, partition_id: int, offset: int, bytes_max: int) -> tuple[Batches, bytes]:
        """
        Return batches of a partition from an offset on.

        Raises:
            WrongBrokerError: the copy does not have this offset, or not yet.
            CorruptLogError: it is damaged here.
        """
        bounds = None if self._queues is None else self._queues.bounds(partition_id)
        if self._queues is None or bounds is None or not bounds[0] <= offset < bounds[1]:
            raise WrongBrokerError(
                f"the copy does not have offset {offset} of partition {partition_id}"
            )
        reader = BatchReader(self._log, self._queues)
        data, upto = reader.read(partition_id, offset, bounds[1], bytes_max)
        return Batches(*bounds, upto, sealed=False), data

    def close(self) -> None:
        """Write the index, and close its files."""
        if self._queues is not None:
            self._queues.close()
