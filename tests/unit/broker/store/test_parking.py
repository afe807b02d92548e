"""Parked messages on the disk: after restarts, failed writes, resets, removed segments and
damage.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane.broker.partition.park_views import changes_to_rebuild
from keylane.broker.partition.parked import Parked
from keylane.broker.partition.records import CursorBody, FenceBody, ParkedBody, encode_body
from keylane.broker.storage.log.commit_log import segment_path
from keylane.broker.storage.log.log_reader import read_segment_headers
from keylane.broker.store.carry_over import STATE_BYTES_MAX
from keylane.broker.store.group_changes import set_cursor
from keylane.broker.store.parking import change_parked
from keylane.protocol.errors import (
    BrokerReadOnlyError,
    CorruptLogError,
    DiskFullError,
    FlushFailedError,
    KeylaneError,
)
from keylane.protocol.frames import Ack
from keylane.protocol.message import pack_properties
from keylane.protocol.parked import (
    Adopt,
    AdoptedKey,
    Freeze,
    Park,
    ParkState,
    Redrive,
    Unpark,
)
from keylane.protocol.progress import SetCursor
from keylane.protocol.record import Kind, encode_record
from keylane.testing.machines.disk import SimDisk, disk_of
from sim.machines.store import SESSION, batch
from support.parked.desk import FAILURE, ParkedDesk
from unit.broker.store.test_replay import ReplayTeller, traced

SMALL = {"segment_bytes": 4096}
ADOPTION = Adopt(3, (AdoptedKey(b"a", ParkState.REDRIVING, 1, None, ((3, 0, 1),)),), last=True)


async def busy(desk: ParkedDesk) -> None:
    """Keys in every state: parked, redriven in part, emptied, adopted, loose."""
    await desk.change(
        Park(b"a", ((2, 4),), FAILURE),
        Park(b"b", ((5, 6),), FAILURE),
        Park(None, ((7, 8),), FAILURE),
    )
    await desk.ack(1, (0, 2), (9, 10))
    await desk.say(Ack(1, "audit", SESSION, 1, (), ((4, 3), (8, 1))))
    await desk.edit(b"a", 3, b"mended", props=pack_properties({"town": "Ulm"}))
    await desk.edit(b"a", 3, b"mended again")
    await desk.edit(None, 7, b"x" * 70_000)
    adopted = AdoptedKey(b"a", ParkState.REDRIVING, -9, FAILURE, ((3, 0, 3),))
    await desk.change(
        Adopt(3, (adopted,), last=True), Park(b"", ((11, 12),), FAILURE), Park(b"b", ((12, 14),))
    )
    await desk.make(Redrive(b"b"), Unpark(b"b", 1, ((5, 6), (12, 14))))
    await desk.change(Park(b"b", ((15, 17),)))


@pytest.mark.parametrize("snapshot", ["none", "before", "between", "after"])
async def test_restart_finds_what_is_parked(snapshot: str):
    """From the log alone, and from a snapshot with the log behind it; the failed tries as well."""
    desk = await ParkedDesk(SimDisk(), **SMALL).fill()
    if snapshot == "before":
        await desk.store.snapshotter.write()
    await desk.change(Park(b"z", ((30, 31),), FAILURE))
    if snapshot == "between":
        await desk.store.snapshotter.write()
    await busy(desk)
    if snapshot == "after":
        await desk.store.snapshotter.write()
    expected = desk.state()
    assert expected[2] == {4: 3, 8: 1}
    assert expected[3][b"b"][0] is ParkState.REDRIVING
    await desk.store.commit.close()
    assert desk.again(snapshot=snapshot != "none").state() == expected
    again = desk.again()
    acquired = await again.acquired(1)
    assert (acquired.attempts, acquired.adopted) == (((4, 3), (8, 1)), (3,))
    assert acquired.parked_version > 0


@pytest.mark.parametrize("keys", [1, 7_000], ids=["small", "large"])
async def test_parked_messages_are_carried_over_when_their_segments_go(keys: int):
    """Also those of an image that is over 512 KiB; what stays of the log alone says the same."""
    desk = await ParkedDesk(SimDisk(), **SMALL).fill()
    await busy(desk)
    many = tuple(
        AdoptedKey(
            b"key-%d" % number,
            ParkState.PARKED,
            number,
            FAILURE,
            ((3, 2 * number, 2 * number + 1),),
        )
        for number in range(keys)
    )
    for first in range(0, keys, 4_000):
        await desk.change(Adopt(4, many[first : first + 4_000], last=False))
    await desk.change(Adopt(4, (), last=True))
    assert (len(desk.parked.image()) > STATE_BYTES_MAX) is (keys > 1)
    for number in range(4, 30):
        await desk.append(batch(sequence=10 * number, count=10))
        await desk.change(Park(b"late", ((10 * number, 10 * number + 1),), FAILURE))
    expected, pages = desk.state(), desk.parked.image()
    for _ in range(2):
        await desk.store.carry_over.remove_oldest_segment()
        assert desk.state() == expected
    await desk.change(Park(b"late", ((299, 300),)))
    expected = desk.state()
    await desk.store.commit.close()
    again = desk.again(snapshot=False)
    assert again.state() == expected
    assert len(again.parked.image()) >= len(pages)
    await again.store.carry_over.remove_oldest_segment()
    await again.store.commit.close()
    assert again.again(snapshot=False).state() == expected


@pytest.mark.parametrize("records", range(5))
async def test_carried_over_messages_stay_when_the_log_ends_between_their_records(records: int):
    """A crash cuts the log behind any of the changes that are written again: the state is as before
    them.
    """
    told = ReplayTeller(1)
    told.batch(1, 0, 20)
    told.own(1, FenceBody("audit", 1, "s"))
    told.own(
        1,
        ParkedBody("audit", 1, 5, (Park(b"k", ((2, 4),), FAILURE), Park(b"l", ((5, 6),), FAILURE))),
    )
    adopted = AdoptedKey(b"l", ParkState.PARKED, 1, FAILURE, ((3, 0, 1),))
    told.own(1, ParkedBody("audit", 1, 6, (Adopt(1, (adopted,), last=True), Freeze())))
    told.own(1, CursorBody("audit", 1, 0, [(2, 4), (5, 6)]))
    parked = told.state.partition(1).groups["audit"].parked
    before = parked.image()
    changes = list(changes_to_rebuild(parked))
    assert len(changes) == 4
    for change in changes[:records]:
        told.own(1, ParkedBody("audit", 1, 0, (change,)))
    told.replay.finish()
    assert parked.image() == before


@pytest.mark.parametrize("trouble", ["full", "fdatasync"])
async def test_failed_write_takes_parked_and_acked_back(trouble: str):
    desk = await ParkedDesk(SimDisk()).fill()
    await desk.change(Park(b"a", ((2, 4),), FAILURE), Park(b"", ((5, 6),), FAILURE))
    await desk.ack(1, (0, 2))
    before = desk.state()
    if trouble == "full":
        desk.disk.free_space = 0
    else:
        desk.disk.failing_operation = trouble
    calls = [
        desk.change(Park(b"k", ((7, 9),), FAILURE), Park(b"a", ((10, 12), (13, 14)))),
        desk.make(Redrive(b"a"), Unpark(b"a", 1, ((2, 3), (13, 14))), Unpark(b"", 1, ((5, 6),))),
        desk.change(ADOPTION, Park(b"new", ((20, 21),), FAILURE)),
    ]
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(error) for error in errors} <= {
        DiskFullError,
        FlushFailedError,
        BrokerReadOnlyError,
    }
    desk.disk.failing_operation, desk.disk.free_space = "", 1 << 40
    assert desk.state() == before
    assert not desk.group.pending_park_changes
    assert 1 in desk.store.first_offsets.changed_ids
    if trouble == "full":
        desk.clock.advance(2_000)
        await desk.change(Park(b"k", ((7, 9),), FAILURE))
        await desk.store.commit.close()
        assert desk.again().state() == desk.state()


async def test_full_queue_takes_no_change(monkeypatch: pytest.MonkeyPatch):
    desk = await ParkedDesk(SimDisk()).fill()
    before = desk.state()

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise BrokerReadOnlyError("no")

    monkeypatch.setattr(desk.store.commit, "check_room", refuse)
    with pytest.raises(BrokerReadOnlyError):
        await desk.change(Park(b"k", ((7, 9),), FAILURE))
    assert desk.state() == before


@pytest.mark.parametrize("cursor", [0, 4, 40])
async def test_reset_clears_what_is_parked(cursor: int):
    """Durably; a repeat of the reset writes nothing."""
    desk = await ParkedDesk(SimDisk()).fill()
    await busy(desk)
    ask = SetCursor(group="audit", token=2, cursor=cursor)
    partition = desk.store.state.partition(1)
    await set_cursor(desk.store, partition, ask)
    assert desk.state() == (2, (cursor, ()), {}, {}, (False, set(), 0), {})
    end = desk.store.log.end
    await set_cursor(desk.store, partition, ask)
    assert desk.store.log.end == end
    await desk.store.commit.close()
    assert desk.again(snapshot=False).state() == desk.state()


async def test_reset_without_its_end_is_finished_by_a_repeat():
    """A log that ends between the cursor and the Clear has lost no message: they are still
    parked.
    """
    desk = await ParkedDesk(SimDisk()).fill()
    await busy(desk)
    parked = desk.parked.image()
    told = ReplayTeller(1)
    told.own(1, ParkedBody("audit", 1, 5, tuple(changes_to_rebuild(desk.parked))))
    told.own(1, FenceBody("audit", 2, "=reset"))
    told.own(1, CursorBody("audit", 2, 40, []))
    assert told.state.partition(1).groups["audit"].parked.image() == parked
    partition = desk.store.state.partition(1)
    ask = SetCursor(group="audit", token=2, cursor=40)
    await set_cursor(desk.store, partition, ask)
    desk.parked.apply(Park(b"k", ((1, 2),), FAILURE), at_ms=1)
    await set_cursor(desk.store, partition, ask)
    assert not desk.parked


async def test_reset_of_a_child_alone_keeps_which_parents_it_has_adopted():
    """Under the tokens of before; also after a restart, and of a repeat. What it never adopted it
    may still adopt.
    """
    desk = await ParkedDesk(SimDisk()).fill()
    await desk.change(Adopt(3, (), last=True), Adopt(4, (), last=True, sources=(2,)))
    partition = desk.store.state.partition(1)
    ask = SetCursor(group="audit", token=2, cursor=40, kept_parents=(3, 5))
    for _ in range(2):
        await set_cursor(desk.store, partition, ask)
        known = desk.parked
        assert (known.adopted_parents, known.adoption_tokens, known.retaining_ancestors) == (
            {3},
            {3: 1},
            {2, 3, 4},
        )
    await desk.store.commit.close()
    again = desk.again(snapshot=False).parked
    assert (again.adopted_parents, again.adoption_tokens, again.unneeded_ancestors()) == (
        {3},
        {3: 1},
        (2, 3, 4),
    )


async def test_reset_of_a_child_alone_keeps_what_it_took_over_of_its_parents():
    """No cursor that is set says that they are handled again; what is parked of the child itself is
    forgotten.
    """
    desk = await ParkedDesk(SimDisk()).fill()
    keys = (
        AdoptedKey(b"k", ParkState.REDRIVING, 1, FAILURE, ((2, 5, 6), (3, 0, 2))),
        AdoptedKey(None, ParkState.DEAD, 1, FAILURE, ((3, 4, 6),)),
    )
    await desk.change(Adopt(3, keys, last=True, sources=(2,)))
    await desk.change(Park(b"k", ((4, 6),)), Park(b"own", ((7, 8),), FAILURE))
    ask = SetCursor(group="audit", token=2, cursor=0, kept_parents=(2, 3))

    def check(desk: ParkedDesk) -> None:
        known = desk.parked
        rows = {key: list(parked.rows()) for key, parked in known.items()}
        assert rows == {b"k": [(2, 5, 6), (3, 0, 2)], None: [(3, 4, 6)]}
        assert (known.messages, known.unneeded_ancestors(), known.lowest_own_offset()) == (
            5,
            (),
            None,
        )
        assert (known.get(b"k").state, known.adopted_parents) == (ParkState.REDRIVING, {3})

    for _ in range(2):
        await set_cursor(desk.store, desk.store.state.partition(1), ask)
        check(desk)
    await desk.store.commit.close()
    check(desk.again(snapshot=False))


@pytest.mark.parametrize("children", [((0, 1024),), ()])
async def test_reset_of_a_partition_leaves_its_ancestors_to_its_children(children):
    """
    They have taken over what it had adopted, so an ancestor that it told would forget what they
    still need; also those that are set with it. A child that has not begun to take it over finds
    it here.
    """
    desk = await ParkedDesk(SimDisk()).fill()
    key = AdoptedKey(b"k", ParkState.PARKED, 1, FAILURE, ((3, 0, 2),))
    await desk.make(
        Adopt(3, (key,), last=True, sources=(2,)), Park(b"own", ((7, 8),), FAILURE), Freeze()
    )
    ask = SetCursor(group="audit", token=2, cursor=0, kept_parents=(3,), kept_children=children)

    def check(known: Parked) -> None:
        rows = {key: list(parked.rows()) for key, parked in known.items()}
        assert (known.adopted_parents, known.unneeded_ancestors(), rows) == (
            {3},
            (),
            {b"k": [(3, 0, 2)]},
        )
        assert known.children_notify_ancestors

    for _ in range(2):
        await set_cursor(desk.store, desk.store.state.partition(1), ask)
        check(desk.parked)
    await desk.store.commit.close()
    check(desk.again(snapshot=False).parked)


async def test_reset_of_a_child_alone_goes_on_taking_its_parent_over():
    """An owner has ended behind the first page: until the next one has all, no operator changes
    what is here.
    """
    desk = await ParkedDesk(SimDisk()).fill()
    key = AdoptedKey(b"k", ParkState.PARKED, 1, FAILURE, ((3, 0, 2),))
    await desk.change(Adopt(3, (key,), last=False))
    ask = SetCursor(group="audit", token=2, cursor=0, kept_parents=(3,))
    await set_cursor(desk.store, desk.store.state.partition(1), ask)
    assert (desk.parked.partly_adopted_parents, desk.parked.adopted_parents, len(desk.parked)) == (
        {3},
        set(),
        1,
    )


async def test_reset_of_a_child_alone_that_ends_anywhere_keeps_its_parents_adopted_after_a_repeat():
    """The log is cut behind each of its records: the metaserver asks again, and no parent is taken
    over a second time.
    """
    disk = SimDisk()
    desk = await ParkedDesk(disk).fill()
    await desk.make(Adopt(3, (), last=True), Adopt(4, (), last=True), Freeze())
    before = desk.store.log.end
    ask = SetCursor(group="audit", token=2, cursor=40, kept_parents=(3, 4))
    await set_cursor(desk.store, desk.store.state.partition(1), ask)
    await desk.store.commit.close()
    headers = list(read_segment_headers(disk, 0))
    ends = [
        header.position + header.length
        for header in headers
        if header.position + header.length >= before
    ]
    assert len(ends) > 3
    for position in ends:
        log = disk.pread(segment_path(0), 0, position)
        cut = ParkedDesk(disk_of({segment_path(0): log}))
        await set_cursor(cut.store, cut.store.state.partition(1), ask)
        known = cut.parked
        assert (known.adopted_parents, len(known), cut.group.acked.cursor) == ({3, 4}, 0, 40)
        await cut.store.commit.close()


async def test_reset_that_fails_takes_the_clear_back():
    desk = await ParkedDesk(SimDisk()).fill()
    await busy(desk)
    before = desk.state()
    desk.disk.free_space = 0
    with pytest.raises(DiskFullError):
        await set_cursor(
            desk.store, desk.store.state.partition(1), SetCursor(group="audit", token=2, cursor=0)
        )
    assert desk.state() == before


def tries_told(desk: ParkedDesk) -> dict[int, int]:
    """Offset → when the message is tried again, of those that have failed twice."""
    marks = desk.parked.get(2).failure_marks(1, ((0, 20),))
    return {
        offset: mark.retry_at_ms for _, start, end, mark in marks for offset in range(start, end)
    }


async def try_again(desk: ParkedDesk, *changes: Park, tries: list[tuple[int, int]]) -> None:
    """Make changes, and tell when messages that have failed twice are tried: offset,
    milliseconds.
    """
    partition, told = desk.store.state.partition(1), [(2, 1, *each) for each in tries]
    await change_parked(desk.store, partition, desk.group, changes, at_ms=9, next_tries=told)


async def test_next_tries_are_those_of_before_when_a_fence_or_a_change_is_not_written():
    """The owner is the same, and tries the messages when it said."""
    desk = await ParkedDesk(SimDisk()).fill()
    await try_again(
        desk, Park(2, ((0, 4), (6, 7)), FAILURE), tries=[(0, 400), (1, 400), (3, 300), (6, 500)]
    )
    before = tries_told(desk)
    assert [before[offset] for offset in (0, 1, 2, 3, 6)] == [400, 400, 0, 300, 500]
    desk.disk.free_space = 0
    calls = [
        try_again(desk, Park(2, ((8, 9),), FAILURE), tries=[(8, 100), (3, 900)]),
        desk.acquired(2),
    ]
    failed = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(each) for each in failed} == {DiskFullError}
    assert desk.group.lock.fence == 1
    assert tries_told(desk) == before
    desk.disk.free_space = 1 << 40
    desk.clock.advance(2_000)
    await desk.acquired(2)
    assert not any(tries_told(desk).values())


async def test_retention_keeps_the_messages_that_are_parked():
    """A group needs its lowest parked message, also when the cursor is far behind it."""
    desk = await ParkedDesk(SimDisk()).fill()
    await desk.change(Park(b"k", ((12, 13),), FAILURE), Park(b"l", ((25, 26),), FAILURE))
    await desk.ack(1, (0, 40))
    assert (desk.group.acked.cursor, desk.group.first_needed_offset) == (40, 12)
    await desk.change(Unpark(b"k", 1, ((12, 13),)))
    assert desk.group.first_needed_offset == 25
    await desk.change(Unpark(b"l", 1, ((25, 26),)))
    assert desk.group.first_needed_offset == 40


def test_lost_record_of_parked_messages_lets_no_owner_in():
    """Messages that are acked may be parked by it: a consumer would leave them out without a
    word.
    """
    record = encode_body(1, ParkedBody("audit", 5, 1, (Park(b"k", ((0, 1),), FAILURE),)))
    told = ReplayTeller(1, 2)
    told.batch(1, 0)
    told.hole(traced((record, False)))
    told.replay.finish()
    with pytest.raises(CorruptLogError):
        told.state.partition(1).check_fences_known()
    told.state.partition(2).check_fences_known()
    assert any("parked" in problem for problem in told.state.problems)


def test_lost_record_of_parked_messages_comes_back_from_the_trail():
    record = encode_body(1, ParkedBody("audit", 5, 1, (Park(b"k", ((0, 1),), FAILURE),)))
    told = ReplayTeller(1)
    told.batch(1, 0)
    told.hole(traced((record, True)))
    told.replay.finish()
    group = told.state.partition(1).groups["audit"]
    assert (group.parked.messages, group.acked.cursor, group.is_durable) == (1, 1, True)
    told.state.partition(1).check_fences_known()


def test_unreadable_record_of_parked_messages_stops_its_partition():
    told = ReplayTeller(1)
    told.tell(encode_record(b"\xc1", kind=Kind.PARKED, partition_id=1))
    told.replay.finish()
    with pytest.raises(KeylaneError):
        told.state.partition(1).check_fences_known()


async def test_change_that_is_made_already_waits_for_the_disk():
    """The answer to a repeat says durable: it waits for the change that is still being written."""
    desk = await ParkedDesk(SimDisk()).fill()
    partition, change = desk.store.state.partition(1), Park(b"k", ((7, 9),), FAILURE)
    first = change_parked(desk.store, partition, desk.group, [change], at_ms=1)
    again = change_parked(desk.store, partition, desk.group, [Park(b"k", ((7, 9),))], at_ms=2)
    assert not again.done()
    await again
    assert first.done()
