"""Arrow batches of a partition: in order, acked and given back as a whole, and what becomes of those
that cannot be unpacked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import crc32c
import pytest

from keylane.consumer import ConsumerSettings
from keylane.consumer.dispatch.arrow import take_arrow
from keylane.consumer.dispatch.failures import FailureRecords
from keylane.consumer.dispatch.loop import LoopDispatch
from keylane.consumer.session.lanes import PART_BYTES_MAX
from keylane.consumer.session_shell import SessionShell
from keylane.protocol.batch import encode_batch
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import CorruptBatchError, InvalidRequestError, LeaseLostError
from keylane.protocol.frames import Batches, Pull
from keylane.protocol.record import HEADER_BYTES, Compression, stamp_record
from support.cluster import eventually
from support.pulling import NotingOwner, ScriptedBroker, opened

SETTINGS = ConsumerSettings()


def stored_rows(start: int, count: int, *, is_damaged: bool = False, repeats: int = 9) -> bytearray:
    """A batch as its broker stores it, each of whose values repeats its text. A damaged one has a
    body that cannot be unpacked, but a valid checksum, which is all that brokers check.
    """
    data = bytearray(
        encode_batch(
            partition_id=1,
            sent_at_ns=[1_000 * (start + number) for number in range(count)],
            keys=[b"k%d" % (start + number) for number in range(count)],
            values=[b"v%d" % (start + number) * repeats for number in range(count)],
            producer_id=7,
            producer_epoch=0,
            sequence=start,
            compression=Compression.ZSTD,
        )
    )
    if is_damaged:
        checksum_at = data.index(_checksum(data), 8)
        data[-8:] = bytes(8)
        data[checksum_at : checksum_at + 4] = _checksum(data)
    header = data[:HEADER_BYTES]
    stamp_record(header, base_offset=start, position=0, appended_at_ms=0)
    data[:HEADER_BYTES] = header
    return data


def _checksum(record: bytearray) -> bytes:
    """Return the checksum of the body, as it is in the header."""
    return crc32c.crc32c(record[HEADER_BYTES:]).to_bytes(4, "little")


class RowBroker(ScriptedBroker):
    """Has batches of three rows, of which these are damaged."""

    def __init__(self, count: int, *damaged: int, repeats: int = 9) -> None:
        super().__init__()
        self.end = 3 * count
        self.damaged = damaged
        self.repeats = repeats

    async def call(self, request: Any, payload: bytes = b"", *, wait_ms: int = 0) -> Any:
        if not isinstance(request, Pull) or request.offset >= self.end:
            return await super().call(request, payload, wait_ms=wait_ms)
        pulled = b"".join(
            stored_rows(start, 3, is_damaged=start // 3 in self.damaged, repeats=self.repeats)
            for start in range(request.offset, self.end, 3)
        )
        return Batches(0, self.end, self.end, False), memoryview(pulled)


class ColumnOwner(NotingOwner):
    """A program that takes columns."""

    by_hand = by_column = True


async def pulled(shell: SessionShell) -> None:
    await eventually(lambda: shell.state.lanes.stored)


async def test_pulled_batches_are_joined_and_acked_together():
    broker = RowBroker(3)
    async with opened(broker, ColumnOwner(), SETTINGS) as shell:
        await pulled(shell)
        batch = take_arrow(shell)
        assert batch is not None
        assert (batch.start_offset, batch.next_offset, batch.partition_id) == (0, 9, 1)
        assert len(batch) == 9
        values = batch.record_batch.column("value").to_pylist()
        assert values == [b"v%d" % at * 9 for at in range(9)]
        assert batch.record_batch.column("key").to_pylist() == [b"k%d" % at for at in range(9)]
        assert batch.record_batch.column("offset").to_pylist() == list(range(9))
        assert (batch.fencing_token, batch.attempt) == (shell.state.tenure.lease.token, 1)
        assert take_arrow(shell) is None, "a batch is in hand"
        await batch.ack()
        await batch.ack()
    assert broker.cursor == 9


async def test_program_that_has_a_batch_does_not_keep_what_was_pulled():
    async with opened(RowBroker(3), ColumnOwner(), SETTINGS) as shell:
        await pulled(shell)
        assert take_arrow(shell) is not None
        columns = shell.state.lanes.columns
        assert columns is not None
        assert columns.in_hand is not None
        assert columns.in_hand.batches == []


async def test_compressed_batches_are_joined_by_their_unpacked_sizes():
    """Two of them are almost as large as an Arrow batch may be."""
    broker = RowBroker(3, repeats=PART_BYTES_MAX // 14)
    async with opened(broker, ColumnOwner(), SETTINGS) as shell:
        await pulled(shell)
        for end in (6, 9):
            batch = take_arrow(shell)
            assert batch is not None
            assert batch.next_offset == end
            await batch.ack()
        assert take_arrow(shell) is None


async def test_batch_given_back_comes_again_and_is_neither_acked_nor_given_back_before():
    async with opened(RowBroker(1), ColumnOwner(), SETTINGS) as shell:
        await pulled(shell)
        batch = take_arrow(shell)
        assert batch is not None
        await batch.nack()
        with pytest.raises(InvalidRequestError, match="was given back"):
            await batch.ack()
        with pytest.raises(InvalidRequestError):
            await batch.nack()
        assert take_arrow(shell) is batch
        assert batch.attempt == 2
        await batch.ack()
        with pytest.raises(InvalidRequestError):
            await batch.nack()


async def test_ack_with_ack_each_is_durable_when_it_returns():
    broker = RowBroker(1)
    async with opened(broker, ColumnOwner(), ConsumerSettings(ack="each")) as shell:
        await pulled(shell)
        batch = take_arrow(shell)
        assert batch is not None
        await batch.ack()
        assert broker.cursor == 3


async def test_ack_is_refused_when_the_partition_was_handed_over():
    async with opened(RowBroker(1), ColumnOwner(), SETTINGS) as shell:
        await pulled(shell)
        batch = take_arrow(shell)
        assert batch is not None
        shell.abandon()
        for outcome in (batch.ack, batch.nack):
            with pytest.raises(LeaseLostError):
                await outcome()


async def test_batch_that_does_not_unpack_stays_before_later_ones():
    """It raises each time; earlier rows are delivered, later ones are not."""
    async with opened(RowBroker(3, 1), ColumnOwner(), SETTINGS) as shell:
        await pulled(shell)
        first = take_arrow(shell)
        assert first is not None
        assert (first.start_offset, first.next_offset) == (0, 3)
        await first.ack()
        for _ in range(3):
            with pytest.raises(CorruptBatchError):
                take_arrow(shell)
        assert shell.state.intake.held == 6


def loop_dispatch(clock: SystemClock, check: Callable[[], None] = lambda: None) -> LoopDispatch:
    records = FailureRecords(client="c", wall_ms=clock.wall_ms)
    return LoopDispatch(clock=clock, handover_ms=0, check=check, records=records)


async def test_other_partitions_go_on_beside_a_batch_that_does_not_unpack():
    loop = loop_dispatch(SystemClock())
    loop.claim_columns()
    owner = ColumnOwner()
    async with (
        opened(RowBroker(2, 0), owner, SETTINGS, dispatch=loop) as damaged,
        opened(RowBroker(1), owner, SETTINGS, dispatch=loop) as sound,
    ):
        await pulled(damaged)
        await pulled(sound)
        taken: list[Any] = []
        for _ in range(4):
            try:
                taken.append(await asyncio.wait_for(loop.take_arrow(), 30))
            except CorruptBatchError:
                taken.append("corrupt")
        assert taken.count("corrupt") == 3
        assert [each._shell for each in taken if each != "corrupt"] == [sound]
        await loop.close()


async def test_message_behind_a_batch_that_does_not_unpack_is_not_handed_out():
    """The iteration raises each time that it comes to the batch, and gets what is before it."""
    loop = loop_dispatch(SystemClock())
    owner = NotingOwner()
    owner.by_hand = True
    async with opened(RowBroker(3, 1), owner, SETTINGS, dispatch=loop) as shell:
        await pulled(shell)
        for offset in range(3):
            message = await loop.next()
            assert message.offset == offset
            await loop.ack(shell, message)
        for _ in range(2):
            with pytest.raises(CorruptBatchError):
                await loop.next()
        assert shell.state.intake.held == 6
        await loop.close()


@pytest.mark.parametrize("turns", [0, 1])
async def test_batch_stays_for_who_asks_next_when_a_wait_is_cancelled(turns: int):
    """A time-out around the next batch loses none, whenever it ends."""
    loop = loop_dispatch(SystemClock())
    loop.claim_columns()
    async with opened(RowBroker(1), ColumnOwner(), SETTINGS, dispatch=loop) as shell:
        await pulled(shell)
        asking = asyncio.create_task(loop.take_arrow())
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        batch = await asyncio.wait_for(loop.take_arrow(), 30)
        assert (batch.start_offset, batch.next_offset) == (0, 3)
        await loop.close()
