"""Disks that fail in every way, life after life: what was acked is there once, at its offset, and
nothing else is.

A seed is a few lives of one broker. Each life has a fault of its own: a crash of the machine, a
kill of the process, a write or a sync that fails, a disk that fills up and gets room again; then
the sender sends again what was not acked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from itertools import pairwise

import pytest

from keylane.broker.store.group_commit import WAITING_MAX
from keylane.protocol.batch import batch_starts, columns
from keylane.protocol.errors import KeylaneError, OverloadedError
from keylane.testing.machines.disk import Crashed, SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store

PRODUCERS = 3
SEEDS = 120


@pytest.fixture(autouse=True)
def quiet(caplog) -> None:
    caplog.set_level(logging.CRITICAL + 1, logger="keylane.broker")


class NumberedSender:
    """Sends numbered messages in order, again and again until each is acked; knows the offsets it
    was told.
    """

    def __init__(self, producer_id: int) -> None:
        self.producer_id = producer_id
        self.acked: dict[int, int] = {}
        """sequence → offset"""

    def batch(self, sequence: int) -> bytes:
        value = b"%d:" % self.producer_id + b"x" * (40 * (sequence % 3))
        return batch(sequence=sequence, count=2, producer_id=self.producer_id, value=value)

    async def send(self, desk: Desk, sequence: int) -> None:
        answer = await desk.append(self.batch(sequence))
        known = self.acked.get(sequence)
        if answer.base_offset >= 0:
            assert known in {None, answer.base_offset}
            self.acked[sequence] = answer.base_offset
        else:
            assert answer.duplicate


FAULTS = ("crash", "kill", "write", "fdatasync", "full", "stop")


class BrokerLives:
    """What survives the lives of the broker: the disk, and what its clients were told."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = SimDisk()
        self.senders = [NumberedSender(number + 1) for number in range(PRODUCERS)]
        self.fence = 0
        self.cursor = 0
        self.settings = {
            "segment_bytes": self.rng.choice((4096, 8192, 1 << 20)),
            "snapshot_bytes": self.rng.choice((4096, 20_000)),
        }

    def choose_fault(self) -> str:
        disk, rng = self.disk, self.rng
        disk.failing_operation, disk.free_space, disk.crash_at = "", None, None
        fault = rng.choice(FAULTS)
        after = disk.steps + rng.randrange(1, 120)
        if fault in {"crash", "kill"}:
            disk.crash_at = after
        elif fault == "full":
            disk.free_space = rng.randrange(200, 12_000)
        elif fault != "stop":

            def fail(_name: str) -> None:
                disk.failing_operation = fault if disk.steps >= after else ""

            disk.on_step = fail
        return fault

    async def live(self) -> None:
        """One life; ends when the fault ends it or there is nothing left to do."""
        clock = ManualClock()
        desk = Desk(open_store(self.disk, clock=clock, **self.settings), clock)
        with contextlib.suppress(KeylaneError):
            await desk.host()
        for _ in range(12):
            with contextlib.suppress(KeylaneError):
                await self.step(desk)
            if self.disk.free_space is not None and self.rng.random() < 0.3:
                self.disk.free_space = None
            clock.advance(1500)
            await asyncio.sleep(0)
        await desk.store.close()

    async def step(self, desk: Desk) -> None:
        calls = []
        for sender in self.senders:
            first = 2 * len(sender.acked)
            calls += [sender.send(desk, first + 2 * index) for index in range(3)]
        await asyncio.gather(*calls, return_exceptions=True)
        if self.rng.random() < 0.3:
            await desk.acquire(self.fence + 1)
            self.fence += 1
        if self.fence and self.rng.random() < 0.5:
            end = desk.store.state.partition(1).readable_offset
            answer = await desk.ack(self.fence, (0, self.rng.randrange(1, end + 1)))
            self.cursor = max(self.cursor, answer.cursor)

    def run_life(self) -> str:
        fault = self.choose_fault()
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda _loop, _context: None)
        try:
            loop.run_until_complete(self.live())
        except Crashed:
            if fault == "crash":
                self.disk = self.disk.disk_after_crash(self.rng)
        except KeylaneError:
            pass  # it could not even start, or stop
        finally:
            for _ in range(3):  # a timer may have begun something new
                for task in asyncio.all_tasks(loop):
                    task.cancel()
                with contextlib.suppress(Crashed, asyncio.CancelledError, RuntimeError):
                    loop.run_until_complete(asyncio.sleep(0))
            loop.close()
        self.disk.failing_operation, self.disk.free_space, self.disk.crash_at = "", None, None
        self.disk.on_step = lambda _name: None
        self.disk.close()
        return fault

    async def check(self) -> None:
        """Everything acked is there, at its offset; each message once; per sender in order."""
        clock = ManualClock()
        desk = Desk(open_store(self.disk, clock=clock, **self.settings), clock)
        await desk.host()
        partition = desk.store.state.partition(1)
        assert not desk.store.state.problems
        if self.fence:
            assert partition.groups["audit"].lock.fence >= self.fence
            assert partition.groups["audit"].acked.cursor >= self.cursor
        values = await read_values(desk)
        assert len(values) == len(set(values))
        for sender in self.senders:
            for sequence, offset in sender.acked.items():
                assert values[offset].startswith(b"%d:" % sender.producer_id)
                assert values[offset].endswith(b" %d" % sequence)
            own = [value for value in values if value.startswith(b"%d:" % sender.producer_id)]
            assert [int(value.split()[-1]) for value in own] == list(range(len(own)))
        await desk.store.close()


async def read_values(desk: Desk) -> list[bytes]:
    values: list[bytes] = []
    while len(values) < desk.store.state.partition(1).readable_offset:
        answer, payload = await desk.read(len(values))
        for at, header in batch_starts(payload):
            cut = columns(payload, header, at)
            edges = cut.value_edges
            values += [cut.blob[a:b] for a, b in pairwise(edges)]
        assert answer.upto == len(values)
    return values


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.whole) for part in (1, 2, 3))]
)
def test_acked_messages_are_kept_through_lives_with_faults(part):
    """Whichever fault ends each life, nothing acked is lost or stored twice, and no fence and no
    cursor falls.
    """
    faults = set()
    for seed in range(part * SEEDS // 4, (part + 1) * SEEDS // 4):
        world = BrokerLives(seed)
        for _ in range(world.rng.randrange(2, 6)):
            faults.add(world.run_life())
            asyncio.run(world.check())
    assert faults == {"crash", "kill", "write", "fdatasync", "full", "stop"}


def test_appends_beyond_the_line_are_refused_and_stored_when_sent_again():
    """An overloaded broker queues appends; it refuses those that the queue has no room for, and
    nothing is lost.
    """
    world = BrokerLives(1)
    count = WAITING_MAX + 10

    async def go() -> None:
        desk = Desk(open_store(world.disk), ManualClock())
        await desk.host()
        desk.store.commit._queued_bytes_max = 1
        results = await asyncio.gather(
            *(desk.append(batch(sequence=2 * n)) for n in range(count)), return_exceptions=True
        )
        refused = [n for n, result in enumerate(results) if isinstance(result, OverloadedError)]
        assert refused == list(range(count - len(refused), count))
        assert 0 < len(refused) <= 10
        again = [await desk.append(batch(sequence=2 * n)) for n in refused]
        assert [receipt.base_offset for receipt in again] == [2 * n for n in refused]

    asyncio.run(go())
