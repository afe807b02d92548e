"""Arrow batches: one per partition is in hand, gaps end a batch, and hand-overs drop what waits."""

from __future__ import annotations

import asyncio

import pytest

from keylane.consumer.delivery.decode import decode_messages
from keylane.consumer.delivery.pulled_batch import PulledBatch
from keylane.consumer.handling.arrow_stream import ArrowStream
from keylane.consumer.handling.stream import Stream
from keylane.protocol.batch import columns, encode_batch
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import CorruptBatchError, InvalidRequestError, LeaseLostError
from keylane.protocol.offsets import Range
from keylane.protocol.record import HEADER_BYTES, Compression, read_record, stamp_record
from sim.machines.clock import ManualClock


class ArrowClient:
    """The part of a pull client that Arrow batches use."""

    def __init__(self, partition_id: int) -> None:
        self.partition_id = partition_id
        self.queue = 3
        self.token = 5
        self.paused = False
        self.deadline_ns = 2**62
        self.acks_each = False
        self.lost = False
        self.done: list[Range] = []
        self.forgotten = 0
        self.parked: list[int] = []
        """The offsets whose keys are parked."""

    def park_rows_of_parked_keys(self, batch: PulledBatch) -> None:
        batch.ranges = [part for part in batch.ranges if part[0] not in self.parked]
        batch.count = sum(end - start for start, end in batch.ranges)

    def check_can_ack(self, offset: int) -> None:
        if self.lost:
            raise LeaseLostError(partition_id=self.partition_id, offset=offset)

    def mark_range_handled(self, start: int, end: int) -> None:
        self.done.append((start, end))

    def discard_in_flight(self, count: int) -> None:
        self.forgotten += count


def stored(client: ArrowClient, start: int, count: int, *ranges: Range) -> PulledBatch:
    data = bytearray(
        encode_batch(
            partition_id=client.partition_id,
            sent_at_ns=[1_000 * (start + number) for number in range(count)],
            keys=[b"k%d" % (start + number) for number in range(count)],
            values=[b"v%d" % (start + number) * 9 for number in range(count)],
            producer_id=7,
            producer_epoch=0,
            sequence=start,
            compression=Compression.ZSTD,
        )
    )
    header = data[:HEADER_BYTES]
    stamp_record(header, base_offset=start, position=0, appended_at_ms=0)
    data[:HEADER_BYTES] = header
    parsed = read_record(memoryview(data), 0)
    return PulledBatch(client, memoryview(data), parsed, list(ranges or [(start, start + count)]))


def stream_of(clock: ManualClock) -> ArrowStream:
    return ArrowStream(boot_ns=clock.boot_ns, wake=lambda: None)


async def test_pulled_batches_of_a_partition_are_joined_and_acked_together():
    stream, client, other = stream_of(ManualClock()), ArrowClient(1), ArrowClient(2)
    for batch in (stored(client, 0, 3), stored(client, 3, 2), stored(other, 7, 1)):
        stream.put(batch)
    first, second = stream.take(), stream.take()
    assert (first.start_offset, first.next_offset, first.partition_id) == (0, 5, 1)
    assert first.record_batch.column("value").to_pylist() == [b"v%d" % at * 9 for at in range(5)]
    assert first.record_batch.column("key").to_pylist() == [b"k%d" % at for at in range(5)]
    assert (second.start_offset, second.queue, second.fencing_token) == (7, 3, 5)
    stream.put(stored(client, 5, 1))
    assert stream.take() is None, "a batch of each partition is in hand"
    await first.ack()
    await first.ack()
    assert client.done == [(0, 5)]
    assert stream.take().start_offset == 5


async def test_gap_of_acked_messages_ends_a_batch():
    stream, client = stream_of(ManualClock()), ArrowClient(1)
    stream.put(stored(client, 0, 8, (1, 3), (5, 8)))
    stream.put(stored(client, 8, 2))
    places = []
    while (batch := stream.take()) is not None:
        places.append((batch.start_offset, batch.next_offset))
        assert batch.record_batch.column("offset").to_pylist() == list(range(*places[-1]))
        await batch.ack()
    assert places == [(1, 3), (5, 10)] == client.done
    assert stream.waiting == 0


async def test_batch_given_back_comes_first_once_it_is_due():
    clock = ManualClock()
    stream, client = stream_of(clock), ArrowClient(1)
    stream.put(stored(client, 0, 2))
    batch = stream.take()
    await batch.nack(after_s=2)
    stream.put(stored(client, 2, 2))
    with pytest.raises(InvalidRequestError):
        await batch.ack()
    with pytest.raises(InvalidRequestError):
        await batch.nack()
    assert stream.take() is None
    assert stream.waiting == 4
    clock.advance(2_000)
    assert stream.take() is batch
    assert batch.attempt == 2
    await batch.ack()
    client.lost = True
    with pytest.raises(LeaseLostError):
        await stream.take().ack()


async def test_batch_given_back_is_not_waited_for_while_its_partition_is_paused():
    """A program that waited for its due time would ask repeatedly without a pause."""
    clock = ManualClock()
    stream, client = stream_of(clock), ArrowClient(1)
    stream.put(stored(client, 0, 2))
    await stream.take().nack()
    assert stream.next_ns() == clock.boot_ns()
    client.paused = True
    assert stream.take() is None
    assert stream.next_ns() is None
    client.paused = False
    assert stream.take().attempt == 2


def test_paused_lapsed_and_dropped_partitions_give_nothing():
    stream, client, lapsed = stream_of(ManualClock()), ArrowClient(1), ArrowClient(2)
    stream.put(stored(client, 0, 2))
    stream.put(stored(lapsed, 0, 3))
    client.paused, lapsed.deadline_ns = True, 0
    assert stream.take() is None
    assert (client.forgotten, lapsed.forgotten) == (0, 3)
    stream.drop(client)
    stream.drop(client)
    assert client.forgotten == 2
    assert stream.waiting == 0


def test_rows_of_parked_keys_are_in_no_batch():
    stream, client = stream_of(ManualClock()), ArrowClient(1)
    client.parked = [0, 7]
    for batch in (stored(client, 0, 2), stored(client, 7, 3, (7, 8), (8, 10))):
        stream.put(batch)
    assert stream.waiting == 2
    assert stream.take().start_offset == 8
    assert stream.take() is None


async def test_batch_stays_for_the_next_one_who_asks_when_the_wait_is_cancelled():
    """A time-out around `anext(consumer.batches())` loses no batch, at whichever step it ends."""
    stream = Stream(clock=SystemClock(), handover_ms=0, check=lambda: None)
    stream.put_batch(stored(ArrowClient(1), 0, 3))
    asking = asyncio.create_task(stream.take_arrow())
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    batch = await asyncio.wait_for(stream.take_arrow(), 30)
    assert (batch.start_offset, batch.next_offset) == (0, 3)


def damaged(batch: PulledBatch) -> PulledBatch:
    """Return the batch with a body that cannot be unpacked, but with a valid checksum, which is all
    that brokers check.
    """
    batch.record[-8:] = bytes(8)
    return batch


async def test_batch_that_does_not_unpack_stays_before_later_ones():
    """It raises every time; earlier messages and other partitions are delivered, later messages are
    not.
    """
    stream, client, other = stream_of(ManualClock()), ArrowClient(1), ArrowClient(2)
    for batch in (stored(client, 0, 3), damaged(stored(client, 3, 3)), stored(client, 6, 3)):
        stream.put(batch)
    first = stream.take()
    assert (first.start_offset, first.next_offset) == (0, 3)
    await first.ack()
    stream.put(stored(other, 0, 2))
    taken = []
    for _ in range(4):
        try:
            taken.append(stream.take())
        except CorruptBatchError:
            taken.append("corrupt")
    assert [each if each is None or each == "corrupt" else each.partition_id for each in taken] in (
        ["corrupt", 2, "corrupt", "corrupt"],
        [2, "corrupt", "corrupt", "corrupt"],
    )
    assert client.done == [(0, 3)]
    assert stream.waiting == 6


async def test_message_behind_a_batch_that_does_not_unpack_is_not_handed_out():
    """The iteration raises every time it reaches the batch."""

    class Decoding(ArrowClient):
        may_be_unregistered = False

        def decode(self, record, header):
            if not header.base_offset:
                raise CorruptBatchError("it does not unpack", length=header.length)
            return decode_messages(columns(record, header), header, "s", 1, 5, self)

        def park_later_messages(self, messages):
            return messages

        def register_delivered(self, message):
            del message

    stream = Stream(clock=SystemClock(), handover_ms=0, check=lambda: None)
    client = Decoding(1)
    for start in (0, 3):
        stream.put_batch(stored(client, start, 3))
    for _ in range(2):
        with pytest.raises(CorruptBatchError):
            await stream.next()
    assert stream._waiting_count == 6
