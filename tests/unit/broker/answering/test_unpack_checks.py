"""Packed batches are unpacked before they are stored; a later append keeps its place behind a large
one.
"""

from __future__ import annotations

import asyncio
import struct
from functools import partial

import pytest

from keylane.broker.answering import unpack_checks
from keylane.protocol.batch import batch_starts, encode_batch
from keylane.protocol.errors import (
    CorruptBatchError,
    MessageTooLargeError,
    OverloadedError,
    SequenceGapError,
    UnpackError,
)
from keylane.protocol.limits import MESSAGE_BYTES_MAX
from keylane.protocol.record import HEADER_BYTES, Compression, Kind, encode_record
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store

PACKED = (Compression.ZSTD, Compression.LZ4)
LINES = b"".join(b'{"flight": %d, "carrier": "UA"}\n' % number for number in range(20_000))
SMALL, LARGE = LINES[:4_000], LINES[:400_000]


def packed(compression: Compression, value: bytes, *, sequence: int = 0) -> bytes:
    """A batch of one message that is packed."""
    data = encode_batch(
        partition_id=1,
        sent_at_ns=[1],
        keys=[b"k"],
        values=[value],
        producer_id=7,
        producer_epoch=0,
        sequence=sequence,
        compression=compression,
    )
    assert batch_starts(data)[0][1].compression == compression
    return data


def damaged(data: bytes) -> bytes:
    """The batch with other packed bytes, and right checksums: as who sends it made them."""
    header = batch_starts(data)[0][1]
    body = bytearray(data[HEADER_BYTES:])
    body[-40:-8] = bytes(range(200, 232))
    return encode_record(
        bytes(body),
        kind=Kind.MESSAGES,
        count=header.count,
        compression=header.compression,
        partition_id=1,
        producer_id=7,
        sequence=header.sequence,
    )


def plain(*, keys: int = 0, value: bytes = b"v") -> bytes:
    """A batch of one message whose lengths say `keys` bytes more of key than there are."""
    body = struct.pack("<qIII", 1, 1 + keys, len(value), 0) + b"k" + value
    return encode_record(body, kind=Kind.MESSAGES, count=1, partition_id=1, producer_id=7)


@pytest.mark.parametrize("value", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("compression", PACKED)
async def test_append_refuses_a_packed_batch_when_it_does_not_unpack(desk, compression, value):
    """Nothing is stored, sent again it is refused again, and the partition takes what its producer
    sends next.
    """
    good = packed(compression, value)
    end = desk.store.log.end
    for _ in range(2):
        with pytest.raises(UnpackError) as refused:
            await desk.append(damaged(good))
        assert "packed it" in refused.value.hint
    assert desk.store.log.end == end
    assert (await desk.append(good)).base_offset == 0
    stored = await desk.read(0)
    assert stored[1][HEADER_BYTES:] == good[HEADER_BYTES:]


@pytest.mark.parametrize("prompt", [True, False])
async def test_append_refuses_a_plain_batch_when_its_lengths_lie(desk, prompt):
    desk.prompt = prompt
    for keys in (1, -1, 900):
        with pytest.raises(CorruptBatchError, match="add up"):
            await desk.append(plain(keys=keys))
    assert (await desk.append(plain())).base_offset == 0


@pytest.mark.parametrize("compression", list(Compression))
async def test_append_refuses_a_message_when_it_is_over_the_limit_of_all(desk, compression):
    """A batch has room for more than one message of the largest size; producers of others know no
    limit.
    """
    fits, over = (LINES * 3)[: MESSAGE_BYTES_MAX - 1], (LINES * 3)[:1_060_000]
    with pytest.raises(MessageTooLargeError) as refused:
        await desk.append(packed(compression, over) if compression else plain(value=over))
    assert refused.value.limit_bytes == MESSAGE_BYTES_MAX
    data = packed(compression, fits) if compression else plain(value=fits)
    assert (await desk.append(data)).base_offset == 0


class Gate:
    """Runs checks once it is open."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.checked = 0

    async def __call__(self, function, /, *args):
        await self.opened.wait()
        self.checked += 1
        return function(*args)


@pytest.fixture
async def gated() -> tuple[Desk, Gate]:
    clock, gate = ManualClock(), Gate()
    store = open_store(SimDisk(), clock=clock)
    store.run_read = gate
    desk = Desk(store, clock)
    await desk.host()
    await desk.host(2)
    return desk, gate


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_appends_keep_their_order_when_a_large_one_is_checked(gated):
    """Plain, small and large batches of one producer, sent without waiting; another partition waits
    for none of them.
    """
    desk, gate = gated
    made = [
        partial(packed, Compression.LZ4, LARGE),
        partial(packed, Compression.LZ4, SMALL),
        lambda *, sequence: batch(sequence=sequence, count=1),
        partial(packed, Compression.ZSTD, LARGE),
    ]
    sending = [
        asyncio.create_task(desk.append(made[number % 4](sequence=number))) for number in range(12)
    ]
    await turns()
    assert (await desk.append(batch(partition_id=2), 2)).base_offset == 0
    assert not any(task.done() for task in sending)
    gate.opened.set()
    answers = await asyncio.gather(*sending)
    assert [answer.base_offset for answer in answers] == list(range(12))
    assert gate.checked == 6
    before = desk.prompt_answers
    await desk.append(batch(sequence=12))
    assert desk.prompt_answers == before + 1  # nothing waits any more


async def test_appends_behind_a_refused_one_are_refused_for_their_gap(gated):
    desk, gate = gated
    gate.opened.set()
    good = packed(Compression.LZ4, LARGE)
    outcomes = await asyncio.gather(
        desk.append(damaged(good)),
        desk.append(packed(Compression.LZ4, LARGE, sequence=1)),
        desk.append(batch(sequence=2)),
        return_exceptions=True,
    )
    assert [type(each) for each in outcomes] == [UnpackError, SequenceGapError, SequenceGapError]


async def test_append_waits_on_when_the_client_of_an_earlier_one_leaves(gated):
    desk, gate = gated
    first, second = (
        asyncio.create_task(desk.append(packed(Compression.LZ4, LARGE))) for _ in range(2)
    )
    await turns()
    first.cancel()
    await turns()
    assert not second.done()
    gate.opened.set()
    assert (await second).base_offset == 0


@pytest.mark.parametrize("behind", [0, 1, 2])
async def test_appends_keep_their_places_when_the_client_of_a_later_one_leaves(gated, behind: int):
    """The one before it is still being checked; those behind it, and a new one, wait for that."""
    desk, gate = gated
    first, second, *later = (
        asyncio.create_task(desk.append(packed(Compression.LZ4, LARGE, sequence=number)))
        for number in (0, 9, *range(1, 1 + behind))
    )
    await turns()
    second.cancel()
    await turns()
    newest = asyncio.create_task(desk.append(batch(sequence=1 + behind, count=1)))
    await turns()
    assert not any(task.done() for task in (first, *later, newest))
    gate.opened.set()
    answers = await asyncio.gather(first, *later, newest)
    assert [answer.base_offset for answer in answers] == list(range(2 + behind))
    before = desk.prompt_answers
    await desk.append(batch(sequence=2 + behind))
    assert desk.prompt_answers == before + 1  # nothing waits any more


async def test_append_is_refused_when_too_many_bytes_wait_for_their_check(gated, monkeypatch):
    desk, gate = gated
    data = packed(Compression.LZ4, LARGE)
    monkeypatch.setattr(unpack_checks, "WAITING_BYTES_MAX", 2 * len(data))
    waiting = [asyncio.create_task(desk.append(data)) for _ in range(2)]
    await turns()
    with pytest.raises(OverloadedError, match="waiting to be checked"):
        await desk.append(data)
    gate.opened.set()
    assert [(await each).base_offset for each in waiting] == [0, 0]
    assert (await desk.append(data)).duplicate
