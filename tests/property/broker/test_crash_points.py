"""A crash in the middle of every operation on the disk: what was answered is there, once, and
nothing comes back.

The machine loses what was not synced, keeps some of its blocks, and comes up again; then the sender
sends again what was not answered.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from keylane.broker.partition.appends import REMEMBERED_BATCHES
from keylane.broker.partition.partition import HostedPartition
from keylane.protocol.batch import batch_starts, columns
from keylane.protocol.errors import FencedError
from keylane.testing.machines.disk import Crashed, SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import SESSION, Desk, batch, is_survived, open_store

BATCHES = 24
SMALL = {"segment_bytes": 4096, "snapshot_bytes": 4096}
"""Several segments and snapshots within a few batches."""
OTHER = "b" * 16


@dataclass
class ToldBeforeCrash:
    """What the clients were told before the machine went down."""

    hosted: bool = False
    acked: dict[int, int] = field(default_factory=dict)
    """sequence → base offset"""
    fence: int = 0
    cursor: int = 0


def data_of(number: int) -> bytes:
    return batch(sequence=3 * number, count=3, value=b"x" * (50 * (number % 5)))


def first_sent_again(partition: HostedPartition) -> int:
    """A sender has fewer batches without an answer than the broker knows again."""
    return max(0, partition.next_offset // 3 - REMEMBERED_BATCHES)


async def workload(desk: Desk, known: ToldBeforeCrash) -> None:
    """Appends, several at once; acks and a change of owner between them."""

    async def send(number: int) -> None:
        answer = await desk.append(data_of(number))
        known.acked[3 * number] = answer.base_offset

    async def ack(token: int, session: str, end: int) -> None:
        answer = await desk.ack(token, (0, end), session=session)
        known.cursor = max(known.cursor, answer.cursor)

    await desk.host()
    known.hosted = True
    for first in range(0, BATCHES, 4):
        await asyncio.gather(*(send(number) for number in range(first, first + 4)))
        if first == 4:
            await desk.acquire(1)
            known.fence = 1
        if first == 8:
            await asyncio.gather(ack(1, SESSION, 5), ack(1, SESSION, 20))
        if first == 12:
            await desk.acquire(2, OTHER)
            known.fence = 2
        if first == 16:
            await ack(2, OTHER, 40)


def run_until_crash(disk: SimDisk, known: ToldBeforeCrash) -> bool:
    """Return True if the workload ended without a crash."""

    async def go() -> None:
        clock = ManualClock()
        await workload(Desk(open_store(disk, clock=clock, **SMALL), clock), known)

    return is_survived(go())


async def check(disk: SimDisk, known: ToldBeforeCrash) -> None:
    clock = ManualClock()
    desk = Desk(open_store(disk, clock=clock, **SMALL), clock)
    if not known.hosted:
        await desk.host()
    partition = desk.store.state.partition(1)
    assert partition.next_offset >= 3 * len(known.acked)
    if known.fence:
        group = partition.groups["audit"]
        assert group.lock.fence >= known.fence
        assert group.acked.cursor >= known.cursor
        if group.lock.fence == 2:
            with pytest.raises(FencedError):
                await desk.ack(1)
    assert all(sequence == offset for sequence, offset in known.acked.items())
    for number in range(first_sent_again(partition), BATCHES):
        answer = await desk.append(data_of(number))
        assert answer.base_offset == 3 * number
        if 3 * number in known.acked:
            assert answer.duplicate
    offset = 0
    values = []
    while offset < 3 * BATCHES:
        answer, payload = await desk.read(offset)
        for at, header in batch_starts(payload):
            cut = columns(payload, header, at)
            values += [
                int(cut.blob[a:b].split()[-1])
                for a, b in zip(cut.value_edges, cut.value_edges[1:], strict=False)
            ]
        offset = answer.upto
    assert values == list(range(3 * BATCHES))


@pytest.mark.parametrize("seeds", [2, pytest.param(6, marks=pytest.mark.whole)])
def test_crash_at_every_operation(seeds):
    """No operation on the disk is a bad moment to crash, whatever of the unsynced bytes
    survives.
    """
    whole = SimDisk()
    assert run_until_crash(whole, ToldBeforeCrash())
    for crash_at in range(1, whole.steps + 1):
        for seed in range(seeds):
            disk, known = SimDisk(), ToldBeforeCrash()
            disk.crash_at = crash_at
            assert not run_until_crash(disk, known)
            asyncio.run(check(disk.disk_after_crash(random.Random(seed)), known))


def test_crash_during_recovery():
    """Recovery may crash as well, any number of times; the final state is the same."""
    whole = SimDisk()
    run_until_crash(whole, ToldBeforeCrash())
    for crash_at in range(10, whole.steps + 1, 7):
        disk, known = SimDisk(), ToldBeforeCrash()
        disk.crash_at = crash_at
        run_until_crash(disk, known)
        disk = disk.disk_after_crash(random.Random(crash_at))
        for again in range(1, 8):
            disk.crash_at = again
            try:
                open_store(disk, **SMALL)
            except Crashed:
                disk = disk.disk_after_crash(random.Random(again))
        disk.crash_at = None
        asyncio.run(check(disk, known))


def test_answers_of_a_restarted_process_survive_a_machine_crash():
    """A killed process leaves unsynced bytes in the page cache: its successor makes them durable
    before it serves.
    """
    found_whole = 0
    for crash_at in range(1, 60):
        disk, known = SimDisk(), ToldBeforeCrash()
        disk.crash_at = crash_at
        run_until_crash(disk, known)
        disk.crash_at = None
        if not known.hosted:
            continue

        async def resend(disk: SimDisk, known: ToldBeforeCrash) -> None:
            clock = ManualClock()
            desk = Desk(open_store(disk, clock=clock, **SMALL), clock)
            partition = desk.store.state.partition(1)
            for number in range(first_sent_again(partition), partition.next_offset // 3):
                answer = await desk.append(data_of(number))
                assert answer.duplicate
                known.acked[3 * number] = 3 * number

        before = len(known.acked)
        asyncio.run(resend(disk, known))
        found_whole += len(known.acked) > before
        asyncio.run(check(disk.disk_after_crash(random.Random(crash_at)), known))
    assert found_whole
