"""A folder that an operator accepted: tokens from before are refused, of every group, after a
restart too.
"""

from __future__ import annotations

import pytest

from keylane.broker.store.group_changes import refuse_old_tokens, register_groups_at
from keylane.protocol.errors import FencedError
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store

FENCE = 9


async def accepted_desk(disk: SimDisk) -> Desk:
    """Partition 1 with ten messages, held by token 1 when the copy was made and accepted; then ten
    others came.
    """
    clock = ManualClock()
    desk = Desk(open_store(disk, clock=clock), clock)
    await desk.host()
    await desk.append(batch(count=10))
    await desk.acquire(1)
    await refuse_old_tokens(desk.store, FENCE)
    await desk.append(batch(sequence=10, count=10))
    return desk


async def test_owner_from_before_can_neither_ack_nor_pull_nor_acquire():
    desk = await accepted_desk(SimDisk())
    with pytest.raises(FencedError):
        await desk.ack(1, (0, 20))
    with pytest.raises(FencedError):
        await desk.pull(1, 0)
    for token in (1, 5, FENCE):
        with pytest.raises(FencedError):
            await desk.acquire(token)
    assert (await desk.acquire(FENCE + 1)).cursor == 0


async def test_group_that_the_folder_lacks_takes_no_older_token_either():
    """Neither before it is told of the group nor after."""
    desk = await accepted_desk(SimDisk())
    with pytest.raises(FencedError):
        await desk.acquire(5, group="younger")
    await register_groups_at(desk.store, desk.store.state.partition(1), ["younger"])
    with pytest.raises(FencedError):
        await desk.acquire(5, group="younger")
    assert (await desk.acquire(FENCE + 1, group="younger")).cursor == 0


async def test_old_tokens_are_refused_after_a_restart():
    """By the log, without a word of the metaserver."""
    disk = SimDisk()
    desk = await accepted_desk(disk)
    await desk.store.commit.close()
    clock = ManualClock()
    again = Desk(open_store(disk, clock=clock), clock)
    with pytest.raises(FencedError):
        await again.ack(1, (0, 20))
    assert again.store.state.partition(1).groups["audit"].lock.fence == FENCE


async def test_refusing_old_tokens_again_writes_nothing():
    desk = await accepted_desk(SimDisk())
    await desk.acquire(FENCE + 1)
    end = desk.store.log.end
    await refuse_old_tokens(desk.store, FENCE)
    assert desk.store.log.end == end
