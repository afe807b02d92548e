"""A crash in the middle of every operation on the disk, around a reset: what was answered holds,
and again finishes it.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from keylane.broker.store.group_changes import set_cursor
from keylane.protocol.progress import SetCursor
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import SESSION, Desk, batch, is_survived, open_store

SMALL = {"segment_bytes": 4096, "snapshot_bytes": 4096}
OTHER = "b" * 16
STEPS = [(4, 30), (7, 3), (9, 12)]
"""Tokens and cursors of the resets, between acks of owners with the tokens below."""


async def workload(desk: Desk, said: list[tuple[int, int]]) -> None:
    """Resets between acks; `said` hears of each cursor that was answered, with the token it is
    under.
    """
    await desk.host()
    for number in range(12):
        await desk.append(batch(sequence=4 * number, count=4, value=b"x" * 60))
    partition = desk.store.state.partition(1)
    for token, cursor in STEPS:
        await desk.acquire(token - 1, OTHER)
        at = (await desk.ack(token - 1, (0, 20), session=OTHER)).cursor
        said.append((token - 1, at))
        late = asyncio.create_task(desk.ack(token - 1, (0, 25), session=OTHER))
        await asyncio.sleep(0)  # decided before the reset, and on its way to the disk with it
        await set_cursor(
            desk.store, partition, SetCursor(group="audit", token=token, cursor=cursor)
        )
        await asyncio.gather(late, return_exceptions=True)
        said.append((token, cursor))
    await desk.store.snapshotter.write()


def run(disk: SimDisk, said: list[tuple[int, int]]) -> bool:
    """Return True if the workload ended without a crash."""

    async def go() -> None:
        clock = ManualClock()
        await workload(Desk(open_store(disk, clock=clock, **SMALL), clock), said)

    return is_survived(go())


def operations() -> int:
    disk = SimDisk()
    assert run(disk, [])
    return disk.steps


@pytest.mark.parametrize("seed", range(4))
def test_crash_at_every_operation(seed: int):
    """An answered reset is kept; one without an answer may be kept or not; a fresh token sets the
    cursor in either case.
    """
    for crash_at in range(1, operations() + 1):
        disk = SimDisk()
        disk.crash_at = crash_at
        said: list[tuple[int, int]] = []
        if run(disk, said):
            continue
        rest = disk.disk_after_crash(random.Random(seed * 10_000 + crash_at))

        async def look(rest: SimDisk = rest, said: list[tuple[int, int]] = said) -> None:
            clock = ManualClock()
            desk = Desk(open_store(rest, clock=clock, **SMALL), clock)
            if 1 not in desk.store.state.partitions:
                assert not said
                return
            partition = desk.store.state.partition(1)
            group = partition.groups.get("audit")
            if said:
                token, cursor = said[-1]
                assert group is not None
                assert group.lock.fence >= token
                if group.lock.fence == token:
                    later = [to for number, to in STEPS if number == token + 1]
                    assert group.acked.cursor in {cursor, 25, *later}
            if partition.readable_offset:
                await set_cursor(
                    desk.store, partition, SetCursor(group="audit", token=100, cursor=1)
                )
                assert (await desk.acquire(101, SESSION)).cursor == 1
            await desk.store.close()

        asyncio.run(look())
