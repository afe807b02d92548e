"""Answers the reads of clients that want no more from a broker than they must: what its copy has.

A client whose read is refused asks the broker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ...protocol.clock import Clock
from ...protocol.errors import InvalidRequestError, KeylaneError, WrongBrokerError
from ...protocol.frames import Read, Request
from ...protocol.ids import check_offset
from ...protocol.limits import PULL_BYTES_MAX
from ...protocol.log_filter import LogFilter
from ...rpc.answer_budget import reserve_bytes
from ...rpc.plane.prompt import Handled, PromptCall
from ..store.group_commit import RunBlocking
from .copied_batches import CopiedBatches

log = logging.getLogger("keylane.broker")

POLL_MS = 50
"""How often it is looked whether the copy has more, in milliseconds."""
AFTER_FAILURE_MS = 5_000


class CopyReads:
    """
    Answers `Read`; implements `DataService`.

    Args:
        durable: returns where the segments of the copy begin, and up to where it is durable, at the
            broker too.
        run_read: runs reads of the disk.
        run_index: runs what changes the index, in one thread.
    """

    def __init__(
        self,
        batches: CopiedBatches,
        durable: Callable[[], tuple[Sequence[int], int]],
        *,
        broker_group: str,
        run_read: RunBlocking,
        run_index: RunBlocking,
        clock: Clock,
    ) -> None:
        self._batches = batches
        self._durable = durable
        self._broker_group = broker_group
        self._run_read = run_read
        self._run_index = run_index
        self._boot_ms = clock.boot_ms
        self._failures = LogFilter()
        self.bytes_read = 0
        """The bytes of messages that clients have read."""

    async def run(self) -> None:
        """Keep the index up to date until cancelled."""
        while True:
            pause_ms = POLL_MS
            try:
                if await self._run_index(self._batches.advance, *self._durable()):
                    continue
            except KeylaneError as error:
                if text := self._failures.count_failure(error.message, self._boot_ms()):
                    log.warning("cannot index the copy for reads: %s", text)
                pause_ms = AFTER_FAILURE_MS
            await asyncio.sleep(pause_ms / 1000)

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
            self._batches.read, request.partition_id, request.offset, bytes_max
        )
        self.bytes_read += len(data)
        return answer, data

    def begin(self, _request: Request, _payload: memoryview, _call: PromptCall) -> bool:
        """See `DataService`."""
        return False
