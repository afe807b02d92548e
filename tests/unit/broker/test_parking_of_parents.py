"""What is parked goes from a parent to its child, while resets and operators come between."""

from __future__ import annotations

import pytest

from keylane.broker.partition.park_views import changes_to_rebuild
from keylane.broker.partition.parked import Parked
from keylane.broker.store.group_changes import set_cursor
from keylane.protocol.errors import FencedError, Reason
from keylane.protocol.frames import AdoptParked, ReleaseParked
from keylane.protocol.parked import Adopt, AdoptedKey, Park, ParkState
from keylane.protocol.progress import SetCursor
from keylane.protocol.routing import logical_partition
from keylane.testing.machines.disk import SimDisk
from support.parked.desk import FAILURE, ParkedDesk
from support.raising import raises


@pytest.fixture
async def desk() -> ParkedDesk:
    return await ParkedDesk(SimDisk()).fill()


async def left(desk: ParkedDesk, token: int) -> int:
    """The owner of the child under this token says that it needs nothing any more; the number of
    parked keys.
    """
    await desk.say(ReleaseParked(1, "audit", 0, 1024, token, True))
    return len(desk.parked)


async def test_leave_that_is_late_drops_nothing_that_was_parked_behind_a_reset(desk: ParkedDesk):
    """The owner of the child stood still while the parent was reset, drained and frozen again."""
    await desk.change(Park(b"a", ((2, 4),), FAILURE))
    await desk.ack(1, (0, 40))
    _, durable = desk.store.seal(1)
    await durable
    assert len((await desk.take())[0]) == 1
    reset = SetCursor(group="audit", token=3, cursor=0)
    await set_cursor(desk.store, desk.store.state.partition(1), reset)
    await desk.acquired(4)
    await desk.change(Park(b"b", ((5, 6),), FAILURE), token=4)
    await desk.ack(4, (0, 40))
    assert [key.key for key in (await desk.take())[0]] == [b"b"]

    with pytest.raises(FencedError):
        await left(desk, token=2)
    assert [key.key for key in (await desk.take())[0]] == [b"b"]
    assert await left(desk, token=5) == 0


def part(key: bytes, *, last: bool) -> Adopt:
    """A page of what the parent 3 has parked."""
    adopted = AdoptedKey(key, ParkState.PARKED, 1, FAILURE, ((3, 0, 2),))
    return Adopt(3, (adopted,), last=last)


@pytest.mark.parametrize("restarts", [False, True])
async def test_operator_changes_nothing_while_a_parent_is_taken_over(desk: ParkedDesk, restarts):
    """The next owner takes all of it over again, if this one ends: a skip, a redrive or an edit
    would be undone.
    """
    await desk.change(part(b"a", last=False))
    if restarts:
        await desk.store.commit.close()
        desk = desk.again(snapshot=False)
    before = desk.state()
    for call in (
        desk.asked("61"),
        desk.asked("61", [(3, 0, 1)]),
        desk.edit(b"a", 0, b"new", source=3),
    ):
        with raises(Reason.PARK_MOVED):
            await call
    assert desk.state() == before
    await desk.acquired(2)
    await desk.change(part(b"a", last=False), part(b"b", last=True), token=2)
    await desk.asked("61", [(3, 0, 1)])
    assert (await desk.rows(b"a", token=2)).rows == ((3, 1, 2),)


async def test_operator_is_heard_when_the_parent_is_not_taken_over_any_more(desk: ParkedDesk):
    """It was reset alone meanwhile, and nothing is parked there now: the next owner goes on with
    what is here.
    """
    await desk.change(part(b"a", last=False))
    await desk.acquired(2)
    await desk.keys(token=2)
    await desk.asked("61", [(3, 0, 1)])
    assert (await desk.rows(b"a", token=2)).rows == ((3, 1, 2),)


async def test_reset_ends_a_taking_over(desk: ParkedDesk):
    await desk.change(part(b"a", last=False))
    reset = SetCursor(group="audit", token=2, cursor=0)
    await set_cursor(desk.store, desk.store.state.partition(1), reset)
    await desk.acquired(3)
    await desk.change(Park(b"a", ((0, 2),), FAILURE), token=3)
    await desk.asked("61")
    assert desk.parked.get(b"a").state is ParkState.REDRIVING


async def test_messages_of_a_reset_parent_are_kept_until_its_child_needs_them_no_more(
    desk: ParkedDesk,
):
    """The child was not reset, so it still has them parked; also behind a restart, from the log or
    a snapshot.
    """
    await desk.change(Park(b"a", ((2, 4),), FAILURE), Park(None, ((7, 8),), FAILURE))
    await desk.ack(1, (0, 40))
    _, durable = desk.store.seal(1)
    await durable
    await desk.take()
    reset = SetCursor(group="audit", token=3, cursor=40, kept_children=((0, 1024),))
    for _ in range(2):
        await set_cursor(desk.store, desk.store.state.partition(1), reset)
        assert (len(desk.parked), desk.parked.frozen, desk.group.first_needed_offset) == (
            0,
            False,
            2,
        )
    assert Parked.of_image(1, desk.parked.image()).lowest_own_offset() == 2
    told = Parked(1)
    for change in changes_to_rebuild(desk.parked):
        told.apply(change, at_ms=1)
    assert told.offsets_for_children == desk.parked.offsets_for_children
    await desk.store.commit.close()
    desk = desk.again(snapshot=False)
    assert desk.group.first_needed_offset == 2
    at = logical_partition(b"a")
    with pytest.raises(FencedError):
        await desk.say(ReleaseParked(1, "audit", at, at + 1, 2))
    await desk.say(ReleaseParked(1, "audit", at, at + 1, 4))
    assert desk.group.first_needed_offset == 7
    await desk.say(ReleaseParked(1, "audit", 0, at, 4, True))
    assert desk.group.first_needed_offset == 40
    assert not desk.parked.left_to_children


async def test_messages_of_a_reset_parent_are_not_kept_for_a_child_that_is_reset_with_it(
    desk: ParkedDesk,
):
    await desk.change(Park(b"a", ((2, 4),), FAILURE), Park(None, ((7, 8),), FAILURE))
    await desk.ack(1, (0, 40))
    _, durable = desk.store.seal(1)
    await durable
    await desk.take()
    at = logical_partition(b"a")
    children = ((0, at), (at + 1, 1024))
    reset = SetCursor(group="audit", token=3, cursor=40, kept_children=children)
    await set_cursor(desk.store, desk.store.state.partition(1), reset)
    assert desk.group.first_needed_offset == 7
    again = SetCursor(group="audit", token=4, cursor=40)
    await set_cursor(desk.store, desk.store.state.partition(1), again)
    assert desk.group.first_needed_offset == 40


async def frozen(desk: ParkedDesk) -> None:
    """One of two children has taken over its half of what the partition and its ancestors 3 and 2
    have parked.
    """
    rows = AdoptedKey(KEYS[1], ParkState.PARKED, 1, FAILURE, ((3, 0, 2),))
    await desk.change(Adopt(3, (rows,), last=True, sources=(2,)))
    await desk.change(*(Park(key, ((at, at + 1),), FAILURE) for at, key in enumerate(KEYS)))
    await desk.ack(1, (0, 40))
    _, durable = desk.store.seal(1)
    await durable
    assert [key.key for key in (await desk.take(0, 512))[0]] == [KEYS[0]]


KEYS = (b"b", b"d")
"""The first is of the first half of the logical partitions, the other of the second."""
CHILDREN = ((0, 512), (512, 1024))


async def reset_alone(
    desk: ParkedDesk, *, children: tuple[tuple[int, int], ...] = CHILDREN
) -> None:
    ask = SetCursor(group="audit", token=3, cursor=40, kept_parents=(3,), kept_children=children)
    await set_cursor(desk.store, desk.store.state.partition(1), ask)


@pytest.mark.parametrize("restarts", [False, True])
async def test_reset_partition_says_that_its_children_have_something_to_take_over(
    desk: ParkedDesk, restarts
):
    """Else a child that had not begun would never tell that it needs nothing, and the broker would
    keep its log for ever.
    """
    assert [logical_partition(key) < 512 for key in KEYS] == [True, False]
    await frozen(desk)
    await reset_alone(desk)
    if restarts:
        await desk.store.commit.close()
        desk = desk.again(snapshot=False)
    (told,) = desk.store.state.partition(1).status(now_ms=0).groups
    assert (told.parked, told.left_to_children) == (2, True), "what its parent had parked"
    assert (await desk.acquired(4)).parked_version > 0


async def test_reset_partition_without_anything_kept_says_so(desk: ParkedDesk):
    await desk.change(Park(b"a", ((2, 4),), FAILURE))
    await set_cursor(
        desk.store, desk.store.state.partition(1), SetCursor(group="audit", token=3, cursor=40)
    )
    (told,) = desk.store.state.partition(1).status(now_ms=0).groups
    assert not told.left_to_children
    assert (await desk.acquired(4)).parked_version == 0


async def test_frozen_partition_has_something_for_the_child_that_has_not_begun(desk: ParkedDesk):
    """A database that is rebuilt has to know of it; what operators are told is counted at the
    children.
    """
    await frozen(desk)
    (told,) = desk.store.state.partition(1).status(now_ms=0).groups
    assert (told.parked, told.left_to_children, told.frozen) == (0, True, True)


@pytest.mark.parametrize("restarts", [False, True])
async def test_child_that_had_not_begun_learns_of_the_ancestors_of_a_reset_partition(
    desk: ParkedDesk, restarts
):
    """The owner of the partition tells them nothing: the other child may still need their
    messages.
    """
    await frozen(desk)
    await reset_alone(desk)
    if restarts:
        await desk.store.commit.close()
        desk = desk.again(snapshot=False)
    assert desk.parked.unneeded_ancestors() == ()
    answer = await desk.say(AdoptParked(1, "audit", 512, 1024, 0))
    assert answer.sources == (2, 3)
    told = Parked(1)
    for change in changes_to_rebuild(desk.parked):
        told.apply(change, at_ms=1)
    for again in (told, Parked.of_image(1, desk.parked.image())):
        assert (
            again.retaining_ancestors,
            again.unneeded_ancestors(),
            again.children_notify_ancestors,
        ) == ({2, 3}, (), True)


async def test_children_that_were_reset_with_the_partition_tell_its_ancestors(desk: ParkedDesk):
    """They may have kept messages of these; they learn of the ancestors when they take the
    partition over once more.
    """
    await frozen(desk)
    await reset_alone(desk, children=())
    assert desk.parked.unneeded_ancestors() == ()
    assert (await desk.say(AdoptParked(1, "audit", 0, 512, 0))).sources == (2, 3)


async def test_partition_between_a_reset_parent_and_a_kept_child_tells_no_ancestor(
    desk: ParkedDesk,
):
    """It has taken over its parent once more, and needs nothing of it; the child may need what it
    took over before.
    """
    await frozen(desk)
    ask = SetCursor(group="audit", token=3, cursor=40, kept_children=CHILDREN)
    await set_cursor(desk.store, desk.store.state.partition(1), ask)
    await desk.acquired(4)
    await desk.change(Adopt(3, (), last=True, sources=(2,)), token=4)
    assert desk.parked.unneeded_ancestors() == ()
    assert (await desk.say(AdoptParked(1, "audit", 0, 512, 0))).sources == (2, 3)


async def test_parent_that_is_taken_over_is_in_the_image(desk: ParkedDesk):
    """Behind a start from a snapshot, or a log that was written anew, operators change nothing of
    it either.
    """
    await desk.change(part(b"a", last=False))
    told = Parked(1)
    for change in changes_to_rebuild(desk.parked):
        told.apply(change, at_ms=1)
    for again in (told, Parked.of_image(1, desk.parked.image())):
        assert (again.partly_adopted_parents, again.adopted_parents) == ({3}, set())
        again.apply(part(b"b", last=True), at_ms=2)
        assert (again.partly_adopted_parents, again.adopted_parents) == (set(), {3})


# ── displaced messages ────────────────────────────────────────────────────────────────────────────
async def restarted(desk: ParkedDesk, *, snapshot: bool) -> ParkedDesk:
    if snapshot:
        await desk.store.snapshotter.write()
    await desk.store.commit.close()
    return desk.again(snapshot=snapshot)


async def sealed(desk: ParkedDesk, *, token: int = 1) -> None:
    await desk.ack(token, (0, 40))
    _, durable = desk.store.seal(1)
    await durable


@pytest.fixture
async def half() -> ParkedDesk:
    """The first half of the logical partitions, which has a key of each half and a dead letter."""
    desk = await ParkedDesk(SimDisk()).fill(range_end=512)
    await desk.change(*(Park(key, ((at, at + 2),), FAILURE) for at, key in PARKED_AT))
    await sealed(desk)
    return desk


PARKED_AT = (2, KEYS[0]), (5, KEYS[1]), (9, None)


@pytest.mark.parametrize("again", [None, "log", "snapshot"])
async def test_displaced_key_passes_with_the_loose_messages_and_is_released_with_them(
    half: ParkedDesk, again: str | None
):
    """The child with its logical partition, if there were one, has nothing of it."""
    desk = half if again is None else await restarted(half, snapshot=again == "snapshot")
    page, _ = await desk.take(0, 256)
    assert [(key.key, key.is_displaced, key.rows) for key in page if key.rows] == [
        (KEYS[0], False, ((1, 2, 4),)),
        (KEYS[1], True, ((1, 5, 7),)),
        (None, False, ((1, 9, 11),)),
    ]
    assert (await desk.take(256, 512))[0] == (await desk.take(512, 1024))[0] == []

    for start, end in ((256, 512), (512, 1024)):
        await desk.say(ReleaseParked(1, "audit", start, end, 2))
        assert (len(desk.parked), desk.group.first_needed_offset) == (3, 2)
    await desk.say(ReleaseParked(1, "audit", 0, 256, 2))
    assert (len(desk.parked), desk.group.first_needed_offset) == (2, 5)
    await desk.say(ReleaseParked(1, "audit", 0, 256, 2, True))
    assert (len(desk.parked), desk.parked.messages) == (0, 0)


@pytest.mark.parametrize("again", [None, "log", "snapshot"])
async def test_reset_keeps_displaced_messages_for_the_child_that_has_adopted_them(
    half: ParkedDesk, again: str | None
):
    await half.take(0, 256)
    reset = SetCursor(group="audit", token=3, cursor=40, kept_children=((0, 32),))
    await set_cursor(half.store, half.store.state.partition(1), reset)
    desk = half if again is None else await restarted(half, snapshot=again == "snapshot")
    assert desk.parked.offsets_for_children == {-1: 5}
    assert desk.group.first_needed_offset == 5
    at = logical_partition(KEYS[1])
    await desk.say(ReleaseParked(1, "audit", at, at + 1, 4))
    assert desk.group.first_needed_offset == 5
    await desk.say(ReleaseParked(1, "audit", 0, 32, 4, True))
    assert desk.group.first_needed_offset == 40


async def test_reset_keeps_no_displaced_messages_for_a_child_that_never_had_them(half: ParkedDesk):
    await half.take(0, 256)
    reset = SetCursor(group="audit", token=3, cursor=40, kept_children=((256, 512),))
    await set_cursor(half.store, half.store.state.partition(1), reset)
    assert half.group.first_needed_offset == 40


@pytest.mark.parametrize("again", [None, "log", "snapshot", "rebuilt"])
@pytest.mark.parametrize("is_reset", [False, True])
async def test_displaced_messages_stay_so_in_a_merged_partition_that_contains_their_key(
    desk: ParkedDesk, again: str | None, is_reset: bool
):
    """Parent 3 did not contain the key, and parent 4 did. So their messages pass to different
    children, which also release them.
    """
    strayed = AdoptedKey(
        KEYS[1], ParkState.PARKED, 1, FAILURE, ((3, 0, 2), (3, 4, 6)), is_displaced=True
    )
    at_home = AdoptedKey(KEYS[1], ParkState.PARKED, 1, FAILURE, ((4, 7, 9),))
    await desk.change(Adopt(3, (strayed,), last=True), Adopt(4, (at_home,), last=True))
    token = 1
    if is_reset:
        ask = SetCursor(group="audit", token=2, cursor=0, kept_parents=(3, 4))
        await set_cursor(desk.store, desk.store.state.partition(1), ask)
        token = 3
        await desk.acquired(token)
    await desk.change(Park(KEYS[1], ((5, 7),), FAILURE), token=token)
    assert (await desk.rows(KEYS[1], token=token)).messages == 8
    await desk.edit(KEYS[1], 5, b"mended", source=3)
    await sealed(desk, token=token)
    if again == "rebuilt":
        told = Parked(1)
        for change in changes_to_rebuild(desk.parked):
            told.apply(change, at_ms=1)
        desk.group.parked = told
    elif again is not None:
        desk = await restarted(desk, snapshot=again == "snapshot")
    first, second = [(await desk.take(*range_))[0] for range_ in CHILDREN]
    assert [(key.key, key.is_displaced, key.rows) for key in first] == [
        (KEYS[1], True, ((3, 0, 2), (3, 4, 6))),
        (KEYS[1], True, ()),
    ]
    assert [edit.value for edit in first[1].edits] == [b"mended"]
    assert [(key.is_displaced, key.rows, key.edits) for key in second] == [
        (False, ((1, 5, 7), (4, 7, 9)), ())
    ]
    await desk.say(ReleaseParked(1, "audit", 0, 512, 9, True))
    assert (await desk.take())[0] == second
    assert desk.group.first_needed_offset == 5
    await desk.say(ReleaseParked(1, "audit", 512, 1024, 9))
    assert len(desk.parked) == 0
