"""Requests about parked messages: of owners, of the owners of children, and of operators."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from msgspec.structs import replace

from keylane.broker.partition.partition import ATTEMPTS_MAX
from keylane.protocol.errors import (
    BusyError,
    FencedError,
    GroupUnknownError,
    InvalidRequestError,
    KeylaneError,
    MessageTooLargeError,
    OverloadedError,
    PartitionUnknownError,
    Reason,
)
from keylane.protocol.frames import Ack, ChangeParked, EditParked, Pull, ReadEdited
from keylane.protocol.ids import MAX_I64
from keylane.protocol.limits import MESSAGE_BYTES_MAX
from keylane.protocol.message import EDITED_PROPERTY, pack_properties, unpack_properties
from keylane.protocol.parked import (
    EDITS_BYTES_MAX,
    PARKED_ROWS_MAX,
    Adopt,
    AdoptedKey,
    Clear,
    Edit,
    EditedMessage,
    FailingMessage,
    Failure,
    FailureMark,
    Fault,
    Free,
    Freeze,
    Park,
    ParkChange,
    ParkedKeyRow,
    ParkState,
    Redrive,
    Unpark,
    encode_parked,
    failing_message,
)
from keylane.protocol.routing import logical_partition
from keylane.testing.machines.disk import SimDisk
from sim.machines.store import SESSION, batch
from support.parked.desk import FAILURE, ParkedDesk
from support.raising import raises

PARKED = (Park(b"a", ((2, 4), (9, 10)), FAILURE), Park(None, ((7, 8),), FAILURE))


@pytest.fixture
async def desk() -> ParkedDesk:
    return await ParkedDesk(SimDisk()).fill()


# ── owners ────────────────────────────────────────────────────────────────────────────────────────
async def test_owner_parks_and_reads_what_is_parked(desk: ParkedDesk):
    assert await desk.change(*PARKED) == 1
    assert await desk.keys() == (
        [ParkedKeyRow(b"a", ParkState.PARKED, 3), ParkedKeyRow(None, ParkState.PARKED, 1)],
        None,
    )
    answer = await desk.rows(b"a", 2)
    assert (answer.rows, answer.messages) == (((1, 2, 4),), 3)
    assert (await desk.rows(b"unknown")).rows == ()
    assert (await desk.ack(1, (0, 2))).cursor == 4


async def test_group_has_nothing_parked_before_its_first_change(desk: ParkedDesk):
    assert await desk.keys() == ([], None)
    assert (await desk.rows(None)).messages == 0
    assert (await desk.ack(1, (0, 2))).parked_version == 0
    assert await desk.take() == ([], None)
    assert (await desk.listed()).keys == []


async def test_parked_messages_are_counted_by_the_group(desk: ParkedDesk):
    await desk.change(*PARKED)
    (status,) = desk.store.state.partition(1).status(now_ms=0).groups
    assert status.parked == 4


async def test_keys_are_listed_by_page(desk: ParkedDesk):
    rows = [
        AdoptedKey(b"%04d" % n + b"k" * 900, ParkState.PARKED, 1, None, ()) for n in range(1_000)
    ]
    await desk.change(Adopt(3, tuple(rows), last=True))
    first, seen = 0, []
    while first is not None:
        page, first = await desk.keys(first)
        assert len(page) < 1_000
        seen += page
    assert [row.key for row in seen] == [row.key for row in rows]


@pytest.mark.parametrize("change", [Redrive(b"a"), Freeze(), Clear()])
async def test_owner_makes_no_change_of_others(desk: ParkedDesk, change: ParkChange):
    await desk.change(*PARKED)
    before = desk.state()
    with pytest.raises(InvalidRequestError):
        await desk.change(Park(b"a", ((12, 13),)), change)
    assert desk.state() == before


async def test_unreadable_changes_are_refused(desk: ParkedDesk):
    for payload in (b"", b"\xc1", b"\x91\x92\x63\x00"):
        with pytest.raises(InvalidRequestError):
            await desk.say(ChangeParked(1, "audit", SESSION, 1), payload)


async def test_changes_over_the_limit_of_a_record_are_refused(desk: ParkedDesk):
    await desk.change(*PARKED)
    before = desk.state()
    many = tuple((3, 1 << 40, 1 << 41) for _ in range(PARKED_ROWS_MAX))
    keys = [Adopt(3, (AdoptedKey(b"k", ParkState.PARKED, 1, None, many),), last=False)] * 16
    with pytest.raises(MessageTooLargeError):
        await desk.change(*keys)
    assert desk.state() == before


async def test_session_without_the_lock_is_refused(desk: ParkedDesk):
    await desk.change(*PARKED)
    before = desk.state()
    await desk.acquire(2, "b" * 16)
    for call in (
        desk.change(Park(b"a", ((12, 13),))),
        desk.keys(),
        desk.rows(b"a"),
        desk.change(Park(b"a", ((12, 13),)), token=2),
    ):
        with pytest.raises(FencedError):
            await call
    assert desk.state()[1:] == before[1:]


async def test_impossible_questions_are_refused(desk: ParkedDesk):
    await desk.change(*PARKED)
    for call in (desk.keys(-1), desk.rows(b"a", 0), desk.rows(b"a", -1)):
        with pytest.raises(InvalidRequestError):
            await call


async def test_failed_tries_are_kept_until_their_message_is_acked(desk: ParkedDesk):
    await desk.say(Ack(1, "audit", SESSION, 1, (), ((0, 2), (5, 1))))
    await desk.say(Ack(1, "audit", SESSION, 1, ((0, 1),), ((5, 3),)))
    assert (await desk.acquired(1)).attempts == ((5, 3),)
    with pytest.raises(OverloadedError):
        await desk.say(
            Ack(1, "audit", SESSION, 1, (), tuple((n, 1) for n in range(ATTEMPTS_MAX + 1)))
        )
    for failed in ((40, 1), (-1, 1), (3, 0), (3, MAX_I64 + 1)):
        with pytest.raises(InvalidRequestError):
            await desk.say(Ack(1, "audit", SESSION, 1, (), (failed,)))
    assert (await desk.acquired(1)).attempts == ((5, 3),)


# ── owners of children ────────────────────────────────────────────────────────────────────────────
async def drained(desk: ParkedDesk) -> None:
    """The partition is sealed, and its group has handled or parked all of it."""
    await desk.change(*PARKED, Park(b"", ((5, 6),), FAILURE), Park(b"b", ((6, 7),), FAILURE))
    await desk.ack(1, (0, 40))
    _, durable = desk.store.seal(1)
    await durable


async def test_partition_that_is_not_drained_gives_nothing_away(desk: ParkedDesk):
    await desk.change(*PARKED)
    with raises(Reason.GROUP_BUSY):
        await desk.take()
    _, durable = desk.store.seal(1)
    await durable
    with raises(Reason.GROUP_BUSY):
        await desk.take()
    assert not desk.parked.frozen


class HeardOf:
    """A data folder that metaservers have not refused, nor accepted yet."""

    set_aside = ""
    asked = True
    accepted = False


async def test_folder_that_may_be_an_older_copy_does_not_say_that_nothing_is_parked(
    desk: ParkedDesk,
):
    """It lacks the group: the child's owner would give up what the original has."""
    desk.parking._folder_ownership = folder = HeardOf()
    with raises(Reason.GROUP_BUSY, match="older copy"):
        await desk.take(group="other")
    with raises(Reason.GROUP_BUSY, match="older copy"):
        await desk.take()
    await desk.ack(1, (0, 40))
    _, durable = desk.store.seal(1)
    await durable
    assert await desk.take() == ([], None)
    folder.accepted = True
    assert await desk.take(group="other") == ([], None)


async def test_children_take_each_key_once_and_loose_messages_go_to_one(desk: ParkedDesk):
    await drained(desk)
    middle = max(map(logical_partition, (b"a", b"b")))
    halves = [await desk.take(0, middle), await desk.take(middle, 1024)]
    assert [following for _, following in halves] == [None, None]
    taken = [{key.key for key in keys} for keys, _ in halves]
    assert taken[0] & {b"", None} == {b"", None}
    assert not taken[1] & {b"", None}
    assert sorted(map(len, taken)) == [1, 3]
    only, failed = (key for key in halves[0][0] if key.key is None)
    assert only == AdoptedKey(None, ParkState.PARKED, only.since_ms, FAILURE, ((1, 7, 8),))
    assert failed.faults == (Fault("ValueError", "no such aircraft", "c", 3),)
    assert failed.marks == (FailureMark(1, 7, 8, only.since_ms, 5, 0),)


async def test_taken_messages_change_no_more(desk: ParkedDesk):
    """Also after a restart, and if the last owner may still handle them; the group has them at the
    children, so they are not counted here.
    """
    await desk.change(Park(b"c", ((11, 12),), FAILURE, token=1))
    await drained(desk)
    await desk.take(0, 1)
    before = desk.state()
    for call in (
        desk.change(Unpark(b"a", 1, ((2, 3),))),
        desk.asked("61"),
        desk.asked("61", [(1, 2, 3)]),
        desk.asked("63", [(1, 11, 12)]),
    ):
        with raises(Reason.PARK_MOVED):
            await call
    assert desk.state() == before
    assert (await desk.listed()).frozen
    (status,) = desk.store.state.partition(1).status(now_ms=0).groups
    assert status.parked == 0
    await desk.store.commit.close()
    again = desk.again(snapshot=False)
    assert again.state() == before
    assert again.parked.frozen


async def test_parent_is_read_by_page(desk: ParkedDesk):
    spread = tuple((3, 2 * n, 2 * n + 1) for n in range(PARKED_ROWS_MAX))
    key = AdoptedKey(b"a", ParkState.PARKED, 1, None, spread)
    await desk.change(Adopt(3, (key,), last=True))
    await drained(desk)
    first, rows = 0, []
    while first is not None:
        page, first = await desk.take(first=first)
        assert sum(len(key.rows) for key in page) <= PARKED_ROWS_MAX
        rows += [(key.key, row) for key in page for row in key.rows]
    assert [row for key, row in rows if key == b"a"] == [(1, 2, 4), (1, 9, 10), *spread]
    assert len(rows) == len(set(rows)) == PARKED_ROWS_MAX + 5


async def test_impossible_ranges_are_refused(desk: ParkedDesk):
    await drained(desk)
    for start, end, first in ((5, 5, 0), (-1, 5, 0), (0, 1025, 0), (0, 5, -1)):
        with pytest.raises(InvalidRequestError):
            await desk.take(start, end, first)
    assert await desk.take(group="other") == ([], None)
    assert not desk.parked.frozen


# ── operators ─────────────────────────────────────────────────────────────────────────────────────
async def test_operator_sees_what_is_parked(desk: ParkedDesk):
    await desk.change(*PARKED)
    listed = await desk.listed(count=1)
    (view,) = listed.keys
    assert (view.key_hex, view.messages, view.failure, view.first_source, view.first_offset) == (
        "61",
        3,
        FAILURE,
        1,
        2,
    )
    assert (listed.more, view.since_ms) == (True, desk.clock.wall_ms())
    assert [key.key_hex for key in (await desk.listed(first=1)).keys] == [None]
    assert (await desk.offsets(key="61")).rows == [(1, 2, 4), (1, 9, 10)]
    assert (await desk.offsets(key="61", first=1, count=1)).rows == [(1, 9, 10)]
    assert (await desk.offsets()).rows == [(1, 7, 8)]


async def test_operator_sees_one_key_among_many_and_what_has_no_order(desk: ParkedDesk):
    await desk.change(*PARKED, Park(b"b", ((3, 4),), FAILURE), Park(3, ((5, 6),), FAILURE))
    listed = await desk.listed(key=b"a".hex())
    assert [each.key_hex for each in listed.keys] == ["61", None]
    listed = await desk.listed(key=b"nothing".hex(), retrying=1)
    assert [(each.key_hex, each.tries) for each in listed.keys] == [(None, None), (None, 3)]
    with raises(InvalidRequestError):
        await desk.listed(key="a")


async def waiting_pull(desk: ParkedDesk) -> asyncio.Task[Any]:
    pull = Pull(1, "audit", SESSION, 1, 40, 1 << 20, 30_000)
    task = asyncio.create_task(desk.say(pull))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


@pytest.mark.parametrize("skip", [None, [(1, 2, 3)]])
async def test_waiting_pull_of_the_owner_is_answered_when_an_operator_changes_a_key(
    desk: ParkedDesk, skip: list[tuple[int, int, int]] | None
):
    await desk.change(*PARKED)
    before = (await desk.ack(1)).parked_version
    pull = await waiting_pull(desk)
    await desk.asked("61", skip)
    version = (await asyncio.wait_for(pull, 5)).parked_version
    assert version not in {before, 0}
    assert (await desk.ack(1)).parked_version == version
    state = ParkState.REDRIVING if skip is None else ParkState.PARKED
    assert (await desk.keys())[0][0] == ParkedKeyRow(b"a", state, 3 if skip is None else 2)


async def test_version_is_never_one_that_the_owner_has_seen_before_a_restart(desk: ParkedDesk):
    await desk.change(*PARKED)
    await desk.asked("61")
    seen = (await desk.ack(1)).parked_version
    await desk.store.commit.close()
    again = desk.again()
    await again.change(Park(b"b", ((20, 21),), FAILURE))
    await again.asked("62")
    assert (await again.ack(1)).parked_version not in {seen, 0}


async def test_owner_hears_of_the_last_skipped_message(desk: ParkedDesk):
    """Nothing of the group is parked any more; its version is still another one than before."""
    await desk.change(PARKED[1])
    before = (await desk.ack(1)).parked_version
    await desk.asked(None, [(1, 7, 8)])
    assert not desk.parked
    assert (await desk.ack(1)).parked_version > before


async def test_key_is_redriving_when_an_operator_skips_all_of_it(desk: ParkedDesk):
    await desk.change(*PARKED)
    await desk.asked("61", [(1, 2, 4), (1, 9, 10)])
    assert (await desk.keys())[0][0] == ParkedKeyRow(b"a", ParkState.REDRIVING, 0)
    (view, _) = (await desk.listed()).keys
    assert view.first_offset == -1


async def test_wrong_calls_of_operators_are_refused(desk: ParkedDesk):
    await desk.change(*PARKED)
    before = desk.state()
    for call, error in (
        (desk.asked("62"), Reason.PARKED_KEY_UNKNOWN),
        (desk.asked(""), Reason.PARKED_KEY_UNKNOWN),
        (desk.asked("6"), InvalidRequestError),
        (desk.asked("61", []), InvalidRequestError),
        (desk.asked("61", [(1, 3, 3)]), InvalidRequestError),
        (desk.listed(group="other"), GroupUnknownError),
        (desk.listed(group="?"), Reason.NAME_INVALID),
        (desk.listed(id="9"), PartitionUnknownError),
        (desk.listed(id="x"), InvalidRequestError),
        (desk.listed(count=0), InvalidRequestError),
        (desk.listed(counts=1), InvalidRequestError),
        (desk.offsets(key="62"), Reason.PARKED_KEY_UNKNOWN),
        (desk.offsets(key="zz"), InvalidRequestError),
    ):
        with raises(error):
            await call
    assert desk.state() == before


async def test_skip_of_messages_that_are_not_parked_changes_nothing(desk: ParkedDesk):
    await desk.change(*PARKED)
    before = desk.state()
    await desk.asked("61", [(1, 20, 30), (9, 2, 4)])
    assert desk.state() == before


def failing(offset: int, *, since_ms: int = 50, text: str = "no such town") -> FailingMessage:
    failure = Failure("ValueError", text, "host-1", since_ms, 1)
    return failing_message(offset, failure, key_digest="key digest 1", since_ms=since_ms)


async def test_failing_message_is_shown_until_it_is_acked(desk: ParkedDesk):
    """The owner tells it with its acks; another owner knows it for a shorter time."""

    def shown() -> FailingMessage | None:
        return desk.group.failing

    await desk.say(Ack(1, "audit", SESSION, 1, (), ((5, 1),), failing(5)))
    assert shown() == failing(5)
    await desk.say(Ack(1, "audit", SESSION, 1, ()))
    assert shown() == failing(5), "an ack without one takes nothing back"
    await desk.say(Ack(1, "audit", SESSION, 1, (), (), failing(5, since_ms=70, text="worse")))
    assert shown() == replace(failing(5, text="worse"), at_ms=70)
    several = replace(failing(5, since_ms=50, text="worse"), others=(failing(6),), others_count=1)
    await desk.say(Ack(1, "audit", SESSION, 1, (), (), several))
    assert shown() == several
    nested = replace(failing(5), others=(several,), others_count=1)
    for wrong in (failing(40), replace(failing(5), others=(failing(40),)), nested):
        with pytest.raises(InvalidRequestError):
            await desk.say(Ack(1, "audit", SESSION, 1, (), (), wrong))
    desk.group.clear_hanging()
    assert shown() == failing(5, since_ms=50, text="worse"), "the owner handles nothing any more"
    await desk.say(Ack(1, "audit", SESSION, 1, ((5, 6),)))
    assert shown() is None


# ── edits ─────────────────────────────────────────────────────────────────────────────────────────
async def test_parked_message_is_edited_in_its_place(
    desk: ParkedDesk, caplog: pytest.LogCaptureFixture
):
    """With the time in its properties; the owner is told which are edited; the log of the broker
    has a line.
    """
    await desk.change(*PARKED)
    caplog.set_level(logging.INFO, logger="keylane.broker")
    await desk.edit(b"a", 3, b"mended", props=pack_properties({"town": "Ulm"}))
    await desk.edit(None, 7, b"")
    answer, value = await desk.service.handle(ReadEdited(1, "audit", b"a", 1, 3), memoryview(b""))
    assert bytes(value) == b"mended"
    properties = unpack_properties(answer.properties)
    assert properties["town"] == "Ulm"
    assert properties[EDITED_PROPERTY].endswith("+00:00")
    assert (await desk.say(ReadEdited(1, "audit", b"a", 1, 2))).properties is None
    assert (await desk.rows(b"a")).edited == ((1, 3),)
    assert (await desk.offsets(key=b"a".hex())).edited == [(1, 3)]
    assert "offset 3 of partition 1, key digest" in caplog.text
    assert "6 bytes of value" in caplog.text
    assert "mended" not in caplog.text


async def test_impossible_edits_are_refused(desk: ParkedDesk):
    """Of messages that are not parked, that are too large or being handled, and too many; nothing
    is changed.
    """
    await desk.change(*PARKED)
    before = desk.state()
    for call, error in (
        (desk.edit(b"a", 4, b"v"), Reason.PARKED_MESSAGE_UNKNOWN),
        (desk.edit(b"b", 2, b"v"), Reason.PARKED_MESSAGE_UNKNOWN),
        (desk.edit(None, 2, b"v"), Reason.PARKED_MESSAGE_UNKNOWN),
        (desk.edit(b"a", 2, b"v", source=3), Reason.PARKED_MESSAGE_UNKNOWN),
        (desk.edit(b"a", 2, b"v", props=b"\xc1"), InvalidRequestError),
        (desk.edit(b"a", 2, bytes(MESSAGE_BYTES_MAX - 20)), MessageTooLargeError),
        (desk.say(EditParked(1, "unknown", b"a", 1, 2, b""), b"v"), GroupUnknownError),
        (desk.say(EditParked(99, "audit", b"a", 1, 2, b""), b"v"), PartitionUnknownError),
        (desk.say(ReadEdited(1, "audit", b"a", 1, 4)), Reason.PARKED_MESSAGE_UNKNOWN),
        (desk.change(Edit(b"a", EditedMessage(1, 2, b"v", b""))), InvalidRequestError),
    ):
        with raises(error):
            await call
    assert desk.state() == before
    await desk.make(Redrive(b"a"))
    with raises(Reason.PARKED_REDRIVEN):
        await desk.edit(b"a", 2, b"v")
    await desk.make(Freeze())
    for call in (desk.edit(None, 7, b"v"), desk.say(ReadEdited(1, "audit", None, 1, 7))):
        with raises(Reason.PARK_MOVED):
            await call


async def is_editable(desk: ParkedDesk, key: bytes | None = b"a", offset: int = 2) -> bool:
    """Whether an edit is taken."""
    try:
        await desk.edit(key, offset, b"mended")
    except BusyError:
        return False
    return True


@pytest.mark.parametrize(
    ("key_hex", "row", "other"),
    [("61", (1, 2, 3), None), (None, (1, 7, 8), "61")],
    ids=["a key", "dead letters"],
)
async def test_message_is_not_skipped_while_it_may_be_with_its_handler(
    desk: ParkedDesk, key_hex: str | None, row: tuple[int, int, int], other: str | None
):
    """Nothing is changed; a repeated skip of messages that are gone is still taken."""
    await desk.change(*PARKED)
    await desk.asked(key_hex)
    before = desk.state()
    with raises(Reason.PARKED_REDRIVEN):
        await desk.asked(key_hex, [(1, 30, 31), row])
    assert desk.state() == before
    await desk.asked(key_hex, [(1, 30, 31)])
    await desk.asked(other, [(1, 7, 8) if other is None else (1, 2, 3)])
    key = None if key_hex is None else bytes.fromhex(key_hex)
    await desk.change(Park(key, (), FAILURE))
    await desk.asked(key_hex, [row])
    assert desk.state() != before


@pytest.mark.parametrize("ends", ["failure", "release", "owner", "all handled"])
async def test_parked_message_is_not_edited_while_its_owner_has_it_handled(
    desk: ParkedDesk, ends: str
):
    """The owner has the key stay parked if its process ends: what it has read it handles, and takes
    out.
    """
    await desk.change(*PARKED)
    await desk.make(Redrive(b"a"))
    assert not await is_editable(desk)
    await desk.change(Park(b"a", (), FAILURE, 1))
    assert not await is_editable(desk)
    assert await is_editable(desk, None, 7), "another key is none of it"
    await desk.change(Park(b"a", ((12, 13),)))
    await desk.change(Unpark(b"a", 1, ((9, 10),)))
    assert not await is_editable(desk)
    match ends:
        case "failure":
            await desk.change(Park(b"a", (), FAILURE))
        case "release":
            await desk.release(1)
            assert await is_editable(desk)
            await desk.acquire(1)
        case "owner":
            await desk.acquire(2, "b" * 16)
            with pytest.raises(FencedError):
                await desk.change(Unpark(b"a", 1, ((2, 3),)))
        case _:
            await desk.change(Unpark(b"a", 1, ((2, 4), (12, 13))), Free(b"a"))
            await desk.change(Park(b"a", ((20, 21),), FAILURE))
            assert await is_editable(desk, b"a", 20)
            return
    assert await is_editable(desk)


@pytest.mark.parametrize("key", [None, b""], ids=["dead letters", "without a key"])
@pytest.mark.parametrize("careful", [False, True])
async def test_loose_messages_are_not_edited_while_they_are_handled_and_others_fail(
    desk: ParkedDesk, key: bytes | None, careful: bool
):
    """A message that is set aside meanwhile ends no redrive: the owner says when it has ended."""
    await desk.change(Park(key, ((7, 9),), FAILURE))
    await desk.make(Redrive(key))
    if careful:
        await desk.change(Park(key, (), FAILURE, 1))
    await desk.change(Park(key, ((10, 11),), FAILURE), Park(key, ((12, 13),), FAILURE))
    await desk.change(Unpark(key, 1, ((7, 8),)))
    assert not await is_editable(desk, key, 8)
    await desk.store.commit.close()
    again = desk.again(snapshot=False)
    assert again.parked.image() == desk.parked.image()
    assert not await is_editable(again, key, 8)
    await again.change(Park(key, ((14, 15),), FAILURE), Park(key, (), FAILURE))
    assert await is_editable(again, key, 8)


@pytest.mark.parametrize("snapshot", [True, False])
async def test_message_with_its_handler_is_not_edited_behind_a_restart_of_the_broker(
    snapshot: bool,
):
    """Until its owner's token ends; also where the record that said it is gone with its segment."""
    desk = await ParkedDesk(SimDisk(), segment_bytes=4096).fill()
    await desk.change(*PARKED, Park(b"", ((11, 12),), FAILURE))
    await desk.edit(b"a", 3, b"mended")
    await desk.change(Park(b"a", (), FAILURE, 1))
    for number in range(4, 12):
        await desk.append(batch(sequence=10 * number, count=10))
    if snapshot:
        await desk.store.snapshotter.write()
    else:
        await desk.store.carry_over.remove_oldest_segment()
    before = desk.parked.image()
    await desk.store.commit.close()
    again = desk.again(snapshot=snapshot)
    assert again.parked.image() == before
    assert not await is_editable(again)
    await again.acquire(1)
    assert not await is_editable(again), "the owner is the same, and still has it"
    await again.acquire(2, "b" * 16)
    assert await is_editable(again)


async def test_failed_write_leaves_a_message_as_it_was_for_edits(desk: ParkedDesk):
    await desk.change(*PARKED)
    desk.disk.free_space = 0
    with pytest.raises(KeylaneError):
        await desk.change(Park(b"a", (), FAILURE, 1))
    desk.disk.free_space = 1 << 40
    desk.clock.advance(2_000)
    assert await is_editable(desk)


async def test_child_takes_no_owner_of_its_parent_over(desk: ParkedDesk):
    """Nothing of a drained partition is with handlers: what children have adopted may be edited
    there.
    """
    adopted = AdoptedKey(b"a", ParkState.PARKED, 1, FAILURE, ((3, 0, 2),), token=1)
    await desk.change(Adopt(3, (adopted,), last=True))
    await desk.edit(b"a", 0, b"mended", source=3)
    assert desk.parked.find_edit(b"a", (3, 0)).value == b"mended"


async def test_edits_have_a_limit(desk: ParkedDesk):
    """In bytes; an edit of the same message takes the place of the one before."""
    await desk.change(Park(b"a", ((0, 40),), FAILURE))
    most = bytes(MESSAGE_BYTES_MAX - 100)
    for offset in range(EDITS_BYTES_MAX // MESSAGE_BYTES_MAX):
        await desk.edit(b"a", offset, most)
    with raises(Reason.EDITS_FULL):
        await desk.edit(b"a", 39, most)
    await desk.edit(b"a", 0, b"small")
    await desk.edit(b"a", 39, most)


async def test_edit_is_refused_when_a_thousand_messages_are_edited():
    """One that is edited already may be edited again, and one that is skipped makes room."""
    desk = await ParkedDesk(SimDisk()).fill(batches=101)
    await desk.change(Park(b"a", ((0, 1_010),), FAILURE))
    for offset in range(1_000):
        await desk.edit(b"a", offset, b"mended")
    with raises(Reason.EDITS_FULL):
        await desk.edit(b"a", 1_000, b"mended")
    await desk.edit(b"a", 0, b"mended again")
    await desk.make(Unpark(b"a", 1, ((0, 1),)))
    await desk.edit(b"a", 1_000, b"mended")


async def test_operators_page_through_dead_letters_with_their_failures(desk: ParkedDesk):
    await desk.change(*PARKED)
    page = await desk.offsets(after="0:0")
    assert (page.rows, page.faults) == (
        [(1, 7, 8)],
        [Fault("ValueError", "no such aircraft", "c", 3)],
    )
    assert page.details[0][1:] == (5, 0, 0)
    assert (await desk.offsets(after="1:8")).rows == []
    for wrong in ({"after": "7"}, {"after": "a:1"}, {"after": "1:-1"}, {"tries": "x"}):
        with pytest.raises(InvalidRequestError):
            await desk.offsets(**wrong)


async def test_next_try_is_told_while_the_owner_is_there_that_said_it(desk: ParkedDesk):
    """Also behind a restart, from when the same owner has acquired again; never behind another
    one.
    """
    request = ChangeParked(1, "audit", SESSION, 1, ((2, 1, 3, 99_000),))
    await desk.say(request, encode_parked((Park(2, ((3, 4),), FAILURE),)))
    (view,) = (await desk.listed(retrying=1)).keys
    assert (view.tries, view.next_ms) == (2, 99_000)
    await desk.store.commit.close()
    again = desk.again(snapshot=False)
    (view,) = (await again.listed(retrying=1)).keys
    assert view.next_ms is None, "no owner holds the partition"
    await again.acquired(1)
    (view,) = (await again.listed(retrying=1)).keys
    assert view.next_ms == 99_000
    await again.acquired(2)
    (view,) = (await again.listed(retrying=1)).keys
    assert view.next_ms is None
    await again.store.commit.close()
    last = again.again(snapshot=False)
    await last.acquired(2)
    assert [view.next_ms for view in (await last.listed(retrying=1)).keys] == [None]
