"""What records and holes make of the state: nothing lost goes unseen, and what is whole goes on."""

from __future__ import annotations

import pytest

from keylane.broker.partition.image import encode_partition, encode_partition_parts
from keylane.broker.partition.partition import HostedPartition
from keylane.broker.partition.pull_lock import check_holder
from keylane.broker.partition.records import CursorBody, FenceBody, encode_body
from keylane.broker.partition.state import BrokerState
from keylane.broker.storage.log.holes import Hole, TrailEntry
from keylane.broker.store.replay import Replay
from keylane.protocol.errors import (
    CorruptLogError,
    DataFolderError,
    FencedError,
    PartitionUnknownError,
)
from keylane.protocol.record import HEADER_BYTES, Header, Kind, encode_record, read_record
from sim.machines.store import facts

HOLE = Hole(start=1000, end=2000, reason="no magic")


class ReplayTeller:
    """A replay, told of records at growing positions."""

    def __init__(self, *partitions: int, start: int = 0) -> None:
        self.state = BrokerState()
        self.replay = Replay(self.state, start=start)
        self.position = start
        for number in partitions:
            self.own(number, facts(number))

    def tell(self, record: bytes) -> None:
        header = at(record, self.position)
        self.position += len(record)
        self.replay.on_record(header, memoryview(record)[HEADER_BYTES:])

    def own(self, partition_id: int, body) -> None:
        self.tell(encode_body(partition_id, body))

    def batch(self, partition_id: int, base: int, count: int = 2) -> None:
        self.tell(messages(partition_id, base, count))

    def hole(self, hole: Hole) -> None:
        self.replay.on_hole(hole)
        self.position = hole.end


def at(record: bytes, position: int) -> Header:
    header = read_record(record)
    assert isinstance(header, Header)
    values = {name: getattr(header, name) for name in Header.__slots__}
    return Header(**(values | {"position": position}))


def messages(
    partition_id: int, base: int, count: int = 2, *, producer_id: int = 7, sequence: int = -1
) -> bytes:
    return encode_record(
        bytes(20 * count),
        kind=Kind.MESSAGES,
        partition_id=partition_id,
        base_offset=base,
        count=count,
        sequence=base if sequence < 0 else sequence,
        producer_id=producer_id,
    )


def traced(*records: tuple[bytes, bool], start: int = 1000) -> Hole:
    """A hole of which all is known; the bodies only where it is said."""
    lost_records = []
    position = start
    for record, whole in records:
        lost_records.append(
            TrailEntry(at(record, position), record[HEADER_BYTES:] if whole else None)
        )
        position += len(record)
    return Hole(
        start=start,
        end=position,
        reason="no magic",
        lost_records=tuple(lost_records),
        explained=True,
    )


@pytest.mark.parametrize(
    "record",
    [
        encode_record(b"\xc1", kind=Kind.FENCE, partition_id=1),
        encode_record(b"\x01", kind=Kind.CURSOR, partition_id=1),
        encode_record(b"\xc1", kind=Kind.STATE, partition_id=1),
        encode_body(1, facts(1, subject="other")),
        messages(1, 1, 9),
    ],
)
def test_record_that_does_not_fit_stops_its_partition(record):
    """Another shape, other facts or overlapping offsets: the partition stops, by position, and the
    others go on.
    """
    told = ReplayTeller(1, 2)
    told.batch(1, 0)
    told.tell(record)
    told.replay.finish()
    with pytest.raises(CorruptLogError) as caught:
        told.state.partition(1).check_undamaged()
    assert caught.value.position == told.position - len(record)
    told.state.partition(2).check_undamaged()
    assert told.state.problems


@pytest.mark.parametrize(
    "record",
    [encode_body(2, FenceBody("audit", 1, "s")), encode_body(2, None), messages(2, 0)],
)
def test_records_of_an_unknown_partition(record):
    """What a partition is was lost: it cannot be looked at, nor hosted anew over its old
    records.
    """
    told = ReplayTeller(1)
    told.tell(record)
    told.replay.finish()
    with pytest.raises(CorruptLogError):
        told.state.partition(2)
    with pytest.raises(CorruptLogError):
        told.state.check_no_orphan(2)
    with pytest.raises(PartitionUnknownError):
        told.state.partition(3)


def test_kind_of_a_newer_broker_refuses_the_start():
    """An unknown kind is no damage: a newer broker wrote it."""
    with pytest.raises(DataFolderError):
        ReplayTeller(1).tell(encode_record(b"", kind=99, partition_id=1))


def test_records_fold_without_a_difference_when_the_snapshot_has_them():
    """Records that the state has already change nothing."""
    told = ReplayTeller(1)
    for base in (0, 2, 4):
        told.batch(1, base)
    told.own(1, FenceBody("audit", 5, "s"))
    told.own(1, CursorBody("audit", 5, 3, []))
    image = encode_partition(told.state.partition(1))

    again = ReplayTeller()
    again.state.partitions.load(1, image)
    for base in (0, 2, 4):
        again.batch(1, base)
    again.own(1, FenceBody("audit", 4, "older"))
    again.own(1, FenceBody("audit", 5, "s"))
    again.own(1, CursorBody("audit", 5, 3, []))
    again.own(1, facts(1))
    again.replay.finish()
    assert encode_partition(again.state.partition(1)) == image
    assert not again.state.problems


def test_lost_batch_stops_its_partition_only():
    """A batch known to have been lost: its offsets are gone, those around it are there, other
    partitions go on.
    """
    told = ReplayTeller(1, 2)
    told.batch(1, 0)
    told.hole(traced((messages(1, 2, 3), False)))
    told.batch(1, 5)
    told.replay.finish()

    hurt = told.state.partition(1)
    assert (hurt.next_offset, hurt.lost) == (7, ((2, 5, 1000),))
    assert hurt.readable_end(0) == 2
    assert hurt.readable_end(5) == 7
    for offset in (2, 4):
        with pytest.raises(CorruptLogError):
            hurt.readable_end(offset)
    with pytest.raises(CorruptLogError):
        hurt.check_undamaged()
    told.state.partition(2).check_undamaged()


def test_own_records_come_back_from_the_trail():
    """A fence, a seal and a partition that damage took are restored, and nothing stops."""
    told = ReplayTeller(1)
    told.hole(
        traced(
            (encode_body(1, FenceBody("audit", 9, "s")), True),
            (encode_body(1, None), False),
            (encode_body(2, facts(2)), True),
        )
    )
    told.replay.finish()
    partition = told.state.partition(1)
    assert partition.sealed
    assert partition.groups["audit"].lock.fence == 9
    told.state.partition(2).check_undamaged()


def test_fence_without_its_body_lets_no_owner_in():
    """The group of the lost token is unknown, so no owner is let in; reading without a group
    works.
    """
    told = ReplayTeller(1, 2)
    told.batch(1, 0)
    told.hole(traced((encode_body(1, FenceBody("audit", 9, "s")), False)))
    told.replay.finish()
    with pytest.raises(CorruptLogError):
        told.state.partition(1).check_fences_known()
    assert told.state.partition(1).readable_end(0) == 2
    told.state.partition(2).check_fences_known()


def test_hole_of_unknown_content_stops_partitions_not_shown_to_be_whole():
    """A batch after the hole that goes on where the one before ended shows that nothing was lost;
    silence does not.
    """
    told = ReplayTeller(1, 2, 3)
    for number in (1, 2, 3):
        told.batch(number, 0)
    told.hole(HOLE)
    told.batch(1, 2)
    told.batch(2, 6)
    told.replay.finish()

    told.state.partition(1).check_undamaged()
    assert told.state.partition(2).lost == ((2, 6, 1000),)
    silent = told.state.partition(3)
    assert silent.lost == ((2, -1, 1000),)
    assert silent.readable_end(0) == 2
    with pytest.raises(CorruptLogError):
        silent.readable_end(2)
    with pytest.raises(CorruptLogError):
        silent.check_end_known()


def test_token_that_may_have_been_followed_in_a_hole_is_out():
    """After a hole of unknown content the owner before it is refused until a newer token comes."""
    told = ReplayTeller(1)
    told.batch(1, 0)
    for group in ("audit", "bill"):
        told.own(1, FenceBody(group, 5, "s"))
    told.hole(HOLE)
    told.batch(1, 2)
    told.own(1, CursorBody("bill", 5, 1, []))
    told.replay.finish()
    groups = told.state.partition(1).groups
    with pytest.raises(FencedError):
        check_holder(groups["audit"].lock, token=5, session="s")
    check_holder(groups["bill"].lock, token=5, session="s")


def test_state_record_stands_for_all_before_it():
    """A partition whose first records were removed is what its STATE record says."""
    whole = ReplayTeller(1)
    for base in range(0, 10, 2):
        whole.batch(1, base)
    whole.own(1, FenceBody("audit", 5, "s"))
    whole.own(1, CursorBody("audit", 5, 3, [(5, 6)]))
    partition: HostedPartition = whole.state.partition(1)
    state = encode_record(
        encode_partition(partition), kind=Kind.STATE, partition_id=1, base_offset=10
    )

    told = ReplayTeller()
    told.batch(1, 8)
    told.tell(state)
    told.batch(1, 10)
    told.replay.finish()
    partition = told.state.partition(1)
    assert partition.next_offset == 12
    assert not told.state.problems
    assert partition.groups["audit"].acked.ranges == [(5, 6)]
    whole.tell(state)
    whole.batch(1, 10)
    assert encode_partition(whole.state.partition(1)) == encode_partition(partition)


def parts_of(partition: HostedPartition, *, together: int = 2) -> list[bytes]:
    """The STATE records of a partition, with `together` producers each."""
    return [
        encode_record(part, kind=Kind.STATE, partition_id=1, base_offset=partition.next_offset)
        for part in encode_partition_parts(partition, producers_max=together)
    ]


def crowded(*, producers: int = 5) -> ReplayTeller:
    """A partition to which several producers sent, the first of them last."""
    whole = ReplayTeller(1)
    for number in [producers, *range(1, producers), producers]:
        base = whole.state.partition(1).next_offset
        whole.tell(messages(1, base, producer_id=number, sequence=2 if base >= 10 else 0))
    return whole


def test_state_in_parts_is_the_whole_one():
    """Producers come from all the parts, silent longest first; told again, they change nothing."""
    whole = crowded().state.partition(1)
    told = ReplayTeller()
    for part in parts_of(whole) * 2:
        told.tell(part)
    told.replay.finish()
    partition = told.state.partition(1)
    assert list(partition.producers) == [1, 2, 3, 4, 5]
    assert encode_partition(partition) == encode_partition(whole)
    assert not told.state.problems


def test_state_that_was_begun_and_written_again():
    """A crash left some of the parts; those that were written after it count, with what came in
    between.
    """
    before = crowded()
    begun = parts_of(before.state.partition(1))[:1]
    told = ReplayTeller()
    for record in [*begun, messages(1, 12, producer_id=3, sequence=2)]:
        told.tell(record)
    before.tell(messages(1, 12, producer_id=3, sequence=2))
    whole = before.state.partition(1)
    for part in parts_of(whole):
        told.tell(part)
    for part in parts_of(whole)[:2]:  # and once more, cut short by a crash
        told.tell(part)
    told.replay.finish()
    assert encode_partition(told.state.partition(1)) == encode_partition(whole)
    assert not told.state.problems


def test_older_state_puts_no_producer_back():
    """A snapshot knows later batches than a STATE record, and they do not come again: its producers
    stay.
    """
    whole = crowded()
    older = parts_of(whole.state.partition(1))
    whole.tell(messages(1, 12, producer_id=1, sequence=2))
    image = encode_partition(whole.state.partition(1))
    for part in older:
        whole.tell(part)
    assert encode_partition(whole.state.partition(1)) == image


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_lost_part_stops_its_partition(lost):
    """Without some of its producers a partition could store a batch twice: it takes no messages."""
    told = ReplayTeller(2)
    for number, part in enumerate(parts_of(crowded().state.partition(1))):
        if number == lost:
            told.hole(Hole(start=told.position, end=told.position + len(part), reason="no magic"))
        else:
            told.tell(part)
    told.batch(1, 12)
    told.replay.finish()
    assert told.state.problems
    with pytest.raises(CorruptLogError):
        told.state.partition(1).check_undamaged()


def test_state_never_makes_more_producers_than_are_remembered(monkeypatch):
    """Those silent longest are forgotten."""
    monkeypatch.setattr("keylane.broker.store.replay.PRODUCERS_PER_PARTITION_MAX", 3)
    whole = crowded().state.partition(1)
    told = ReplayTeller(1)
    for part in parts_of(whole):
        told.tell(part)
    assert list(told.state.partition(1).producers) == [3, 4, 5]
