"""A reader without brokers: invalid arguments, removed messages, and partitions whose data
is gone.
"""

from __future__ import annotations

import asyncio
import logging

import pytest
from msgspec.structs import replace

from keylane import NotSentError, Reader
from keylane.consumer.reading.reader import _ReadState
from keylane.errors import (
    ConfigError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    Reason,
)
from keylane.protocol.frames import Batches, Read
from keylane.protocol.limits import READ_GIVE_UP_MS
from keylane.protocol.operations import PartitionHistory, SubjectHistory
from keylane.protocol.routing import OrderStrategy, PartitionState, Route
from support.call_doubles import BrokerDouble, MetaDouble
from support.pulling import ToBrokers, stored
from support.raising import raises
from unit.consumer.reading.test_lineage_order import OPEN, past

META = "127.0.0.1:1"


def at(address: str | None, **told) -> PartitionHistory:
    """Return partition 7 with its broker's address."""
    entry = past(7, 0, 1024, **told)
    return replace(entry, partition=replace(entry.partition, address=address))


def reader_at(offset: int, end: int | None, **more) -> tuple[Reader, _ReadState]:
    reader: Reader = Reader(META, "s", **more)
    entry = at("b:1", state=OPEN)
    reader._lineage.update([entry])
    place = reader._read_states[7] = _ReadState(entry.partition, offset, end)
    return reader, place


def test_reader_goes_on_behind_removed_messages(caplog):
    reader, place = reader_at(3, None)
    with caplog.at_level(logging.WARNING):
        reader._skip_removed(place, OffsetOutOfRangeError(first_offset=9))
    assert place.next_offset == reader.positions[7] == 9
    assert "6 messages were removed" in caplog.text
    with pytest.raises(OffsetOutOfRangeError):
        reader._skip_removed(place, OffsetOutOfRangeError(first_offset=9))


def test_partition_is_finished_when_all_that_was_wanted_is_removed():
    reader, place = reader_at(3, 9)
    reader._skip_removed(place, OffsetOutOfRangeError(first_offset=9))
    assert (reader._read_states, reader._lineage.unread_ids) == ({}, frozenset())


def test_partition_that_is_lost_is_left_out_with_a_warning(caplog):
    entry = past(7, 0, 1024, lost=True)
    with caplog.at_level(logging.WARNING):
        Reader(META, "s")._report_gone([entry])
    assert "partition 7 of s" in caplog.text
    with pytest.raises(PartitionUnknownError, match="are gone"):
        Reader(META, "s", partition=7)._report_gone([entry])


@pytest.mark.parametrize("gone", [{"lost": True}, {"state": PartitionState.EXPIRED}])
def test_following_reader_leaves_out_what_is_gone_meanwhile(gone, caplog):
    """The broker that had it no longer replies, or does not know it."""
    reader, place = reader_at(3, None)
    place.may_have_more = False
    with caplog.at_level(logging.WARNING):
        assert reader._refresh_partitions([past(7, 0, 1024, **gone), past(9, 0, 1024)])
    assert (reader._read_states, reader._lineage.unread_ids) == ({}, frozenset())
    assert "from offset 3 on" in caplog.text
    reader, place = reader_at(3, None)
    assert not reader._refresh_partitions([at("b:1", state=OPEN)])
    assert reader._read_states == {7: place}


@pytest.mark.parametrize("only", [None, 7])
def test_following_reader_is_through_when_what_it_has_read_is_gone(only, caplog):
    """No message is skipped."""
    reader, place = reader_at(3, None, partition=only)
    place.may_have_more = False
    gone = at("b:1", state=PartitionState.EXPIRED)
    with caplog.at_level(logging.WARNING):
        assert reader._refresh_partitions([replace(gone, end_offset=3)])
    assert (reader._read_states, caplog.text) == ({}, "")
    reader, place = reader_at(2, None, partition=7)
    place.may_have_more = False
    with pytest.raises(PartitionUnknownError, match="are gone"):
        reader._refresh_partitions([replace(gone, end_offset=3)])


class Metaserver(MetaDouble):
    """Reports the address of partition 7."""

    def __init__(self, address: str | None) -> None:
        self.address = address

    async def history(self, subject: str) -> SubjectHistory:
        partitions = [at(self.address, state=OPEN)]
        return SubjectHistory(subject=subject, route_version=1, partitions=partitions)


async def test_reader_tries_a_new_address_when_the_old_one_has_failed_for_long():
    """A program that is slow with messages of other partitions makes fewer attempts."""
    reader, place = reader_at(3, None)
    reader._meta = meta = Metaserver(None)
    error = NotSentError(address="b:1")
    now_ms = reader._environment.clock.boot_ms()
    reader._failures.record_failures({7: error}, now_ms - 2 * READ_GIVE_UP_MS)
    with pytest.raises(NotSentError):
        await reader._wait_for_servers(now_ms)
    meta.address = "b:2"
    await reader._wait_for_servers(now_ms)
    assert place.partition.address == "b:2"
    with pytest.raises(NotSentError):
        await reader._wait_for_servers(now_ms)


async def test_reader_reads_what_it_knows_when_no_metaserver_tells_what_continues_the_rest():
    """Partition 9 is read to its end, and the metaservers are down."""

    class Away(MetaDouble):
        async def history(self, subject: str) -> SubjectHistory:
            raise NotSentError(address=META)

    class Busy:
        address = "b:1"

        async def call(self, request: Read) -> tuple[Batches, bytes]:
            return Batches(0, 99, request.offset + 2, False), bytes(stored(request.offset))

    reader, _ = reader_at(4, None, follow=True)
    reader._lineage.update([past(9, 0, 1024)])
    reader._lineage.finish(9)
    reader._meta, reader._connections = Away(), ToBrokers(Busy())
    assert await reader._fill()
    assert [message.offset for message in reader._buffer] == [4, 5]


class Giving:
    """Replies to reads of partition 7, which ends at `end`, and of no other partition."""

    address = "b:1"

    def __init__(self, end: int) -> None:
        self.end = end

    async def call(self, request: Read, *, wait_ms: int = 0) -> tuple[Batches, bytes]:
        if request.partition_id != 7:
            raise NotSentError(address=self.address)
        if request.offset >= self.end:
            await asyncio.sleep(wait_ms / 1000)
            return Batches(0, self.end, self.end, False), b""
        return Batches(0, self.end, request.offset + 2, False), bytes(stored(request.offset))


async def test_reader_reads_a_lost_partition_as_far_as_its_old_broker_gives_messages(caplog):
    """Another partition fails, which makes the reader notice the loss."""
    reader, _ = reader_at(0, None, follow=True)
    other = past(9, 0, 1024, state=OPEN)
    other = replace(other, partition=replace(other.partition, address="b:1"))
    reader._lineage.update([other])
    reader._read_states[9] = _ReadState(other.partition, 0, None)
    lost = at(None, state=PartitionState.SEALED, lost=True)

    class Knowing(MetaDouble):
        async def history(self, subject: str) -> SubjectHistory:
            return SubjectHistory(subject=subject, route_version=2, partitions=[lost, other])

    reader._meta, reader._connections = Knowing(), ToBrokers(Giving(4))
    for upto in (2, 4):
        assert await reader._fill()
        assert [message.offset for message in reader._buffer] == [upto - 2, upto - 1]
        assert reader._read_states[7].next_offset == upto
        reader._buffer.clear()
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):  # partition 9 stays away
            await reader._fill()
    assert "from offset 4 on are skipped" in caplog.text
    assert list(reader._read_states) == [9]
    await reader._open_reads.end()


class OlderCopy:
    """A broker whose data folder has fewer messages than it had reported to the reader."""

    address = "b:1"

    async def call(self, request: Read) -> tuple[Batches, bytes]:
        return Batches(0, request.offset, request.offset, False), b""


async def test_reader_is_not_through_when_the_broker_lacks_what_was_stored():
    reader, place = reader_at(3, 9)
    reader._connections = ToBrokers(OlderCopy())
    with pytest.raises(OffsetOutOfRangeError) as caught:
        await reader._read_chunk(7)
    assert (caught.value.offset, caught.value.next_offset) == (3, 3)
    assert reader._read_states == {7: place}


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"subject": "not a name"}, Reason.NAME_INVALID),
        ({"meta": "nowhere"}, ConfigError),
        ({"codec": 7}, ConfigError),
        ({"key": ""}, ConfigError),
        ({"partition": "7"}, ConfigError),
        ({"where": 7}, ConfigError),
        ({"call_timeout_ms": 0}, ConfigError),
    ],
)
def test_reader_refuses_arguments_that_cannot_work(arguments, kind):
    with raises(kind):
        Reader(**({"meta": META, "subject": "s"} | arguments))


class Going(MetaDouble, BrokerDouble):
    """A metaserver and a broker: partition 7 exists in each first history, and has expired when its
    broker was asked.
    """

    address = "b:1"

    def __init__(self) -> None:
        self.looks = 0
        self._is_gone = True

    async def route(self, subject: str) -> Route:
        self.looks += 1
        return Route(subject=subject, version=1, order_strategy=OrderStrategy.STRICT, partitions=())

    async def history(self, subject: str) -> SubjectHistory:
        self._is_gone = not self._is_gone
        state = PartitionState.EXPIRED if self._is_gone else OPEN
        partitions = [at("b:1", state=state)]
        return SubjectHistory(subject=subject, route_version=1, partitions=partitions)

    async def partition(self, partition_id: int) -> None:
        raise PartitionUnknownError(partition_id=partition_id)


async def test_reader_pauses_and_gives_up_when_a_partition_goes_at_each_look(monkeypatch):
    """A loop without a pause would call the metaserver thousands of times."""
    monkeypatch.setattr("keylane.consumer.reading.reader.READ_GIVE_UP_MS", 500)
    reader: Reader = Reader(META, "s")
    reader._meta = going = Going()
    reader._connections = ToBrokers(going)
    async with asyncio.timeout(10):
        with pytest.raises(PartitionUnknownError):
            await reader._locate_start()
    assert 2 <= going.looks <= 10
