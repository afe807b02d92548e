"""Parked messages that are read from where they are stored: what is given up, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from keylane.consumer import ConsumerSettings
from keylane.consumer.parked_reads import _not_passed_over
from keylane.consumer.session.events import ReadWindow, SourceUnreadable, WindowRead
from keylane.protocol.batch import batch_starts
from keylane.protocol.errors import (
    CorruptLogError,
    KeylaneError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
)
from keylane.protocol.frames import Batches, ParkedRows, Read, ReadParked
from keylane.protocol.ids import MAX_I64
from keylane.protocol.operations import SubjectHistory
from keylane.protocol.parked import RETRIED
from keylane.protocol.record import HEADER_BYTES
from keylane.protocol.routing import PartitionState
from support.pulling import NotingOwner, ScriptedBroker, opened, stored
from unit.consumer.reading.test_lineage_order import past

KEY = b"k"
ANCESTOR = 30
AWAY = "b:2"


class ParkedRowsBroker(ScriptedBroker):
    """Has parked offsets [5, 9) of the ancestor."""

    async def call(self, request: Any, payload: bytes = b"", *, wait_ms: int = 0) -> Any:
        if isinstance(request, ReadParked):
            return ParkedRows(((ANCESTOR, 5, 9),), None), b""
        return await super().call(request, payload, wait_ms=wait_ms)


class ReadBroker(ScriptedBroker):
    """Has an ancestor of the partition, and answers each read of it alike."""

    address = AWAY

    def __init__(self, told: KeylaneError | Batches) -> None:
        super().__init__()
        self.told = told

    async def call(self, request: Any, payload: bytes = b"", *, wait_ms: int = 0) -> Any:
        if not isinstance(request, Read):
            return await super().call(request, payload, wait_ms=wait_ms)
        if isinstance(self.told, KeylaneError):
            raise self.told
        return self.told, memoryview(b"")


class HistoryOwner(NotingOwner):
    """Its metaserver tells this of the ancestor."""

    def __init__(self, **told: Any) -> None:
        super().__init__()
        entry = past(ANCESTOR, 0, 1024, **told)
        entry = replace(entry, partition=replace(entry.partition, address=AWAY))
        self._history = SubjectHistory(subject="s", route_version=1, partitions=[entry])

    async def history(self) -> SubjectHistory:
        return self._history


async def read_at(told: KeylaneError | Batches, **known: Any) -> WindowRead | SourceUnreadable:
    """Have the first window of the key read, where the ancestor's broker tells this."""
    others = (ReadBroker(told),)
    owner = HistoryOwner(**known)
    async with opened(ParkedRowsBroker(), owner, ConsumerSettings(), others=others) as shell:
        return await shell.calls.reads.read_window(ReadWindow(1, KEY, 0, (), 100))


@pytest.mark.parametrize(
    "told",
    [
        OffsetOutOfRangeError(offset=5, first_offset=0, next_offset=3),
        Batches(0, 5, 5, False),
        PartitionUnknownError(partition_id=ANCESTOR),
    ],
    ids=["a copy that ends before", "a copy that ends there", "a copy from before the partition"],
)
async def test_parked_messages_are_kept_when_the_broker_lacks_them(told: KeylaneError | Batches):
    """It stands on an older copy of its data folder, and the original may come back."""
    assert await read_at(told) == SourceUnreadable(1, ANCESTOR)


async def test_parked_messages_are_given_up_when_retention_has_removed_them():
    read = await read_at(OffsetOutOfRangeError(offset=5, first_offset=7, next_offset=20))
    assert isinstance(read, WindowRead)
    assert (read.messages, list(read.gone)) == ([], [(ANCESTOR, 5, 7)])


@pytest.mark.parametrize("gone", [{"lost": True}, {"state": PartitionState.EXPIRED}])
async def test_parked_messages_are_given_up_when_their_partition_is_gone(gone: dict[str, Any]):
    read = await read_at(PartitionUnknownError(), **gone)
    assert isinstance(read, WindowRead)
    assert (read.messages, list(read.gone)) == ([], [(ANCESTOR, 5, 9)])


# ── damaged messages ──────────────────────────────────────────────────────────────────────────────
def not_unpacking(base_offset: int) -> bytes:
    """A batch whose lengths do not add up: its sender has packed it so, or what the broker sent was
    changed on the way.
    """
    record = bytearray(stored(base_offset))
    ((_, header),) = batch_starts(record)
    record[HEADER_BYTES + 8 * header.count] += 1  # the length of the first key
    return bytes(record)


class DamagedBroker(ScriptedBroker):
    """Has parked messages in batches of two, of which some are damaged."""

    def __init__(self, rows: list[tuple[int, int, int]], *damaged: int, unpacks: bool) -> None:
        super().__init__()
        self.end = 0  # nothing else is pulled
        self._rows = rows
        self._damaged = damaged
        self._unpacks = unpacks
        self.asked_from: list[int] = []
        """The rows from which lists of them were asked for, which have one row each."""
        self.reads: list[int] = []

    async def call(self, request: Any, payload: bytes = b"", *, wait_ms: int = 0) -> Any:
        match request:
            case ReadParked(first=first):
                self.asked_from.append(first)
                rows = self._rows[first : first + 1]
                return ParkedRows(tuple(rows), len(rows)), b""
            case Read(offset=offset):
                self.reads.append(offset)
                base = offset - offset % 2
                if base in self._damaged and self._unpacks:
                    raise CorruptLogError(partition_id=1, offset=base, end_offset=base + 2)
                batches = [
                    not_unpacking(each) if each in self._damaged else stored(each)
                    for each in range(base, self._rows[-1][2], 2)
                ]
                return Batches(0, 6, 6, False), b"".join(map(bytes, batches))
        return await super().call(request, payload, wait_ms=wait_ms)


async def windows_of(
    broker: DamagedBroker, *, passed_over: tuple[tuple[int, int], ...] = (), first_row: int = 0
) -> tuple[WindowRead | SourceUnreadable, list[int]]:
    """Read the next window of the dead letters; it, and the offsets of its messages."""
    request = ReadWindow(1, RETRIED, 0, (), 100, passed_over=passed_over, first_row=first_row)
    async with opened(broker, NotingOwner(), ConsumerSettings()) as shell:
        window = await shell.calls.reads.read_window(request)
    messages = window.messages if isinstance(window, WindowRead) else []
    return window, [message.offset for message in messages]


@pytest.mark.parametrize("unpacks", [True, False], ids=["the log", "the batch"])
async def test_damaged_batch_is_named_and_later_messages_are_read(unpacks: bool):
    broker = DamagedBroker([(1, 0, 4)], 0, unpacks=unpacks)
    window, _ = await windows_of(broker)
    assert window == SourceUnreadable(1, 1, upto=2)
    _, read = await windows_of(broker, passed_over=((1, 2),))
    assert read == [2, 3]
    window, read = await windows_of(broker, passed_over=((1, 4),))
    assert (type(window), read) == (WindowRead, []), "nothing else is left"


async def test_messages_before_and_after_a_batch_that_does_not_unpack_are_read():
    broker = DamagedBroker([(1, 0, 6)], 2, unpacks=False)
    _, read = await windows_of(broker)
    assert read == [0, 1]
    broker._rows = [(1, 2, 6)]
    window, _ = await windows_of(broker)
    assert window == SourceUnreadable(1, 1, upto=4)
    _, read = await windows_of(broker, passed_over=((1, 4),))
    assert read == [4, 5]


async def test_pages_of_rows_that_are_passed_over_are_asked_for_once():
    """Thousands of them would be asked for again for each few messages behind them."""
    broker = DamagedBroker([(1, at, at + 2) for at in range(0, 12, 2)], unpacks=True)
    window, read = await windows_of(broker, passed_over=((1, 6),))
    assert (window.first_row, read) == (3, [6, 7])
    assert broker.asked_from == [0, 1, 2, 3]
    _, read = await windows_of(broker, passed_over=((1, 6),), first_row=window.first_row)
    assert read == [6, 7]
    assert broker.asked_from[4:] == [3]


async def test_messages_of_another_source_are_read_when_one_does_not_answer():
    """Not even a read of it is tried while it is passed over."""
    broker = DamagedBroker([(ANCESTOR, 0, 9), (1, 2, 4)], unpacks=True)
    _, read = await windows_of(broker, passed_over=((ANCESTOR, MAX_I64),))
    assert read == [2, 3]
    assert broker.reads == [2]


@pytest.mark.parametrize(
    ("below", "count", "left"),
    [
        ({}, 5, [(1, 0, 4), (1, 6, 7)]),
        ({1: 2}, 4, [(1, 2, 4), (1, 6, 8)]),
        ({1: 8}, 4, [(1, 8, 9), (2, 0, 3)]),
        ({1: MAX_I64}, 100, [(2, 0, 3)]),
    ],
)
def test_rows_left_are_the_first_ones_that_are_not_passed_over(below, count, left):
    assert _not_passed_over([(1, 0, 4), (1, 6, 9), (2, 0, 3)], below, count) == left
