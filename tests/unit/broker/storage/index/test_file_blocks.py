"""Blocks of the file index: what a checkpoint vouches for is on the disk."""

from __future__ import annotations

import random
import threading

from keylane.broker.storage.index import file_blocks
from keylane.broker.storage.index.file import FileConsumeQueues
from keylane.broker.storage.index.interface import Unit
from keylane.testing.machines.disk import SimDisk

ALL = 1 << 60


def test_blocks_written_while_their_file_is_synced(monkeypatch):
    """Blocks that go into a file after its sync, and before the next file is begun, are synced by
    the next checkpoint.
    """
    monkeypatch.setattr(file_blocks, "FILE_BLOCKS", 8)
    disk = SimDisk()
    queues = FileConsumeQueues(disk)
    queues.recover(0)
    count = 0

    def add(blocks: int) -> None:
        nonlocal count
        units = [
            (1, Unit(offset, 1, 100 * offset, 100, 1000))
            for offset in range(count, count + file_blocks.BLOCK_UNITS * blocks)
        ]
        count += len(units)
        queues.dispatch(units)

    def meanwhile(step: str) -> None:
        if step == "synced":
            disk.on_step = lambda _name: None
            writer = threading.Thread(target=add, args=(4,))
            writer.start()
            writer.join()

    add(5)
    disk.on_step = meanwhile
    queues.checkpoint(100 * count)
    add(1)
    queues.checkpoint(100 * count)
    for seed in range(20):
        restored = FileConsumeQueues(disk.disk_after_crash(random.Random(seed)))
        assert restored.recover(100 * count) == 100 * count
        offset = 0
        while offset < count:
            offset = restored.find(1, offset, end=count, bytes_max=ALL)[-1].next_offset
