"""A cursor set by an operator: who is refused, what is refused, what a restart finds."""

from __future__ import annotations

import pytest

from keylane.broker.partition.pull_lock import RESET
from keylane.broker.store.group_changes import register_groups_at, set_cursor
from keylane.protocol.errors import (
    DiskFullError,
    FencedError,
    OffsetOutOfRangeError,
    Reason,
)
from keylane.protocol.progress import SetCursor
from keylane.protocol.routing import ConsumeStrategy
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store
from support.raising import raises

OTHER = "b" * 16


async def desk_of(disk: SimDisk, messages: int = 20, **changes: object) -> Desk:
    """A partition of `messages` messages, held by token 1, acked up to 15 with 17 above."""
    clock = ManualClock()
    desk = Desk(open_store(disk, clock=clock, **changes), clock)
    await desk.host()
    await desk.append(batch(count=messages))
    await desk.acquire(1)
    await desk.ack(1, (0, 15), (17, 18))
    return desk


async def set_to(desk: Desk, token: int, cursor: int, *, group: str = "audit") -> None:
    await set_cursor(
        desk.store,
        desk.store.state.partition(1),
        SetCursor(group=group, token=token, cursor=cursor),
    )


def progress(desk: Desk, group: str = "audit") -> tuple[int, list[tuple[int, int]], int]:
    """Cursor, ranges above, fence."""
    progress = desk.store.state.partition(1).groups[group]
    return progress.acked.cursor, progress.acked.ranges, progress.lock.fence


async def test_back_and_who_held_it_is_refused():
    """The cursor falls, what was acked above is forgotten, the old owner can neither ack nor
    pull.
    """
    desk = await desk_of(SimDisk())
    await set_to(desk, 2, 5)
    assert progress(desk) == (5, [], 2)
    with pytest.raises(FencedError):
        await desk.ack(1, (5, 6))
    with pytest.raises(FencedError):
        await desk.pull(1, 5)
    assert (await desk.acquire(3, OTHER)).cursor == 5
    status = desk.store.state.partition(1).status(now_ms=0)
    assert (status.groups[0].cursor, status.groups[0].lag) == (5, 15)


async def test_on_to_the_end_and_of_a_group_that_never_came():
    """Forward is as good as back; a group the partition does not know is known from then on."""
    desk = await desk_of(SimDisk())
    await set_to(desk, 2, 20)
    await set_to(desk, 7, 9, group="new")
    assert progress(desk) == (20, [], 2)
    assert progress(desk, "new") == (9, [], 7)


async def test_set_cursor_changes_nothing_when_repeated_under_its_token():
    """The second call finds the cursor where it shall be, and writes nothing."""
    desk = await desk_of(SimDisk())
    await set_to(desk, 2, 5)
    end = desk.store.log.end
    await set_to(desk, 2, 5)
    assert desk.store.log.end == end
    assert progress(desk) == (5, [], 2)


async def test_cursor_is_unchanged_when_setting_it_is_refused():
    """A lower token, a consumer's token, an offset beyond the end, an illegal name: nothing is
    changed.
    """
    desk = await desk_of(SimDisk())
    await desk.acquire(4, OTHER)
    before = progress(desk)
    for token, cursor, group, error in (
        (3, 5, "audit", FencedError),
        (4, 5, "audit", FencedError),
        (9, 21, "audit", OffsetOutOfRangeError),
        (9, 5, "?", Reason.NAME_INVALID),
    ):
        with raises(error):
            await set_to(desk, token, cursor, group=group)
    assert progress(desk) == before
    assert list(desk.store.state.partition(1).groups) == ["audit"]


async def test_set_cursor_leaves_out_messages_that_retention_removed():
    """A cursor below the first offset becomes the first offset."""
    desk = await desk_of(SimDisk())
    desk.store.state.partition(1).first_offset = 8
    await set_to(desk, 2, 0)
    assert progress(desk) == (8, [], 2)


@pytest.mark.parametrize("snapshot", [True, False])
async def test_restart_finds_it(snapshot: bool):
    """With the snapshot or from the log alone, the fallen cursor stays fallen, and later acks count
    from it.
    """
    disk = SimDisk()
    desk = await desk_of(disk, segment_bytes=4096)
    if snapshot:
        await desk.store.snapshotter.write()
    await set_to(desk, 2, 5)
    if snapshot:
        await desk.store.snapshotter.write()
    await desk.acquire(3, OTHER)
    await desk.ack(3, (5, 7), session=OTHER)
    await set_to(desk, 4, 2)
    await desk.store.commit.close()
    for name in disk.list("snapshot") if not snapshot else []:
        disk.remove(f"snapshot/{name}")
    clock = ManualClock()
    again = Desk(open_store(disk, clock=clock, segment_bytes=4096), clock)
    assert progress(again) == (2, [], 4)
    assert again.store.state.partition(1).groups["audit"].lock.session == RESET
    await set_to(again, 4, 2)
    with pytest.raises(FencedError):
        await again.acquire(3, OTHER)
    assert (await again.acquire(5)).cursor == 2


async def test_set_cursor_is_carried_over_when_its_segment_goes():
    """The first segment, with the records of the reset, is removed: the state written again says
    the same.
    """
    disk = SimDisk()
    desk = await desk_of(disk, segment_bytes=4096)
    await set_to(desk, 2, 5)
    for number in range(1, 20):
        await desk.append(batch(sequence=20 * number, count=20))
    assert len(desk.store.log.bases) > 2
    await desk.store.carry_over.remove_oldest_segment()
    await desk.store.commit.close()
    for name in disk.list("snapshot"):
        disk.remove(f"snapshot/{name}")
    again = Desk(open_store(disk, segment_bytes=4096), ManualClock())
    cursor, ranges, fence = progress(again)
    first = again.store.state.partition(1).first_offset
    assert (max(cursor, first), ranges, fence) == (max(5, first), [], 2)


async def test_groups_made_known_before_they_come():
    """They begin at the first message, also after a restart; a group that has come already stays
    where it is.
    """
    disk = SimDisk()
    desk = await desk_of(disk)
    partition = desk.store.state.partition(1)
    partition.first_offset = 4
    await register_groups_at(desk.store, partition, ["late", "audit", "late"])
    end = desk.store.log.end
    await register_groups_at(desk.store, partition, ["late"])
    assert desk.store.log.end == end
    with raises(Reason.NAME_INVALID):
        await register_groups_at(desk.store, partition, ["?"])
    await desk.store.close()
    again = Desk(open_store(disk, clock=ManualClock()), ManualClock())
    assert progress(again, "late") == (4, [], 0)
    assert progress(again) == (15, [(17, 18)], 1)
    assert (await again.acquire(9, OTHER, group="late")).cursor == 4


async def test_group_that_could_not_be_made_known_is_not():
    """The disk was full: the group is gone again."""
    disk = SimDisk()
    desk = await desk_of(disk)
    disk.free_space = 0
    with pytest.raises(DiskFullError):
        await register_groups_at(desk.store, desk.store.state.partition(1), ["late"])
    assert list(desk.store.state.partition(1).groups) == ["audit"]


async def test_full_disk_leaves_it_as_it_was():
    """What could not be made durable is taken back, cursor and fence; the owner goes on."""
    disk = SimDisk()
    desk = await desk_of(disk)
    before = progress(desk)
    disk.free_space = 0
    with pytest.raises(DiskFullError):
        await set_to(desk, 2, 5)
    assert progress(desk) == before


@pytest.mark.parametrize("strategy", list(ConsumeStrategy))
async def test_how_the_group_consumes_is_kept(strategy: ConsumeStrategy):
    """A partition tells it after a reset, and after a restart, together with who brought the
    token.
    """
    disk = SimDisk()
    desk = await desk_of(disk)
    await set_cursor(
        desk.store,
        desk.store.state.partition(1),
        SetCursor(group="audit", token=2, cursor=5, strategy=strategy),
    )
    await desk.store.close()
    for store in (desk.store, open_store(disk)):
        (group,) = store.state.partition(1).status(now_ms=0).groups
        assert (group.strategy, group.by_operator, group.holder) == (strategy, True, None)
