"""Arrow record batches of the messages of one partition, acked as a whole.

a partition offers ─▶ the program asks ─▶ a part of its stored batches ─▶ a record batch
─▶ acked: the next part       given back: the same batch again
"""

from __future__ import annotations

import asyncio
from typing import Any

from ...protocol.errors import (
    CorruptBatchError,
    InvalidRequestError,
    LeaseLostError,
    MissingExtraError,
)
from ...protocol.message import make_lease
from ...rpc.race import shield, start_task
from ..session.events import ColumnsCut, ColumnsHandled, ColumnsReturned, ColumnsWanted
from ..session.lanes import PART_BYTES_MAX, ColumnPart
from .handlers import limited_wait_ms, parse_wait_ms


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

    def __init__(self, record_batch: Any, _part: ColumnPart, _shell: Any) -> None:
        self.record_batch = record_batch
        self.partition_id: int = _shell.partition_id
        self.queue: int = _shell.delivery.queue
        self.start_offset, self.next_offset = _part.range
        self.fencing_token: int = _shell.state.tenure.lease.token
        self.lease = make_lease(_shell.partition_id, _shell.state.tenure.lease.token)
        self._part = _part
        self._shell = _shell
        self._acking: asyncio.Task[bool] | None = None
        """The task that waits for a durable ack, if the next batch must wait for it."""

    @property
    def attempt(self) -> int:
        """How often the batch was handed out, including this time."""
        return self._part.attempt

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
        shell, part = self._shell, self._part
        shell.check_can_ack(self.start_offset)
        columns = shell.state.lanes.columns
        if columns.in_hand is part:
            shell.feed(ColumnsHandled(part))
            if columns.awaited is part:
                self._acking = start_task(self._wait_until_durable())
        elif columns.again is part:
            raise InvalidRequestError(f"{self!r} was given back; ack it when it is delivered again")
        if self._acking is not None and not await shield(self._acking):
            raise LeaseLostError(partition_id=self.partition_id, offset=self.start_offset)

    async def _wait_until_durable(self) -> bool:
        """Wait until the ack is durable. Return False if it never will be."""
        shell, columns = self._shell, self._shell.state.lanes.columns
        while columns.awaited is self._part:
            await shell.calls.wait_for_answer()
            if shell.ended.is_set():
                break
        return self._part.offset not in shell.state.acks.handled

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
        shell, part = self._shell, self._part
        shell.check_can_ack(self.start_offset)
        wait_ms = limited_wait_ms(parse_wait_ms(after_s), self.attempt)
        if shell.state.lanes.columns.in_hand is not part:
            raise InvalidRequestError(f"{self!r} is already acked or given back")
        shell.feed(ColumnsReturned(part, wait_ms))

    def put_back(self) -> None:
        """Give the batch back, which never reached the program. It is handed out again at once, as
        the same attempt.
        """
        if self._shell.state.lanes.columns.in_hand is self._part:
            self._shell.feed(ColumnsReturned(self._part, is_try=False))


def check_arrow() -> None:
    """Raise MissingExtraError if pyarrow or numpy is not installed."""
    try:
        from ...arrow import columns  # noqa: F401 - it needs both
    except ModuleNotFoundError as error:
        raise MissingExtraError.of(error, "a consumer of Arrow batches", "arrow") from error


def take_arrow(shell: Any) -> ArrowBatch | None:
    """
    Take the next Arrow batch of a partition, which is then in hand; None if there is none.

    Raises:
        CorruptBatchError: the next batch cannot be unpacked; it stays ahead of later ones.
    """
    columns = shell.state.lanes.columns
    if columns.in_hand is not None:
        return None
    shell.ask(ColumnsWanted())
    part: ColumnPart | None = columns.in_hand
    if part is None:
        return None
    if part.built is None:
        try:
            record_batch = _build(part, shell)
        except CorruptBatchError:
            shell.feed(ColumnsReturned(part, is_try=False))
            raise
        part.keep_built(ArrowBatch(record_batch, part, shell))
    batch: ArrowBatch = part.built
    return batch


def _build(part: ColumnPart, shell: Any) -> Any:
    """Return a record batch of the rows of a part. Rows from a batch on that cannot be unpacked, or
    with which it is too large, go back; raises CorruptBatchError if the first one cannot be.
    """
    from ...arrow import columns

    pieces: list[columns.Piece] = []
    first, size = part.range[0], 0
    for stored in part.batches:
        ((start, end),) = stored.ranges
        pulled: Any = stored.batch
        base = pulled.start
        try:
            record = pulled.unpack()
            piece = columns.slice_piece(record, pulled.header, start - base, end - base)
        except CorruptBatchError:
            if not pieces:
                raise
            shell.feed(ColumnsCut(start))  # the next call raises it
            break
        size += len(record)
        if pieces and size > PART_BYTES_MAX:
            shell.feed(ColumnsCut(start))  # compressed batches are larger than they were pulled
            break
        pieces.append(piece)
    return columns.record_batch(pieces, first)
