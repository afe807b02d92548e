"""Arrow record batches of the messages of one partition, acked as a whole."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from ...protocol.batch import unpack_batch
from ...protocol.errors import (
    CorruptBatchError,
    InvalidRequestError,
    LeaseLostError,
    MissingExtraError,
)
from ...protocol.message import make_lease
from ...rpc.race import shield, start_task
from ..delivery.pulled_batch import PulledBatch
from ..pulling.pull_client import PullClient
from .not_acked import limited_wait_ms, parse_wait_ms

BATCH_BYTES_MAX = 2 << 20
"""The maximum size, in bytes, of the stored batches that are joined into one Arrow batch. They are
copied, and larger copies would need newly allocated memory.
"""


class ArrowOwner(Protocol):
    """Tracks the state of a consumer's batches."""

    def is_unacked(self, batch: ArrowBatch) -> bool:
        """Return True if the batch is in hand."""
        ...

    def is_requeued(self, batch: ArrowBatch) -> bool:
        """Return True if the batch was nacked and has not been handed out again."""
        ...

    def record_ack(self, batch: ArrowBatch) -> None:
        """Record that the batch in hand is acked."""
        ...

    def requeue(self, batch: ArrowBatch, wait_ms: int) -> None:
        """Take back the batch in hand, for at least `wait_ms`."""
        ...


class ArrowBatch:
    """
    Consecutive messages of one partition.

    Attributes:
        record_batch: a `pyarrow.RecordBatch` with columns `offset` (int64), `key` and `value`
            (binary), `timestamp` (the time of sending, in UTC) and `properties` (a map of strings;
            bytes are base64-encoded); one row per message, in offset order.
        partition_id: the partition.
        queue: the number of the partition's logic queue.
        start_offset: the offset of the first row.
        next_offset: one past the offset of the last row.
        lease: the lease under which the messages were delivered, see `Message`; None without a
            group.
        fencing_token: the token of the lease.
        attempt: how often the batch was handed out, including this time.
    """

    def __init__(
        self,
        record_batch: Any,
        start_offset: int,
        _client: PullClient,
        _owner: ArrowOwner,
    ) -> None:
        self.record_batch = record_batch
        self.partition_id = _client.partition_id
        self.queue = _client.queue
        self.start_offset = start_offset
        self.next_offset: int = start_offset + record_batch.num_rows
        self.fencing_token = _client.token
        self.lease = make_lease(_client.partition_id, _client.token)
        self.attempt = 1
        self._client = _client
        self._owner = _owner
        self._acking: asyncio.Task[bool] | None = None
        """The task that waits for a durable ack, if the next batch must wait for it."""

    def __len__(self) -> int:
        return self.next_offset - self.start_offset

    def __repr__(self) -> str:
        return (
            f"<ArrowBatch of partition {self.partition_id}, offsets [{self.start_offset}, "
            f"{self.next_offset}), "
            f"attempt {self.attempt}>"
        )

    async def ack(self) -> None:
        """
        Ack all messages of the batch. The partition's next batch may then be handed out. Repeated
        acks are harmless.

        Raises:
            LeaseLostError: another consumer owns the partition now, and gets the messages again.
            InvalidRequestError: the batch was nacked, and will be handed out again.
        """
        client = self._client
        client.check_can_ack(self.start_offset)
        if self._acking is None and self._owner.is_unacked(self):
            client.mark_range_handled(self.start_offset, self.next_offset)
            if not client.acks_each:
                self._owner.record_ack(self)
                return
            self._acking = start_task(self._release_when_durable())
        if self._acking is not None:
            if not await shield(self._acking):
                raise LeaseLostError(partition_id=self.partition_id, offset=self.start_offset)
        elif self._owner.is_requeued(self):
            raise InvalidRequestError(f"{self!r} was given back; ack it when it is delivered again")

    async def _release_when_durable(self) -> bool:
        """Wait until the ack is durable and then release the next batch, even if the caller's wait
        was cancelled.
        """
        durable = await self._client.wait_until_acked(self.next_offset - 1)
        if durable and self._owner.is_unacked(self):
            self._owner.record_ack(self)
        return durable

    async def nack(self, *, after_s: float = 0) -> None:
        """
        Nack the batch: it is handed out again before any later message of its partition.

        Args:
            after_s: the minimum number of seconds until it is handed out again, up to a day.

        Raises:
            InvalidRequestError: the batch is already acked or nacked, or `after_s` is not a number
                from 0 to a day.
            LeaseLostError: another consumer owns the partition now, and gets the messages again.
        """
        self._client.check_can_ack(self.start_offset)
        wait_ms = limited_wait_ms(parse_wait_ms(after_s), self.attempt)
        if self._acking is not None or not self._owner.is_unacked(self):
            raise InvalidRequestError(f"{self!r} is already acked or given back")
        self._owner.requeue(self, wait_ms)


def check_arrow() -> None:
    """Raise MissingExtraError if pyarrow or numpy is not installed."""
    try:
        from ...arrow import columns  # noqa: F401 - it needs both
    except ModuleNotFoundError as error:
        raise MissingExtraError.of(error, "a consumer of Arrow batches", "arrow") from error


def build_arrow_batch(batches: list[PulledBatch], owner: ArrowOwner) -> tuple[ArrowBatch, int]:
    """
    Join the first messages of some batches of one partition, up to a gap in the offsets or
    BATCH_BYTES_MAX.

    Returns:
        The Arrow batch, and the number of stored batches that it fully contains. The rest of the
        next stored batch is in its `ranges`.

    Raises:
        CorruptBatchError: the first batch cannot be unpacked; nothing is consumed.
    """
    from ...arrow import columns

    pieces: list[columns.Piece] = []
    consumed: list[PulledBatch] = []
    first = upto = batches[0].ranges[0][0]
    size = 0
    for batch in batches:
        start, end = batch.ranges[0]
        if start != upto or (pieces and size + len(batch.record) > BATCH_BYTES_MAX):
            break
        base = batch.header.base_offset
        try:
            record = memoryview(unpack_batch(batch.record, batch.header))
            pieces.append(columns.slice_piece(record, batch.header, start - base, end - base))
        except CorruptBatchError:
            if not pieces:
                raise
            break  # the next call raises it
        consumed.append(batch)
        size, upto = size + len(record), end
        if len(batch.ranges) > 1:
            break
    record_batch = columns.record_batch(pieces, first)
    for batch in consumed:  # not earlier, so that an error changes nothing
        start, end = batch.ranges.pop(0)
        batch.count -= end - start
    client: PullClient = batches[0].client  # type: ignore[assignment]
    consumed_count = sum(not batch.ranges for batch in consumed)
    return ArrowBatch(record_batch, first, client, owner), consumed_count
