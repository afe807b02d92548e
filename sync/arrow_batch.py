"""The Arrow batch of a blocking consumer."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..consumer import ArrowBatch
from ..protocol.message import Lease
from .loop_thread import LoopThread


class TakenBatch:
    """A batch like `keylane.ArrowBatch`, whose `ack` and `nack` block."""

    __slots__ = ("_thread", "batch")

    def __init__(self, thread: LoopThread, batch: ArrowBatch) -> None:
        self._thread = thread
        self.batch = batch
        """The `keylane.ArrowBatch`."""

    def __repr__(self) -> str:
        return repr(self.batch)

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def record_batch(self) -> Any:
        """The `pyarrow.RecordBatch`; `keylane.ArrowBatch` documents its columns."""
        return self.batch.record_batch

    @property
    def partition_id(self) -> int:
        """The id of the partition."""
        return self.batch.partition_id

    @property
    def queue(self) -> int:
        """The number of the partition's logic queue."""
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
        """How often the batch was delivered, including this time."""
        return self.batch.attempt

    def ack(self) -> None:
        """Ack all messages of the batch. Raises the same errors as `keylane.ArrowBatch.ack`."""
        self._thread.run(self.batch.ack)

    def nack(self, *, after_s: float = 0) -> None:
        """Nack the batch. Raises the same errors as `keylane.ArrowBatch.nack`."""
        self._thread.run(partial(self.batch.nack, after_s=after_s))
