"""What is parked goes from a parent to its child, while resets and operators come between."""

from __future__ import annotations

import pytest

from keylane.broker.partition.park_views import changes_of
from keylane.broker.partition.parked import Parked
from keylane.broker.store.set_cursor import set_cursor
from keylane.protocol.errors import FencedError, InvalidRequestError, ParkMovedError
from keylane.protocol.frames import LeaveParked
from keylane.protocol.parked import Adopt, AdoptedKey, Park, ParkState
from keylane.protocol.progress import SetCursor
from keylane.protocol.routing import logical_partition
from keylane.testing.machines.disk import SimDisk
from support.parked.desk import FAILURE, ParkedDesk


@pytest.fixture
async def desk() -> ParkedDesk:
    return await ParkedDesk(SimDisk()).fill()


async def left(desk: ParkedDesk, token: int) -> int:
    """The owner of the child under this token says that it needs nothing any more; the number of parked keys."""
    await desk.say(LeaveParked(1, "audit", 0, 1024, token))
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


async def test_leave_without_a_token_is_heard(desk: ParkedDesk):
    """It comes from a consumer of before 1.0."""
    await desk.change(Park(b"a", ((2, 4),), FAILURE))
    await desk.ack(1, (0, 40))
    _, durable = desk.store.seal(1)
    await durable
    await desk.take()
    assert await left(desk, token=0) == 0


async def test_leave_without_a_token_drops_nothing_that_was_parked_behind_a_reset(desk: ParkedDesk):
    """A consumer of an older version has one child; the owner of the other one has taken over what was parked anew."""
    await desk.change(Park(b"a", ((2, 4),), FAILURE))
    await desk.ack(1, (0, 40))
    _, durable = desk.store.seal(1)
    await durable
    await desk.take()
    reset = SetCursor(group="audit", token=3, cursor=0, kept_children=((0, 1024),))
    await set_cursor(desk.store, desk.store.state.partition(1), reset)
    await desk.acquired(4)
    await desk.change(Park(b"a", ((5, 6),), FAILURE), token=4)
    await desk.ack(4, (0, 40))
    at = logical_partition(b"a")
    await desk.take(0, at)
    assert desk.parked.frozen

    with pytest.raises(InvalidRequestError, match="newer version"):
        await desk.say(LeaveParked(1, "audit", at, 1024))
    assert [key.key for key in (await desk.take(at, 1024))[0]] == [b"a"]
    await desk.say(LeaveParked(1, "audit", 0, at))
    assert await left(desk, token=5) == 0
    assert await left(desk, token=0) == 0


async def test_adoption_counts_as_of_the_fence_when_the_snapshot_has_no_token_of_it(
    desk: ParkedDesk,
):
    """It is of a broker of before.  What the parent parks behind a later reset has a higher token, and is taken over again."""
    await desk.change(Adopt(3, (), last=True))
    await desk.acquired(6)
    desk.parked.adopted_under = {}
    assert await desk.store.snapshotter.write()
    await desk.store.commit.close()
    answer = await desk.again().acquired(7)
    assert (answer.adopted, answer.adopted_under) == ((3,), ((3, 6),))


def part(key: bytes, *, last: bool) -> Adopt:
    """A page of what the parent 3 has parked."""
    adopted = AdoptedKey(key, ParkState.PARKED, 1, FAILURE, ((3, 0, 2),))
    return Adopt(3, (adopted,), last=last)


@pytest.mark.parametrize("restarts", [False, True])
async def test_operator_changes_nothing_while_a_parent_is_taken_over(desk: ParkedDesk, restarts):
    """The next owner takes all of it over again, if this one ends: a skip, a redrive or an edit would be undone."""
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
        with pytest.raises(ParkMovedError):
            await call
    assert desk.state() == before
    await desk.acquired(2)
    await desk.change(part(b"a", last=False), part(b"b", last=True), token=2)
    await desk.asked("61", [(3, 0, 1)])
    assert (await desk.rows(b"a", token=2)).rows == ((3, 1, 2),)


async def test_operator_is_heard_when_the_parent_is_not_taken_over_any_more(desk: ParkedDesk):
    """It was reset alone meanwhile, and nothing is parked there now: the next owner goes on with what is here."""
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
    """The child was not reset, so it still has them parked; also behind a restart, from the log or a snapshot."""
    await desk.change(Park(b"a", ((2, 4),), FAILURE), Park(None, ((7, 8),), FAILURE))
    await desk.ack(1, (0, 40))
    _, durable = desk.store.seal(1)
    await durable
    await desk.take()
    reset = SetCursor(group="audit", token=3, cursor=40, kept_children=((0, 1024),))
    for _ in range(2):
        await set_cursor(desk.store, desk.store.state.partition(1), reset)
        assert (len(desk.parked), desk.parked.frozen, desk.group.needed_from) == (0, False, 2)
    assert Parked.of_image(1, desk.parked.image()).first_own() == 2
    told = Parked(1)
    for change in changes_of(desk.parked):
        told.apply(change, at_ms=1)
    assert told.passed == desk.parked.passed
    await desk.store.commit.close()
    desk = desk.again(snapshot=False)
    assert desk.group.needed_from == 2
    at = logical_partition(b"a")
    with pytest.raises(FencedError):
        await desk.say(LeaveParked(1, "audit", at, at + 1, 2))
    await desk.say(LeaveParked(1, "audit", at, at + 1, 4))
    assert desk.group.needed_from == 7
    await desk.say(LeaveParked(1, "audit", 0, at, 4))
    assert desk.group.needed_from == 40
    assert not desk.parked


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
    assert desk.group.needed_from == 7
    again = SetCursor(group="audit", token=4, cursor=40)
    await set_cursor(desk.store, desk.store.state.partition(1), again)
    assert desk.group.needed_from == 40
