"""Where parked messages are read again: what is given up, and what is waited for."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from keylane.consumer import ConsumerSettings
from keylane.consumer.parking import redrive
from keylane.consumer.pulling.pull_client import PullClient
from keylane.protocol.batch import batch_starts
from keylane.protocol.errors import (
    CorruptLogError,
    KeylaneError,
    NotSentError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
)
from keylane.protocol.frames import Batches, ChangeParked, ParkedRows, Read, ReadParked
from keylane.protocol.operations import SubjectHistory
from keylane.protocol.parked.changes import (
    RETRIED,
    ParkKey,
    RequestedChange,
    Unpark,
    decode_changes,
)
from keylane.protocol.record import HEADER_BYTES
from keylane.protocol.routing import PartitionState
from support.pulling import FAST, NotingOwner, ScriptedBroker, opened, stored
from unit.consumer.reading.test_lineage_order import past

ANCESTOR = 70
KEY = b"k"


class AncestorBroker(ScriptedBroker):
    """Has an ancestor of the partition, and answers each read of it alike."""

    address = "b:2"

    def __init__(self, told: KeylaneError | Batches) -> None:
        super().__init__()
        self.told = told

    async def call(self, request, payload=b"", *, wait_ms=0):
        if not isinstance(request, Read):
            return await super().call(request, payload, wait_ms=wait_ms)
        if isinstance(self.told, KeylaneError):
            raise self.told
        return self.told, b""


class KnowingOwner(NotingOwner):
    """Its metaserver tells this of the ancestor."""

    def __init__(self, **told) -> None:
        super().__init__()
        entry = past(ANCESTOR, 0, 1024, **told)
        there = replace(entry.partition, address=AncestorBroker.address)
        entry = replace(entry, partition=there)
        self._history = SubjectHistory(subject="s", route_version=1, partitions=[entry])

    async def history(self) -> SubjectHistory:
        return self._history


class HomeBroker(ScriptedBroker):
    """Has the partition, and keeps what is changed of what is parked."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[RequestedChange] = []

    async def call(self, request, payload=b"", *, wait_ms=0):
        if isinstance(request, ChangeParked):
            self.changes += decode_changes(payload)
        return await super().call(request, payload, wait_ms=wait_ms)


async def read_at(home: HomeBroker, told: KeylaneError | Batches, owner: KnowingOwner) -> None:
    """Have offsets [5, 9) of the ancestor read, which are parked, where its broker tells this."""
    others = (AncestorBroker(told),)
    async with opened(PullClient, home, owner, ConsumerSettings(), others=others) as client:
        assert await client.parking._redrives.read(KEY, ANCESTOR, [(5, 9)])


@pytest.mark.parametrize(
    "told",
    [
        OffsetOutOfRangeError(offset=5, first_offset=0, next_offset=3),
        Batches(0, 5, 5, False),
        PartitionUnknownError(partition_id=ANCESTOR),
    ],
    ids=["a copy that ends before", "a copy that ends there", "a copy from before the partition"],
)
async def test_parked_messages_are_kept_when_the_broker_lacks_them(told):
    """It stands on an older copy of its data folder, and the original may come back."""
    home = HomeBroker()
    with pytest.raises((NotSentError, PartitionUnknownError)):
        await read_at(home, told, KnowingOwner())
    assert home.changes == []


async def test_parked_messages_are_given_up_when_retention_has_removed_them():
    home = HomeBroker()
    told = OffsetOutOfRangeError(offset=5, first_offset=7, next_offset=20)
    await read_at(home, told, KnowingOwner())
    assert home.changes == [Unpark(KEY, ANCESTOR, ((5, 7),))]


@pytest.mark.parametrize("gone", [{"lost": True}, {"state": PartitionState.EXPIRED}])
async def test_parked_messages_are_given_up_when_their_partition_is_gone(gone):
    home = HomeBroker()
    await read_at(home, PartitionUnknownError(), KnowingOwner(**gone))
    assert home.changes == [Unpark(KEY, ANCESTOR, ((5, 9),))]


class DamagedBroker(HomeBroker):
    """Has a damaged batch at offset 0, a whole one at 2, and both as parked messages of these
    keys.
    """

    def __init__(self, key: ParkKey, *, unpacks: bool = True) -> None:
        super().__init__()
        self._unpacks = unpacks
        self.end = 0  # nothing else is pulled
        self.parked = {key: [(1, 0, 4)]}
        self.reads: list[int] = []
        self.damaged = True

    async def call(self, request, payload=b"", *, wait_ms=0):
        match request:
            case ReadParked(key=key, count=count, first=first):
                assert count
                rows = self.parked.get(key, [])[first:]
                return ParkedRows(tuple(rows), len(rows)), b""
            case Read(offset=offset):
                self.reads.append(offset)
                if offset < 2 and self.damaged and not self._unpacks:
                    return Batches(0, 4, 4, False), not_unpacking(0) + stored(2)
                if offset < 2 and self.damaged:
                    raise CorruptLogError(partition_id=1, offset=0, end_offset=2)
                return Batches(0, 4, offset - offset % 2 + 2, False), stored(offset - offset % 2)
        return await super().call(request, payload, wait_ms=wait_ms)


def not_unpacking(base_offset: int) -> bytes:
    """A batch whose lengths do not add up: its sender has packed it so, or what the broker sent was
    changed on the way.
    """
    record = bytearray(stored(base_offset))
    ((_, header),) = batch_starts(record)
    record[HEADER_BYTES + 8 * header.count] += 1  # the length of the first key
    return bytes(record)


@pytest.mark.parametrize("unpacks", [True, False])
@pytest.mark.parametrize("key", [RETRIED, b""])
async def test_redrive_of_loose_messages_passes_over_those_that_cannot_be_read(key, unpacks):
    """They wait for nothing: a damaged batch holds up no other, and is read again once it is
    whole.
    """
    broker, owner = DamagedBroker(key, unpacks=unpacks), NotingOwner()
    owner.allows_redrives = True
    async with opened(PullClient, broker, owner, ConsumerSettings(backoff=FAST)) as client:
        client.parking._redrives.begin(key)
        while not owner.messages:
            await asyncio.sleep(0)
        assert [message.offset for message in owner.messages] == [2, 3]
        broker.parked[key] = [(1, 0, 2)]
        for message in owner.messages:
            message.delivery.mark_handled(message.offset)
        while broker.reads.count(0) < 3:  # asked again, after pauses
            await asyncio.sleep(0.001)
        assert len(owner.messages) == 2
        broker.damaged = False
        while len(owner.messages) < 4:
            await asyncio.sleep(0.001)
        assert [message.offset for message in owner.messages[2:]] == [0, 1]


class BetweenBroker(DamagedBroker):
    """Sends a batch that does not unpack at offset 2 behind a whole one, and before another."""

    async def call(self, request, payload=b"", *, wait_ms=0):
        if isinstance(request, Read):
            batches = {0: stored(0), 2: not_unpacking(2), 4: stored(4)}
            sent = [record for base, record in batches.items() if base + 2 > request.offset]
            return Batches(0, 6, 6, False), b"".join(sent)
        return await super().call(request, payload, wait_ms=wait_ms)


async def test_redrive_of_loose_messages_has_those_before_and_behind_a_batch_that_does_not_unpack():
    broker, owner = BetweenBroker(RETRIED), NotingOwner()
    owner.allows_redrives = True
    broker.parked[RETRIED] = [(1, 0, 6)]
    async with opened(PullClient, broker, owner, ConsumerSettings(backoff=FAST)) as client:
        client.parking._redrives.begin(RETRIED)
        while not owner.messages:
            await asyncio.sleep(0)
        assert [message.offset for message in owner.messages] == [0, 1]
        broker.parked[RETRIED] = [(1, 2, 6)]
        for message in owner.messages:
            message.delivery.mark_handled(message.offset)
        while len(owner.messages) == 2:
            await asyncio.sleep(0.001)
        assert [message.offset for message in owner.messages[2:]] == [4, 5]


async def test_redrive_of_a_key_waits_for_its_oldest_message_when_that_cannot_be_read():
    broker, owner = DamagedBroker(KEY), NotingOwner()
    owner.allows_redrives = True
    async with opened(PullClient, broker, owner, ConsumerSettings(backoff=FAST)) as client:
        client.parking._redrives.begin(KEY)
        while broker.reads.count(0) < 3:
            await asyncio.sleep(0.001)
        assert not owner.messages
        assert set(broker.reads) == {0}


@pytest.mark.parametrize("careful", [True, False])
async def test_key_is_redriven_when_another_one_cannot_be_read(monkeypatch, careful):
    """After an owner that ended without a release, and where the turns are few."""
    monkeypatch.setattr(redrive, "CONCURRENT_MAX", 1)
    broker, owner = DamagedBroker(KEY), NotingOwner()
    broker.parked = {KEY: [(1, 0, 2)], b"other": [(1, 2, 4)]}
    owner.allows_redrives = True
    async with opened(PullClient, broker, owner, ConsumerSettings(backoff=FAST)) as client:
        client.parking._redrives.careful = careful
        client.parking._redrives.begin(KEY)
        client.parking._redrives.begin(b"other")
        while not owner.messages:
            await asyncio.sleep(0.001)
        assert [message.offset for message in owner.messages] == [2, 3]
        broker.parked[b"other"] = []
        for message in owner.messages:
            message.delivery.mark_handled(message.offset)


async def test_message_that_may_have_ended_a_process_is_alone_behind_one_that_cannot_be_read():
    """What is passed over is no window: the first messages that are handed out are the careful
    ones.
    """
    broker, owner = DamagedBroker(b""), NotingOwner()
    owner.allows_redrives = True
    async with opened(PullClient, broker, owner, ConsumerSettings(backoff=FAST)) as client:
        client.parking._redrives.careful = True
        client.parking._redrives.begin(b"")
        while not owner.messages:
            await asyncio.sleep(0)
        assert [message.offset for message in owner.messages] == [2, 3]
        assert owner.alone._lock is not None
        assert owner.alone._lock.locked()
        broker.parked[b""] = []
        for message in owner.messages:
            message.delivery.mark_handled(message.offset)


class PagesBroker(HomeBroker):
    """Has dead letters that were chosen, one batch and one page of rows each: damaged ones, then
    whole ones.
    """

    DAMAGED, WHOLE = 20, 20

    def __init__(self) -> None:
        super().__init__()
        self.end = 0  # nothing else is pulled
        self.rows = [(1, 2 * at, 2 * at + 2) for at in range(self.DAMAGED + self.WHOLE)]
        self.asked: list[int] = []

    async def call(self, request, payload=b"", *, wait_ms=0):
        match request:
            case ReadParked(key=key, first=first) if key == RETRIED:
                self.asked.append(first)
                rows = self.rows[first : first + 1]
                return ParkedRows(tuple(rows), len(rows)), b""
            case ReadParked():
                return ParkedRows((), 0), b""
            case Read(offset=offset):
                if offset < 2 * self.DAMAGED:
                    raise CorruptLogError(partition_id=1, offset=offset, end_offset=offset + 2)
                return Batches(0, 2 * len(self.rows), offset + 2, False), stored(offset)
        return await super().call(request, payload, wait_ms=wait_ms)

    def handled(self, messages) -> None:
        """What is handled is parked no longer."""
        for message in messages:
            message.delivery.mark_handled(message.offset)
        self.rows = [row for row in self.rows if row[1] not in {each.offset for each in messages}]


async def test_redrive_asks_for_pages_that_were_passed_over_once_and_not_for_each_window():
    """Thousands of pages that could not be read were asked for again for each few messages behind
    them.
    """
    broker, owner = PagesBroker(), NotingOwner()
    owner.allows_redrives = True
    async with opened(PullClient, broker, owner, ConsumerSettings(backoff=FAST)) as client:
        client.parking._redrives.begin(RETRIED)
        seen = 0
        while seen < 2 * broker.WHOLE:
            while len(owner.messages) == seen:
                await asyncio.sleep(0)
            fresh, seen = owner.messages[seen:], len(owner.messages)
            if len(broker.rows) == broker.DAMAGED + broker.WHOLE // 2:
                del broker.rows[0]  # an operator skips one: the others move up
            broker.handled(fresh)
        assert {message.offset for message in owner.messages} == set(range(40, 80))
        assert len(broker.asked) <= 3 * len(range(broker.DAMAGED + broker.WHOLE))
