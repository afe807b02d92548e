"""A batch of Arrow data in hand, for programs without an event loop."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..consumer import ArrowBatch
from ..protocol.message import Lease
from .loop_thread import LoopThread


class TakenBatch:
    """Messages of one partition, as `keylane.ArrowBatch`, whose `ack` and `nack` wait
    themselves.
    """

    __slots__ = ("_thread", "batch")

    def __init__(self, thread: LoopThread, batch: ArrowBatch) -> None:
        self._thread = thread
        self.batch = batch
        """The batch of `keylane`."""

    def __repr__(self) -> str:
        return repr(self.batch)

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def record_batch(self) -> Any:
        """The `pyarrow.RecordBatch`, with the columns that `keylane.ArrowBatch` names."""
        return self.batch.record_batch

    @property
    def partition_id(self) -> int:
        """The partition."""
        return self.batch.partition_id

    @property
    def queue(self) -> int:
        """The number of its logic queue."""
        return self.batch.queue

    @property
    def start_offset(self) -> int:
        """The offset of the first row."""
        return self.batch.start_offset

    @property
    def next_offset(self) -> int:
        """One past the offset of the last row."""
        return self.batch.next_offset

    @property
    def lease(self) -> Lease | None:
        """The lease under which the messages were delivered."""
        return self.batch.lease

    @property
    def fencing_token(self) -> int:
        """The token of `lease`."""
        return self.batch.fencing_token

    @property
    def attempt(self) -> int:
        """How often the batch was handed out, this time included."""
        return self.batch.attempt

    def ack(self) -> None:
        """Ack all messages of the batch.  Raises as `keylane.ArrowBatch.ack` does."""
        self._thread.run(self.batch.ack)

    def nack(self, *, after_s: float = 0) -> None:
        """Give the batch back.  Raises as `keylane.ArrowBatch.nack` does."""
        self._thread.run(partial(self.batch.nack, after_s=after_s))
