"""Answers the reads of clients that want no more from a broker than they must: what its copy has.
Does disk I/O through `Files`.

    Read ─┬─ the copy's index has the offset ─▶ batches
          ╰─ it has not, or it is damaged    ─▶ refused: the client asks the broker

Invariants
    The index has only what no promotion cuts away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...protocol.errors import InvalidRequestError, WrongBrokerError
from ...protocol.frames import Batches, Read, Request
from ...protocol.ids import check_offset
from ...protocol.limits import PULL_BYTES_MAX
from ...rpc.answer_budget import reserve_bytes
from ...rpc.plane.prompt import Handled, PromptCall
from ..storage.files import Files
from ..storage.index.interface import ConsumeQueues
from ..storage.log.commit_log import CommitLog
from ..storage.log.log_reader import BatchReader
from ..store.group_commit import RunBlocking


class CopyReads:
    """
    Answers `Read`; implements `DataService`.

    Args:
        durable: returns where the segments of the copy begin, and the end of what is durable at it
            and at the broker.
        queues: returns the index of that; None while there is none.
        run_read: runs reads of the disk.
    """

    def __init__(
        self,
        files: Files,
        durable: Callable[[], tuple[Sequence[int], int]],
        queues: Callable[[], ConsumeQueues | None],
        *,
        broker_group: str,
        run_read: RunBlocking,
    ) -> None:
        self._files = files
        self._durable = durable
        self._queues = queues
        self._broker_group = broker_group
        self._run_read = run_read
        self.bytes_read = 0
        """The bytes of messages that clients have read."""

    async def handle(self, request: Request, _payload: memoryview) -> Handled:
        """
        Answer a read.

        Raises:
            WrongBrokerError: it is another request, or the copy does not have the offset.
            InvalidRequestError, CorruptLogError
        """
        if not isinstance(request, Read):
            raise WrongBrokerError(
                f"this is a copy of broker group {self._broker_group}, which only serves reads"
            )
        check_offset(request.offset)
        if request.bytes_max < 1:
            raise InvalidRequestError(f"cannot read {request.bytes_max} bytes")
        bytes_max = min(request.bytes_max, PULL_BYTES_MAX)
        await reserve_bytes(bytes_max)
        answer, data = await self._run_read(
            self._read, request.partition_id, request.offset, bytes_max
        )
        self.bytes_read += len(data)
        return answer, data

    def begin(self, _request: Request, _payload: memoryview, _call: PromptCall) -> bool:
        """See `DataService`."""
        return False

    def _read(self, partition_id: int, offset: int, bytes_max: int) -> tuple[Batches, bytes]:
        """Return batches of a partition from an offset on. Blocks."""
        queues = self._queues()
        bounds = None if queues is None else queues.bounds(partition_id)
        if queues is None or bounds is None or not bounds[0] <= offset < bounds[1]:
            raise WrongBrokerError(
                f"the copy does not have offset {offset} of partition {partition_id}"
            )
        bases, end = self._durable()
        copied = CommitLog(self._files, segment_bytes=1, bases=bases, end=end)
        data, upto = BatchReader(copied, queues).read(partition_id, offset, bounds[1], bytes_max)
        return Batches(*bounds, upto, sealed=False), data
