"""Two producers under one id at a broker: what one of them stored is never an ack for the other."""

from __future__ import annotations

import pytest

from keylane.broker.partition.appends import REMEMBERED_BATCHES
from keylane.protocol.errors import SequenceGapError, SequenceReusedError
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store

SEGMENT = 4096


def mine(number: int, *, epoch: int = 0) -> bytes:
    return batch(sequence=2 * number, epoch=epoch)


def others(number: int, *, epoch: int = 0) -> bytes:
    return batch(sequence=2 * number, epoch=epoch, value=b"twin!")


async def opened(disk: SimDisk, *, stored: int = 0) -> Desk:
    clock = ManualClock()
    desk = Desk(open_store(disk, clock=clock, segment_bytes=SEGMENT), clock)
    if stored:
        await desk.host()
    for number in range(stored):
        await desk.append(mine(number))
    return desk


async def assert_told_apart(desk: Desk, stored: int) -> None:
    """Repeats are known again, the other producer's batches are refused, and nothing is stored."""
    first = max(0, stored - REMEMBERED_BATCHES)
    for number in range(first, stored):
        again = await desk.append(mine(number))
        assert (again.duplicate, again.base_offset) == (True, 2 * number)
    for number in range(stored):
        with pytest.raises(SequenceReusedError):
            await desk.append(others(number))
    if first:
        with pytest.raises(SequenceReusedError):
            await desk.append(mine(0))
    assert desk.store.state.partition(1).next_offset == 2 * stored


@pytest.mark.parametrize("stored", [1, REMEMBERED_BATCHES, 3 * REMEMBERED_BATCHES])
async def test_batches_of_another_producer_are_refused(stored):
    """However far the first one is, also where its batches are remembered no more."""
    await assert_told_apart(await opened(SimDisk(), stored=stored), stored)


async def test_batches_are_told_apart_after_a_restart():
    """From the log, from a snapshot, and from what is written again before a segment goes."""
    disk, stored = SimDisk(), 40
    desk = await opened(disk, stored=stored)
    await assert_told_apart(await opened(disk), stored)
    assert await desk.store.snapshotter.write()
    await assert_told_apart(await opened(disk), stored)
    while len(desk.store.log.bases) > 1:
        await desk.store.carry_over.remove_oldest_segment()
    for name in disk.list("snapshot"):
        disk.remove(f"snapshot/{name}")
    again = await opened(disk)
    assert again.store.log.first_position > 0
    await assert_told_apart(again, stored)


async def test_epoch_that_is_shared_stores_nothing_more():
    """Else what the refused one sends next might be stored in front of what was refused; a new
    epoch begins again.
    """
    desk = await opened(SimDisk(), stored=2)
    with pytest.raises(SequenceReusedError):
        await desk.append(others(0))
    for data in (others(2), mine(2)):
        with pytest.raises(SequenceReusedError):
            await desk.append(data)
    with pytest.raises(SequenceGapError):
        await desk.append(mine(3))
    assert not desk.store.state.partition(1).is_quiet(0)
    for number in range(3):
        assert not (await desk.append(mine(number, epoch=1))).duplicate
    assert desk.store.state.partition(1).next_offset == 10


async def test_producer_that_is_forgotten_is_no_longer_shared(monkeypatch):
    """What is known of a shared id goes with the rest that is known of it."""
    monkeypatch.setattr("keylane.broker.partition.partition.PRODUCERS_PER_PARTITION_MAX", 2)
    desk = await opened(SimDisk(), stored=1)
    with pytest.raises(SequenceReusedError):
        await desk.append(others(0))
    for producer_id in (1, 2):
        await desk.append(batch(producer_id=producer_id))
    partition = desk.store.state.partition(1)
    assert not partition.clashed_ids
    assert partition.is_quiet(0)
    await desk.append(others(0))
